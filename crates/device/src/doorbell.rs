//! Kick, call and err: the fds of a queue, checked at the door.
//!
//! QEMU passes eventfds, UML what it calls a pipe, which is a socket pair. Anything else is
//! refused: a file would always be readable, a terminal could block the worker.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

/// Why a doorbell is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// Neither an eventfd nor a pipe.
    #[error("the file descriptor is neither an eventfd nor a pipe nor a socket")]
    Kind,
    /// The system refused to look at it or to make it non-blocking.
    #[error("the file descriptor cannot be used: {0}")]
    System(Errno),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Eventfd,
    Pipe,
}

fn kind_of(fd: &OwnedFd) -> Result<Kind, DoorbellError> {
    let stat = rustix::fs::fstat(fd).map_err(DoorbellError::System)?;
    if matches!(FileType::from_raw_mode(stat.st_mode), FileType::Fifo | FileType::Socket) {
        return Ok(Kind::Pipe);
    }
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    match info {
        Ok(text) if text.contains("eventfd-count:") => Ok(Kind::Eventfd),
        Ok(_) => Err(DoorbellError::Kind),
        // Without /proc: an anonymous inode has no file type. Better than nothing.
        Err(_) if stat.st_mode & 0o170_000 == 0 => Ok(Kind::Eventfd),
        Err(_) => Err(DoorbellError::Kind),
    }
}

fn set_nonblocking(fd: &OwnedFd) -> Result<(), DoorbellError> {
    let flags = rustix::fs::fcntl_getfl(fd).map_err(DoorbellError::System)?;
    if flags.contains(OFlags::NONBLOCK) {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(DoorbellError::System)
}

/// Available buffer notifications of a queue. An eventfd is watched and never read.
#[derive(Debug)]
pub struct Kick {
    fd: OwnedFd,
    kind: Kind,
}

/// Reads of one drain at most: a front-end that writes without end must not hold the worker.
const DRAIN_READS: usize = 1024;

impl Kick {
    /// Checks `fd`.
    ///
    /// # Errors
    /// [`DoorbellError`]; the fd is closed.
    pub fn new(fd: OwnedFd) -> Result<Self, DoorbellError> {
        let kind = kind_of(&fd)?;
        if kind == Kind::Pipe {
            set_nonblocking(&fd)?;
        }
        Ok(Self { fd, kind })
    }

    /// Takes what a pipe holds, so that it does not fill up.
    pub(crate) fn drain(&self) {
        if self.kind == Kind::Eventfd {
            return;
        }
        let mut bytes = [0; 512];
        for _ in 0..DRAIN_READS {
            if !matches!(rustix::io::read(&self.fd, &mut bytes), Ok(n) if n == bytes.len()) {
                break;
            }
        }
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Used buffer notifications of a queue, or its error notifications.
#[derive(Debug)]
pub struct Call {
    fd: OwnedFd,
}

impl Call {
    /// Checks `fd` and makes it non-blocking.
    ///
    /// # Errors
    /// [`DoorbellError`]; the fd is closed.
    pub fn new(fd: OwnedFd) -> Result<Self, DoorbellError> {
        kind_of(&fd)?;
        set_nonblocking(&fd)?;
        Ok(Self { fd })
    }

    /// Rings. A full pipe or counter means "already told"; a peer that is gone needs no telling.
    #[inline]
    pub fn ring(&self) {
        while rustix::io::write(&self.fd, &1u64.to_ne_bytes()) == Err(Errno::INTR) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn eventfds_and_pipes_are_doorbells() {
        assert!(Kick::new(eventfd(0, EventfdFlags::empty()).unwrap()).is_ok());
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(Kick::new(reader).is_ok());
        let call = Call::new(writer).unwrap();
        (0..70_000 / 8).for_each(|_| call.ring());
    }

    #[test]
    fn files_are_refused_and_sockets_do_not_block() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Kick::new(file.into()).unwrap_err(), DoorbellError::Kind);
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let call = Call::new(socket.into()).unwrap();
        (0..300_000 / 8).for_each(|_| call.ring());
    }
}
