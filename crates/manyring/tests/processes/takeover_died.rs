//! The daemon that runs dies at each step of a takeover: the next one goes on with its guests, or
//! starts anew; somebody serves.

use crate::domain::{client_works, two_domains, works};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, kill_and_reap, wait_until};
use crate::support::program::manyring;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Set for a process that stands for the daemon: its folder, that one's number, and the step.
const STANDS: &str = "MANYRING_TEST_STANDS";

/// When the daemon dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It was asked to hand over, and has not begun.
    Asked,
    /// It does not die then: it stops, because it was told to.
    Stopped,
    /// It has sent so many messages; all of them, if there are fewer.
    Sent(usize),
    /// It has not read yet that everything is taken.
    Unread,
    /// It has read that.
    Read,
}

impl Step {
    fn emit(self) -> String {
        match self {
            Self::Asked => "asked".to_owned(),
            Self::Stopped => "stopped".to_owned(),
            Self::Sent(count) => count.to_string(),
            Self::Unread => "unread".to_owned(),
            Self::Read => "read".to_owned(),
        }
    }

    fn parse(text: &str) -> Self {
        match text {
            "asked" => Self::Asked,
            "stopped" => Self::Stopped,
            "unread" => Self::Unread,
            "read" => Self::Read,
            count => Self::Sent(count.parse().unwrap()),
        }
    }
}

/// True if a process has ended with all its threads, though its parent has not waited for it.
fn has_ended(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    threads <= 1 && stat.map_or(true, |stat| stat.contains(") Z "))
}

/// Reads a request: its first line, and its body.
fn request(stream: &mut UnixStream) -> (String, String) {
    let mut reader = BufReader::new(stream);
    let (mut first, mut len) = (String::new(), 0);
    reader.read_line(&mut first).unwrap();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(number) = line.strip_prefix("content-length:") {
            len = number.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body).unwrap();
    (first, String::from_utf8(body).unwrap())
}

fn seqpacket() -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// The next message and its descriptors; `None`: the other end is gone.
fn receive(socket: &OwnedFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 1 << 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut into, &mut control, flags).unwrap();
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    bytes.truncate(received.bytes);
    (!bytes.is_empty()).then_some((bytes, fds))
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    let slices = [IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &slices, &mut control, SendFlags::empty()).unwrap();
}

/// Whoever does not come to this socket, or says nothing, is not waited for without an end.
fn bounded(socket: &impl AsFd) {
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
}

/// Stands between the daemon and the next one, which takes this process for the daemon: hands on
/// what the daemon says, and dies with it at the step.
fn stand(told: &str) -> ! {
    let [folder, daemon, step] =
        <[&str; 3]>::try_from(told.split('|').collect::<Vec<_>>()).unwrap();
    let (folder, daemon, step) =
        (PathBuf::from(folder), daemon.parse::<i32>().unwrap(), Step::parse(step));
    let listener = UnixListener::bind(folder.join("stands")).unwrap();
    bounded(&listener);
    println!("stands");
    std::io::stdout().flush().unwrap();
    let dies = || -> ! {
        kill_process(Pid::from_raw(daemon).unwrap(), Signal::KILL).unwrap();
        assert!(wait_until(|| has_ended(daemon)));
        let _ = kill_process(rustix::process::getpid(), Signal::KILL);
        unreachable!("it was killed")
    };
    let (asks, body) = loop {
        let mut stream = listener.accept().unwrap().0;
        bounded(&stream);
        let (first, body) = request(&mut stream);
        if first.starts_with("POST /v1/takeover ") {
            break (stream, body);
        }
        assert!(first.starts_with("GET /v1/processes "), "{first}");
        let processes = "{\"processes\":[]}";
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n";
        write!(stream, "{head}content-length: {}\r\n\r\n{processes}", processes.len()).unwrap();
    };
    if step == Step::Asked {
        dies();
    }
    if step == Step::Stopped {
        std::fs::remove_file(folder.join("stands")).unwrap();
        std::process::exit(0);
    }
    let path = folder.join("between");
    let between = seqpacket();
    rustix::net::bind(&between, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&between, 1).unwrap();
    bounded(&between);
    let control = folder.join("control");
    let request = serde_json::json!({ "socket": path }).to_string();
    let head = "POST /v1/takeover HTTP/1.1\r\nhost: x\r\n";
    // It dies before it answers.
    let mut asked = UnixStream::connect(control).unwrap();
    write!(asked, "{head}content-length: {}\r\n\r\n{request}", request.len()).unwrap();
    let runs = rustix::net::accept_with(&between, SocketFlags::CLOEXEC).unwrap();
    bounded(&runs);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let next = seqpacket();
    let at = SocketAddrUnix::new(body["socket"].as_str().unwrap()).unwrap();
    rustix::net::connect(&next, &at).unwrap();
    let most = if let Step::Sent(count) = step { count } else { usize::MAX };
    for _ in 0..most {
        let (bytes, fds) = receive(&runs).unwrap();
        send(&next, &bytes, &fds);
        if bytes.ends_with(b"{\"end\":{}}") {
            break;
        }
    }
    if step == Step::Unread || step == Step::Read {
        // It has something to say, which is that it has taken everything.
        let longest = Timespec::try_from(TIMEOUT).unwrap();
        poll(&mut [PollFd::new(&next, PollFlags::IN)], Some(&longest)).unwrap();
    }
    if step == Step::Read {
        assert_eq!(receive(&next).unwrap().0, b"\x02{\"taken\":{}}");
    }
    drop((asks, asked));
    dies()
}

/// The next daemon; killed when dropped.
struct Next(Child);

impl Drop for Next {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

/// Has another process stand for the daemon, and end at this step, and the next daemon take over
/// from that.
fn ends_at(daemon: &Daemon, step: Step) -> Next {
    let folder = daemon.folder().display();
    let mut stands = Running::start(
        Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "takeover_died::the_next_daemon_serves_wherever_the_one_that_runs_dies",
                "--nocapture",
            ])
            .env(STANDS, format!("{folder}|{}|{}", daemon.pid(), step.emit()))
            .stdout(Stdio::piped()),
    );
    let lines = BufReader::new(stands.stdout.as_mut().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.ends_with("stands")));
    let log = std::fs::File::create(daemon.folder().join("next.log")).unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
    command.arg("--takeover").arg(daemon.folder().join("stands"));
    let next = Next(command.stderr(log).spawn().unwrap());
    end_of(&mut stands);
    next
}

/// As [`ends_at`]; the daemon dies at that step, too.
fn dies_at(daemon: &Daemon, step: Step) -> Next {
    let next = ends_at(daemon, step);
    let ended = wait_until(|| has_ended(i32::try_from(daemon.pid()).unwrap()));
    assert!(ended, "{step:?} {} {}", daemon.log(), log_of(daemon));
    next
}

fn log_of(daemon: &Daemon) -> String {
    std::fs::read_to_string(daemon.folder().join("next.log")).unwrap_or_default()
}

/// The next daemon listens, is asked, and ends as it should.
fn serves(daemon: &Daemon, mut next: Next, step: Step) {
    let said = || format!("{step:?}: {} {}", daemon.log(), log_of(daemon));
    let mut is_there = |path: &Path| {
        assert!(next.0.try_wait().unwrap().is_none(), "{}", said());
        UnixStream::connect(path).is_ok()
    };
    assert!(wait_until(|| is_there(&daemon.socket_of("control"))), "{}", said());
    for name in ["a", "b"] {
        assert!(wait_until(|| is_there(&daemon.socket_of(name))), "{}", said());
        client_works(&daemon.socket_of(name), 3);
    }
    kill_process(Pid::from_child(&next.0), Signal::TERM).unwrap();
    assert!(end_of(&mut next.0).success(), "{}", said());
    assert!(!daemon.socket_of("a").exists() && !daemon.socket_of("control").exists());
    assert!(!log_of(daemon).contains("fault"), "{}", said());
}

#[test]
fn the_next_daemon_serves_wherever_the_one_that_runs_dies() {
    // Started again by `dies_at`, this test is the process that stands for the daemon.
    if let Ok(told) = std::env::var(STANDS) {
        stand(&told);
    }
    for step in [Step::Asked, Step::Sent(0), Step::Sent(2), Step::Sent(5), Step::Sent(7)] {
        let daemon = two_domains();
        let mut client = Client::connect(&daemon.socket_of("a"), false);
        works(&mut client, 1);
        let next = dies_at(&daemon, step);
        let said = || format!("{step:?}: {} {}", daemon.log(), log_of(&daemon));
        assert!(wait_until(|| log_of(&daemon).contains("starting anew")), "{}", said());
        drop(client);
        serves(&daemon, next, step);
    }
}

#[test]
fn a_daemon_that_was_told_to_stop_before_it_hands_over_is_not_taken_for_dead() {
    let daemon = two_domains();
    let mut next = ends_at(&daemon, Step::Stopped);
    assert!(wait_until(|| next.0.try_wait().unwrap().is_some()), "{}", log_of(&daemon));
    assert!(!end_of(&mut next.0).success(), "{}", log_of(&daemon));
    assert!(log_of(&daemon).contains("the running daemon was stopped"), "{}", log_of(&daemon));
    // It has touched nothing.
    client_works(&daemon.socket_of("a"), 3);
    assert!(daemon.terminate().success());
}

#[test]
fn guests_go_on_if_the_daemon_that_runs_dies_when_it_has_handed_everything_over() {
    for step in [Step::Sent(usize::MAX), Step::Unread, Step::Read] {
        let daemon = two_domains();
        let mut client = Client::connect(&daemon.socket_of("a"), false);
        works(&mut client, 1);
        let next = dies_at(&daemon, step);
        // On the connection of before.
        works(&mut client, 2);
        let taken = if step == Step::Read { "taken over" } else { "serving its guests here" };
        assert!(wait_until(|| log_of(&daemon).contains(taken)), "{step:?} {}", log_of(&daemon));
        drop(client);
        serves(&daemon, next, step);
    }
}
