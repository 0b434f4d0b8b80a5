//! Kick, call, err and the back-end channel: fds of the front-end, checked at the door.
//!
//! QEMU passes eventfds, UML what it calls a pipe, which is a socket pair or a pipe. Anything else
//! is refused: a file would always be readable, a terminal could block the worker.
//!
//! The flags of such an fd are the front-end's too: it could take `O_NONBLOCK` back. A socket is
//! told with each call not to wait, a pipe is opened anew so that its flags are ours. An eventfd
//! allows neither: see SECURITY.md.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

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
    Socket,
}

fn kind_of(fd: &OwnedFd) -> Result<Kind, DoorbellError> {
    let stat = rustix::fs::fstat(fd).map_err(DoorbellError::System)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Fifo => return Ok(Kind::Pipe),
        FileType::Socket => return Ok(Kind::Socket),
        _ => {}
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

/// Makes sure that reading or writing does not wait.
fn nonblocking(fd: OwnedFd, kind: Kind, access: OFlags) -> Result<OwnedFd, DoorbellError> {
    if kind == Kind::Pipe {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        // Fails without /proc, or if the other end is closed: then the flag has to do.
        if let Ok(ours) = rustix::fs::open(path, flags, Mode::empty()) {
            return Ok(ours);
        }
    }
    if kind != Kind::Socket {
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(DoorbellError::System)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(DoorbellError::System)?;
    }
    Ok(fd)
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
        let fd = if kind == Kind::Eventfd { fd } else { nonblocking(fd, kind, OFlags::RDONLY)? };
        Ok(Self { fd, kind })
    }

    /// True if it is kept for ever that the driver kicked, and it did.
    pub(crate) fn keeps(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        self.kind == Kind::Eventfd && poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }

    /// Takes what a pipe holds, so that it does not fill up.
    pub(crate) fn drain(&self) {
        let mut bytes = [0; 512];
        for _ in 0..DRAIN_READS {
            let read = match self.kind {
                Kind::Eventfd => return,
                Kind::Pipe => rustix::io::read(&self.fd, &mut bytes),
                Kind::Socket => {
                    rustix::net::recv(&self.fd, &mut bytes, RecvFlags::DONTWAIT).map(|(n, _)| n)
                }
            };
            if read != Ok(bytes.len()) {
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

/// What we write to: used buffer notifications of a queue, its error notifications, or the
/// back-end request channel.
#[derive(Debug)]
pub struct Call {
    fd: OwnedFd,
    kind: Kind,
}

impl Call {
    /// Checks `fd` and makes it non-blocking.
    ///
    /// # Errors
    /// [`DoorbellError`]; the fd is closed.
    pub fn new(fd: OwnedFd) -> Result<Self, DoorbellError> {
        let kind = kind_of(&fd)?;
        Ok(Self { fd: nonblocking(fd, kind, OFlags::WRONLY)?, kind })
    }

    /// Rings. A full pipe or counter means "already told"; a peer that is gone needs no telling.
    #[inline]
    pub fn ring(&self) {
        let _ = self.write(&1u64.to_ne_bytes());
    }

    /// Writes bytes without waiting.
    ///
    /// # Errors
    /// The system's: `EAGAIN` if there is no room, `EPIPE` if the peer is gone.
    #[inline]
    pub fn write(&self, bytes: &[u8]) -> Result<(), Errno> {
        loop {
            let written = match self.kind {
                Kind::Socket => {
                    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                    rustix::net::send(&self.fd, bytes, flags)
                }
                Kind::Eventfd | Kind::Pipe => rustix::io::write(&self.fd, bytes),
            };
            match written {
                Err(Errno::INTR) => {}
                other => return other.map(drop),
            }
        }
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
    fn a_front_end_cannot_make_a_pipe_or_socket_block_again() {
        let blocking = |fd: &OwnedFd| {
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK).unwrap();
        };
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let theirs = rustix::io::dup(&writer).unwrap();
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = OwnedFd::from(socket);
        let theirs_too = rustix::io::dup(&socket).unwrap();
        for (ours, theirs) in [(writer, theirs), (socket, theirs_too)] {
            let call = Call::new(ours).unwrap();
            blocking(&theirs);
            while call.write(&[0; 8]).is_ok() {}
            assert_eq!(call.write(&[0; 8]), Err(Errno::AGAIN));
        }
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let theirs = rustix::io::dup(&reader).unwrap();
        let kick = Kick::new(reader).unwrap();
        blocking(&theirs);
        kick.drain();
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
