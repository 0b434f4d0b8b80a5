//! Descriptors that a front-end sends do not lend it the daemon's rights, nor keep its session open
//! when it has left.

use crate::support::process::{Daemon, wait_until};
use manyring_driver::{BlkDriver, BlkDriverOptions, DriverError, DriverOp, FrontEnd};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(30);

type Send = fn(&mut FrontEnd, BorrowedFd<'_>) -> Result<(), DriverError>;

/// The places of a doorbell.
const PLACES: [(&str, Send); 4] = [
    ("kick", |front, fd| front.set_vring_kick(0, Some(fd))),
    ("call", |front, fd| front.set_vring_call(0, Some(fd))),
    ("err", |front, fd| front.set_vring_err(0, Some(fd))),
    ("back-end channel", |front, fd| front.send_message(SET_BACKEND_REQ_FD, &[], &[fd])),
];
const SET_BACKEND_REQ_FD: u32 = 21;
/// The requests of these places, and how long their payload is.
const REQUESTS: [(u32, usize); 4] = [(12, 8), (13, 8), (14, 8), (SET_BACKEND_REQ_FD, 0)];

fn front(daemon: &Daemon) -> FrontEnd {
    let mut front = FrontEnd::connect(&daemon.socket(), LONG).unwrap();
    let channel = manyring_driver::wire::vhost_user::PROTOCOL_F_BACKEND_REQ;
    front.negotiate(0, 1 << 30, channel).unwrap();
    front
}

fn next_guest_is_served(daemon: &Daemon, case: &str) {
    let served = || {
        let guest = BlkDriver::connect(&daemon.socket(), &BlkDriverOptions::default());
        guest.is_ok_and(|mut guest| guest.queues[0].run(DriverOp::Flush).is_ok())
    };
    assert!(wait_until(served), "{case}: {}", daemon.log());
}

fn fifo(at: &Path) -> PathBuf {
    let path = at.join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// The front-end need not be able to open it: the descriptor only names it.
#[test]
fn a_fifo_that_a_front_end_names_is_neither_read_nor_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(folder.path());
    let ours = open(&path, OFlags::RDWR | OFlags::NONBLOCK, Mode::empty()).unwrap();
    rustix::io::write(&ours, b"message").unwrap();
    let daemon = Daemon::blk(&["--memory", "16M"]);
    for (place, send) in PLACES {
        for flags in [OFlags::PATH, OFlags::RDWR | OFlags::NONBLOCK] {
            let mut front = front(&daemon);
            let fd = open(&path, flags, Mode::empty()).unwrap();
            // The answer, or the end of the session.
            let _ = send(&mut front, fd.as_fd());
            assert!(front.is_closed_within(LONG).unwrap(), "{place} {flags:?}: it is taken");
        }
    }
    let mut bytes = [0; 64];
    let len = rustix::io::read(&ours, &mut bytes).unwrap();
    assert_eq!(&bytes[..len], b"message", "the daemon has read or written it");
    next_guest_is_served(&daemon, "fifo");
}

/// Sends a message with a file descriptor.
fn send(socket: &UnixStream, request: u32, payload: usize, fd: BorrowedFd<'_>) {
    let mut message = [request, 1, u32::try_from(payload).unwrap()].map(u32::to_ne_bytes).concat();
    message.resize(message.len() + payload, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// Whoever is killed does not shut its socket down: the daemon alone could hold it open.
#[test]
fn the_end_of_its_session_as_a_doorbell_does_not_keep_the_device() {
    let daemon = Daemon::blk(&["--memory", "16M"]);
    for (request, payload) in REQUESTS {
        let front = UnixStream::connect(daemon.socket()).unwrap();
        send(&front, request, payload, front.as_fd());
        drop(front);
        next_guest_is_served(&daemon, &format!("request {request}"));
    }
}

#[test]
fn the_end_of_its_session_that_lies_in_a_doorbell_does_not_keep_the_device() {
    let daemon = Daemon::blk(&["--memory", "16M"]);
    for (request, payload) in REQUESTS {
        let front = UnixStream::connect(daemon.socket()).unwrap();
        let (bell, other) = UnixStream::pair().unwrap();
        send(&other, 0, 0, front.as_fd());
        send(&front, request, payload, bell.as_fd());
        drop((front, bell, other));
        next_guest_is_served(&daemon, &format!("request {request}"));
    }
}
