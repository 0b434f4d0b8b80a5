//! `FailureLines`: which failures of an attempt are logged, while it is made again and again.

use crate::limit::Rate;
use std::time::Duration;
use tokio::time::Instant;

/// The least time between two lines about one kind of failure.
const LINE_EACH: Duration = Duration::from_secs(10);

/// Limits the log lines about an attempt that may fail several times a second, for example while
/// the host has no file descriptor. Otherwise they would hide the other lines of the log.
#[derive(Debug)]
pub struct FailureLines {
    rate: Rate,
    unlogged: u64,
}

impl Default for FailureLines {
    fn default() -> Self {
        Self { rate: Rate::of(1, LINE_EACH, Instant::now()), unlogged: 0 }
    }
}

impl FailureLines {
    /// Counts a failure. Returns the number of failures since the last line, with this one, if a
    /// line is due: for the first failure at once, and then every ten seconds.
    pub fn count(&mut self) -> Option<u64> {
        self.count_at(Instant::now())
    }

    fn count_at(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        (self.rate.due() <= now).then(|| {
            self.rate.charge(LINE_EACH, now);
            std::mem::take(&mut self.unlogged)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_logged_and_then_their_number_every_ten_seconds() {
        let mut lines = FailureLines::default();
        let start = Instant::now();
        // A failure each 200 ms, for a minute.
        let failures = (0..300).map(|n| start + n * Duration::from_millis(200));
        let logged: Vec<_> = failures.filter_map(|now| lines.count_at(now)).collect();
        assert_eq!(logged, [1, 50, 50, 50, 50, 50]);
        assert_eq!(lines.count_at(start + Duration::from_secs(600)), Some(50), "49 and this one");
        assert_eq!(lines.count_at(start + Duration::from_secs(601)), None);
    }
}
