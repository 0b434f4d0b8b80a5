//! `Channel`: whole messages with file descriptors over a pair of sockets, without waiting.

use super::message::{FDS_MAX, SIZE_MAX};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// An end of the pair. Needs a tokio runtime.
#[derive(Debug)]
pub(super) struct Channel(AsyncFd<OwnedFd>);

/// A message has none.
pub(super) const NO_FDS: &[OwnedFd] = &[];

/// What has come.
pub(super) type Came = (Vec<u8>, Vec<OwnedFd>);

/// Two ends. The second one is to be given to another process, which makes it a [`Channel`].
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The descriptor, watched by the runtime.
#[allow(deprecated, reason = "its replacement is unsafe; an `OwnedFd` never changes its fd")]
pub(super) fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(watched(socket, Interest::READABLE | Interest::WRITABLE)?))
    }

    /// The socket, off the runtime, to be closed where that may block: with it the kernel closes
    /// what was sent and not received.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.0.into_inner()
    }

    /// Sends a message as soon as there is room for it.
    ///
    /// # Errors
    /// The other end is gone.
    pub(super) async fn send(&self, bytes: &[u8], fds: &[impl AsFd]) -> io::Result<()> {
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
        self.0.async_io(Interest::WRITABLE, send).await
    }

    /// The next message; `None`: the other end is gone.
    ///
    /// # Errors
    /// `InvalidData`: a message that is too long, or has more file descriptors than any.
    pub(super) async fn receive(&self) -> io::Result<Option<Came>> {
        self.0.async_io(Interest::READABLE, receive).await
    }

    /// The next message of what the other end has sent before it was gone; `None`: there is no
    /// further one.
    pub(super) fn receive_left(&self) -> Option<Came> {
        receive(self.0.get_ref()).ok().flatten()
    }
}

fn receive(socket: &OwnedFd) -> io::Result<Option<Came>> {
    let mut bytes = vec![0; SIZE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = match rustix::net::recvmsg(socket, &mut slices, &mut control, flags) {
        Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        received => received?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.truncate(received.bytes);
    Ok((!bytes.is_empty()).then_some((bytes, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_channels<F: Future<Output = ()>>(test: impl FnOnce(Channel, Channel) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (a, b) = pair().unwrap();
            test(Channel::new(a).unwrap(), Channel::new(b).unwrap()).await;
        });
    }

    #[test]
    fn messages_come_whole_with_their_descriptors_and_the_end_is_seen() {
        with_channels(|a, b| async move {
            let fds: Vec<_> = (0..FDS_MAX).map(|_| a.0.get_ref().try_clone().unwrap()).collect();
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
}
