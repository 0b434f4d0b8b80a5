//! `Pace`: how many messages the front-ends of a device may send.
//!
//! All sessions share the thread that reads messages, and each message can be an order to a worker
//! that serves other guests too. A front-end sends some seven messages for each queue when its
//! guest starts, and hardly any while it runs. A front-end that sends messages without end, or
//! connects again and again, would take a CPU from all others. So a device reads [`AT_ONCE`]
//! messages at once, and then one in [`EACH`]. Further messages stay in the socket, until the
//! front-end cannot send any more and waits.

use std::time::Duration;
use tokio::time::Instant;

/// Messages that may come at once: three starts of a guest with 256 queues.
pub(super) const AT_ONCE: u32 = 8192;
/// The time after which one more message may come.
pub(super) const EACH: Duration = Duration::from_millis(1);
/// A client that connects counts as this many messages: a session is made and torn down for it.
const CLIENT: u32 = 16;

/// The messages of a device, over all of its sessions.
#[derive(Debug)]
pub(super) struct Pace {
    /// From when on [`AT_ONCE`] messages may come at once again, if none comes before.
    restored_at: Instant,
    /// It was logged that messages must wait, and `restored_at` has not been reached since.
    is_told: bool,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { restored_at: now, is_told: false }
    }

    /// When the next message may be read; at once if that time has passed.
    pub(super) fn due(&self) -> Instant {
        let last = AT_ONCE.saturating_sub(1);
        self.restored_at.checked_sub(EACH * last).unwrap_or(self.restored_at)
    }

    /// Notes that a message must wait. True if this is to be logged: it was not since the
    /// front-ends last rested.
    pub(super) fn note_wait(&mut self) -> bool {
        !std::mem::replace(&mut self.is_told, true)
    }

    /// Counts a message that was read.
    pub(super) fn count_message(&mut self, now: Instant) {
        self.count(1, now);
    }

    /// Counts a client that has connected.
    pub(super) fn count_client(&mut self, now: Instant) {
        self.count(CLIENT, now);
    }

    fn count(&mut self, messages: u32, now: Instant) {
        self.is_told &= self.restored_at > now;
        self.restored_at = self.restored_at.max(now) + EACH * messages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `count` messages as fast as they may come from `from` on. Returns when the last came.
    fn send(pace: &mut Pace, count: u32, from: Instant) -> Instant {
        (0..count).fold(from, |now, _| {
            let now = now.max(pace.due());
            pace.count_message(now);
            now
        })
    }

    #[test]
    fn many_messages_come_at_once_and_further_ones_by_and_by() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(send(&mut pace, AT_ONCE, start), start);
        assert_eq!(send(&mut pace, 1, start), start + EACH);
        let ended = send(&mut pace, 1000, start + EACH);
        assert_eq!(ended, start + 1001 * EACH);
        // A rest gives back as much as it is long, and never more than at first.
        let later = ended + 100 * EACH;
        assert_eq!(send(&mut pace, 100, later), later);
        assert_eq!(send(&mut pace, 1, later), later + EACH);
        let much_later = later + 3 * AT_ONCE * EACH;
        assert_eq!(send(&mut pace, AT_ONCE, much_later), much_later);
        assert_eq!(send(&mut pace, 1, much_later), much_later + EACH);
    }

    #[test]
    fn a_wait_is_told_once_until_the_front_ends_have_rested() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let ended = send(&mut pace, AT_ONCE + 1, start);
        assert_eq!([pace.note_wait(), pace.note_wait()], [true, false]);
        let rested = ended + AT_ONCE * EACH;
        send(&mut pace, 1, rested - 10 * EACH);
        assert!(!pace.note_wait());
        send(&mut pace, 1, rested + 10 * EACH);
        assert!(pace.note_wait());
    }

    #[test]
    fn a_client_counts_for_more_than_a_message() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for _ in 0..AT_ONCE / CLIENT {
            assert!(pace.due() <= start);
            pace.count_client(start);
        }
        assert_eq!(pace.due(), start + EACH);
    }
}
