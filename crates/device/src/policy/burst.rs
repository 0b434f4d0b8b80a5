//! `BurstBounds`: limits the frames and bytes that a transmitq sends in a turn.
//!
//! ```text
//! beside other guests:  256 KiB, then the rest of the burst waits for the next turn
//! alone:                2 MiB, or half a millisecond behind the first group, if that is earlier
//! ```
//! A sleeping receiver on the host is woken by each burst of its flow. If a guest sends on several
//! queues, short bursts wake the receiver once for each turn of each queue; so long bursts are
//! better. But a driver waits until its frames are returned, and other guests wait for their turn;
//! so a burst is limited. A long frame can be expensive for the host: a bridge segments and copies
//! it for each of its ports.

/// The most bytes in a turn if the worker serves other guests too. A port that makes a system call
/// for each frame returns after this many bytes, so that no turn is much longer.
pub(crate) const SHARED_BYTES: usize = 256 << 10;
/// The most bytes in a turn if the guest is alone on its worker.
const ALONE_BYTES: usize = 2 << 20;
/// Nanoseconds after which a turn of such a guest ends in any case.
const ALONE_NS: u64 = 500_000;
/// The least frames that a turn pops, however long the last ones were, so that a turn is worth its
/// cost.
const FRAMES_MIN: usize = 4;
/// The most frames that a turn pops: a full batch.
pub(crate) const FRAMES_MAX: usize = 64;

/// The bounds of a transmitq's turns.
#[derive(Debug)]
pub(crate) struct BurstBounds {
    frames_max: usize,
    shared_bytes: usize,
    is_alone: bool,
}

/// The bytes that a turn has sent, and the time at which it must end.
#[derive(Debug, Default)]
pub(crate) struct Spent {
    bytes: usize,
    end_ns: Option<u64>,
}

impl BurstBounds {
    /// Returns the bounds of a queue that has sent nothing yet.
    pub(crate) const fn new() -> Self {
        Self { frames_max: FRAMES_MAX, shared_bytes: SHARED_BYTES, is_alone: false }
    }

    /// Returns bounds with `shared_bytes` for a turn beside other guests.
    #[cfg(test)]
    pub(crate) const fn of(shared_bytes: usize) -> Self {
        Self { shared_bytes, ..Self::new() }
    }

    /// Returns the most frames to pop for the next turn, computed from the length of the last ones.
    #[inline]
    pub(crate) fn frames_max(&self) -> usize {
        self.frames_max
    }

    /// Sets whether the guest is alone on its worker. After a change the next turn is short.
    #[inline]
    pub(crate) fn set_alone(&mut self, is_alone: bool) {
        if is_alone != self.is_alone {
            self.is_alone = is_alone;
            self.frames_max = self.frames_max.min(FRAMES_MIN);
        }
    }

    /// Computes the bound of the next turn, after a burst whose frames had `mean` bytes on average.
    #[inline]
    pub(crate) fn learn(&mut self, mean: usize) {
        let bytes = if self.is_alone { ALONE_BYTES } else { self.shared_bytes };
        self.frames_max = (bytes / mean.max(1)).clamp(FRAMES_MIN, FRAMES_MAX);
    }

    /// Counts a sent group of `bytes`, when frames are left. Returns true if these must wait for
    /// the next turn.
    #[inline]
    pub(crate) fn is_over(&self, spent: &mut Spent, bytes: usize, clock: impl Fn() -> u64) -> bool {
        spent.bytes += bytes;
        if !self.is_alone {
            return spent.bytes >= self.shared_bytes;
        }
        let now_ns = clock();
        let end_ns = *spent.end_ns.get_or_insert(now_ns + ALONE_NS);
        spent.bytes >= ALONE_BYTES || now_ns >= end_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_popped_as_the_last_ones_were_long() {
        for (is_alone, mean, frames) in [
            (false, 60, 64),
            (false, 4096, 64),
            (false, 8192, 32),
            (false, 65_000, 4),
            (true, 60, 64),
            (true, 65_000, 32),
            (true, 1 << 20, 4),
            (true, 0, 64),
        ] {
            let mut burst = BurstBounds { is_alone, ..BurstBounds::new() };
            burst.learn(mean);
            assert_eq!(burst.frames_max(), frames, "{is_alone} {mean}");
            burst.set_alone(is_alone);
            assert_eq!(burst.frames_max(), frames, "nothing has changed");
            burst.set_alone(!is_alone);
            assert_eq!(burst.frames_max(), 4);
        }
    }

    #[test]
    fn a_turn_ends_by_bytes_and_alone_by_time_too() {
        const KIB: usize = 1024;
        // In each row: bytes of a group, when it ends, and the group with which the turn ends.
        for (is_alone, kib, ns, last) in [
            (false, 256, 0, Some(1)),
            (false, 255, 0, Some(2)),
            (false, 1, 1_000_000, None),
            (true, 256, 0, Some(8)),
            (true, 1, 0, None),
            (true, 1, 499_999, Some(3)),
            (true, 1, 500_000, Some(2)),
            (true, 256, 3_000_000, Some(2)),
            (true, 2048, 0, Some(1)),
        ] {
            let burst = BurstBounds { is_alone, ..BurstBounds::new() };
            let mut spent = Spent::default();
            let mut groups = 1..=64;
            let ends = groups.find(|group| burst.is_over(&mut spent, kib * KIB, || group * ns));
            assert_eq!(ends, last, "{is_alone} {kib} KiB {ns} ns");
        }
    }
}
