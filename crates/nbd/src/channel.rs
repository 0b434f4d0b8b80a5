//! `Channel`: a connection as its queue has it: the socket's stream, and the TLS session on it if
//! there is one.

use super::join::Joined;
use super::session::{Broken, Session};
use super::tls::Tls;
use manyring_backend::blk::Completion;
use manyring_backend::sys::uring::Stream;
use manyring_wire::nbd::{Command, CommandKind};

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) stream: Stream,
    tls: Option<Box<Tls>>,
}

impl Channel {
    pub(super) fn new(joined: Joined) -> Self {
        Self { stream: Stream::new(joined.socket), tls: joined.tls }
    }

    /// Appends commands of the session, with about `room` bytes, to what is to be sent. Returns how
    /// many.
    ///
    /// # Errors
    /// [`Broken`]: the connection is over.
    pub(super) fn emit(&mut self, session: &mut Session, room: usize) -> Result<usize, Broken> {
        let Some(tls) = &mut self.tls else { return Ok(session.emit(self.stream.out(), room)) };
        let count = session.emit(tls.unsealed(), room);
        tls.seal(self.stream.out())?;
        Ok(count)
    }

    /// Takes the replies that have come.
    ///
    /// # Errors
    /// [`Broken`]: the connection is over.
    pub(super) fn take(
        &mut self,
        session: &mut Session,
        done: &mut Vec<Completion>,
    ) -> Result<(), Broken> {
        let Some(tls) = &mut self.tls else {
            let taken = session.take(self.stream.bytes(), done)?;
            self.stream.consume(taken);
            return Ok(());
        };
        let mut answers = Vec::new();
        let bytes = self.stream.bytes();
        let (count, opened) = (bytes.len(), tls.open(bytes, &mut answers));
        self.stream.consume(count);
        self.stream.out().append(&mut answers);
        // Answers that TLS decrypted before it found a fault are taken; then the fault is reported.
        let taken = session.take(tls.plain(), done)?;
        tls.consume(taken);
        Ok(opened?)
    }

    /// Sends the disconnect command (`NBD_CMD_DISC`), if the socket takes it without waiting.
    /// Otherwise the server learns of the end when the socket is closed.
    pub(super) fn leave(&mut self) {
        let kind = CommandKind::Disconnect;
        let command = Command { kind, flags: 0, cookie: 0, offset: 0, len: 0 }.emit();
        match &mut self.tls {
            Some(tls) => {
                tls.unsealed().extend(command);
                let _ = tls.seal(self.stream.out());
                tls.close(self.stream.out());
            }
            None => self.stream.out().extend(command),
        }
        let _ = self.stream.send_now();
    }
}
