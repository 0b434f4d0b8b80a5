//! Bad starts: one clear line that names the key or the path, a status that is not 0, and nothing
//! created or changed.

use crate::support::process::{self, Daemon, Running, copy_program, kill_and_reap};
use crate::support::program::{
    manyring, misused, names_in, output_of, refused, refused_configuration,
};
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// A folder with an image in it.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("image"), [7; 4096]).unwrap();
    folder
}

/// `manyring blk` with these arguments, in which `@` stands for the folder.
fn blk(folder: &Path, arguments: &str) -> Command {
    let mut command = manyring();
    let folder = folder.to_str().unwrap();
    command.arg("blk").args(arguments.split(' ').map(|a| a.replace('@', folder)));
    command
}

#[test]
fn an_image_that_cannot_be_served_is_named() {
    let folder = folder();
    let at = folder.path();
    std::fs::create_dir(at.join("directory")).unwrap();
    std::fs::write(at.join("empty"), []).unwrap();
    std::fs::write(at.join("short"), [0; 511]).unwrap();
    std::fs::write(at.join("odd"), [0; 1023]).unwrap();
    for (file, problem) in [
        ("missing", "No such file"),
        ("directory", "neither a file nor a block device"),
        ("empty", "smaller than one sector"),
        ("short", "smaller than one sector"),
        ("odd", "not whole sectors of 512 bytes: 1023 bytes"),
        ("image/below", "Not a directory"),
    ] {
        let error = refused(at, &mut blk(at, &format!("--socket-path @/s --blk-file @/{file}")));
        assert!(error.contains(&format!("{}/{file}", at.display())), "{error}");
        assert!(error.contains(problem), "{error}");
    }
    let error = refused(at, &mut blk(at, "--socket-path @/s --blk-file /dev/null"));
    assert!(error.contains("/dev/null is neither"), "{error}");
}

#[test]
fn a_size_that_is_not_whole_logical_blocks_is_named_with_the_key() {
    let folder = folder();
    let at = folder.path();
    std::fs::write(at.join("odd"), [0; 4096 + 512]).unwrap();
    let chosen = "--socket-path @/s --logical-block-size 4096";
    let error = refused(at, &mut blk(at, &format!("{chosen} --blk-file @/odd")));
    let words = format!("--logical-block-size: {}/odd is not whole blocks of 4096", at.display());
    assert!(error.contains(&words) && error.contains("4608 bytes"), "{error}");
    let error = misused(at, &mut blk(at, &format!("{chosen} --memory 512")));
    assert!(error.contains("--memory: 512 bytes are not whole blocks of 4096"), "{error}");
    let wrong = "--socket-path @/s --blk-file @/image --logical-block-size 1024";
    let error = misused(at, &mut blk(at, wrong));
    assert!(error.contains("--logical-block-size: 1024 is neither 512 nor 4096"), "{error}");
}

#[test]
fn without_permission_nothing_is_served() {
    let folder = folder();
    let at = folder.path();
    // Everybody may look into the folder, nobody but the owner may change it.
    std::fs::set_permissions(at, Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(at.join("image"), Permissions::from_mode(0o600)).unwrap();
    let program = at.join("program");
    copy_program(&program);
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    let start = |arguments: &[&str]| {
        let mut command = Command::new(if is_root { "setpriv" } else { "env" });
        if is_root {
            // Permissions do not bind root: become nobody.
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        } else {
            std::fs::set_permissions(at.join("image"), Permissions::from_mode(0o000)).unwrap();
            std::fs::set_permissions(at, Permissions::from_mode(0o555)).unwrap();
        }
        let replaced = arguments.iter().map(|a| a.replace('@', at.to_str().unwrap()));
        command.arg(&program).arg("blk").args(replaced);
        refused(at, &mut command)
    };
    let image = start(&["--socket-path", "/tmp/none", "--blk-file", "@/image"]);
    let socket = start(&["--socket-path", "@/socket", "--null", "1G"]);
    std::fs::set_permissions(at, Permissions::from_mode(0o755)).unwrap();
    assert!(image.contains("/image: Permission denied"), "{image}");
    assert!(socket.contains("/socket: Permission denied"), "{socket}");
}

#[test]
fn an_image_in_use_is_refused_unless_both_only_read() {
    let folder = folder();
    let at = folder.path();
    let image = at.join("image");
    let file = image.to_str().unwrap();
    let writer = Daemon::blk(&["--blk-file", file]);
    for arguments in ["--blk-file @/image", "--blk-file @/image --read-only"] {
        let arguments = format!("--socket-path @/s --wait 0 {arguments}");
        let error = refused(at, &mut blk(at, &arguments));
        // It is a process of the user who asks: the system tells.
        let holder = format!("{file} is in use by another process (pid {})", writer.pid());
        assert!(error.contains(&holder), "{error}");
    }
    assert!(writer.terminate().success());
    let _reader = Daemon::blk(&["--blk-file", file, "--read-only"]);
    let _second = Daemon::blk(&["--blk-file", file, "--read-only"]);
    let arguments = "--socket-path @/s --wait 0 --blk-file @/image";
    let error = refused(at, &mut blk(at, arguments));
    assert!(error.contains("is in use"), "{error}");
}

#[test]
fn a_socket_path_that_cannot_be_had_is_named() {
    let folder = folder();
    let at = folder.path();
    let _live = UnixListener::bind(at.join("live")).unwrap();
    let long = "x".repeat(110);
    for (path, problem) in [
        ("live", "in use: another process listens"),
        ("image", "in use: it is not a socket"),
        ("none/socket", "No such file or directory"),
        ("image/socket", "Not a directory"),
        (long.as_str(), "107 bytes"),
    ] {
        for (option, arguments) in [
            ("--socket-path", format!("--socket-path @/{path} --blk-file @/image")),
            ("--control", format!("--control @/{path} --socket-path @/s --blk-file @/image")),
        ] {
            let arguments = format!("{arguments} --wait 0");
            let mut command = blk(at, &arguments);
            let is_long = path.len() > 107;
            let error = if is_long { misused(at, &mut command) } else { refused(at, &mut command) };
            assert!(error.starts_with(&format!("manyring: {option}: ")), "{error}");
            assert!(error.contains(path) && error.contains(problem), "{error}");
        }
    }
}

#[test]
fn a_socket_that_a_dying_process_still_holds_is_waited_for() {
    let folder = folder();
    let socket = folder.path().join("blk0");
    // As a process that was killed, whose memory is still being freed.
    let dying = UnixListener::bind(&socket).unwrap();
    let mut command = blk(folder.path(), "--socket-path @/blk0 --null 1G --control @/control");
    let mut child = Running::start(&mut command);
    std::thread::sleep(Duration::from_millis(500));
    let waits = child.try_wait().unwrap().is_none();
    drop(dying);
    let serves = process::wait_until(|| {
        folder.path().join("control").exists() && UnixStream::connect(&socket).is_ok()
            || child.try_wait().unwrap().is_some()
    });
    let runs = child.try_wait().unwrap().is_none();
    kill_and_reap(&mut child);
    assert!(waits && serves && runs, "{waits} {serves} {runs}");
}

#[test]
fn a_refused_start_is_no_client_of_whoever_listens_there() {
    let folder = folder();
    let mut first = Daemon::blk(&["--null", "1G", "--one-off"]);
    let socket = first.socket().display().to_string();
    let error = refused(
        folder.path(),
        &mut blk(folder.path(), &format!("--socket-path {socket} --null 1G --wait 0")),
    );
    assert!(error.contains("another process listens"), "{error}");
    // A client that comes and goes would have ended it.
    assert!(first.is_running() && !first.log().contains("connected"), "{}", first.log());
}

#[test]
fn a_stale_socket_is_taken_over() {
    let folder = folder();
    let stale = folder.path().join("blk0");
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    let before = std::fs::metadata(&stale).unwrap().ino();
    let mut command = blk(folder.path(), "--socket-path @/blk0 --null 1G --one-off");
    let mut child = Running::start(&mut command);
    let replaced =
        process::wait_until(|| std::fs::metadata(&stale).is_ok_and(|m| m.ino() != before));
    let connected = UnixStream::connect(&stale);
    let connected = connected.map(drop).is_ok();
    // It was `--one-off`: the connection that closes ends it.
    let ended = process::wait_until(|| child.try_wait().unwrap().is_some());
    kill_and_reap(&mut child);
    assert!(replaced && connected && ended, "{replaced} {connected} {ended}");
    assert_eq!(names_in(folder.path()), ["image"]);
}

#[test]
fn a_bad_configuration_names_its_key() {
    let base = "[[blk]]\nname = 'a'\nsocket_path = '@/s'\n";
    let null = format!("{base}null = '1G'\n");
    for (config, words) in [
        (format!("{null}colour = 1\n"), vec!["line 5", "unknown field `colour`"]),
        (format!("{null}num_queues = 'x'\n"), vec!["line 5", "num_queues", "expected"]),
        ("[[blk\n".to_owned(), vec!["line 1"]),
        (String::new(), vec!["blk", "no device"]),
        (base.to_owned(), vec!["[[blk]] a: file", "missing (or null, memory or nbd)"]),
        (format!("{null}file = '@/image'\n"), vec!["a: file", "only one of"]),
        (format!("{null}direct = true\n"), vec!["a: direct", "needs file"]),
        (format!("{null}fd = 3\n"), vec!["a: fd", "cannot be combined with socket_path"]),
        (format!("{null}num_queues = 0\n"), vec!["a: num_queues: 0"]),
        (format!("{null}num_queues = 257\n"), vec!["a: num_queues: 257"]),
        (format!("{null}queue_size = 100\n"), vec!["a: queue_size: 100"]),
        (format!("{null}cache = 'none'\n"), vec!["a: cache", "none"]),
        (format!("{null}serial = '123456789012345678901'\n"), vec!["a: serial", "20"]),
        (format!("{null}socket_mode = '888'\n"), vec!["a: socket_mode", "888"]),
        (format!("{null}handshake_timeout = 0\n"), vec!["a: handshake_timeout: 0"]),
        (format!("{base}null = '0'\n"), vec!["a: null", "0"]),
        (format!("{base}null = '1000'\n"), vec!["a: null", "1000"]),
        (format!("{base}memory = '64X'\n"), vec!["a: memory", "64X"]),
        (format!("{null}{null}"), vec!["a: name", "already used by "]),
        (
            format!("{null}{}", null.replace("'a'", "'b'")),
            vec!["b: socket_path", "already used by "],
        ),
        (format!("[daemon]\nworkers = 0\n{null}"), vec!["[daemon]: workers: 0"]),
        (format!("[daemon]\nspin_us = 1001\n{null}"), vec!["[daemon]: spin_us: 1001"]),
        (format!("[daemon]\npolling = 'often'\n{null}"), vec!["[daemon]: polling: \"often\""]),
        (
            format!("[daemon]\npolling = 'always'\nspin_us = 0\n{null}"),
            vec!["[daemon]: spin_us: 0", "cannot be combined with polling \"always\""],
        ),
        (
            format!("[daemon]\nworker_cpus = ['0-1024']\n{null}"),
            vec!["[daemon]: worker_cpus: \"0-1024\" is not a list of CPUs"],
        ),
        (format!("[daemon]\ncontrol = '@/s'\n{null}"), vec!["a: socket_path", "control"]),
        (null.replace("name = 'a'", "name = 'a b'"), vec!["name", "a b"]),
    ] {
        refused_configuration(folder().path(), &config, &words);
    }
}

#[test]
fn a_configuration_that_cannot_be_read_is_named() {
    let folder = folder();
    let at = folder.path();
    for path in [at.join("none.toml"), at.to_path_buf(), at.join("binary")] {
        std::fs::write(at.join("binary"), [0xff; 10]).unwrap();
        let error = refused(at, manyring().arg("run").arg("--config").arg(&path));
        assert!(error.contains("--config") && error.contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_bad_option_names_its_key() {
    let folder = folder();
    let at = folder.path();
    for (arguments, words) in [
        ("--null 1G", "--socket-path: is missing (or --fd)"),
        ("--socket-path @/s", "--blk-file: is missing (or --null, --memory or --nbd)"),
        ("--socket-path @/s --null 1G --memory 1G", "--blk-file: only one of --blk-file, --null"),
        ("--socket-path @/s --null 1G --direct", "--direct: needs --blk-file"),
        ("--socket-path @/s --null 1G --format raw", "--format: needs --blk-file"),
        (
            "--socket-path @/s --blk-file @/image --format qcow2",
            "--format: \"qcow2\" needs state_dir",
        ),
        ("--socket-path @/s --null 1000", "--null: \"1000\" is not a size"),
        ("--socket-path @/s --null 1G --num-queues 0", "--num-queues: 0 is not"),
        ("--socket-path @/s --null 1G --workers 0", "--workers: 0 is not"),
        ("--socket-path @/s --null 1G --polling often", "--polling: \"often\" is not one of"),
        (
            "--socket-path @/s --null 1G --polling never --spin-us 5",
            "--spin-us: 5 cannot be combined",
        ),
        (
            "--socket-path @/s --null 1G --worker-cpus 1023",
            "--worker-cpus: CPU 1023 is not available",
        ),
        (
            "--socket-path @/s --null 1G --workers 1 --queue-workers 0,1",
            "--queue-workers: worker 1",
        ),
        ("--fd 7 --client --null 1G", "--client: needs --socket-path"),
        ("--fd 2 --null 1G", "--fd: 2 is not"),
        ("--fd 7 --socket-path @/s --null 1G", "--fd: cannot be combined with --socket-path"),
        ("--socket-path @/s --null 1G --socket-mode 8", "--socket-mode: \"8\" is not"),
        ("--socket-path @/s --null 1G --name a/b", "--name: must be"),
        ("--socket-path @/s --null 1G --log-level loud", "--log-level: \"loud\" is not one of"),
    ] {
        let error = misused(at, &mut blk(at, arguments));
        assert!(error.starts_with(&format!("manyring: {words}")), "{arguments}\n-> {error}");
    }
    for (arguments, words) in [
        // Nobody handed it in, but the daemon may have opened a descriptor of this number itself.
        ("--fd 7 --null 1G", "--fd: 7 "),
        ("--socket-path @/s --memory 9999999T", "--memory: "),
        ("--fd 4000000 --null 1G", "--fd: 4000000 is not open"),
        ("--socket-path @/s --blk-file @/none", "--blk-file: cannot open"),
    ] {
        let error = refused(at, &mut blk(at, arguments));
        assert!(error.starts_with(&format!("manyring: {words}")), "{arguments}\n-> {error}");
    }
    // A descriptor that is no socket is not taken for one.
    let script = format!(
        "exec {} blk --fd 3 --null 1G 3<{}/image",
        env!("CARGO_BIN_EXE_manyring"),
        at.display()
    );
    let error = refused(at, Command::new("sh").arg("-c").arg(script));
    assert!(error.contains("fd: 3 is not a unix socket"), "{error}");
}

#[test]
fn wrong_usage_is_told_apart() {
    for arguments in [&["blk", "--no-such-option"][..], &["no-such-command"], &[]] {
        let output = output_of(manyring().args(arguments));
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(!output.stderr.is_empty());
    }
}
