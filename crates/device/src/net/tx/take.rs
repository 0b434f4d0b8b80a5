//! Makes the frames of a burst from a batch of chains.

use super::NetTx;
use crate::net::parse::{Wrong, add_frame};
use manyring_engine::stats::{Counter, QueueStats};
use manyring_queue::Chains;
use manyring_wire::net::{HASH_HEADER_SIZE, HEADER_SIZE, LEGACY_HEADER_SIZE};

impl NetTx {
    /// Adds the frames of the batch to the burst. Chains without a valid frame, or whose frames are
    /// to be dropped, are returned at once. Returns their number.
    pub(super) fn take_batch(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        popped: usize,
        is_enabled: bool,
    ) -> usize {
        if !self.rules.link_up {
            self.drop_batch(queue, &stats.dropped_link_down, popped)
        } else if !is_enabled {
            self.drop_batch(queue, &stats.dropped_disabled, popped)
        } else if self.header_size != HEADER_SIZE {
            self.take_other_frames(queue, stats, popped)
        } else {
            self.take_frames::<HEADER_SIZE>(queue, stats, popped)
        }
    }

    /// Returns the chains of the batch without sending them, and counts the drops. Returns their
    /// number.
    #[cold]
    fn drop_batch(&mut self, queue: &mut impl Chains, cause: &Counter, popped: usize) -> usize {
        let chains = (0..popped).filter_map(|index| Some(self.batch.take(index)?.0));
        let dropped = chains.map(|chain| queue.push_used(chain, 0)).count();
        cause.add(dropped as u64);
        dropped
    }

    /// [`Self::take_frames`] for a driver with short headers, or with headers that have a hash.
    #[inline(never)]
    fn take_other_frames(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        popped: usize,
    ) -> usize {
        if self.header_size == HASH_HEADER_SIZE {
            return self.take_frames::<HASH_HEADER_SIZE>(queue, stats, popped);
        }
        self.take_frames::<LEGACY_HEADER_SIZE>(queue, stats, popped)
    }

    /// Adds the frames of the batch to the burst, each behind a header of `SIZE` bytes. Returns how
    /// many chains were dropped.
    #[inline]
    fn take_frames<const SIZE: usize>(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        popped: usize,
    ) -> usize {
        let mut dropped = 0;
        let rules = (self.taken, self.port.checks_place());
        for index in 0..popped {
            let Some((chain, readable, _)) = self.batch.take(index) else { continue };
            let to = (&mut self.frames, &mut self.last);
            let Err(wrong) = add_frame::<SIZE>(to, chain.slot(), readable, rules) else {
                self.chains.push(chain);
                continue;
            };
            queue.push_used(chain, 0);
            count_wrong(&wrong, stats);
            dropped += 1;
        }
        dropped
    }
}

#[cold]
#[inline(never)]
fn count_wrong(wrong: &Wrong, stats: &QueueStats) {
    let cause = match wrong {
        Wrong::Short => &stats.dropped_short,
        Wrong::TooLong => &stats.dropped_too_long,
        Wrong::Header => &stats.dropped_bad_header,
    };
    cause.add(1);
}
