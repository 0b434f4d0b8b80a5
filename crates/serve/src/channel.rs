//! `Channel`: sends and receives whole messages with file descriptors over a pair of sockets,
//! without blocking a thread.

pub use crate::byte_stream::Brought;
use crate::byte_stream::receive_into;
use crate::times::CHANNEL_RETRY;
use manyring_engine::Janitor;
use manyring_protocol::message::{FDS_MAX, SIZE_MAX};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, socketpair,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// One end of a channel. Needs a tokio runtime.
#[derive(Debug)]
pub struct Channel {
    socket: AsyncFd<OwnedFd>,
    /// Closes descriptors that arrived and are not used. The peer chose these files, and closing
    /// one of them may block.
    janitor: Arc<Janitor>,
}

/// The empty list of descriptors, for a message that has none.
pub const NO_FDS: &[OwnedFd] = &[];

/// A message that arrived: its bytes and its descriptors.
pub type Came = (Vec<u8>, Brought);

/// Makes two connected sockets. The second one is for another process, which makes a [`Channel`] of
/// it.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Registers a descriptor with the tokio runtime.
#[allow(deprecated, reason = "its replacement is unsafe; no owner here ever changes its fd")]
pub fn watched<T: AsRawFd>(fd: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, interest)
}

impl Channel {
    /// Makes a channel of one socket of a pair. The janitor closes unused descriptors that the peer
    /// sends.
    pub fn new(socket: OwnedFd, janitor: Arc<Janitor>) -> io::Result<Self> {
        let socket = watched(socket, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self { socket, janitor })
    }

    /// Returns the socket, no longer registered with the runtime. The caller closes it on a thread
    /// that may block: the kernel closes the descriptors in unread messages with it.
    pub fn into_socket(self) -> OwnedFd {
        self.socket.into_inner()
    }

    /// Sends a message, after waiting until the socket has room for it and for its descriptors.
    ///
    /// # Errors
    /// The peer has closed the channel.
    pub async fn send(&self, bytes: &[u8], fds: &[impl AsFd]) -> io::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let send = |socket: &OwnedFd| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
            Ok(())
        };
        loop {
            match self.socket.async_io(Interest::WRITABLE, send).await {
                // `ETOOMANYREFS`: all processes of this user together (other device processes
                // included) have too many descriptors in flight. Try again later.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::TOOMANYREFS) => {
                    tokio::time::sleep(CHANNEL_RETRY).await;
                }
                result => return result,
            }
        }
    }

    /// Receives the next message; `None`: the peer has closed the channel.
    ///
    /// # Errors
    /// `InvalidData`: the message is longer than [`SIZE_MAX`], or has more than [`FDS_MAX`]
    /// descriptors. `Other`: this process has no descriptor free for those of the message. They are
    /// lost, so the channel is of no use any more: the peer counts them as received.
    pub async fn receive(&self) -> io::Result<Option<Came>> {
        match self.came().await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            came => came,
        }
    }

    async fn came(&self) -> io::Result<Option<Came>> {
        let receive = |socket: &OwnedFd| receive(socket, &self.janitor);
        self.socket.async_io(Interest::READABLE, receive).await
    }

    /// Waits until the peer has closed the channel after it had read all messages.
    ///
    /// # Errors
    /// `ConnectionReset`: the peer left messages unread. `InvalidData`: the peer sent a message.
    pub async fn ended(&self) -> io::Result<()> {
        match self.came().await? {
            None => Ok(()),
            Some(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// True if the peer has closed the channel, even if messages are left to read.
    pub fn is_alone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self.socket.get_ref(), PollFlags::empty())];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Ends sending: the peer reads end of file.
    pub fn finish(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    /// Returns the next message that the peer sent before it closed the channel, without waiting;
    /// `None`: there is no other.
    pub fn receive_buffered(&self) -> Option<Came> {
        receive(self.socket.get_ref(), &self.janitor).ok().flatten()
    }
}

fn receive(socket: &OwnedFd, janitor: &Arc<Janitor>) -> io::Result<Option<Came>> {
    let mut bytes = vec![0; SIZE_MAX];
    let (count, brought, flags) = receive_into(socket, &mut bytes, janitor)?;
    // The buffer holds as many descriptors as a message can carry: the kernel drops some only if
    // this process can have no more.
    if flags.contains(ReturnFlags::CTRUNC) {
        let problem = "no file descriptor was free for those of a message (limit of open files)";
        return Err(io::Error::other(problem));
    }
    if flags.contains(ReturnFlags::TRUNC) || brought.len() > FDS_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.truncate(count);
    Ok((!bytes.is_empty()).then_some((bytes, brought)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use manyring_engine::MESSAGE_FDS_MAX;
    use std::time::Duration;

    fn with_channels<F: Future<Output = ()>>(test: impl FnOnce(Channel, Channel) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (a, b) = pair().unwrap();
            let janitor = Arc::new(Janitor::of("test"));
            let new = |socket| Channel::new(socket, janitor.clone()).unwrap();
            test(new(a), new(b)).await;
        });
    }

    #[test]
    fn messages_come_whole_with_their_descriptors_and_the_end_is_seen() {
        with_channels(|a, b| async move {
            let fds: Vec<_> =
                (0..FDS_MAX).map(|_| a.socket.get_ref().try_clone().unwrap()).collect();
            a.send(b"one", &fds).await.unwrap();
            a.send(b"two", NO_FDS).await.unwrap();
            let (bytes, came) = b.receive().await.unwrap().unwrap();
            assert_eq!((bytes.as_slice(), came.len()), (&b"one"[..], FDS_MAX));
            drop((came, fds));
            let (bytes, came) = b.receive().await.unwrap().unwrap();
            assert_eq!((bytes.as_slice(), came.len()), (&b"two"[..], 0));
            drop(a);
            assert!(b.receive().await.unwrap().is_none());
        });
    }

    #[test]
    fn a_message_that_is_too_long_is_refused() {
        with_channels(|a, b| async move {
            a.send(&[1; SIZE_MAX + 1], NO_FDS).await.unwrap();
            let error = b.receive().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        });
    }

    /// A TCP connection whose close waits for its peer, which reads nothing.
    fn lingers() -> (OwnedFd, std::net::TcpStream) {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        stream.set_nonblocking(false).unwrap();
        let linger = Some(Duration::from_secs(60));
        rustix::net::sockopt::set_socket_linger(&stream, linger).unwrap();
        (stream.into(), peer)
    }

    #[test]
    fn descriptors_that_nobody_takes_are_closed_on_no_thread_of_the_runtime() {
        with_channels(|a, b| async move {
            let most = MESSAGE_FDS_MAX - 1;
            for (text, others) in [(&b"one"[..], 0), (&[1; SIZE_MAX + 1], 0), (b"many", most)] {
                let (fd, _peer) = lingers();
                let mut fds = vec![a.socket.get_ref().as_fd(); others];
                fds.push(fd.as_fd());
                let mut space =
                    [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
                let (flags, socket) = (SendFlags::empty(), a.socket.get_ref());
                rustix::net::sendmsg(socket, &[IoSlice::new(text)], &mut control, flags).unwrap();
                drop(fd);
                drop(b.receive().await);
                // The janitor has it, and waits for the peer.
                let idle = b.janitor.idle();
                tokio::pin!(idle);
                let is_idle = std::future::poll_fn(|context| {
                    std::task::Poll::Ready(idle.as_mut().poll(context).is_ready())
                });
                assert!(!is_idle.await, "closed by the runtime's thread");
                // It is interrupted.
                idle.await;
            }
        });
    }
}
