//! `Rate`: a limit of actions that may happen a few at once, and then at intervals, as one number:
//! the time at which all past actions are paid for. For the control thread, in its clock; queues
//! have [`Bucket`](super::bucket::Bucket).
//!
//! ```text
//! due:     paid_at - credit
//! charge:  paid_at = max(paid_at, now) + cost
//! ```
//! Time without actions restores as much credit, up to the maximum.

use std::time::Duration;
use tokio::time::Instant;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    paid_at: Instant,
    credit: Duration,
}

impl Rate {
    /// Makes a limit. `credit`: the cost of all actions that may happen at once, without the last.
    #[must_use]
    pub fn new(credit: Duration, now: Instant) -> Self {
        Self { paid_at: now, credit }
    }

    /// Allows `at_once` actions at once, each of the cost `each`, and then one per `each`.
    #[must_use]
    pub fn of(at_once: u32, each: Duration, now: Instant) -> Self {
        Self::new(each * at_once.saturating_sub(1), now)
    }

    /// Returns when the next action may happen; now if that time has passed.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.paid_at.checked_sub(self.credit).unwrap_or(self.paid_at)
    }

    /// Charges an action that happens now.
    pub fn charge(&mut self, cost: Duration, now: Instant) {
        self.paid_at = self.paid_at.max(now) + cost;
    }

    /// True if all actions are paid for: the whole credit is available again.
    #[must_use]
    pub fn is_rested(&self, now: Instant) -> bool {
        self.paid_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: Duration = Duration::from_millis(10);

    /// How many things are done from `now` on, without a wait.
    fn at_once(rate: &mut Rate, now: Instant) -> u32 {
        let mut count = 0;
        while rate.due() <= now {
            rate.charge(EACH, now);
            count += 1;
        }
        count
    }

    #[test]
    fn many_at_once_then_one_after_each_interval_and_a_rest_gives_back_its_length() {
        let start = Instant::now();
        let mut rate = Rate::of(5, EACH, start);
        assert!(rate.is_rested(start));
        assert_eq!(at_once(&mut rate, start), 5);
        assert_eq!(rate.due(), start + EACH);
        assert_eq!(at_once(&mut rate, start + EACH), 1);
        assert_eq!(at_once(&mut rate, start + 4 * EACH), 3);
        assert!(!rate.is_rested(start + 8 * EACH) && rate.is_rested(start + 9 * EACH));
        assert_eq!(at_once(&mut rate, start + 1000 * EACH), 5);
    }
}
