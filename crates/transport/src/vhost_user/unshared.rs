//! Tells the operator of a front-end whose guest memory is not shared.
//!
//! QEMU with plain `-m 1G` has no memory that it could send. It sets the guest's rings up without a
//! memory table and says nothing; the guest waits for its disk for ever.

use std::time::Duration;
use tokio::time::Instant;

/// How long rings may wait for memory before the operator is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether a session's rings wait for memory, and since when.
#[derive(Debug, Default)]
pub(super) struct Unshared {
    due: Option<Instant>,
    is_told: bool,
}

impl Unshared {
    /// Notes, after a message, whether rings wait for memory alone.
    pub(super) fn note(&mut self, lacks_memory: bool, now: Instant) {
        self.due = match lacks_memory && !self.is_told {
            true => self.due.or(Some(now + PATIENCE)),
            false => None,
        };
    }

    /// When the operator must be told; `None`: there is nothing to tell.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Tells the operator, once in a session.
    pub(super) fn tell(&mut self, device: &str) {
        (self.due, self.is_told) = (None, true);
        tracing::warn!(
            device,
            "the guest's rings are set up, but the front-end has sent no memory: is the memory of \
             this VM shared?"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_that_wait_for_memory_are_told_of_once_after_five_seconds() {
        let (mut unshared, now) = (Unshared::default(), Instant::now());
        unshared.note(false, now);
        assert_eq!(unshared.due(), None);
        unshared.note(true, now);
        unshared.note(true, now + Duration::from_secs(3));
        assert_eq!(unshared.due(), Some(now + PATIENCE), "a later message does not put it off");
        unshared.note(false, now);
        assert_eq!(unshared.due(), None, "memory has come");
        unshared.note(true, now);
        unshared.tell("disk");
        unshared.note(true, now);
        assert_eq!(unshared.due(), None);
    }
}
