//! `Channel`: a connection in the transmission phase: the stream of the socket, and the TLS session
//! on it, if there is one.

use super::session::{Broken, NbdSession};
use super::tls::Tls;
use manyring_backend::blk::Completion;
use manyring_backend::sys::uring::Stream;
use manyring_wire::nbd::{Command, CommandKind};
use rustix::fd::OwnedFd;

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) stream: Stream,
    tls: Option<Box<Tls>>,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd, tls: Option<Box<Tls>>) -> Self {
        Self { stream: Stream::new(socket), tls }
    }

    /// The buffer to which commands are appended, before [`Self::seal`].
    pub(super) fn plain_out(&mut self) -> &mut Vec<u8> {
        match &mut self.tls {
            Some(tls) => tls.unsealed(),
            None => self.stream.out(),
        }
    }

    /// Encrypts the appended commands, if the connection has TLS, so that they can be sent.
    ///
    /// # Errors
    /// [`Broken`]: the connection is over.
    pub(super) fn seal(&mut self) -> Result<(), Broken> {
        Ok(self.tls.as_mut().map_or(Ok(()), |tls| tls.seal(self.stream.out()))?)
    }

    /// Appends commands of the session, about `room` bytes, to the stream's output, and encrypts
    /// them if the connection has TLS. Returns the number of commands.
    ///
    /// # Errors
    /// [`Broken`]: the connection is over.
    pub(super) fn emit(&mut self, session: &mut NbdSession, room: usize) -> Result<usize, Broken> {
        let count = session.emit(self.plain_out(), room);
        self.seal().map(|()| count)
    }

    /// Decrypts the received bytes, if the connection has TLS.
    ///
    /// # Errors
    /// [`Broken`]: the connection must be closed, after the replies in [`Self::plain`] are handled.
    pub(super) fn open(&mut self) -> Result<(), Broken> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        let mut answers = Vec::new();
        let bytes = self.stream.bytes();
        let (count, opened) = (bytes.len(), tls.open(bytes, &mut answers));
        self.stream.consume(count);
        self.stream.out().append(&mut answers);
        Ok(opened?)
    }

    /// The received bytes of replies, decrypted, that are not consumed yet.
    pub(super) fn plain(&self) -> &[u8] {
        self.tls.as_ref().map_or_else(|| self.stream.bytes(), |tls| tls.plain())
    }

    /// Drops the first `n` bytes of [`Self::plain`].
    pub(super) fn consume(&mut self, n: usize) {
        match &mut self.tls {
            Some(tls) => tls.consume(n),
            None => self.stream.consume(n),
        }
    }

    /// Hands the received replies to the session.
    ///
    /// # Errors
    /// [`Broken`]: the connection is over.
    pub(super) fn take(
        &mut self,
        session: &mut NbdSession,
        done: &mut Vec<Completion>,
    ) -> Result<(), Broken> {
        // Answers that TLS decrypted before it found a fault are taken; then the fault is reported.
        let opened = self.open();
        let taken = session.take(self.plain(), done)?;
        self.consume(taken);
        opened
    }

    /// Sends the disconnect command (`NBD_CMD_DISC`), if the socket takes it without waiting.
    /// Otherwise the server learns of the end when the socket is closed.
    pub(super) fn leave(&mut self) {
        let kind = CommandKind::Disconnect;
        self.plain_out().extend(Command { kind, flags: 0, cookie: 0, offset: 0, len: 0 }.emit());
        let _ = self.seal();
        if let Some(tls) = &mut self.tls {
            tls.close(self.stream.out());
        }
        let _ = self.stream.send_now();
    }
}

impl Drop for Channel {
    /// Shuts the socket down. The process that has connected may keep a copy of the socket, so
    /// closing this one alone would leave the connection open.
    fn drop(&mut self) {
        self.stream.shut();
    }
}
