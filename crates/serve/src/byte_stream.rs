//! `ByteStream`: bytes from a process that may be hostile, over a pair of sockets.
//!
//! No pipe leads from such a process to the supervisor. A write to a pipe copies the writer's
//! memory under the pipe's lock, and a page of that memory may be one that a hostile file system
//! never delivers: then each read and each close of the pipe waits for that lock, where no signal
//! ends the wait. A write to a unix socket copies before it takes a lock that a reader takes.
//!
//! A process can send descriptors over a socket, which an honest process does not do: the stream
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

/// The supervisor's end.
#[derive(Debug)]
pub struct ByteStream {
    /// `None`: the janitor has it.
    socket: Option<OwnedFd>,
    janitor: Arc<Janitor>,
}

/// Two connected ends. The first one is for [`ByteStream::new`]. The second one is for the
/// process, whose writes block while about `size` bytes are unread. The kernel counts its own
/// overhead, too, and a user who is not root may get less.
///
/// # Errors
/// The host has no socket.
pub fn pair(size: usize) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The kernel doubles the size that is set.
    if sockopt::set_socket_send_buffer_size_force(&theirs, size / 2).is_err() {
        sockopt::set_socket_send_buffer_size(&theirs, size / 2)?;
    }
    // Read bytes out of band like all others: the kernel closes the descriptors of a byte that it
    // skips, on the reading thread.
    sockopt::set_socket_oobinline(&ours, true)?;
    Ok((ours, theirs))
}

impl ByteStream {
    /// The end of a pair that is read here. The janitor closes descriptors that nobody wants.
    pub fn new(socket: OwnedFd, janitor: Arc<Janitor>) -> Self {
        Self { socket: Some(socket), janitor }
    }

    /// Reads without waiting; 0: every holder of the other end has closed it.
    ///
    /// # Errors
    /// `WouldBlock`: there are no bytes yet. `InvalidData`: the process has sent descriptors; the
    /// stream has ended for that.
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, brought, is_cut) = receive_into(self.as_fd(), bytes, &self.janitor)?;
        if is_cut || !brought.is_empty() {
            self.finish();
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(count)
    }

    /// Waits until there is something to read, or the end.
    pub(crate) fn wait(&self) {
        while poll(&mut [PollFd::new(self, PollFlags::IN)], None) == Err(Errno::INTR) {}
    }

    /// Ends the stream: the holder of the other end can write no more. Written bytes can still be
    /// read.
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
        // The janitor may close the socket much later: no writer shall wait until then.
        self.finish();
        self.janitor.dispose(self.socket.take());
    }
}

/// Descriptors that arrived with a message. The janitor closes the descriptors that are not taken.
#[derive(Debug)]
pub struct Brought {
    fds: Vec<OwnedFd>,
    janitor: Arc<Janitor>,
}

impl Brought {
    /// Descriptors that arrived in another way: tests and the fuzzer make them.
    pub fn of(fds: Vec<OwnedFd>, janitor: Arc<Janitor>) -> Self {
        Self { fds, janitor }
    }

    /// True if no descriptor came, or all were taken.
    pub fn is_empty(&self) -> bool {
        self.fds.is_empty()
    }

    /// The number of descriptors.
    pub fn len(&self) -> usize {
        self.fds.len()
    }

    /// The descriptors, which are the caller's from now on.
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

/// Receives without waiting: how many bytes, with which descriptors, and whether bytes or
/// descriptors were lost because there was no room for them.
pub(crate) fn receive_into(
    socket: impl AsFd,
    bytes: &mut [u8],
    janitor: &Arc<Janitor>,
) -> io::Result<(usize, Brought, bool)> {
    // Space for the descriptors of any message: the kernel closes those that do not fit, on this
    // thread.
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
    let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok((received.bytes, brought, is_cut))
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
