//! `ClientStream`: the stream of a client of a control socket.
//!
//! A client may send file descriptors with its bytes, although the API takes none. The client can
//! make the close of such a descriptor block without end, for example that of a FUSE file. The
//! kernel closes descriptors that a plain `read` ignores, and unread ones when the stream is
//! closed, on the calling thread: the control thread, which serves all clients and sessions. So
//! this stream receives every descriptor, and a janitor thread of the client closes it.

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

/// A client's stream. If the client sends a file descriptor, reading fails with `InvalidData`.
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

    /// Returns the thread that closes the descriptors which the client has sent.
    pub(super) fn janitor(&self) -> Arc<Janitor> {
        self.janitor.clone()
    }

    /// Sends the part of `bytes` that fits into the socket's buffer, and drops the rest. Never
    /// blocks.
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
    // The buffer holds as many descriptors as the kernel allows in a message. The kernel would
    // close all others on this thread, and such a close may block.
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
        // From here on the client can send nothing, so the peek below stays true. Only the reading
        // side is shut down: if a request is still unread, `close` resets the connection, and the
        // client learns that the request was not handled.
        let _ = stream.shutdown(std::net::Shutdown::Read);
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let is_empty = matches!(recv(&stream, &mut [0; 1], flags), Ok((_, 0)));
        // Unread bytes may carry descriptors, which `close` would close here.
        if !is_empty {
            self.janitor.dispose(stream);
        }
    }
}
