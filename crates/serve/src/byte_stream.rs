//! `ByteStream`: bytes from a process that may be hostile, over a pair of sockets.
//!
//! The supervisor reads no pipe of such a process. A write to a pipe copies the writer's memory
//! while it holds the pipe's lock, and that memory may be a page that a hostile file system never
//! delivers. Each read and each close of the pipe would then wait for the lock, and no signal ends
//! that wait. A write to a unix socket copies the memory before it takes a lock that a reader
//! takes.
//!
//! A hostile process can send descriptors over the socket; an honest one never does. The stream
//! ends then, and the janitor closes the descriptors. The janitor also closes the socket, with the
//! unread bytes in it.

use manyring_engine::{Janitor, MESSAGE_FDS_MAX};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, Shutdown,
    SocketFlags, SocketType, shutdown, socketpair, sockopt,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// The supervisor's end of a pair of stream sockets.
#[derive(Debug)]
pub struct ByteStream {
    /// `None` only after `drop` has passed the socket to the janitor.
    socket: Option<OwnedFd>,
    janitor: Arc<Janitor>,
}

/// Makes two connected sockets. The first one is for [`ByteStream::new`]. The second one is for the
/// other process, whose writes block while about `size` bytes are unread. The kernel counts its own
/// overhead in `size`, and limits the size of a user who is not root.
///
/// # Errors
/// The socket pair cannot be made.
pub fn pair(size: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The kernel doubles the size that is set.
    if sockopt::set_socket_send_buffer_size_force(&theirs, size / 2).is_err() {
        sockopt::set_socket_send_buffer_size(&theirs, size / 2)?;
    }
    // Have `read` return out-of-band bytes, too. If the kernel skipped such a byte, it would close
    // the descriptors that came with it on the reading thread.
    sockopt::set_socket_oobinline(&ours, true)?;
    Ok((ours, theirs))
}

impl ByteStream {
    /// Makes a stream of the first socket of a pair. The janitor closes descriptors that the
    /// process sends.
    pub fn new(socket: OwnedFd, janitor: Arc<Janitor>) -> Self {
        Self { socket: Some(socket), janitor }
    }

    /// Reads without waiting. 0: every holder of the other socket has closed it.
    ///
    /// # Errors
    /// `WouldBlock`: there are no bytes yet. `InvalidData`: the process has sent descriptors; the
    /// stream has ended for that reason.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, brought, flags) = receive_into(self.as_fd(), bytes, &self.janitor)?;
        if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || !brought.is_empty() {
            self.finish();
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(count)
    }

    /// Waits until the stream is readable or has ended.
    pub(crate) fn wait(&self) {
        while poll(&mut [PollFd::new(self, PollFlags::IN)], None) == Err(Errno::INTR) {}
    }

    /// Ends the stream: later writes to the other socket fail. Bytes that were written before can
    /// still be read.
    pub(crate) fn finish(&self) {
        let _ = shutdown(self, Shutdown::Both);
    }
}

impl AsFd for ByteStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let Some(socket) = &self.socket else { unreachable!("`drop` alone takes it") };
        socket.as_fd()
    }
}

impl AsRawFd for ByteStream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for ByteStream {
    fn drop(&mut self) {
        // The janitor may close the socket much later: until then, a write must fail and not block.
        self.finish();
        self.janitor.dispose(self.socket.take());
    }
}

/// The descriptors that arrived with a message. The janitor closes those that are not taken.
#[derive(Debug)]
pub struct Brought {
    fds: Vec<OwnedFd>,
    janitor: Arc<Janitor>,
}

impl Brought {
    /// Wraps descriptors that arrived in another way; for tests and the fuzzer.
    pub fn of(fds: Vec<OwnedFd>, janitor: Arc<Janitor>) -> Self {
        Self { fds, janitor }
    }

    /// True if no descriptor came, or the caller has taken them.
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    /// Returns the number of descriptors.
    pub fn len(&self) -> usize {
        self.fds.len()
    }

    /// Returns the descriptors; the janitor no longer closes them.
    pub fn take(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }
}

impl Drop for Brought {
    fn drop(&mut self) {
        if !self.is_empty() {
            let fds = self.take();
            self.janitor.dispose(fds);
        }
    }
}

/// Receives without waiting. Returns the number of bytes, the descriptors, and whether bytes
/// (`TRUNC`) or descriptors (`CTRUNC`) were lost because there was no space for them.
pub(crate) fn receive_into(
    socket: impl AsFd,
    bytes: &mut [u8],
    janitor: &Arc<Janitor>,
) -> io::Result<(usize, Brought, ReturnFlags)> {
    // Room for the most descriptors that a message can carry: the kernel would close those that do
    // not fit, on this thread.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(bytes)];
    let received = rustix::net::recvmsg(socket, &mut slices, &mut control, flags)?;
    let mut brought = Brought { fds: Vec::new(), janitor: janitor.clone() };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            brought.fds.extend(rights);
        }
    }
    Ok((received.bytes, brought, received.flags))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::{ErrorKind, IoSlice};
    use std::sync::mpsc::{Receiver, channel};

    fn stream() -> (ByteStream, OwnedFd) {
        let (ours, theirs) = pair(64 << 10).unwrap();
        (ByteStream::new(ours, Arc::new(Janitor::of("test"))), theirs)
    }

    fn write(to: &OwnedFd, bytes: &[u8]) -> Result<usize, Errno> {
        rustix::net::send(to, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    #[test]
    fn what_was_written_is_read_to_its_end_whoever_else_has_the_other_end() {
        let mut bytes = [0; 8];
        for is_kept in [false, true] {
            let (stream, theirs) = stream();
            assert_eq!(stream.read(&mut bytes).unwrap_err().kind(), ErrorKind::WouldBlock);
            write(&theirs, b"one").unwrap();
            write(&theirs, b"two").unwrap();
            let _kept = is_kept.then(|| theirs.try_clone().unwrap());
            drop(theirs);
            if is_kept {
                stream.finish();
            }
            assert_eq!((stream.read(&mut bytes).unwrap(), &bytes[..6]), (6, &b"onetwo"[..]));
            assert_eq!(stream.read(&mut bytes).unwrap(), 0);
        }
    }

    #[test]
    fn a_writer_has_no_more_than_the_room_of_the_stream_and_none_after_its_end() {
        let (stream, theirs) = stream();
        let mut written = 0;
        while let Ok(count) = write(&theirs, &[0; 4096]) {
            written += count;
            assert!(written <= 128 << 10, "{written}");
        }
        assert!(written >= 16 << 10, "{written}");
        drop(stream);
        assert_eq!(write(&theirs, &[0]), Err(Errno::PIPE));
    }

    /// Holds the janitor until the sender is dropped.
    struct Held(Receiver<()>);

    impl Drop for Held {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn descriptors_end_the_stream_and_the_janitor_alone_closes_them() {
        // In band, out of band, and one that nobody reads.
        for (flags, is_read) in
            [(SendFlags::empty(), true), (SendFlags::OOB, true), (SendFlags::empty(), false)]
        {
            let (stream, theirs) = stream();
            let (hostile, peer) = pair(4096).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [hostile.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, flags).unwrap();
            drop(hostile);
            let (release, held) = channel();
            let janitor = stream.janitor.clone();
            janitor.dispose(Held(held));
            if is_read {
                let error = stream.read(&mut [0; 8]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidData);
                assert_eq!(write(&theirs, &[0]), Err(Errno::PIPE));
            }
            drop(stream);
            let peer = ByteStream::new(peer, Arc::new(Janitor::of("peer")));
            let is_open = peer.read(&mut [0]).unwrap_err().kind() == ErrorKind::WouldBlock;
            assert!(is_open, "this thread has closed it");
            drop(release);
            peer.wait();
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        }
    }
}
