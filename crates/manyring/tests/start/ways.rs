//! The ways to start: by another name, with sockets that are handed in, as the connecting side.

use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, end_of, kill_and_reap, wait_until};
use crate::support::program::{manyring, names_in, output_of};
use manyring_engine::QueueStats;
use manyring_engine::stats::QueueClass;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// GET_FEATURES: request 1, version 1, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// The header of its answer: a reply with 8 bytes.
const FEATURES: [u8; 12] = [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0];

/// True if whoever is at the other end answers like a back-end.
fn is_served(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut reply = [0; 20];
    stream.write_all(&GET_FEATURES).is_ok()
        && stream.read_exact(&mut reply).is_ok()
        && reply[..12] == FEATURES
}

/// A child that is killed when dropped.
struct Started(Child);

impl Started {
    fn has_ended(&mut self) -> bool {
        wait_until(|| self.0.try_wait().unwrap().is_some())
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

/// Starts `manyring blk --fd 7` with `socket` as that fd.
fn with_fd_7(socket: impl Into<OwnedFd>, arguments: &str) -> Started {
    // It comes as the shell's input, and goes on under its number.
    let program = env!("CARGO_BIN_EXE_manyring");
    let script = format!("exec {program} blk --fd 7 {arguments} 7<&0 </dev/null");
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).stdin(Stdio::from(socket.into()));
    Started(command.spawn().unwrap())
}

#[test]
fn a_listening_socket_that_is_handed_in_is_served_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut started = with_fd_7(listener, "--null 1G");
    for _ in 0..2 {
        let mut client = Client::connect(&path, 1);
        client.submit_reads(0, 1);
        assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
    }
    assert!(started.runs());
    // Its name is not ours to remove.
    let pid = rustix::process::Pid::from_child(&started.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(started.has_ended());
    assert_eq!(names_in(folder.path()), ["socket"]);
}

#[test]
fn a_connected_socket_that_is_handed_in_is_served_to_its_end() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut started = with_fd_7(theirs, "--null 1G");
    assert!(is_served(&ours));
    drop(ours);
    assert!(started.has_ended() && end_of(&mut started.0).success());
}

#[test]
fn as_a_client_it_connects_again_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut command = manyring();
    command.args(["blk", "--client", "--null", "1G", "--socket-path"]).arg(&path);
    // It starts before there is anybody to connect to.
    let mut started = Started(command.spawn().unwrap());
    for _ in 0..3 {
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut front = None;
        assert!(wait_until(|| {
            front = listener.accept().ok();
            front.is_some()
        }));
        let (front, _) = front.unwrap();
        front.set_nonblocking(false).unwrap();
        assert!(is_served(&front));
        // The front-end ends with its socket; a new one will come.
        drop(listener);
        std::fs::remove_file(&path).unwrap();
    }
    assert!(started.runs());
}

#[test]
fn as_a_client_that_is_one_off_it_ends_with_the_first_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut command = manyring();
    command.args(["blk", "--client", "--one-off", "--null", "1G", "--socket-path"]).arg(&path);
    let mut started = Started(command.spawn().unwrap());
    let (front, _) = listener.accept().unwrap();
    assert!(is_served(&front));
    drop(front);
    assert!(started.has_ended() && end_of(&mut started.0).success());
    assert_eq!(names_in(folder.path()), ["socket"]);
}

#[test]
fn as_a_client_it_stops_while_nobody_listens() {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'a'\nsocket_path = '@/a'\nclient = true\nnull = '1G'\n";
    let mut daemon = Daemon::run(config, &["control"]);
    let (status, took) = daemon.stop();
    assert!(status.success() && took.as_millis() < 1000, "{status} after {took:?}");
}

#[test]
fn the_name_vhost_user_blk_means_the_command_blk() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("vhost-user-blk");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_manyring"), &program).unwrap();
    let output = output_of(Command::new(&program).arg("--print-capabilities"));
    assert!(output.status.success(), "{output:?}");
    let capabilities: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(capabilities["type"], "block");
    // As Firecracker's own tests start one.
    let (image, socket) = (folder.path().join("image"), folder.path().join("socket"));
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let mut command = Command::new(&program);
    command.arg("--socket-path").arg(&socket).arg("--blk-file").arg(&image).arg("--read-only");
    let _started = Started(command.spawn().unwrap());
    assert!(wait_until(|| socket.exists()));
    assert!(is_served(&UnixStream::connect(&socket).unwrap()));
}

#[test]
fn capabilities_are_printed_without_anything_else() {
    let output = output_of(manyring().args(["blk", "--print-capabilities"]));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let capabilities: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let wanted = serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] });
    assert_eq!(capabilities, wanted);
}

#[test]
fn capabilities_are_printed_whatever_else_is_asked_under_every_name() {
    let folder = tempfile::tempdir().unwrap();
    let asked = |program: &str, arguments: &str| {
        let path = folder.path().join(program);
        if !path.exists() {
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_manyring"), &path).unwrap();
        }
        output_of(Command::new(&path).args(arguments.split_whitespace()))
    };
    for (program, arguments, kind) in [
        ("vhost-user-blk", "--print-capabilities", "block"),
        ("vhost-user-blk", "--print-capabilities --colour red --no-such", "block"),
        ("vhost-user-blk", "--num-queues none --fd=3 --print-capabilities x y", "block"),
        ("vhost-user-blk", "blk --print-capabilities", "block"),
        ("vhost-user-net", "--print-capabilities --no-such", "net"),
        ("vhost-user-net", "-x --print-capabilities", "net"),
        ("manyring", "blk --no-such=1 --print-capabilities", "block"),
        ("manyring", "net --print-capabilities --no-such", "net"),
        ("manyring", "--log-level=debug --no-such net --print-capabilities", "net"),
    ] {
        let output = asked(program, arguments);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments}: {output:?}");
        let capabilities: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(capabilities["type"], kind, "{program} {arguments}");
    }
    // Of which device, nobody can tell.
    assert!(!asked("manyring", "--print-capabilities").status.success());
}

#[test]
fn the_example_is_a_plan_that_holds() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/blk.toml");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    // The files that the example's first lines ask for, in a folder of the test.
    for image in ["root.img", "data.img"] {
        std::fs::File::create(folder.path().join(image)).unwrap().set_len(1 << 20).unwrap();
    }
    let text = std::fs::read_to_string(example).unwrap();
    let text = text.replace("\"/run/manyring/", &format!("\"{at}/"));
    let file = folder.path().join("blk.toml");
    std::fs::write(&file, text.replace("\"/var/lib/manyring/", &format!("\"{at}/"))).unwrap();
    let output = output_of(manyring().arg("run").arg("--print-plan").arg("--config").arg(&file));
    assert!(output.status.success(), "{output:?}");
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = plan["blk"].as_array().unwrap().iter().map(|b| &b["name"]).collect();
    assert_eq!(names, ["root", "data", "scratch"]);
    assert_eq!(plan["daemon"]["control"], format!("{at}/control.sock"));
}

/// The keys of the last table of `config`, as the program lists them.
fn keys(config: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("manyring.toml");
    std::fs::write(&file, format!("{config}no_such_key = 1\n")).unwrap();
    let error = output_of(manyring().arg("run").arg("--config").arg(&file)).stderr;
    let error = String::from_utf8(error).unwrap();
    let (_, list) = error.split_once("expected one of ").expect(&error);
    list.trim().split(", ").map(|key| key.trim_matches('`').to_owned()).collect()
}

#[test]
fn the_descriptors_say_what_the_program_says_of_itself() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    for command in ["blk", "net"] {
        let text = std::fs::read(examples.join(format!("50-manyring-{command}.json"))).unwrap();
        let descriptor: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let output = output_of(manyring().args([command, "--print-capabilities"]));
        let capabilities: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(descriptor["type"], capabilities["type"], "{command}");
        let binary = Path::new(descriptor["binary"].as_str().unwrap());
        let name = binary.file_name().unwrap().to_str().unwrap();
        assert_eq!(name, format!("vhost-user-{command}"), "a name that means the command");
    }
}

#[test]
fn every_key_of_the_configuration_is_in_the_guide() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(manifest.join(path)).unwrap();
    let names = read("../../docs/design/0001-names.md");
    for (command, tables) in [
        ("blk", ["[daemon]\n", "[[blk]]\n", "[[blk]]\n[blk.fault]\n"]),
        ("net", ["[daemon]\n", "[[net]]\n", "[[net]]\n[net.fault]\n"]),
    ] {
        let path = format!("docs/guide/{command}.md");
        let guide = read(&format!("../../{path}"));
        let keys: Vec<_> = tables.into_iter().flat_map(keys).collect();
        assert!(keys.len() > 25, "{keys:?}");
        for key in keys {
            assert!(guide.contains(&format!("`{key}`")), "{key} is not in {path}");
            assert!(names.contains(&key), "{key} is not in docs/design/0001-names.md");
        }
        let help = output_of(manyring().args([command, "--help"])).stdout;
        let help = String::from_utf8(help).unwrap();
        let options = help.split_whitespace().filter(|w| w.starts_with("--"));
        for option in options.map(|o| o.trim_end_matches([',', '.', ']'])) {
            assert!(guide.contains(&format!("`{option}")), "{option} is not in {path}");
        }
    }
}

#[test]
fn every_counter_is_in_the_guide_and_fixed() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(manifest.join(path)).unwrap();
    let (guide, names) = (read("../../docs/guide/net.md"), read("../../docs/design/0001-names.md"));
    let stats = QueueStats::new(QueueClass::Net);
    let counters: Vec<_> = stats.counters().iter().map(|c| c.name).collect();
    assert!(counters.len() > 20, "{counters:?}");
    for name in counters.into_iter().chain(stats.histograms().iter().map(|h| h.name)) {
        assert!(guide.contains(&format!("`{name}`")), "{name} is not in docs/guide/net.md");
        // Those of one family have a common beginning there: `dropped_{..}`.
        let name = name.strip_prefix("dropped_").unwrap_or(name);
        assert!(names.contains(name), "{name} is not in docs/design/0001-names.md");
    }
}
