//! Where the log cannot be written, or not now: guests are served as if it could.

use crate::support::client::Client;
use crate::support::process::{Running, TIMEOUT, end_of, fill, kill_and_reap, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// A `manyring blk` with a log of the test's choice; killed when dropped.
struct Served {
    child: Running,
    folder: tempfile::TempDir,
}

impl Served {
    /// `limits` go before the program in a shell.
    fn start(limits: &str, log: impl Into<Stdio>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (program, at) = (env!("CARGO_BIN_EXE_manyring"), folder.path().display());
        let script = format!("{limits} exec {program} blk --socket-path {at}/blk0 --null 1G");
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).stdin(Stdio::null()).stderr(log);
        let child = Running::start(&mut command);
        let mut served = Self { child, folder };
        let up = wait_until(|| {
            served.folder.path().join("blk0").exists() || served.has_ended().is_some()
        });
        assert!(up && served.has_ended().is_none(), "{:?}", served.has_ended());
        served
    }

    fn has_ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Front-ends that each cost lines of the log, and a guest that is served after them.
    fn misbehave(&self, front_ends: usize) {
        let socket = self.folder.path().join("blk0");
        for _ in 0..front_ends {
            let mut front = UnixStream::connect(&socket).unwrap();
            front.set_read_timeout(Some(TIMEOUT)).unwrap();
            front.write_all(&[99, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            let ended = front.read(&mut [0]);
            let waits = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
            assert!(!ended.is_err_and(|e| waits(&e)), "its session does not end");
        }
        let mut client = Client::connect(&socket, 2);
        for queue in 0..2 {
            client.submit_reads(queue, 4);
            assert_eq!(client.wait_for(queue, 4, TIMEOUT), 4);
        }
    }

    /// Ends it in good order, soon.
    fn end(mut self) {
        assert_eq!(self.has_ended(), None);
        let start = SystemTime::now();
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(wait_until(|| self.child.try_wait().unwrap().is_some()));
        let took = start.elapsed().unwrap();
        assert!(self.has_ended().is_some_and(|status| status.success()), "{:?}", self.has_ended());
        assert!(took < Duration::from_secs(30), "{took:?}");
        assert!(!self.folder.path().join("blk0").exists());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        kill_and_reap(&mut self.child);
    }
}

#[test]
fn a_log_without_space_ends_nothing() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let served = Served::start("", full);
    served.misbehave(20);
    served.end();
}

#[test]
fn a_log_whose_reader_has_left_ends_nothing() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let served = Served::start("", writer);
    served.misbehave(20);
    served.end();
}

#[test]
fn a_log_past_the_hosts_limit_for_files_ends_nothing() {
    // Where the limit is passed the host sends SIGXFSZ, whose default ends a process.
    let log = tempfile::NamedTempFile::new().unwrap();
    let served = Served::start("ulimit -f 2;", log.reopen().unwrap());
    served.misbehave(40);
    served.end();
    let len = log.as_file().metadata().unwrap().len();
    assert!((512..=2048).contains(&len), "{len} bytes: the limit was not reached");
}

#[test]
fn a_log_that_nobody_reads_holds_nobody_and_goes_on_when_it_is_read() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    fill(&writer);
    let served = Served::start("", writer.try_clone().unwrap());
    served.misbehave(200);
    drop(writer);
    // Lines that were logged while nobody read are there when somebody reads.
    let read = std::thread::Builder::new().spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        text
    });
    served.misbehave(1);
    served.end();
    let text = read.unwrap().join().unwrap();
    let warnings = text.lines().filter(|line| line.contains("WARN")).count();
    assert!(warnings >= 50 && text.contains("SIGTERM"), "{warnings} warnings");
}

#[test]
fn a_log_that_nobody_ever_reads_does_not_hold_the_end() {
    let (_reader, writer) = std::io::pipe().unwrap();
    fill(&writer);
    let served = Served::start("", writer);
    served.misbehave(20);
    served.end();
}

#[test]
fn a_refused_start_says_why_however_late_its_standard_error_is_read() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    fill(&writer);
    let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
    command.args(["blk", "--socket-path=/none/s", "--blk-file=/none/image"]);
    let mut child = Running::start(command.stdin(Stdio::null()).stderr(writer));
    drop(command);
    // Nobody reads for longer than a process that has served waits at its end.
    std::thread::sleep(Duration::from_secs(1));
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(end_of(&mut child).code(), Some(1));
    let said = text.trim_start_matches('x');
    assert!(said.starts_with("manyring: ") && said.lines().count() == 1, "{said:?}");
    assert!(said.contains("/none/"), "{said:?}");
}

#[test]
fn a_refused_start_ends_though_nobody_ever_reads_why() {
    let (_reader, writer) = std::io::pipe().unwrap();
    fill(&writer);
    let mut command = Command::new(env!("CARGO_BIN_EXE_manyring"));
    command.args(["blk", "--socket-path=/none/s", "--blk-file=/none/image"]);
    let mut child = Running::start(command.stdin(Stdio::null()).stderr(writer));
    assert!(wait_until(|| child.try_wait().unwrap().is_some()), "it waits for ever");
    assert_eq!(end_of(&mut child).code(), Some(1));
}
