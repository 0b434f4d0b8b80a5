//! `ClientStream`: the stream of a client of a control socket.
//!
//! A client may send file descriptors with its bytes, although nobody asks for any, and it chooses
//! what they are: to close them can take as long as it likes. The kernel closes those that a plain
//! read leaves, and those that nobody has read when the stream is closed, on the thread that reads
//! or closes. That is the thread of all clients and sessions, so a thread of the client does it.

use manyring_engine::{Janitor, MESSAGE_FDS_MAX};
use rustix::fd::OwnedFd;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// The stream. A client that sends a file descriptor loses it.
#[derive(Debug)]
pub(super) struct ClientStream {
    /// `None` only while `drop` runs.
    stream: Option<UnixStream>,
    janitor: Arc<Janitor>,
}

impl ClientStream {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream: Some(stream), janitor: Arc::new(Janitor::of("")) }
    }

    /// Who closes what the client has sent.
    pub(super) fn janitor(&self) -> Arc<Janitor> {
        self.janitor.clone()
    }

    /// Sends this, as far as that needs no wait.
    pub(super) fn try_write(&self, bytes: &[u8]) {
        let _ = self.stream.as_ref().map(|stream| stream.try_write(bytes));
    }

    fn written<T>(
        &mut self,
        write: impl FnOnce(Pin<&mut UnixStream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut self.stream {
            Some(stream) => write(Pin::new(stream)),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(stream) = &self.stream else { return Poll::Ready(Ok(())) };
        loop {
            ready!(stream.poll_read_ready(cx))?;
            let into = buf.initialize_unfilled();
            match stream.try_io(Interest::READABLE, || receive(stream, into)) {
                Ok((len, fds)) if fds.is_empty() => {
                    buf.advance(len);
                    return Poll::Ready(Ok(()));
                }
                Ok((_, fds)) => {
                    self.janitor.dispose(fds);
                    return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// Receives some bytes, and the file descriptors that come with them.
fn receive(stream: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    // Space for all that any message can have: the kernel closes what does not fit, on this thread.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received.bytes, fds))
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.written(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.written(|stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.written(|stream| stream.poll_shutdown(cx))
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        let Some(Ok(stream)) = self.stream.take().map(UnixStream::into_std) else { return };
        // Nothing comes any more from here on. The other direction stays open until it is closed: a
        // client whose request has not been read is told so by that, and asks again.
        let _ = stream.shutdown(std::net::Shutdown::Read);
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let is_empty = matches!(recv(&stream, &mut [0; 1], flags), Ok((_, 0)));
        if !is_empty {
            self.janitor.dispose(stream);
        }
    }
}
