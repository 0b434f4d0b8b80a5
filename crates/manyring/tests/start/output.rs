//! The fate of the program where its output cannot be written, or its standard streams are closed.

use crate::support::client::Client;
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, fill, wait_until};
use crate::support::program::manyring;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A daemon with a control socket, and every command that prints, with its arguments.
fn commands() -> (Daemon, Vec<Vec<String>>) {
    let config = "[daemon]\ncontrol = '@/control'\n\
        [[blk]]\nname = 'a'\nsocket_path = '@/a'\nnull = '1G'\n";
    let daemon = Daemon::run(config, &["a", "control"]);
    let at = daemon.folder().display().to_string();
    let commands = [
        "--help",
        "--version",
        "blk --help",
        "blk --print-capabilities",
        "net --print-capabilities",
        "run --print-plan --config @/manyring.toml",
        "snippet qemu --config @/manyring.toml a",
        "snippet libvirt --socket-path /run/a",
        "stats --control @/control",
        "stats --control @/control --json",
        "stats --control @/control --watch",
    ];
    let split = |line: &str| line.split(' ').map(|word| word.replace('@', &at)).collect();
    (daemon, commands.map(split).into())
}

fn ended(arguments: &[String], stdout: impl Into<Stdio>) -> Output {
    let mut command = manyring();
    let mut child = command.args(arguments).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
    let ended = wait_until(|| child.try_wait().unwrap().is_some());
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    assert!(ended, "{arguments:?} does not end");
    output
}

#[test]
fn a_command_whose_reader_has_left_ends_quietly() {
    let (_daemon, commands) = commands();
    for arguments in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let Output { status, stderr, .. } = ended(&arguments, writer);
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!((status.code(), stderr.as_str()), (Some(0), ""), "{arguments:?}: {status}");
    }
}

#[test]
fn a_command_whose_output_finds_no_space_says_so() {
    let (_daemon, commands) = commands();
    for arguments in commands {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let Output { status, stderr, .. } = ended(&arguments, full);
        let stderr = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{arguments:?}: {status}: {stderr}");
        let words = "manyring: cannot write to standard output: No space left on device";
        assert!(stderr.starts_with(words) && stderr.lines().count() == 1, "{stderr}");
    }
}

#[test]
fn a_wrong_option_is_a_status_also_where_nobody_can_be_told() {
    for arguments in ["blk --no-such-option", "blk --null 1G"] {
        for is_dead in [true, false] {
            let (reader, writer) = std::io::pipe().unwrap();
            let reader = if is_dead {
                drop(reader);
                None
            } else {
                fill(&writer);
                Some(reader)
            };
            let mut command = manyring();
            let mut child = Running::start(command.args(arguments.split(' ')).stderr(writer));
            let ended = wait_until(|| child.try_wait().unwrap().is_some());
            let _ = child.kill();
            assert!(ended, "{arguments}: does not end");
            assert_eq!(end_of(&mut child).code(), Some(2), "{arguments}");
            drop(reader);
        }
    }
}

#[test]
fn it_serves_with_its_standard_streams_closed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("blk0");
    let control = folder.path().join("control");
    let mut child = Running::start(&mut closed(folder.path()));
    let up = wait_until(|| socket.exists() && control.exists());
    let served = up && {
        let mut client = Client::connect(&socket, 2);
        client.submit_reads(1, 3);
        client.wait_for(1, 3, TIMEOUT) == 3
    };
    let pid = rustix::process::Pid::from_child(&child);
    let told = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    let ended = told.is_ok() && wait_until(|| child.try_wait().unwrap().is_some());
    let _ = child.kill();
    assert!(served && ended && end_of(&mut child).success());
    assert!(!socket.exists() && !control.exists());
}

/// `manyring blk` with none of the three streams open.
fn closed(folder: &Path) -> Command {
    let (program, at) = (env!("CARGO_BIN_EXE_manyring"), folder.display());
    let options = format!("--socket-path {at}/blk0 --control {at}/control --null 1G");
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("exec {program} blk {options} <&- >&- 2>&-"));
    command
}
