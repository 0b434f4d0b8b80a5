//! Makes the frames of a burst from a batch of chains.

use super::NetTx;
use crate::net::parse::{Wrong, add_frame};
use manyring_engine::stats::{Counter, QueueStats};
use manyring_queue::Chains;
use manyring_wire::net::{HASH_HEADER_SIZE, HEADER_SIZE, LEGACY_HEADER_SIZE};

impl NetTx {
    /// Adds the frames of the batch to the burst. Chains without a frame, and those of frames to be
    /// dropped, are returned at once; the result is their number.
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

    /// Drops the chains of the batch, and counts them.
    #[cold]
    fn drop_batch(&mut self, queue: &mut impl Chains, cause: &Counter, popped: usize) -> usize {
        let chains = (0..popped).filter_map(|index| Some(self.batch.take(index)?.0));
        let dropped = chains.map(|chain| queue.push_used(chain, 0)).count();
        cause.add(dropped as u64);
        dropped
    }

    /// As [`Self::take_frames`], for a driver with short headers, or headers that have a hash.
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

    /// Makes frames of the batch, each behind a header of `SIZE` bytes.
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
