//! File descriptors of another kind than a message promises. Each can block a thread that uses it.

use crate::DriverError;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// A kind of file descriptor that a front-end may pass in the place of the expected kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OddFd {
    /// A TCP connection whose peer reads nothing, with `SO_LINGER` and unsent bytes: the last
    /// `close()` of it waits.
    TcpLinger,
    /// An epoll instance that watches other epoll instances.
    Epoll,
    /// An eventfd at its largest count without `O_NONBLOCK`: a write to it waits.
    FullEventfd,
    /// The writing end of a full pipe without `O_NONBLOCK`.
    FullPipe,
    /// The reading end of an empty pipe without `O_NONBLOCK`.
    EmptyPipe,
    /// One end of a socket pair whose buffer is full.
    FullSocket,
    /// A file, always readable.
    File,
    /// The master of a pseudo terminal.
    Tty,
    /// A timer that never expires.
    Timerfd,
    /// A folder.
    Folder,
    /// A file that was opened with `O_PATH`.
    PathOnly,
}

impl OddFd {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::TcpLinger,
        Self::Epoll,
        Self::FullEventfd,
        Self::FullPipe,
        Self::EmptyPipe,
        Self::FullSocket,
        Self::File,
        Self::Tty,
        Self::Timerfd,
        Self::Folder,
        Self::PathOnly,
    ];

    /// Makes a descriptor of this kind.
    ///
    /// # Errors
    /// [`DriverError::System`], [`DriverError::Io`]: the system refuses (no terminal, no loopback).
    pub fn open(self) -> Result<OddDescriptor, DriverError> {
        Ok(match self {
            Self::TcpLinger => tcp_linger()?,
            Self::Epoll => nested_epolls()?,
            Self::FullEventfd => {
                let event = eventfd(0, EventfdFlags::CLOEXEC)?;
                fill_eventfd(&event)?;
                OddDescriptor::new(event, [])
            }
            Self::FullPipe => {
                let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
                fill(&write)?;
                set_blocking(&write)?;
                OddDescriptor::new(write, [read])
            }
            Self::EmptyPipe => {
                let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
                OddDescriptor::new(read, [write])
            }
            Self::FullSocket => {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let (one, other) =
                    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                fill(&one)?;
                set_blocking(&one)?;
                OddDescriptor::new(one, [other])
            }
            Self::File => {
                let file = memfd_create("odd", MemfdFlags::CLOEXEC)?;
                ftruncate(&file, 4096)?;
                OddDescriptor::new(file, [])
            }
            Self::Tty => OddDescriptor::new(open("/dev/ptmx", OFlags::RDWR | OFlags::NOCTTY)?, []),
            Self::Timerfd => {
                let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
                OddDescriptor::new(timer, [])
            }
            Self::Folder => OddDescriptor::new(open("/", OFlags::RDONLY | OFlags::DIRECTORY)?, []),
            Self::PathOnly => OddDescriptor::new(open("/", OFlags::PATH)?, []),
        })
    }
}

/// An odd file descriptor, and the other ends that must stay open so that it stays odd.
#[derive(Debug)]
pub struct OddDescriptor {
    /// The other ends. They are dropped first, so that the close of `fd` here does not wait.
    pub rest: Vec<OwnedFd>,
    /// The descriptor to pass. Once this copy is dropped, the receiver has the last one.
    pub fd: OwnedFd,
}

impl OddDescriptor {
    fn new<const N: usize>(fd: OwnedFd, rest: [OwnedFd; N]) -> Self {
        Self { fd, rest: rest.into() }
    }
}

/// Sets an eventfd to its largest count and clears `O_NONBLOCK`: the next writer waits until
/// somebody reads it.
///
/// # Errors
/// [`DriverError::System`].
pub fn fill_eventfd(event: impl AsFd) -> Result<(), DriverError> {
    let flags = fcntl_getfl(&event)?;
    fcntl_setfl(&event, flags | OFlags::NONBLOCK)?;
    // The largest value for one write. No count is lost if others write at the same time.
    let mut step = u64::MAX - 1;
    while step > 0 {
        if rustix::io::write(&event, &step.to_ne_bytes()).is_err() {
            step /= 2;
        }
    }
    set_blocking(event)
}

fn set_blocking(fd: impl AsFd) -> Result<(), DriverError> {
    let flags = fcntl_getfl(&fd)?;
    Ok(fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?)
}

/// Writes to `fd` until it accepts no more bytes.
fn fill(fd: impl AsFd) -> Result<(), DriverError> {
    let bytes = [0x5a; 4096];
    loop {
        match rustix::io::write(&fd, &bytes) {
            Ok(_) => {}
            Err(rustix::io::Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn open(path: &str, flags: OFlags) -> Result<OwnedFd, DriverError> {
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// How long the close of a lingering socket may block.
const LINGER: Duration = Duration::from_secs(3);

fn tcp_linger() -> Result<OddDescriptor, DriverError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    stream.set_nonblocking(true)?;
    loop {
        match stream.write(&[0x5a; 4096]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error.into()),
        }
    }
    stream.set_nonblocking(false)?;
    sockopt::set_socket_linger(&stream, Some(LINGER))?;
    Ok(OddDescriptor::new(stream.into(), [listener.into()]))
}

/// An epoll instance on a chain of four others: the kernel walks all of them at each poll.
fn nested_epolls() -> Result<OddDescriptor, DriverError> {
    let mut inner = eventfd(1, EventfdFlags::CLOEXEC)?;
    let mut rest = Vec::new();
    for _ in 0..4 {
        let outer = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&outer, &inner, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        rest.push(std::mem::replace(&mut inner, outer));
    }
    Ok(OddDescriptor { fd: inner, rest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_ready(fd: &OwnedFd, flags: PollFlags) -> bool {
        poll(&mut [PollFd::new(fd, flags)], Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn a_filled_eventfd_takes_no_further_write_and_would_wait() {
        for count in [0, 1, 12345] {
            let event = eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            fill_eventfd(&event).unwrap();
            assert!(!is_ready(&event, PollFlags::OUT) && is_ready(&event, PollFlags::IN));
            assert!(!fcntl_getfl(&event).unwrap().contains(OFlags::NONBLOCK));
        }
    }

    #[test]
    fn every_kind_can_be_made_and_those_that_are_full_take_no_byte() {
        for kind in OddFd::ALL {
            // A container may have no terminals.
            let Ok(odd) = kind.open() else {
                assert_eq!(kind, OddFd::Tty);
                continue;
            };
            let is_full = matches!(
                kind,
                OddFd::TcpLinger | OddFd::FullEventfd | OddFd::FullPipe | OddFd::FullSocket
            );
            assert!(!is_full || !is_ready(&odd.fd, PollFlags::OUT), "{kind:?} is not full");
        }
    }
}
