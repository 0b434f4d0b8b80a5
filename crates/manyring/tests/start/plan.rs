//! Errors that the plan finds before anything is opened, its output, and images that are no disks.

use crate::support::process::Daemon;
use crate::support::program::{
    manyring, misused, names_in, output_of, program_for_all, refused, refused_configuration,
};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A folder with an image, a link and a hard link to it, and itself under another name.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("image"), [7; 4096]).unwrap();
    std::fs::hard_link(at.join("image"), at.join("hard")).unwrap();
    symlink("image", at.join("link")).unwrap();
    symlink(".", at.join("self")).unwrap();
    folder
}

/// The plan of a configuration, in which `@` stands for the folder.
fn planned(at: &Path, config: &str) -> Value {
    let file = at.join("manyring.toml");
    std::fs::write(&file, config.replace('@', at.to_str().unwrap())).unwrap();
    let output = output_of(manyring().args(["run", "--print-plan", "--config"]).arg(&file));
    assert!(output.status.success(), "{config}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The error of a plan that lacks something on this host.
fn unplanned(at: &Path, config: &str) -> String {
    let file = at.join("manyring.toml");
    std::fs::write(&file, config.replace('@', at.to_str().unwrap())).unwrap();
    refused(at, manyring().args(["run", "--print-plan", "--config"]).arg(&file))
}

/// Planning and starting are refused alike, with these words.
fn refused_twice(folder: &TempDir, config: &str, words: &[&str]) {
    let at = folder.path();
    refused_configuration(at, config, words);
    let file = at.join("manyring.toml");
    let mut plan = manyring();
    let error = misused(at, plan.args(["run", "--print-plan", "--config"]).arg(&file));
    assert!(words.iter().all(|word| error.contains(word)), "{config}\n-> {error}");
}

#[test]
fn one_image_under_two_names_is_found_unless_both_only_read() {
    let folder = folder();
    let disk = |name: &str, file: &str, read_only: bool| {
        let sockets = format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\n");
        format!("{sockets}file = '@/{file}'\nread_only = {read_only}\n")
    };
    for other in ["image", "link", "hard", "self/image", "./image", "self/self/./link"] {
        let (first, second) = (disk("a", "image", false), disk("b", other, true));
        let words = ["[[blk]] b: file", "already used by device \"a\"", "needs read_only on both"];
        refused_twice(&folder, &(first + &second), &words);
        let both = disk("a", "image", true) + &disk("b", other, true);
        assert_eq!(planned(folder.path(), &both)["blk"].as_array().unwrap().len(), 2);
        // A capture begins with an empty file: it would be the end of the disk.
        let capture = "[[net]]\nname = 'n'\nsocket_path = '@/n'\nnull = true\n";
        let capture = format!("{}{capture}pcap = '@/{other}'\n", disk("a", "image", false));
        refused_twice(&folder, &capture, &["[[net]] n: pcap", "used by the disk \"a\""]);
    }
    assert_eq!(std::fs::read(folder.path().join("image")).unwrap(), [7; 4096]);
}

#[test]
fn one_socket_under_two_names_is_found() {
    let folder = folder();
    let disk = |name: &str, socket: &str| {
        format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{socket}'\nnull = '1G'\n")
    };
    for other in ["s", "self/s", "./s", "self/./self/s"] {
        let words = ["[[blk]] b: socket_path", "already used by device \"a\""];
        refused_twice(&folder, &(disk("a", "s") + &disk("b", other)), &words);
        let control = format!("[daemon]\ncontrol = '@/{other}'\n{}", disk("a", "s"));
        refused_twice(&folder, &control, &["[[blk]] a: socket_path", "control"]);
    }
    // A link that is a name of its own is another socket: it would be replaced.
    let at = folder.path();
    symlink("s", at.join("t")).unwrap();
    let error = unplanned(at, &(disk("a", "s") + &disk("b", "t")));
    assert!(error.contains("[[blk]] b: socket_path") && error.contains("not a socket"), "{error}");
    let fds = "[[blk]]\nname = 'a'\nfd = 7\nnull = '1G'\n\
        [[net]]\nname = 'b'\nfd = 8\ntap_fds = [7]\n";
    refused_twice(&folder, fds, &["[[net]] b: tap_fds: 7", "already used by "]);
    let fds = "[[blk]]\nname = 'a'\nfd = 7\nnull = '1G'\n\
        [[blk]]\nname = 'b'\nfd = 7\nnull = '1G'\n";
    refused_twice(&folder, fds, &["[[blk]] b: fd: 7", "already used by "]);
}

#[test]
fn a_plan_names_what_the_host_lacks_and_leaves_everything_as_it_is() {
    let folder = folder();
    let at = folder.path();
    std::fs::write(at.join("odd"), [0; 1023]).unwrap();
    let blk = "[[blk]]\nname = 'a'\nsocket_path = '@/s'\n";
    let net = "[[net]]\nname = 'a'\nsocket_path = '@/s'\n";
    let null = format!("{blk}null = '1G'\n");
    for (config, key, value) in [
        (format!("{blk}file = '@/missing'\n"), "[[blk]] a: file", "/missing: No such file"),
        (format!("{blk}file = '@/image/x'\n"), "[[blk]] a: file", "/image/x: Not a directory"),
        (format!("{blk}file = '@/self'\n"), "[[blk]] a: file", "/self is neither a file"),
        (format!("{blk}file = '@/odd'\n"), "[[blk]] a: file", "1023 bytes; if it is an image"),
        (null.replace("@/s", "@/none/s"), "[[blk]] a: socket_path", "/none/s: No such file"),
        (null.replace("@/s", "@/image"), "[[blk]] a: socket_path", "/image is in use: it is not"),
        (
            format!("[daemon]\ncontrol = '@/none/c'\n{null}"),
            "[daemon]: control",
            "/none/c: No such file",
        ),
        (format!("{net}null = true\npcap = '@/no/p'\n"), "[[net]] a: pcap", "/no/p: No such file"),
        (format!("{net}null = true\npcap = '@/self'\n"), "[[net]] a: pcap", "/self: "),
        (
            format!("{net}tap = 'mr-none'\nmust_exist = true\n"),
            "[[net]] a: tap",
            "mr-none: no such interface",
        ),
        (format!("{net}tap = 'lo'\n"), "[[net]] a: tap", "lo is an interface, but not a tap"),
        (format!("{net}macvtap = 'mr-none'\n"), "[[net]] a: macvtap", "mr-none: no such interface"),
        (
            format!("{net}tap = 'mr-t'\nbridge = 'mr-none'\n"),
            "[[net]] a: bridge",
            "bridge mr-none: no such interface",
        ),
        (
            format!("{net}tap = 'mr-t'\nbridge = 'lo'\n"),
            "[[net]] a: bridge",
            "lo is an interface, but not a bridge",
        ),
    ] {
        let error = unplanned(at, &config);
        let begins = format!("manyring: {key}: ");
        assert!(error.starts_with(&begins) && error.contains(value), "{config}\n-> {error}");
    }
    for (keys, key) in [
        ("tap = 'twenty-letters-long-'\n", "tap"),
        ("macvtap = 'twenty-letters-long-'\n", "macvtap"),
        ("tap = 'mr-t'\nbridge = 'a/b'\n", "bridge"),
    ] {
        let words = [&*format!("[[net]] a: {key}: \""), "is not an interface name"];
        refused_twice(&folder, &format!("{net}{keys}"), &words);
    }
    // Files and sockets to be made need not be there, and those that are there may be in use.
    let _live = std::os::unix::net::UnixListener::bind(at.join("s")).unwrap();
    let control = "[daemon]\ncontrol = '@/c'\n";
    planned(at, &format!("{control}{blk}file = '@/image'\n"));
    planned(at, &format!("{net}tap = 'mr-new'\npcap = '@/new'\n"));
}

#[test]
fn what_operators_were_seen_to_write_is_answered_with_its_cure() {
    let folder = folder();
    let blk = "[[blk]]\nname = 'a'\nsocket_path = '@/s'\n";
    let net = "[[net]]\nname = 'a'\nsocket_path = '@/s'\n";
    for (config, words) in [
        (format!("{blk}fle = '@/image'\n"), ["line 4", "did you mean `file`?"]),
        ("[blk]\nfile = '@/image'\n".to_owned(), ["line 1", "write [[blk]]"]),
        (format!("{blk}num_queues = 'four'\n"), ["num_queues", "a whole number from 1 to 256"]),
        (format!("{net}queue_pairs = 1.5\n"), ["queue_pairs", "a whole number from 1 to 127"]),
        (format!("{blk}null = 1000\n"), ["a: null: \"1000\"", "whole sectors, like 64G"]),
        (format!("{blk}memory = '1.5G'\n"), ["a: memory: \"1.5G\"", "like 64G or 1536M"]),
        (format!("{blk}file = '~/x.img'\n"), ["a: file: ~/x.img", "does not expand ~"]),
        (format!("{blk}file = '$HOME/x.img'\n"), ["a: file: $HOME/x.img", "does not expand $"]),
        (format!("{blk}file = /x.img\n"), ["file = /x.img", "stand in quotes"]),
        (
            format!("{net}null = true\nmac = '01:00:5e:00:00:01'\n"),
            ["a: mac: \"01:00:5e:00:00:01\"", "multicast"],
        ),
        (
            format!("{net}tap = 'twenty-letters-long-'\n"),
            ["a: tap: \"twenty-letters-long-\"", "1 to 15 bytes"],
        ),
    ] {
        refused_twice(&folder, &config, &words);
    }
    for (arguments, words) in [
        (
            "--null 1G --num-queues four",
            "--num-queues: \"four\" is not a whole number from 1 to 256",
        ),
        ("--blk-file ~/x.img", "--blk-file: ~/x.img: there is no \"~\", and Manyring does not"),
        (
            "--null 1G --control $XDG/c",
            "--control: $XDG/c: there is no \"$XDG\", and Manyring does",
        ),
    ] {
        let mut command = manyring();
        command.args(["blk", "--socket-path", "/tmp/none"]).args(arguments.split(' '));
        let error = misused(folder.path(), &mut command);
        assert!(error.starts_with(&format!("manyring: {words}")), "{error}");
    }
    let stats = refused(folder.path(), manyring().args(["stats", "--control", "~/c"]));
    assert!(stats.contains("--control: ~/c: there is no \"~\""), "{stats}");
    for size in ["4096", "'64GiB'", "1_073_741_824"] {
        planned(folder.path(), &format!("{blk}null = {size}\n"));
    }
}

#[test]
fn keys_of_a_socket_that_is_not_made_here_contradict() {
    let folder = folder();
    for (key, value) in
        [("socket_owner", "0"), ("socket_group", "'root'"), ("socket_mode", "'0660'")]
    {
        let set = format!("{key} = {value}\nnull = '1G'\n");
        let client = format!("[[blk]]\nname = 'a'\nsocket_path = '@/s'\nclient = true\n{set}");
        let words = [&format!("[[blk]] a: {key}"), "cannot be combined with client"];
        refused_twice(&folder, &client, &words);
        let fd = format!("[[blk]]\nname = 'a'\nfd = 7\n{set}");
        refused_twice(&folder, &fd, &[&format!("[[blk]] a: {key}"), "cannot be combined with fd"]);
    }
    let mut command = manyring();
    let options = "blk --client --socket-path /tmp/none --null 1G --socket-mode 0660";
    let error = misused(folder.path(), command.args(options.split(' ')));
    assert!(
        error.starts_with("manyring: --socket-mode: cannot be combined with --client"),
        "{error}"
    );
}

#[test]
fn the_plan_shows_who_may_connect_by_number() {
    let folder = folder();
    let null = "null = '1G'\n";
    let base = format!("[[blk]]\nname = 'a'\nsocket_path = '@/s'\n{null}");
    let shown = |keys: &str| {
        let plan = planned(folder.path(), &format!("{base}{keys}"));
        let listen = &plan["blk"][0]["socket"]["listen"];
        json!([listen["owner"], listen["group"], listen["mode"]])
    };
    assert_eq!(shown(""), json!([null, null, null]));
    let keys = "socket_owner = 'root'\nsocket_group = 'root'\nsocket_mode = '660'\n";
    assert_eq!(shown(keys), json!([0, 0, "0660"]));
    let keys = "socket_owner = 12\nsocket_group = '34'\nsocket_mode = '0007'\n";
    assert_eq!(shown(keys), json!([12, 34, "0007"]));
    for (keys, words) in [
        ("socket_owner = 'no such user'\n", ["a: socket_owner", "there is no user"]),
        ("socket_group = 'no-such-group'\n", ["a: socket_group", "there is no group"]),
        ("socket_owner = \"a\\u0000b\"\n", ["a: socket_owner", "there is no user"]),
        ("socket_owner = ''\n", ["a: socket_owner", "there is no user"]),
        ("socket_owner = -1\n", ["a: socket_owner", "\"-1\""]),
        // It would mean "leave it".
        ("socket_owner = 4294967295\n", ["a: socket_owner", "4294967295"]),
        ("socket_owner = '99999999999999999999'\n", ["a: socket_owner", "99999999999"]),
        ("socket_group = true\n", ["line 5", "a name or a number"]),
    ] {
        refused_twice(&folder, &format!("{base}{keys}"), &words);
    }
}

#[test]
fn a_socket_belongs_to_whom_the_options_name() {
    use std::os::unix::fs::MetadataExt;
    let ours = rustix::process::geteuid().is_root();
    let owner = if ours { "nobody" } else { "4294967294" };
    let options = ["--null", "1G", "--socket-owner", owner, "--socket-mode", "0606"];
    if !ours {
        // Only root gives sockets away.
        let error = refused_access(&mut manyring(), &options);
        assert!(error.starts_with("manyring: --socket-owner: cannot give"), "{error}");
        return;
    }
    let daemon = Daemon::blk(&options);
    let socket = std::fs::metadata(daemon.socket()).unwrap();
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid.as_raw();
    assert_eq!((socket.uid(), socket.mode() & 0o777), (nobody, 0o606));
}

/// The error of a start whose socket cannot have the owner or the group of `options`.
fn refused_access(command: &mut Command, options: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
    let socket = folder.path().join("s");
    command.arg("blk").arg("--socket-path").arg(&socket).args(options);
    let error = refused(folder.path(), command);
    let words = format!("cannot give the socket {} to ", socket.display());
    assert!(error.contains(&words) && error.contains("(needs CAP_CHOWN)"), "{error}");
    error
}

#[test]
fn a_socket_that_cannot_be_given_away_names_the_key_of_its_owner_or_group() {
    if !rustix::process::geteuid().is_root() {
        // Others cannot become nobody; `a_socket_belongs_to_whom_the_options_name` tries it.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = program_for_all(folder.path());
    for (option, words) in [
        ("--socket-owner", "--socket-owner: cannot give the socket"),
        ("--socket-group", "--socket-group: cannot give the socket"),
    ] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        let error = refused_access(&mut command, &["--null", "1G", option, "0"]);
        assert!(error.starts_with(&format!("manyring: {words}")), "{error}");
    }
}

#[test]
fn a_snippet_without_a_device_lists_them() {
    let folder = folder();
    let file = folder.path().join("manyring.toml");
    let text = "[[blk]]\nname = 'web'\nsocket_path = '/s'\nnull = '1G'\n\
        [[net]]\nname = 'lan'\nsocket_path = '/t'\nnull = true\n";
    std::fs::write(&file, text).unwrap();
    let error = misused(folder.path(), manyring().args(["snippet", "qemu", "--config"]).arg(&file));
    assert!(error.contains("DEVICE") && error.contains("web, lan"), "{error}");
}

/// The beginning of an image of each format that is not a disk's bytes.
fn headers() -> [(&'static str, Vec<u8>); 7] {
    let mut vdi = vec![0; 64];
    vdi.extend(0xbeda_107f_u32.to_le_bytes());
    [
        ("qcow2", b"QFI\xfb\0\0\0\x03".to_vec()),
        ("qcow", b"QFI\xfb\0\0\0\x01".to_vec()),
        ("VMDK", b"KDMV\x01\0\0\0".to_vec()),
        ("VHDX", b"vhdxfile".to_vec()),
        ("VHD", b"conectix".to_vec()),
        ("LUKS", b"LUKS\xba\xbe\0\x02".to_vec()),
        ("VDI", vdi),
    ]
}

#[test]
fn an_image_of_another_format_is_refused_unless_raw_is_insisted_on() {
    let folder = folder();
    let (at, image) = (folder.path(), folder.path().join("disk"));
    for (format, header) in headers() {
        let mut bytes = header;
        bytes.resize(1 << 20, 0);
        // A new file, which no guest has had.
        let _ = std::fs::remove_file(&image);
        std::fs::write(&image, bytes).unwrap();
        let mut command = manyring();
        command.arg("blk").arg("--socket-path").arg(at.join("s")).arg("--blk-file").arg(&image);
        let error = refused(at, &mut command);
        let words = format!("manyring: --blk-file: {} is a {format} image", image.display());
        assert!(error.starts_with(&words) && error.contains("--format raw"), "{error}");
        let file = image.to_str().unwrap();
        let config = format!("[[blk]]\nname = 'a'\nsocket_path = '@/a'\nfile = '{file}'\n");
        std::fs::write(at.join("c.toml"), config.replace('@', at.to_str().unwrap())).unwrap();
        let error = refused(at, manyring().arg("run").arg("--config").arg(at.join("c.toml")));
        assert!(error.contains("[[blk]] a: file") && error.contains("format = \"raw\""), "{error}");
        let insists = Daemon::blk(&["--blk-file", file, "--format", "raw"]);
        assert!(insists.terminate().success());
        let insists = Daemon::run(&format!("{config}format = 'raw'\n"), &["a"]);
        assert!(insists.terminate().success());
    }
    // A header that ends the file: a VHD of fixed size.
    let mut bytes = vec![0; 4096];
    bytes[4096 - 512..][..8].copy_from_slice(b"conectix");
    std::fs::remove_file(&image).unwrap();
    std::fs::write(&image, bytes).unwrap();
    let mut command = manyring();
    command.arg("blk").arg("--socket-path").arg(at.join("s")).arg("--blk-file").arg(&image);
    assert!(refused(at, &mut command).contains("is a VHD image"));
    assert!(!names_in(at).contains(&"s".to_owned()));
}

#[test]
fn an_image_of_another_format_is_named_before_its_odd_size() {
    let folder = folder();
    let (at, image) = (folder.path(), folder.path().join("disk"));
    for (format, header) in headers() {
        let mut bytes = header;
        bytes.resize(196_624, 0);
        let _ = std::fs::remove_file(&image);
        std::fs::write(&image, bytes).unwrap();
        for more in ["", "--logical-block-size 4096", "--read-only"] {
            let mut command = manyring();
            command.arg("blk").arg("--socket-path").arg(at.join("s")).arg("--blk-file").arg(&image);
            let error = refused(at, command.args(more.split_whitespace()));
            let words = format!("manyring: --blk-file: {} is a {format} image", image.display());
            assert!(error.starts_with(&words) && error.contains("--format raw"), "{error}");
        }
    }
}

/// The first sector of a qcow2 image.
fn header() -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    sector
}

/// Sector 0 as a new front-end of a socket reads it.
fn first_sector(socket: &Path) -> [u8; 512] {
    let mut driver = BlkDriver::connect(socket, &BlkDriverOptions::default()).unwrap();
    let mut found = [0; 512];
    driver.queues[0].read(0, &mut found).unwrap();
    found
}

#[test]
fn a_guest_that_writes_such_a_header_is_served_after_a_restart_and_so_are_others() {
    let folder = folder();
    let disk = |name: &str| {
        let file = folder.path().join(format!("{name}.img"));
        std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let file = file.display();
        format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nfile = '{file}'\n")
    };
    let config = disk("other") + &disk("writes");
    let daemon = Daemon::run(&config, &["writes", "other"]);
    let mut driver =
        BlkDriver::connect(&daemon.socket_of("writes"), &BlkDriverOptions::default()).unwrap();
    driver.queues[0].write(0, &header()).unwrap();
    driver.queues[0].flush().unwrap();
    drop(driver);
    assert!(daemon.terminate().success());
    // A front-end that only reads is no reason to look either.
    for keys in ["", "read_only = true\n"] {
        let daemon = Daemon::run(&(config.clone() + keys), &["writes", "other"]);
        assert_eq!(first_sector(&daemon.socket_of("writes")), header());
        assert_eq!(first_sector(&daemon.socket_of("other")), [0; 512]);
        assert!(daemon.terminate().success());
    }
}

#[test]
fn an_image_that_cannot_be_opened_costs_its_own_device() {
    let folder = folder();
    let (at, image) = (folder.path(), folder.path().join("qcow2"));
    let mut bytes = header().to_vec();
    bytes.resize(1 << 20, 0);
    std::fs::write(&image, bytes).unwrap();
    let disk = |name: &str, file: &Path| {
        let file = file.display();
        format!("[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nfile = '{file}'\n")
    };
    let bad = disk("bad", &image) + &disk("none", &at.join("nothing"));
    let good = "[[blk]]\nname = 'good'\nsocket_path = '@/good'\nnull = '1G'\n";
    let daemon = Daemon::run(&format!("{bad}{good}"), &["good"]);
    assert_eq!(first_sector(&daemon.socket_of("good")), [0; 512]);
    let log = daemon.log();
    for (name, why) in [("bad", "is a qcow2 image"), ("none", "cannot open")] {
        let says = |line: &str| {
            line.contains("ERROR") && line.contains(&format!("\"{name}\"")) && line.contains(why)
        };
        assert!(log.lines().any(says), "{name}: {log}");
        assert!(!daemon.socket_of(name).exists());
    }
    assert!(daemon.terminate().success());
    // With nothing to serve, the daemon ends and says why.
    let file = at.join("manyring.toml");
    std::fs::write(&file, bad.replace('@', at.to_str().unwrap())).unwrap();
    let error = refused(at, manyring().arg("run").arg("--config").arg(&file));
    assert!(error.contains("[[blk]] bad: file") && error.contains("qcow2"), "{error}");
}
