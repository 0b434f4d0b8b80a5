//! Reads a message without taking it from the socket: if this process is killed, the next one reads
//! the message again (`saved_session.rs`).

use super::{Connection, Message, SocketError};
use crate::vhost_user::meter::Meter;
use manyring_engine::{FdReservation, MESSAGE_FDS_MAX};
use manyring_wire::vhost_user::{HEADER_SIZE, Header, Request, row_of};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::time::Duration;
use tokio::io::Interest;

/// A message that was peeked.
struct Seen {
    header: Header,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// True if the file descriptors belong to this message, and not to the next one.
    has_fds: bool,
    /// True if the message is complete, with all of its file descriptors.
    is_whole: bool,
}

impl Connection {
    /// Reads the next message. If the session has a journal, the message stays in the socket until
    /// [`Self::consume`], unless it arrives in pieces. May be cancelled and called again.
    ///
    /// # Errors
    /// Those of [`Connection::receive`].
    pub(in crate::vhost_user) async fn next(
        &mut self,
        silence: Option<Duration>,
        meter: &Meter,
    ) -> Result<Message, SocketError> {
        if self.stream.journal().is_some() && self.bytes.is_empty() {
            let seen = match silence {
                None => self.peek(meter).await?,
                Some(after) => match tokio::time::timeout(after, self.peek(meter)).await {
                    Ok(seen) => seen?,
                    Err(_) => return Err(SocketError::Silent { after }),
                },
            };
            if let Some(message) = seen {
                return Ok(message);
            }
        }
        self.receive(silence, meter).await
    }

    /// Takes a message from the socket that [`Self::next`] has peeked. Receiving its bytes is
    /// charged like that of any message.
    ///
    /// # Errors
    /// Those of [`Connection::receive`].
    pub(in crate::vhost_user) async fn consume(
        &mut self,
        message_is_peeked: bool,
        meter: &Meter,
    ) -> Result<(), SocketError> {
        if message_is_peeked {
            self.receive(None, meter).await?;
        }
        Ok(())
    }

    /// True if the next bytes of the socket are `expected`.
    pub(in crate::vhost_user) fn begins_with(&self, expected: &[u8]) -> bool {
        let mut bytes = vec![0; expected.len()];
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let mut control = RecvAncillaryBuffer::default();
        let stream = self.stream.as_fd();
        let received = rustix::net::recvmsg(stream, &mut slices, &mut control, flags);
        received.is_ok_and(|received| received.bytes == expected.len()) && bytes == expected
    }

    /// Reads the next message and leaves it in the socket. `None`: there is no room for its
    /// descriptors, or it is incomplete, or malformed. The caller then receives the message, which
    /// reports the error.
    async fn peek(&self, meter: &Meter) -> Result<Option<Message>, SocketError> {
        loop {
            self.stream.readable().await?;
            self.origin.janitor().room().await;
            let Some(mut room) = FdReservation::at_once() else { return Ok(None) };
            let stream = &self.stream;
            let look = || stream.try_io(Interest::READABLE, || peek_once(stream.as_fd()));
            let seen = match meter.measure(look) {
                Ok(seen) => seen,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error.into()),
            };
            meter.check()?;
            let Some(seen) = seen else { return Ok(None) };
            let Seen { header, payload, fds, has_fds, is_whole } = seen;
            let adopt = |fd| self.origin.adopt(fd, &mut room);
            let mut fds: Vec<_> = fds.into_iter().map(adopt).collect();
            if !has_fds {
                // These belong to the next message, which is read again later. The janitor closes
                // the copies.
                fds.clear();
            }
            let message = Message { header, payload, fds, is_peeked: true };
            return Ok(Some(message).filter(|message| is_whole && message.is_sound()));
        }
    }
}

impl Message {
    /// True if the message has the size and the number of descriptors that its request must have.
    fn is_sound(&self) -> bool {
        let row = row_of(self.header.request);
        row.is_some_and(|row| Request::parse(row, &self.payload, self.fds.len()).is_ok())
    }
}

/// Peeks at the next message without waiting. `None`: the next bytes are no header of a known
/// request.
///
/// A peek returns the descriptors of the bytes that it has read, or, if these bytes have none,
/// those of the bytes behind them. So one byte more than the message is asked for: if that byte
/// comes, the descriptors belong to the next message.
fn peek_once(stream: impl AsFd) -> io::Result<Option<Seen>> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let mut bytes = vec![0; HEADER_SIZE];
    let len = {
        // Without space for control messages, the kernel installs no descriptors for this peek.
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let mut control = RecvAncillaryBuffer::default();
        rustix::net::recvmsg(&stream, &mut slices, &mut control, flags)?.bytes
    };
    let header = bytes.first_chunk().filter(|_| len == HEADER_SIZE).map(Header::parse);
    let Some(Ok(header)) = header.filter(|h| matches!(h, Ok(h) if row_of(h.request).is_some()))
    else {
        return Ok(None);
    };
    let whole = HEADER_SIZE + header.size as usize;
    bytes.resize(whole + 1, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(&stream, &mut slices, &mut control, flags)?;
    let has_fds = received.bytes == whole;
    let is_whole = received.bytes >= whole && !received.flags.contains(ReturnFlags::CTRUNC);
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    bytes.truncate(whole);
    Ok(Some(Seen { header, payload: bytes.split_off(HEADER_SIZE), fds, has_fds, is_whole }))
}
