//! Obeys, answers and consumes a message; goes on with a session whose process has died
//! (`saved_session.rs`).

use super::requests::{Sent, ServedFrontEnd};
use super::saved_session::{AnswerState, SavedEntry};
use super::socket::{Connection, Message};
use super::socket_error::SocketError;
use super::{Server, SessionEnd};
use manyring_engine::{Event, Origin};
use std::io::ErrorKind;
use tokio::sync::mpsc;

/// Bytes of a message that are kept to know it again: more than any message has that is answered.
const KNOWN_BY: usize = 64;

impl Server {
    /// Logs why a session ends whose doorbells block or hold up the threads that write to them.
    pub(super) fn tell_blocked(&self, origin: &Origin) {
        let why = match origin.is_costly() {
            true => "one of its eventfds has too many waiters",
            false => "one of its eventfds is full and blocks writers",
        };
        tracing::warn!(device = self.device.name(), "session closed: {why}");
    }

    /// Logs the events that queues have sent before the end of their session.
    pub(super) fn log_events(&self, events: &mut mpsc::Receiver<Event>) {
        while let Ok(event) = events.try_recv() {
            self.log_event(event);
        }
    }

    /// Logs why a session ends.
    pub(super) fn tell_end(&self, end: &SessionEnd) {
        let device = self.device.name();
        match end {
            SessionEnd::Socket(SocketError::Closed) => {
                tracing::info!(device, "front-end disconnected");
            }
            // The front-end was killed before it could read an answer.
            SessionEnd::Socket(SocketError::Io(error))
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                tracing::info!(device, "front-end disconnected");
            }
            error => tracing::warn!(device, %error, "session closed"),
        }
    }

    /// Answers a message, and charges the session for the time that this takes.
    pub(super) async fn attend(
        &self,
        connection: &mut Connection,
        front: &mut ServedFrontEnd,
        message: Result<Message, SocketError>,
    ) -> Result<(), SessionEnd> {
        self.meter.count_message();
        // A disk that does not finish its requests can delay an answer: not for ever.
        let journal = connection.journal().cloned();
        let given_up = async {
            self.given_up().await;
            // Another process would go on while this one still does what the message says.
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

    /// Obeys a message, answers it, and takes it from the socket if it was only peeked.
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

    /// Goes on with a session that was handed over with all that was kept of it. False: the session
    /// begins.
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
        front.ring_all();
        if count > 0 {
            tracing::info!(device = self.device.name(), messages = count, "session resumed");
        }
        match saved_session.answering {
            // The answer was sent, if the message is not there any more.
            Some(message) if message.is_empty() || connection.begins_with(&message) => {
                Err(SessionEnd::Unanswered)
            }
            Some(_) => {
                // The next process of the session must not take another message for this one.
                self.meter.of(front.journal_answered()).await;
                Ok(count > 0)
            }
            None => Ok(count > 0),
        }
    }
}
