//! `manyring run --takeover`: the next daemon takes guests over while they work, or the one that
//! runs goes on.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{client_works, disk, pid, process, serve, two_domains, works, works_until};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, is_root_or_left_out, wait_until};
use crate::support::program::{http, manyring, shown};
use crate::support::rings::StopAtEnd;
use manyring_driver::{BlkDriver, BlkDriverOptions};
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::AtomicBool;

/// Starts the next daemon with this configuration; its log goes to `next.log`.
pub(crate) fn take_over(daemon: &Daemon, config: &str) -> Running {
    let log = std::fs::File::options()
        .append(true)
        .create(true)
        .open(daemon.folder().join("next.log"))
        .unwrap();
    let mut command = manyring();
    command.arg("run").arg("--config").arg(daemon.folder().join(config));
    command.arg("--takeover").arg(daemon.socket_of("control"));
    Running::start(command.stderr(Stdio::from(log)))
}

pub(crate) fn log(daemon: &Daemon) -> String {
    std::fs::read_to_string(daemon.folder().join("next.log")).unwrap_or_default()
}

/// True if a process has ended, though its parent has not waited for it.
pub(crate) fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_err() || stat.unwrap().contains(") Z ")
}

fn answers(daemon: &Daemon) -> bool {
    UnixStream::connect(daemon.socket_of("control")).is_ok()
}

#[test]
fn guests_go_on_with_the_daemon_that_takes_over_again_and_again() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut other = BlkDriver::connect(&daemon.socket_of("b"), &options).unwrap();
    let is_over = AtomicBool::new(false);
    let mut running: Vec<Running> = Vec::new();
    std::thread::scope(|scope| {
        let end = StopAtEnd(&is_over);
        let guest = scope.spawn(|| works_until(&mut client, &is_over));
        let mut before = daemon.pid();
        for round in 0..5_u8 {
            let next = take_over(&daemon, "manyring.toml");
            let pid = next.id();
            running.push(next);
            assert!(wait_until(|| has_ended(before)), "{} {}", daemon.log(), log(&daemon));
            before = pid;
            other.queues[0].write(0, &[round; 512]).unwrap();
            let mut bytes = [9; 512];
            other.queues[0].read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [round; 512]);
            assert!(wait_until(|| process(&daemon, "a")["state"] == "serving"), "{}", log(&daemon));
        }
        drop(end);
        assert!(guest.join().unwrap() > 0);
    });
    works(&mut client, 77);
    drop(client);
    // Whoever comes later finds the same sockets.
    client_works(&daemon.socket_of("a"), 78);
    let last = running.last_mut().unwrap();
    let pid = Pid::from_child(last);
    kill_process(pid, Signal::TERM).unwrap();
    assert!(end_of(last).success(), "{}", log(&daemon));
    assert!(!daemon.socket_of("a").exists() && !daemon.socket_of("control").exists());
    assert!(!log(&daemon).contains("fault"), "{}", log(&daemon));
}

#[test]
fn a_daemon_that_is_started_with_few_open_files_takes_over_as_many_as_there_are() {
    let names: Vec<_> = (0..40).map(|n| format!("d{n}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let devices: String = names.iter().map(|name| disk(name, "memory = '1M'\n")).collect();
    let daemon = serve("domains = 'user'", &devices, &names);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut guests = [("d0", 3), ("d39", 4)].map(|(name, byte)| {
        let mut guest = BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
        guest.queues[0].write(0, &[byte; 512]).unwrap();
        guest
    });
    let mut shell = std::process::Command::new("sh");
    // A socket and a disk for each: more than this limit, which the daemon may raise.
    shell.args(["-c", "ulimit -S -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_manyring")]);
    shell.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
    shell.arg("--takeover").arg(daemon.socket_of("control"));
    let log_file = std::fs::File::create(daemon.folder().join("next.log")).unwrap();
    let mut next = Running::start(shell.stderr(Stdio::from(log_file)));
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    for (guest, byte) in guests.iter_mut().zip([3, 4]) {
        let mut bytes = [0; 512];
        guest.queues[0].read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [byte; 512]);
    }
    drop(guests);
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

/// The host answers no call that opens the image until this is dropped.
fn opens_no_more(image: &Path) -> Fanotify {
    // The next daemon does not get it.
    let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC;
    let listener = Fanotify::init(flags, EventFFlags::O_RDONLY).unwrap();
    let (add, open) = (MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_PERM);
    let file = std::fs::File::open(image).unwrap();
    listener.mark(add, open, &file, None::<&Path>).unwrap();
    listener
}

#[test]
fn an_image_that_opens_slowly_keeps_no_guest_from_the_daemon_that_takes_over() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = two_domains();
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut other = BlkDriver::connect(&daemon.socket_of("b"), &options).unwrap();
    other.queues[0].write(0, &[1; 512]).unwrap();
    let host = opens_no_more(&daemon.folder().join("a.img"));
    // The image is opened for the device process of this one.
    let mut waiting = UnixStream::connect(daemon.socket_of("a")).unwrap();
    let get_features = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    waiting.write_all(&get_features).unwrap();
    waiting.set_read_timeout(Some(TIMEOUT)).unwrap();
    let event = host.read_events().unwrap();
    assert_eq!(event[0].pid().cast_unsigned(), daemon.pid());
    let mut next = take_over(&daemon, "manyring.toml");
    let is_over = || has_ended(daemon.pid());
    assert!(wait_until(|| is_over() || next.try_wait().unwrap().is_some()));
    assert!(is_over() && next.try_wait().unwrap().is_none(), "{} {}", daemon.log(), log(&daemon));
    other.queues[0].write(0, &[2; 512]).unwrap();
    drop((event, host));
    // Its front-end has waited, and goes on when the image is open.
    let mut answer = [0; 20];
    waiting.read_exact(&mut answer).unwrap();
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

/// A socket at which a next daemon waits.
fn listens(path: &Path) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let listener = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    // A daemon that refuses does not connect.
    sockopt::set_socket_timeout(&listener, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
    listener
}

/// The daemon, as it connects to a socket at which a next daemon waits.
fn accepts(listener: &OwnedFd) -> OwnedFd {
    let next = rustix::net::accept_with(listener, SocketFlags::CLOEXEC).expect("it connects");
    sockopt::set_socket_timeout(&next, sockopt::Timeout::Recv, Some(TIMEOUT)).unwrap();
    next
}

/// The next message; `None`: the daemon has closed the socket, and hands nothing over.
fn receives(next: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 1 << 16];
    let (_, len) = rustix::net::recv(next, &mut bytes, RecvFlags::empty()).expect("a message");
    bytes.truncate(len);
    (!bytes.is_empty()).then_some(bytes)
}

/// Asks a daemon to hand over to a process that does `acts`, and ends. Returns what that gives, and
/// why the daemon goes on.
fn hands_over<T>(daemon: &Daemon, acts: impl FnOnce(OwnedFd) -> T) -> (T, String) {
    let path = daemon.folder().join("next");
    let listener = listens(&path);
    let done = std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask(daemon, &path));
        let done = acts(accepts(&listener));
        let (status, answer) = asked.join().unwrap();
        assert_eq!(status, 409, "{answer}");
        (done, answer)
    });
    std::fs::remove_file(path).unwrap();
    done
}

/// Asks a daemon to hand over to a process that reads `messages` messages and then says this, or
/// dies. Returns how many there were.
pub(crate) fn die_after(daemon: &Daemon, messages: usize, says: Option<&[u8]>) -> usize {
    /// How often the device processes may have no time to end, where the host is busy.
    const TRIES: usize = 5;
    for _ in 0..TRIES {
        let (count, answer) = died_after(daemon, messages, says);
        if let Some(count) = count {
            return count;
        }
        assert!(answer.contains("a device process did not end in time"), "{answer}");
    }
    panic!("the device processes do not end in time: {}", daemon.log())
}

/// As [`die_after`], and why the daemon goes on. `None`: the daemon itself has handed nothing over.
fn died_after(daemon: &Daemon, messages: usize, says: Option<&[u8]>) -> (Option<usize>, String) {
    hands_over(daemon, |next| {
        let mut count = 0;
        while count < messages {
            let message = receives(&next)?;
            count += 1;
            if message.ends_with(b"{\"end\":{}}") {
                break;
            }
        }
        // The daemon finds the last message and the end together.
        daemon.while_stopped(|| {
            if let Some(says) = says {
                rustix::io::write(&next, says).unwrap();
            }
            // A process that another test starts at this moment may have a copy of it.
            rustix::net::shutdown(&next, Shutdown::Both).unwrap();
            drop(next);
        });
        Some(count)
    })
}

fn ask(daemon: &Daemon, path: &Path) -> (u16, String) {
    let body = serde_json::json!({ "socket": path }).to_string();
    let (status, _, said) = http(&daemon.socket_of("control"), "POST", "/v1/takeover", &body);
    (status, said)
}

#[test]
fn a_daemon_goes_on_wherever_the_next_one_dies() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let (status, said) = ask(&daemon, &daemon.folder().join("nobody"));
    assert_eq!(status, 409, "{said}");
    works(&mut client, 2);
    let all = die_after(&daemon, usize::MAX, None);
    let named = "three sockets, two disks, a front-end, what its journal names, and the end";
    assert_eq!(all, 8, "{named}");
    works(&mut client, 3);
    for messages in 0..all {
        die_after(&daemon, messages, None);
        works(&mut client, messages as u64);
    }
    die_after(&daemon, usize::MAX, Some(b"\x02{\"taken\":7}"));
    works(&mut client, 4);
    die_after(&daemon, usize::MAX, Some(b"\x02{\"taken\":{}}"));
    works(&mut client, 5);
    // One that cannot have what its configuration names.
    let text = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap();
    let wrong = text.replace("b.img", "none.img").replace("[daemon]", "[daemon]\nwait = 0");
    std::fs::write(daemon.folder().join("wrong.toml"), wrong).unwrap();
    assert!(!end_of(&mut take_over(&daemon, "wrong.toml")).success());
    assert!(log(&daemon).contains("none.img"), "{}", log(&daemon));
    works(&mut client, 6);
    assert!(answers(&daemon) && !daemon.log().contains("fault"), "{}", daemon.log());
    drop(client);
    client_works(&daemon.socket_of("b"), 7);
    assert!(daemon.terminate().success());
}

/// A configuration file beside the daemon's own, with these keys of the daemon first.
fn with_keys(daemon: &Daemon, keys: &str) {
    let text = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap();
    let more = text.replacen("[daemon]\n", &format!("[daemon]\n{keys}\n"), 1);
    assert_ne!(text, more);
    std::fs::write(daemon.folder().join("more.toml"), more).unwrap();
}

#[test]
fn a_daemon_goes_on_if_the_next_one_cannot_have_its_own_sockets() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    // Nobody makes a socket in /proc, and no host has the address (TEST-NET-1).
    for keys in ["control_read = '/proc/control'", "metrics_listen = '192.0.2.1:9'"] {
        works(&mut client, 1);
        with_keys(&daemon, keys);
        let ended = end_of(&mut take_over(&daemon, "more.toml"));
        assert!(!ended.success() && !has_ended(daemon.pid()), "{keys}: {}", log(&daemon));
        assert!(answers(&daemon), "{keys}: {}", log(&daemon));
    }
    works(&mut client, 2);
    drop(client);
    assert!(daemon.terminate().success());
}

#[test]
fn the_next_daemon_waits_for_the_address_at_which_the_other_one_was_scraped() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let keys = format!("wait = 0\nmetrics_listen = '{free}'");
    let devices = disk("a", "file = '@/a.img'\ndomain = 'a'\n");
    let daemon = serve(&keys, &devices, &["a"]);
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    works(&mut client, 1);
    assert!(wait_until(|| std::net::TcpStream::connect(free).is_ok()), "{}", log(&daemon));
    drop(client);
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn a_device_that_waits_keeps_no_other_one_from_the_next_daemon() {
    let waits = disk("c", "file = '@/none/c.img'\ndomain = 'c'\n");
    let devices = disk("a", "file = '@/a.img'\ndomain = 'a'\n") + &waits;
    let daemon = serve("", &devices, &["a"]);
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    works(&mut client, 2);
    drop(client);
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn a_change_that_the_next_daemon_would_not_know_of_is_not_answered() {
    let daemon = two_domains();
    let socket = daemon.socket_of("c");
    let device = serde_json::json!({ "kind": "blk", "socket_path": socket, "null": "1G" });
    let put = || http(&daemon.socket_of("control"), "PUT", "/v1/devices/c", &device.to_string());
    let (asked, _) = hands_over(&daemon, |next| {
        // The device processes have quiesced.
        receives(&next).expect("it hands over");
        std::thread::scope(|scope| {
            let asked = scope.spawn(put);
            // It has been read by now, and waits.
            for _ in 0..3 {
                shown(&daemon.socket_of("control"), "/v1/processes");
            }
            assert!(!asked.is_finished() && !socket.exists(), "{}", daemon.log());
            drop(next);
            asked.join().unwrap()
        })
    });
    assert_eq!(asked.0, 201, "{asked:?}");
    assert!(socket.exists());
    assert!(daemon.terminate().success());
}

#[test]
fn the_first_process_of_a_container_hands_nothing_over() {
    if !is_root_or_left_out() {
        return;
    }
    let config = "[daemon]\ncontrol = '@/control'\n".to_owned()
        + &disk("a", "memory = '16M'\ndomain = 'a'\n");
    let how = "exec unshare --pid --fork --kill-child";
    let daemon = Daemon::run_behind(how, &config, &["a", "control"]);
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    let first = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_raw(first).unwrap(), Signal::USR2).unwrap();
    let said = "the first process of its container";
    assert!(wait_until(|| daemon.log().contains(said)), "{}", daemon.log());
    assert!(wait_until(|| daemon.log().contains("takeover refused")), "{}", daemon.log());
    works(&mut client, 2);
}

#[test]
fn a_daemon_whose_devices_are_in_no_device_process_is_not_taken_over() {
    let daemon = serve("domains = 'one'", &disk("a", "memory = '1M'\n"), &["a"]);
    assert!(!end_of(&mut take_over(&daemon, "manyring.toml")).success());
    assert!(log(&daemon).contains("not served by a device process"), "{}", log(&daemon));
    client_works(&daemon.socket_of("a"), 1);
    assert!(daemon.terminate().success());
}

#[test]
fn a_domain_whose_device_processes_die_again_and_again_keeps_no_other_from_a_takeover() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let _dies = BlkDriver::connect(&daemon.socket_of("b"), &options).unwrap();
    // Before each start the supervisor waits longer, and before the next one for five seconds: more
    // than a takeover does.
    for starts in 1..=6 {
        let is_there =
            || process(&daemon, "b")["starts"] == starts && process(&daemon, "b")["pid"] != 0;
        assert!(wait_until(is_there), "{starts} {}", daemon.log());
        kill_process(pid(&daemon, "b"), Signal::KILL).unwrap();
    }
    assert!(wait_until(|| process(&daemon, "b")["state"] == "ended"), "{}", daemon.log());
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    works(&mut client, 2);
    drop(client);
    let pid = Pid::from_child(&next);
    kill_process(pid, Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn what_the_next_daemon_does_not_serve_is_let_go_of() {
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let mut other = UnixStream::connect(daemon.socket_of("b")).unwrap();
    other.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert!(wait_until(|| process(&daemon, "b")["state"] == "serving"), "{}", daemon.log());
    let text = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap();
    let (only_a, _) = text.split_once("[[blk]]\nname = 'b'").unwrap();
    std::fs::write(daemon.folder().join("less.toml"), only_a).unwrap();
    let mut first = take_over(&daemon, "less.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    // A connection that is reset has an end, too.
    let end = other.read(&mut [0; 16]);
    assert!(matches!(end, Ok(0)) || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    works(&mut client, 2);
    // Nobody is left to connect to.
    assert!(wait_until(|| answers(&daemon)), "{}", log(&daemon));
    assert!(wait_until(|| !daemon.socket_of("b").exists()), "{}", log(&daemon));
    // Nor does it keep the image from the one that comes next.
    let mut second = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(first.id())), "{}", log(&daemon));
    assert!(end_of(&mut first).success());
    assert!(wait_until(|| log(&daemon).contains("listening device=\"b\"")), "{}", log(&daemon));
    client_works(&daemon.socket_of("b"), 3);
    works(&mut client, 4);
    drop(client);
    let pid = Pid::from_child(&second);
    kill_process(pid, Signal::TERM).unwrap();
    assert!(end_of(&mut second).success(), "{}", log(&daemon));
}

#[test]
fn a_name_that_another_process_has_by_now_stays_where_the_next_daemon_does_not_serve_it() {
    let daemon = two_domains();
    let path = daemon.socket_of("b");
    let other = UnixListener::bind(daemon.folder().join("other")).unwrap();
    std::fs::rename(daemon.folder().join("other"), &path).unwrap();
    let text = std::fs::read_to_string(daemon.folder().join("manyring.toml")).unwrap();
    // The other device has another socket from now on.
    let (only_a, _) = text.split_once("[[blk]]\nname = 'b'").unwrap();
    let moved = only_a.replace("/a'", "/moved'");
    assert_ne!(moved, only_a);
    std::fs::write(daemon.folder().join("less.toml"), moved).unwrap();
    let mut next = take_over(&daemon, "less.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    // The next daemon listens, and removes the name, after the other one has ended.
    assert!(wait_until(|| daemon.socket_of("moved").exists()), "{}", log(&daemon));
    client_works(&daemon.socket_of("moved"), 1);
    assert!(wait_until(|| !daemon.socket_of("a").exists()), "{}", log(&daemon));
    let _connected = UnixStream::connect(&path).unwrap();
    other.accept().unwrap();
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
    assert!(path.exists());
}

#[test]
fn a_daemon_that_is_told_to_stop_while_another_one_takes_over_tells_that_one() {
    let daemon = two_domains();
    let path = daemon.folder().join("next");
    let listener = listens(&path);
    std::thread::scope(|scope| {
        // The daemon may end before it answers.
        let asked = scope.spawn(|| {
            let body = serde_json::json!({ "socket": path }).to_string();
            let mut asks = UnixStream::connect(daemon.socket_of("control")).unwrap();
            let head = format!(
                "POST /v1/takeover HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            asks.write_all((head + &body).as_bytes()).unwrap();
            let _ = asks.read(&mut [0; 4096]);
        });
        let next = accepts(&listener);
        let read = || receives(&next).unwrap_or_else(|| panic!("{}", daemon.log()));
        while !read().ends_with(b"{\"end\":{}}") {}
        daemon.send(Signal::TERM);
        assert_eq!(read(), b"\x02{\"goes_on\":{}}");
        asked.join().unwrap();
    });
    assert!(wait_until(|| has_ended(daemon.pid())), "{}", daemon.log());
}
