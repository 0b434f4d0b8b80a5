//! `domains = "user"`: who connects decides which process serves, and a key overrules. Needs root.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{self, disk, pid, process, serve};
use crate::support::process::{Daemon, Running, TIMEOUT, end_of, wait_until};
use crate::support::program::{http, manyring, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, Uid, kill_process};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

const NOBODY: u32 = 65534;
/// How long a lingering socket holds whoever closes it: far longer than anything here may take.
const LINGER: Duration = Duration::from_secs(40);
/// `GET_FEATURES`: a header alone.
const ASKS: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// A connection of this user: the kernel notes who connects, of each thread.
fn connect_as(daemon: &Daemon, name: &str, uid: u32) -> BlkDriver {
    let socket = daemon.socket_of(name);
    let connect = move || {
        let user = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
        BlkDriver::connect(&socket, &options).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// A connection of another user than the device's, who has sent these bytes with these descriptors.
/// The daemon has accepted it, and reads nothing of it before the device is his.
fn waits(daemon: &Daemon, name: &str, bytes: &[u8], fds: Vec<OwnedFd>) -> UnixStream {
    let (socket, bytes) = (daemon.socket_of(name), bytes.to_vec());
    let connect = move || {
        let user = Uid::from_raw(NOBODY);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let stream = UnixStream::connect(&socket).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = sendmsg(&stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
        stream
    };
    let stream = std::thread::spawn(connect).join().unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    // One thread accepts and answers; it sees who has come first, and accepts it before long.
    for _ in 0..3 {
        shown(&daemon.socket_of("control"), "/v1/processes");
    }
    stream
}

/// A TCP socket whose last close waits for its peer, which does not read.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &socket, &[0; 65536]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
    (socket.into(), peer)
}

/// A disk to which every user may connect.
fn one_for_all() -> Daemon {
    start(&[disk("a", "file = '@/a.img'\nsocket_mode = '0666'\n")], &["a"])
}

fn take_over(daemon: &Daemon) -> Running {
    let mut next = manyring();
    next.arg("run").arg("--config").arg(daemon.folder().join("manyring.toml"));
    next.arg("--takeover").arg(daemon.socket_of("control"));
    Running::start(next.stderr(Stdio::null()))
}

fn start(devices: &[String], names: &[&str]) -> Daemon {
    let daemon = serve("domains = 'user'", &devices.concat(), names);
    std::fs::set_permissions(daemon.folder(), PermissionsExt::from_mode(0o755)).unwrap();
    daemon
}

#[test]
fn a_device_is_served_for_the_user_who_connects_and_moves_when_he_has_left() {
    let open = "socket_mode = '0666'\n";
    let devices = [
        disk("a", &format!("file = '@/a.img'\n{open}")),
        disk("b", &format!("memory = '1M'\n{open}")),
        disk("c", &format!("memory = '1M'\ndomain = 'mine'\n{open}")),
    ];
    let daemon = start(&devices, &["a", "b", "c"]);
    let mut roots = connect_as(&daemon, "a", 0);
    roots.queues[0].write(0, &[7; 512]).unwrap();
    let mut others = connect_as(&daemon, "b", NOBODY);
    others.queues[0].write(0, &[8; 512]).unwrap();
    let own = connect_as(&daemon, "c", NOBODY);
    let devices = |name: &str| process(&daemon, name)["devices"].clone();
    assert_eq!(devices("user:0"), serde_json::json!(["a"]));
    assert_eq!(devices("user:65534"), serde_json::json!(["b"]));
    assert_eq!(devices("mine"), serde_json::json!(["c"]));
    assert!(pid(&daemon, "user:0") != pid(&daemon, "user:65534"));
    // One at a time: the other user waits until the first one has left, then has the same disk.
    std::thread::scope(|scope| {
        let next = scope.spawn(|| connect_as(&daemon, "a", NOBODY));
        roots.queues[0].write(512 / 512, &[9; 512]).unwrap();
        assert!(!next.is_finished());
        drop(roots);
        let mut driver = next.join().unwrap();
        let mut bytes = [0; 1024];
        driver.queues[0].read(0, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[1023]), (7, 9));
        assert_eq!(devices("user:0"), serde_json::json!([]));
        // Whatever the first device process says: its end alone takes away what it was given.
        assert_eq!(process(&daemon, "user:0")["state"], "ended");
        assert_eq!(devices("user:65534"), serde_json::json!(["a", "b"]));
        let written = || domain::counted(&daemon, "a", "writes") == 2;
        assert!(wait_until(written), "what the first device process counted is kept");
    });
    drop((others, own));
    // A disk in memory keeps its bytes when it moves.
    let mut bytes = [0; 512];
    connect_as(&daemon, "b", 0).queues[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [8; 512]);
    assert!(daemon.terminate().success());
}

/// Another daemon with the image of disk `a`, which it locks as long as it runs.
fn locks_all(daemon: &Daemon) -> Daemon {
    let image = daemon.folder().join("a.img");
    Daemon::blk(&[std::ffi::OsStr::new("--blk-file"), image.as_os_str()])
}

/// What a device process has under way by a description that has no mark is not known to be over:
/// the image is another daemon's, which keeps the mark away.
#[test]
fn an_image_that_another_daemon_has_goes_to_no_further_device_process() {
    let keys = "file = '@/a.img'\nlock_with_rings = true\nsocket_mode = '0666'\n";
    let daemon = start(&[disk("a", keys)], &["a"]);
    let mut roots = connect_as(&daemon, "a", 0);
    roots.queues[0].write(0, &[7; 512]).unwrap();
    let former = pid(&daemon, "user:0").as_raw_nonzero().get();
    drop(roots);
    // When its rings have stopped, another daemon gets the image, by a lock of all bytes.
    let other = locks_all(&daemon);
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let mut others = BlkDriver::connect(&other.socket(), &options).unwrap();
    let waiting = waits(&daemon, "a", &ASKS, Vec::new());
    let is_gone = || !std::path::Path::new(&format!("/proc/{former}")).exists();
    assert!(wait_until(is_gone), "{}", daemon.log());
    let is_told = || daemon.log().contains("image is locked by another process");
    let is_given = || process(&daemon, "user:65534")["devices"] == serde_json::json!(["a"]);
    assert!(wait_until(|| is_told() || is_given()), "{}", daemon.log());
    assert!(is_told() && !is_given(), "{}", daemon.log());
    others.queues[0].write(0, &[8; 512]).unwrap();
    drop(others);
    assert!(other.terminate().success());
    let mut answer = [0; 20];
    (&waiting).read_exact(&mut answer).unwrap();
    drop(waiting);
    let mut bytes = [0; 512];
    connect_as(&daemon, "a", NOBODY).queues[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [8; 512]);
    assert!(daemon.terminate().success());
}

/// A guest has moved to a daemon that locks the image as long as it runs: the disk can be removed
/// where it was, at once and without harm to the other disks of its device process.
#[test]
fn a_disk_whose_image_another_daemon_has_is_removed_with_what_its_device_process_may_keep() {
    let goes = disk("a", "file = '@/a.img'\nlock_with_rings = true\n");
    let daemon = start(&[goes.clone(), disk("b", "memory = '1M'\n")], &["a", "b"]);
    let mut first = connect_as(&daemon, "a", 0);
    let mut stays = connect_as(&daemon, "b", 0);
    first.queues[0].write(0, &[7; 512]).unwrap();
    let serves = pid(&daemon, "user:0");
    drop(first);
    let other = locks_all(&daemon);
    let file = daemon.folder().join("manyring.toml");
    let goes = goes.replace('@', &daemon.folder().display().to_string());
    std::fs::write(&file, std::fs::read_to_string(&file).unwrap().replace(&goes, "")).unwrap();
    let reloads = || {
        let control = daemon.socket_of("control");
        http(&control, "POST", "/v1/reload", "").0 == 200
    };
    assert!(wait_until(reloads), "{}", daemon.log());
    // The log has a thread of its own, so its lines may come after the answer.
    for line in ["image is locked by another process", "one of its images is locked by another"] {
        assert!(wait_until(|| daemon.log().contains(line)), "{line}: {}", daemon.log());
    }
    let log = daemon.log();
    assert!(!log.contains("still open"), "{log}");
    // The other device goes on in the next device process, which has not seen the image.
    stays.queues[0].write(0, &[7; 512]).unwrap();
    assert_ne!(pid(&daemon, "user:0"), serves, "{log}");
    assert!(other.terminate().success());
    assert!(daemon.terminate().success());
}

#[test]
fn a_user_who_waits_for_a_device_holds_nobody_up_when_the_device_goes() {
    let daemon = one_for_all();
    let _roots = connect_as(&daemon, "a", 0);
    let (fd, _peer) = lingering();
    let _waiting = waits(&daemon, "a", b"x", vec![fd]);
    let mut daemon = daemon;
    let (status, took) = daemon.stop();
    assert!(status.success() && took < LINGER / 2, "{took:?}: {}", daemon.log());
}

#[test]
fn a_user_who_waits_for_a_device_waits_on_with_the_daemon_that_takes_over() {
    let daemon = one_for_all();
    let mut roots = connect_as(&daemon, "a", 0);
    roots.queues[0].write(0, &[7; 512]).unwrap();
    let mut waiting = waits(&daemon, "a", &ASKS, Vec::new());
    let mut next = take_over(&daemon);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid()));
    assert!(wait_until(|| stat().map_or(true, |stat| stat.contains(") Z "))), "{}", daemon.log());
    // The device is the first user's still.
    let mut bytes = [0; 512];
    roots.queues[0].read(0, &mut bytes).unwrap();
    assert_eq!((bytes, &process(&daemon, "user:65534")), ([7; 512], &serde_json::Value::Null));
    drop(roots);
    let mut answer = [0; 20];
    waiting.read_exact(&mut answer).unwrap();
    assert_eq!(process(&daemon, "user:65534")["devices"], serde_json::json!(["a"]));
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success());
}

#[test]
fn a_user_who_waits_for_a_device_holds_no_takeover_up() {
    let daemon = one_for_all();
    let mut roots = connect_as(&daemon, "a", 0);
    let (fd, peer) = lingering();
    let _waiting = waits(&daemon, "a", b"x", vec![fd]);
    let mut next = take_over(&daemon);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid()));
    let has_ended = || stat().map_or(true, |stat| stat.contains(") Z "));
    assert!(wait_until(|| has_ended() || next.try_wait().unwrap().is_some()));
    assert!(has_ended() && next.try_wait().unwrap().is_none(), "{}", daemon.log());
    roots.queues[0].write(0, &[7; 512]).unwrap();
    drop(peer);
    kill_process(Pid::from_child(&next), Signal::TERM).unwrap();
    assert!(end_of(&mut next).success());
}
