//! Handles, answers and consumes a message; resumes a session whose process has died
//! (`saved_session.rs`).

use super::requests::{Sent, ServedFrontEnd};
use super::saved_session::{AnswerState, SavedEntry};
use super::socket::{Connection, Message};
use super::socket_error::SocketError;
use super::{Server, SessionEnd};

/// Bytes of a message's payload that are kept to recognise the message in the socket: more than any
/// message with an answer has.
const KNOWN_BY: usize = 64;

impl Server {
    /// Answers a message, and charges the session for the time that this takes.
    pub(super) async fn attend(
        &self,
        connection: &mut Connection,
        front: &mut ServedFrontEnd,
        message: Result<Message, SocketError>,
    ) -> Result<(), SessionEnd> {
        self.meter.count_message();
        // Requests that a disk does not complete can delay an answer. When the daemon stops, that
        // is bounded.
        let journal = connection.journal().cloned();
        let given_up = async {
            self.given_up().await;
            // Not if another process resumes the session: it would handle the message again while
            // this process still carries it out.
            if journal.is_some_and(|journal| journal.quiesces()) {
                std::future::pending::<()>().await;
            }
        };
        let answered = tokio::select! {
            answered = self.answer(connection, front, message) => answered,
            () = given_up => Ok(()),
        };
        self.meter.begin_message();
        answered
    }

    /// Handles a message, answers it, and consumes it if it was only peeked. The order of these
    /// steps and of the journal's updates is that of `saved_session.rs`.
    async fn answer(
        &self,
        connection: &mut Connection,
        front: &mut ServedFrontEnd,
        message: Result<Message, SocketError>,
    ) -> Result<(), SessionEnd> {
        let message = message?;
        let request = message.header.request;
        tracing::trace!(device = self.device.name(), request, "message");
        let is_peeked = message.is_peeked;
        let mut known_by = Vec::new();
        if is_peeked {
            known_by.extend(message.header.emit());
            known_by.extend(message.payload.iter().take(KNOWN_BY));
        }
        // `saved_session.rs` argues the order of the next steps: a process that resumes the session
        // finds each message in the socket, to handle it again, or its settings in the journal.
        let pending = self.meter.of(front.journal_before(&message)).await;
        let sent = self.meter.of(front.handle(message)).await?;
        let has_answer = sent.is_some();
        let answer = match has_answer {
            true => AnswerState::UnderWay(known_by),
            false => AnswerState::Unchanged,
        };
        self.meter.of(front.journal_after(pending, answer)).await;
        if let Some(Sent { bytes, fd }) = sent {
            self.meter.of(connection.send(&bytes, fd)).await?;
        }
        connection.consume(is_peeked, &self.meter).await?;
        if has_answer {
            self.meter.of(front.journal_answered()).await;
        }
        Ok(self.meter.check()?)
    }

    /// Resumes a session that was handed over with its journal. Returns false if the session is
    /// new: nothing was saved of it.
    pub(super) async fn resume(
        &self,
        connection: &mut Connection,
        front: &mut ServedFrontEnd,
    ) -> Result<bool, SessionEnd> {
        let Some(journal) = connection.journal() else { return Ok(false) };
        front.keep(journal.clone());
        let Some(saved_session) = connection.take_saved_session() else { return Ok(false) };
        let count = saved_session.entries.len();
        for SavedEntry { entry, fds } in saved_session.entries {
            self.meter.of(front.resume(entry, fds, connection.origin())).await?;
        }
        // After all entries: a driver that is notified may kick at once, and its rings must run.
        front.ring_all();
        if count > 0 {
            tracing::info!(device = self.device.name(), messages = count, "session resumed");
        }
        match saved_session.answering {
            // If the message is still in the socket, its answer may or may not have been sent.
            Some(message) if message.is_empty() || connection.begins_with(&message) => {
                Err(SessionEnd::Unanswered)
            }
            Some(_) => {
                // The message is consumed, so its answer was sent. Clear it in the journal: a later
                // message that begins with the same bytes must not be taken for it.
                self.meter.of(front.journal_answered()).await;
                Ok(count > 0)
            }
            None => Ok(count > 0),
        }
    }
}
