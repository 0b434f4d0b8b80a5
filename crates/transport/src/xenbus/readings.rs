//! `Readings`: limits how often the nodes of a device are read. A guest can change its nodes
//! without end, and each reading is work for xenstore and for this process, and delays the
//! transactions of other devices.

use manyring_engine::Rate;
use std::time::Duration;
use tokio::time::Instant;

/// Shortest time between two readings.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// How many readings may follow each other at intervals of [`RETRY_DELAY`]. Attaching, connecting
/// or detaching a device needs about ten.
const BURST: u32 = 64;
/// The time between two readings after such a burst: eight per second for each device.
const RENEWAL: Duration = Duration::from_millis(125);

/// Decides when the nodes of a device may be read.
#[derive(Debug)]
pub(super) struct Readings {
    last: Option<Instant>,
    rate: Rate,
}

impl Readings {
    /// Makes the limit of a device whose nodes were not read yet.
    pub(super) fn new(now: Instant) -> Self {
        Self { last: None, rate: Rate::of(BURST, RENEWAL, now) }
    }

    /// Returns when the next reading may begin.
    pub(super) fn due(&self) -> Instant {
        let due = self.rate.due();
        self.last.map_or(due, |last| due.max(last + RETRY_DELAY))
    }

    /// Counts a reading that begins now.
    pub(super) fn begin(&mut self, now: Instant) {
        self.last = Some(now);
        self.rate.charge(RENEWAL, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many readings begin in this long, of a device whose nodes change all the time.
    fn count_in(readings: &mut Readings, begin: Instant, time: Duration) -> u32 {
        let mut count = 0;
        while readings.due().max(begin) < begin + time {
            readings.begin(readings.due().max(begin));
            count += 1;
        }
        count
    }

    #[test]
    fn device_that_changes_now_and_then_is_read_at_once() {
        let mut now = Instant::now();
        let mut readings = Readings::new(now);
        for _ in 0..1000 {
            assert!(readings.due() <= now);
            readings.begin(now);
            now += RENEWAL;
        }
    }

    #[test]
    fn device_that_changes_without_end_is_read_a_bounded_number_of_times() {
        let now = Instant::now();
        let mut readings = Readings::new(now);
        assert_eq!(count_in(&mut readings, now, BURST / 2 * RETRY_DELAY), BURST / 2);
        let count = count_in(&mut readings, now + Duration::from_secs(1), Duration::from_secs(60));
        assert!((BURST / 2..BURST + 61 * 8).contains(&count), "{count}");
        // After a quiet time all of the burst is there again.
        let later = now + Duration::from_secs(600);
        assert_eq!(count_in(&mut readings, later, BURST * RETRY_DELAY), BURST);
    }
}
