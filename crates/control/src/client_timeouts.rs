//! `Patient`: a client's stream, which fails when the client takes too long to read an answer.
//! `Prompt`: a request's body, which fails when the client takes too long to send it.

use crate::client_places::Busy;
use hyper::body::{Body, Frame, SizeHint};
use manyring_serve::times::{HTTP_ANSWER, HTTP_BODY};
use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A client's stream; its writes fail with `TimedOut` if the client does not read for too long.
#[derive(Debug)]
pub(super) struct Patient<S> {
    stream: S,
    busy: Arc<Busy>,
    /// The timeout, which starts with the first write that would block, and ends when a flush
    /// finds that all is written.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    pub(super) fn new(stream: S, busy: Arc<Busy>) -> Self {
        Self { stream, busy, waits: None }
    }

    /// Stops the timeout: the client has read all that was written.
    fn rest(&mut self) {
        self.waits = None;
        self.busy.takes.store(false, Ordering::Relaxed);
    }

    /// Passes the result of a write on. A write that would block starts the timeout, and fails with
    /// `TimedOut` once [`HTTP_ANSWER`] has passed.
    fn limited<T>(
        &mut self,
        polled: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            return polled;
        }
        self.busy.takes.store(true, Ordering::Relaxed);
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(HTTP_ANSWER)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.limited(polled, cx)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        if polled.is_ready() {
            self.rest();
        }
        self.limited(polled, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A request's body; reading it fails if the client has not sent it within [`HTTP_BODY`].
#[derive(Debug)]
pub(super) struct Prompt<B> {
    body: B,
    /// The timeout, which starts with the first read that would block.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<B> Prompt<B> {
    pub(super) fn new(body: B) -> Self {
        Self { body, waits: None }
    }
}

impl<B: Body<Error: Error + Send + Sync + 'static> + Unpin> Body for Prompt<B> {
    type Data = B::Data;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Self::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(HTTP_BODY)));
        ready!(waits.as_mut().poll(cx));
        let seconds = HTTP_BODY.as_secs();
        Poll::Ready(Some(Err(format!("did not arrive within {seconds} s").into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
