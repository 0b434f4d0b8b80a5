//! `ChangePace`: limits how often a device may make the host change the queues in use.
//!
//! Each change takes the host's network lock, which all guests of the host share, and waits for a
//! grace period (RCU) of the kernel. A guest whose VMM serves the control queue causes changes by
//! `VQ_PAIRS_SET`, which the VMM turns into vhost-user messages; a front-end can also send these by
//! itself. So a device has some free changes, enough to start and stop several times, and regains
//! them slowly. After each further change it must pause for a multiple of the time that the change
//! took.

use manyring_engine::Rate;
use std::time::Duration;
use tokio::time::Instant;

/// Free changes for each queue pair: four times attached and detached.
const FREE_OF_PAIR: u32 = 8;
/// The time after which one free change is regained.
const REGAIN: Duration = Duration::from_millis(100);
/// The pause after a change that is not free: this many times the time that the change took,
/// [`REST_MAX`] at most. So a device can hold the lock for a fifth of the time, or for more if a
/// change takes longer than 25 ms.
pub(super) const REST: u32 = 4;
pub(super) const REST_MAX: Duration = Duration::from_millis(100);

/// The limit for one device.
#[derive(Debug)]
pub(super) struct ChangePace {
    free: Rate,
    rests_until: Instant,
}

impl ChangePace {
    /// Makes the limit for a device with `pairs` queue pairs.
    pub(super) fn new(pairs: usize, now: Instant) -> Self {
        let free = FREE_OF_PAIR * u32::try_from(pairs).unwrap_or(u32::MAX / FREE_OF_PAIR);
        Self { free: Rate::of(free, REGAIN, now), rests_until: now }
    }

    /// Returns when the next change may begin.
    pub(super) fn next(&self) -> Instant {
        self.rests_until
    }

    /// Charges a change that was made between these times.
    pub(super) fn changed(&mut self, began: Instant, ended: Instant) {
        if self.free.due() <= began {
            self.free.charge(REGAIN, began);
        } else {
            self.rests_until = ended + ((ended - began) * REST).min(REST_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes `count` changes at the pace; each takes `took`. Returns when the last one ended.
    fn make(pace: &mut ChangePace, count: u32, took: Duration, mut now: Instant) -> Instant {
        for _ in 0..count {
            now = now.max(pace.next());
            pace.changed(now, now + took);
            now += took;
        }
        now
    }

    #[test]
    fn who_changes_without_end_has_the_host_for_a_fifth_of_the_time() {
        let (took, start) = (Duration::from_millis(5), Instant::now());
        let mut pace = ChangePace::new(2, start);
        // Some free changes are regained while these are made.
        let end = make(&mut pace, 16, took, start);
        assert_eq!(end - start, took * 16, "those are free");
        let later = make(&mut pace, 1000, took, end) - end;
        let share = (took * 1000).as_secs_f64() / later.as_secs_f64();
        // One free change in each 100 ms, and a fifth of the remaining time.
        assert!((0.2..0.25).contains(&share), "{share}");
        // After a change that takes a second, the rest is 100 ms and not four seconds.
        let mut pace = ChangePace::new(1, start);
        let second = Duration::from_secs(1);
        make(&mut pace, FREE_OF_PAIR, Duration::ZERO, start);
        pace.changed(start, start + second);
        assert_eq!(pace.next() - start, second + REST_MAX);
    }

    #[test]
    fn changes_are_free_again_after_a_while() {
        let (took, start) = (Duration::from_millis(5), Instant::now());
        let mut pace = ChangePace::new(1, start);
        let end = make(&mut pace, 20, took, start);
        assert!(pace.next() > end);
        let start = end + REGAIN * 8;
        assert_eq!(make(&mut pace, 8, took, start) - start, took * 8);
        let start = start + Duration::from_secs(3600);
        assert_eq!(make(&mut pace, 8, took, start) - start, took * 8, "and no more than that");
        assert!(make(&mut pace, 8, took, start + took * 8) - start > took * 30);
    }
}
