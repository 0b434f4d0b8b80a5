//! Logs which messages a front-end does not send, if no ring of its guest is served because of
//! that.
//!
//! QEMU with plain `-m 1G` has no shared memory that it could send. It sets up the guest's rings
//! without a memory table and reports no error; the guest waits for its disk for ever. Another
//! front-end begins to set up a ring and stops half-way, for example after a failed migration.

use super::session::Unsent;
use std::time::Duration;
use tokio::time::Instant;

/// How long rings wait before a lack is logged: of memory, and of messages of their own.
const TIMEOUT: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(10)];

/// The messages that a session has not received, and the time at which this must be logged.
#[derive(Debug, Default)]
pub(super) struct SessionLack {
    what: Option<Unsent>,
    due: Option<Instant>,
    is_told: [bool; 2],
}

/// Returns the index of a kind of lack in [`TIMEOUT`] and in `is_told`.
fn kind(what: &Unsent) -> usize {
    usize::from(*what != Unsent::Memory)
}

impl SessionLack {
    /// Stores, after each message of the front-end, which messages are lacking now.
    pub(super) fn note(&mut self, what: Option<Unsent>, now: Instant) {
        let what = what.filter(|what| !self.is_told[kind(what)]);
        let is_same = self.what.as_ref().map(kind) == what.as_ref().map(kind);
        if !is_same {
            self.due = what.as_ref().map(|what| now + TIMEOUT[kind(what)]);
        }
        self.what = what;
    }

    /// Returns when the lack must be logged; `None`: there is nothing to log.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Logs the lack, once in a session for each kind.
    pub(super) fn tell(&mut self, device: &str) {
        self.due = None;
        let Some(what) = self.what.take() else { return };
        self.is_told[kind(&what)] = true;
        match what {
            Unsent::Memory => tracing::warn!(
                device,
                "the guest's rings are set up, but the front-end has sent no memory; share the \
                 memory of this VM"
            ),
            Unsent::OfVring(queue, missing) => tracing::warn!(
                device,
                queue,
                "queue not started: the front-end has sent no {}",
                missing.join(", no ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_told_once_of_each_kind_after_its_time() {
        let (mut awaited, now) = (SessionLack::default(), Instant::now());
        let [memory, ring] = [Unsent::Memory, Unsent::OfVring(0, vec!["SET_VRING_KICK"])];
        for (what, max_wait) in [(memory, TIMEOUT[0]), (ring, TIMEOUT[1])] {
            awaited.note(None, now);
            assert_eq!(awaited.due(), None);
            awaited.note(Some(what.clone()), now);
            awaited.note(Some(what.clone()), now + Duration::from_secs(3));
            assert_eq!(awaited.due(), Some(now + max_wait), "a later message does not put it off");
            awaited.note(None, now);
            assert_eq!(awaited.due(), None, "it has come");
            awaited.note(Some(what.clone()), now);
            awaited.tell("disk");
            awaited.note(Some(what), now);
            assert_eq!(awaited.due(), None);
        }
    }
}
