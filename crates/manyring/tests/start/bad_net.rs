//! Bad starts of network devices: one clear line that names the key, a status that is not 0, and
//! nothing created or changed. Needs root.

use crate::support::program::{
    manyring, misused, misused_as_it_is, program_for_all, refused, refused_as_it_is,
    refused_configuration,
};
use crate::support::space::{
    MULTI, RIGHT, as_nobody, handing_in, in_own_space, link, open_taps_to_all, queue, run,
};
use manyring_backend::sys::tuntap::{self, IFF_NO_PI, IFF_TAP, IFF_VNET_HDR};
use rustix::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// A tun's queue, not a tap's.
const IFF_TUN: u16 = 1;

/// `manyring net` with these arguments and a socket in `folder`.
fn net(folder: &Path, arguments: &str) -> Command {
    let mut command = manyring();
    command.arg("net").arg("--socket-path").arg(folder.join("s"));
    command.args(arguments.split(' '));
    command
}

/// The error of `manyring net` with these arguments, without what all of them begin with.
fn error_of(arguments: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    bare(&refused(folder.path(), &mut net(folder.path(), arguments)))
}

fn bare(error: &str) -> String {
    error.trim().strip_prefix("manyring: --").unwrap_or_else(|| panic!("{error}")).to_owned()
}

/// The error of `manyring net` with these arguments, where `fds` are handed in as 7 and 8.
fn error_with(arguments: &str, fds: Vec<OwnedFd>) -> String {
    let folder = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_manyring");
    let socket = folder.path().join("s");
    let arguments = format!("net --socket-path {} {arguments}", socket.display());
    let error = refused_as_it_is(folder.path(), &mut handing_in(program, &arguments, fds));
    bare(&error)
}

#[test]
fn a_bad_configuration_names_its_key() {
    let base = "[[net]]\nname = 'a'\nsocket_path = '@/s'\n";
    let tap = format!("{base}tap = 't0'\n");
    let other = "[[net]]\nname = 'b'\nsocket_path = '@/t'\n";
    let blk = "[[blk]]\nname = 'a'\nsocket_path = '@/u'\nnull = '1G'\n";
    for (config, words) in [
        (base.to_owned(), vec!["a: tap", "missing"]),
        (format!("{tap}null = true\n"), vec!["a: tap", "only one of"]),
        (format!("{tap}macvtap = 'm0'\n"), vec!["a: tap", "only one of"]),
        (format!("{tap}tap_fds = [7]\n"), vec!["a: tap", "only one of"]),
        (format!("{tap}generate = 64\n"), vec!["a: generate", "needs null"]),
        (format!("{base}null = true\ngenerate = 59\n"), vec!["a: generate", "59"]),
        (format!("{base}null = true\nbridge = 'br0'\n"), vec!["a: bridge", "needs tap"]),
        (format!("{base}null = true\nup = true\n"), vec!["a: up", "needs tap"]),
        (format!("{base}null = true\nsndbuf = 4096\n"), vec!["a: sndbuf", "needs tap"]),
        (
            format!("{base}macvtap = 'm'\nreceive_pairs = 'auto'\n"),
            vec!["a: receive_pairs", "needs tap"],
        ),
        (format!("{tap}receive_pairs = 0\n"), vec!["a: receive_pairs: \"0\" is neither \"all\""]),
        (
            format!("{tap}steer = false\nreceive_pairs = 'auto'\n"),
            vec!["a: receive_pairs: \"auto\" needs", "steer"],
        ),
        (format!("{base}null = true\ntxqueuelen = 9\n"), vec!["a: txqueuelen", "needs tap"]),
        (format!("{tap}txqueuelen = 0\n"), vec!["a: txqueuelen: \"0\" is neither \"auto\""]),
        (format!("{tap}txqueuelen = 1000001\n"), vec!["a: txqueuelen: \"1000001\""]),
        (format!("{tap}txqueuelen = 'many'\n"), vec!["a: txqueuelen: \"many\"", "nor \"host\""]),
        (
            format!("{tap}txqueuelen = true\n"),
            vec!["line 5", "or a whole number from 1 to 1000000"],
        ),
        (format!("{base}null = true\ntxqueuelen = 'auto'\n"), vec!["a: txqueuelen", "needs tap"]),
        (format!("{base}null = true\nmust_exist = true\n"), vec!["a: must_exist", "needs tap"]),
        (format!("{base}macvtap = 'm0'\nbridge = 'br0'\n"), vec!["a: bridge", "macvtap"]),
        (format!("{base}macvtap = 'm0'\nsteer = true\n"), vec!["a: steer", "needs tap or tap_fds"]),
        (format!("{base}null = true\nsteer = false\n"), vec!["a: steer", "needs tap or tap_fds"]),
        (format!("{tap}steer = 'host'\n"), vec!["line 5", "steer"]),
        (format!("{tap}queue_pairs = 0\n"), vec!["a: queue_pairs: 0"]),
        (format!("{tap}queue_pairs = 128\n"), vec!["a: queue_pairs: 128"]),
        (format!("{tap}mtu = 67\n"), vec!["a: mtu: 67 is not between 68 and 65535"]),
        (format!("{tap}mtu = 65536\n"), vec!["a: mtu: 65536"]),
        (format!("{tap}mtu = -1\n"), vec!["line 5", "mtu"]),
        (format!("{tap}mac = '01:00:5e:00:00:01'\n"), vec!["a: mac", "01:00:5e"]),
        (format!("{tap}mac = '52:54:00:12:34'\n"), vec!["a: mac", "not an address like"]),
        (format!("{tap}speed = 0\n"), vec!["a: speed"]),
        (format!("{tap}colour = 1\n"), vec!["line 5", "unknown field `colour`"]),
        (format!("{base}tap_fds = []\n"), vec!["a: tap_fds", "empty"]),
        (format!("{base}tap_fds = [2]\n"), vec!["a: tap_fds: 2"]),
        (format!("{base}tap_fds = [7, 8, 7]\n"), vec!["a: tap_fds: 7", "twice"]),
        (format!("{tap}{}", tap.replace("@/s", "@/t")), vec!["a: name", "already used by "]),
        (
            format!("{tap}pcap = '@/p'\n{other}null = true\npcap = '@/p'\n"),
            vec!["b: pcap", "already used by "],
        ),
        (
            format!("{tap}pcap = '@/i'\n[[blk]]\nname = 'd'\nsocket_path = '@/u'\nfile = '@/i'\n"),
            vec!["a: pcap", "already used by the disk"],
        ),
        (format!("{tap}[net.fault]\nlose = 1\n"), vec!["unknown field `lose`"]),
        (format!("{tap}{blk}"), vec!["a: name", "already used by "]),
        (format!("{tap}{}", tap.replace("'a'", "'b'")), vec!["b: socket_path", "already used by "]),
        (format!("{tap}{other}tap = 't0'\n"), vec!["b: tap", "already used by "]),
        (format!("{tap}{other}macvtap = 't0'\n"), vec!["b: macvtap", "already used by "]),
        (format!("{base}tap_fds = [7]\n{other}tap_fds = [7]\n"), vec!["b: tap_fds: 7"]),
        (format!("[daemon]\ncontrol = '@/s'\n{tap}"), vec!["a: socket_path", "control"]),
    ] {
        refused_configuration(tempfile::tempdir().unwrap().path(), &config, &words);
    }
}

#[test]
fn a_bad_option_names_its_key() {
    for (arguments, wanted) in [
        ("--tap t0 --generate 64", "generate: needs --null"),
        ("--null --up", "up: needs --tap, --tap-fd, --macvtap or --xdp"),
        ("--null --tap t0", "tap: only one of --tap, --tap-fd, --macvtap, --xdp and --null can be"),
        ("--null --mtu 65536", "mtu: 65536 is not between 68 and 65535"),
        ("--null --mac ff:ff:ff:ff:ff:ff", "mac: \"ff:ff:ff:ff:ff:ff\" is not an address"),
        ("--tap-fd 7,7", "tap-fd: 7 is given twice"),
        ("--tap sixteen--letters", "tap: \"sixteen--letters\" is not an interface name"),
        (
            "--tap t0 --bridge sixteen--letters",
            "bridge: \"sixteen--letters\" is not an interface name",
        ),
        ("--macvtap m0 --bridge b0", "bridge: a macvtap cannot be in a bridge"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let error = bare(&misused(folder.path(), &mut net(folder.path(), arguments)));
        assert!(error.starts_with(wanted), "{arguments}\n-> {error}");
    }
    let error = error_of("--tap-fd 4000");
    assert!(error.starts_with("tap-fd: 4000 is not open"), "{error}");
}

#[test]
fn a_capture_that_cannot_be_written_is_named_and_one_that_is_there_survives_a_bad_start() {
    let error = error_of("--null --pcap /none/such");
    assert_eq!(error, "pcap: /none/such: No such file or directory (os error 2)");
    let folder = tempfile::tempdir().unwrap();
    let capture = folder.path().join("capture");
    std::fs::write(&capture, "precious").unwrap();
    let config = format!(
        "[daemon]\nwait = 0\n[[net]]\nsocket_path = '@/a'\nnull = true\npcap = '{}'\n\
         [[net]]\nsocket_path = '@/b'\ntap = 'mr9'\nmust_exist = true\n",
        capture.display()
    );
    let file = folder.path().join("manyring.toml");
    std::fs::write(&file, config.replace('@', folder.path().to_str().unwrap())).unwrap();
    let error = refused(folder.path(), manyring().arg("run").arg("--config").arg(&file));
    assert_eq!(error, "manyring: [[net]] net1: tap: mr9: no such interface\n");
    assert_eq!(std::fs::read(&capture).unwrap(), b"precious");
}

#[test]
fn an_interface_that_cannot_be_served_says_why() {
    in_own_space(|| {
        run("ip tuntap add dev mr0 mode tap");
        run("ip tuntap add dev tun0 mode tun");
        let busy =
            ["mr1", "mr2"].map(|name| queue(name, if name == "mr2" { MULTI } else { RIGHT }));
        for (arguments, wanted) in [
            ("--tap mr9 --must-exist", "tap: mr9: no such interface"),
            (
                "--tap mr0 --queue-pairs 2",
                "queue-pairs: tap mr0 is not multi-queue: it cannot have 2 queue pairs",
            ),
            ("--tap mr1 --wait 0", "tap: mr1 is in use by another process"),
            ("--tap mr2 --queue-pairs 2 --wait 0", "tap: mr2 is in use by another process"),
            ("--tap lo", "tap: lo is an interface, but not a tap"),
            ("--tap tun0", "tap: tun0 is an interface, but not a tap"),
            ("--macvtap mv9", "macvtap: mv9: no such interface"),
            ("--macvtap mr0", "macvtap: mr0 is an interface, but not a macvtap"),
        ] {
            assert_eq!(error_of(arguments), wanted, "{arguments}");
        }
        drop(busy);
    });
}

#[test]
fn a_bridge_or_an_mtu_that_cannot_be_leaves_no_interface() {
    in_own_space(|| {
        run("ip link add br0 type bridge");
        run("ip link add br1 type bridge");
        run("ip tuntap add dev mr0 mode tap");
        run("ip link set mr0 master br1");
        for (arguments, wanted) in [
            ("--tap mr1 --bridge br9", "bridge: bridge br9: no such interface"),
            ("--tap mr1 --bridge lo", "bridge: lo is an interface, but not a bridge"),
            ("--tap mr0 --bridge br0", "bridge: mr0 already belongs to another bridge"),
            (
                "--tap mr1 --mtu 65522",
                "mtu: setting MTU 65522 of mr1 failed: the interface does not support it",
            ),
        ] {
            assert_eq!(error_of(arguments), wanted, "{arguments}");
            assert_eq!(link("mr1"), None, "{arguments}");
        }
        assert_eq!(link("mr0").unwrap().master, Some(link("br1").unwrap().index));
        // With `wait = 0` the second device's missing interface ends the first device's start too.
        let folder = tempfile::tempdir().unwrap();
        let config = "[daemon]\nwait = 0\n[[net]]\nname = 'a'\nsocket_path = '@/a'\ntap = 'mr2'\n\
            [[net]]\nname = 'b'\nsocket_path = '@/b'\ntap = 'mr3'\nmust_exist = true\n";
        let file = folder.path().join("manyring.toml");
        std::fs::write(&file, config.replace('@', folder.path().to_str().unwrap())).unwrap();
        let error = refused(folder.path(), manyring().arg("run").arg("--config").arg(&file));
        assert_eq!(error, "manyring: [[net]] b: tap: mr3: no such interface\n");
        assert_eq!((link("mr2"), link("mr3")), (None, None));
    });
}

#[test]
fn a_process_without_the_capability_is_told_which() {
    in_own_space(|| {
        let folder = tempfile::tempdir().unwrap();
        let program = program_for_all(folder.path());
        open_taps_to_all();
        run("ip tuntap add dev mr0 mode tap user 4711");
        run("ip tuntap add dev mr1 mode tap user 65534");
        for (arguments, wanted) in [
            ("--tap mr9", "tap: mr9: no permission to create it or join it"),
            ("--tap mr0", "tap: mr0: no permission to create it or join it"),
            ("--tap mr1 --up", "tap: mr1: no permission to set it up or down"),
            ("--tap mr1 --mtu 1400", "tap: mr1: no permission to set its MTU"),
            ("--tap mr1 --txqueuelen 1000", "tap: mr1: no permission to set its txqueuelen"),
        ] {
            let mut command = as_nobody(&program);
            command.args(["net", "--socket-path", "/tmp/none"]).args(arguments.split(' '));
            let error = refused(folder.path(), &mut command);
            let wanted = format!("manyring: --{wanted} (needs CAP_NET_ADMIN)\n");
            assert_eq!(error, wanted, "{arguments}");
        }
    });
}

#[test]
fn a_wrong_file_descriptor_says_what_is_wrong_with_it() {
    in_own_space(|| {
        let file = || tempfile::tempfile().unwrap().into();
        let unused = || tuntap::open(Path::new("/dev/net/tun")).unwrap();
        let one = queue("mr9", MULTI);
        for (fds, wanted) in [
            (vec![file()], "tap-fd: file descriptor 7 is not a queue of a tap"),
            (vec![unused()], "tap-fd: file descriptor 7 is not a queue of a tap"),
            (
                vec![queue("tun%d", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)],
                "tap-fd: file descriptor 7 belongs to a tun, not to a tap (IFF_TAP)",
            ),
            (
                vec![queue("mr%d", IFF_TAP | IFF_NO_PI)],
                "tap-fd: file descriptor 7 gives no virtio-net headers (IFF_VNET_HDR)",
            ),
            (
                vec![queue("mr%d", IFF_TAP | IFF_VNET_HDR)],
                "tap-fd: file descriptor 7 puts packet information before frames (lacks \
                 IFF_NO_PI)",
            ),
            (
                vec![queue("mr7", RIGHT), queue("mr8", RIGHT)],
                "tap-fd: file descriptor 8 belongs to mr8, others to mr7",
            ),
            (
                vec![one.try_clone().unwrap(), one],
                "tap-fd: file descriptor 8 is the same queue of the tap as another",
            ),
        ] {
            let arguments = if fds.len() == 2 { "--tap-fd 7,8" } else { "--tap-fd 7" };
            assert_eq!(error_with(arguments, fds), wanted);
        }
        let wanted =
            "queue-pairs: 1 tap file descriptors for 2 queue pairs: one is needed for each";
        assert_eq!(error_with("--tap-fd 7 --queue-pairs 2", vec![queue("mr6", RIGHT)]), wanted);
    });
}

#[test]
fn what_was_not_handed_in_is_not_taken() {
    in_own_space(|| {
        // Standard output is a queue of a tap, and still not handed in.
        let folder = tempfile::tempdir().unwrap();
        let mut command = net(folder.path(), "--tap-fd 1");
        command.stdout(Stdio::from(queue("mr0", RIGHT)));
        let error = misused_as_it_is(folder.path(), &mut command);
        assert_eq!(error, "manyring: --tap-fd: 1 was not passed to this process\n");
    });
}
