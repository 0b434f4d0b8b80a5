//! The limit of log lines: how many warnings and how many lines of level info may be logged at
//! once, and then one each [`LOG_LINE_EACH`].

use crate::times::LOG_LINE_EACH;
use manyring_engine::Rate;
use tokio::time::Instant;

/// Warnings and errors that may be logged at once.
pub(super) const BURST: u32 = 50;
/// Lines of level info that may be logged at once: a start logs some for each of many devices.
pub(super) const INFO_BURST: u32 = 1000;

/// The decision whether a line is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The line is shown. `suppressed`: the number of lines before it that were not.
    Show { suppressed: u64 },
    /// The line is not shown, as the first one: log that lines are suppressed.
    Suppress,
    /// The line is not shown; the suppression was logged before.
    Drop,
}

/// The bound on lines of one sort (warnings, or info), and the number of suppressed lines.
#[derive(Debug)]
pub(super) struct Limit {
    rate: Rate,
    suppressed: u64,
}

impl Limit {
    pub(super) fn new(burst: u32) -> Self {
        Self { rate: Rate::of(burst, LOG_LINE_EACH, Instant::now()), suppressed: 0 }
    }

    /// Decides whether a line at time `now` is shown, and charges the rate if so.
    pub(super) fn decide(&mut self, now: Instant) -> Verdict {
        if self.rate.due() <= now {
            self.rate.charge(LOG_LINE_EACH, now);
            return Verdict::Show { suppressed: std::mem::take(&mut self.suppressed) };
        }
        self.suppressed += 1;
        if self.suppressed == 1 { Verdict::Suppress } else { Verdict::Drop }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// How many of `count` lines, one each `step`, are shown, and how many are said to be lost.
    fn flood(limit: &mut Limit, start: Instant, step: Duration, count: u32) -> (u32, u64, u64) {
        let (mut shown, mut told, mut notices) = (0, 0, 0);
        for n in 0..count {
            match limit.decide(start + step * n) {
                Verdict::Show { suppressed } => {
                    shown += 1;
                    told += suppressed;
                }
                Verdict::Suppress => notices += 1,
                Verdict::Drop => {}
            }
        }
        (shown, told, notices)
    }

    #[test]
    fn a_burst_passes_and_the_rest_is_said_to_be_suppressed_once() {
        let (mut limit, start) = (Limit::new(BURST), Instant::now());
        assert_eq!(flood(&mut limit, start, Duration::ZERO, 500), (BURST, 0, 1));
        let later = limit.decide(start + Duration::from_secs(1));
        assert_eq!(later, Verdict::Show { suppressed: 450 });
    }

    #[test]
    fn a_flood_comes_through_at_the_rate() {
        let mut limit = Limit::new(BURST);
        // 1000 lines a second for a minute.
        let step = Duration::from_millis(1);
        let (shown, told, _) = flood(&mut limit, Instant::now(), step, 60_000);
        assert!((600 + BURST - 1..=600 + BURST).contains(&shown), "{shown}");
        assert!(told >= 59_000, "{told}");
    }

    #[test]
    fn a_slow_trickle_is_never_touched() {
        let mut limit = Limit::new(BURST);
        let step = Duration::from_millis(100);
        assert_eq!(flood(&mut limit, Instant::now(), step, 10_000), (10_000, 0, 0));
    }

    #[test]
    fn a_clock_that_jumps_gives_no_more_than_a_burst() {
        let (mut limit, start) = (Limit::new(BURST), Instant::now());
        let far = start + Duration::from_secs(1 << 32);
        assert_eq!(flood(&mut limit, far, Duration::ZERO, 100).0, BURST);
        assert_eq!(flood(&mut limit, start, Duration::ZERO, 100).0, 0);
    }
}
