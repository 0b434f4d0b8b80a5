//! Logs why a session ends, and the last events of its queues.

use super::socket_error::SocketError;
use super::{Server, SessionEnd};
use manyring_engine::{Event, Origin};
use std::io::ErrorKind;
use tokio::sync::mpsc;

impl Server {
    /// Logs that a session ends because its eventfds block the threads that write to them, or make
    /// such writes slow.
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
            // This error means that a front-end was killed before it read an answer.
            SessionEnd::Socket(SocketError::Io(error))
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                tracing::info!(device, "front-end disconnected");
            }
            error => tracing::warn!(device, %error, "session closed"),
        }
    }
}
