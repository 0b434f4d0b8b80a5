//! `Aside`: the numbers of chains that were popped and then set aside, to be popped again later.
//!
//! A disk on a full file system refuses a write. The write is tried again when there may be space.
//! Until then its chain is neither in flight nor in the ring: only its number is kept, so that the
//! chain holds no guest memory and no bounce buffer while it waits.

use crate::chain::{BATCH_CHAINS, BATCH_SLICES, Batch};
use crate::error::QueueError;
use crate::ring::{Chains, Ring};
use std::collections::VecDeque;

/// Pops chains that do not lie in the ring (owed or set aside) and adds them to the batch. Each
/// call of `walk` walks the next chain, and adds the number of its empty descriptors to its
/// argument; `None`: no chain is left. A chain that cannot be walked is latched as the ring's fault
/// and ends this.
pub(crate) fn pop_again<R: Ring>(
    ring: &mut R,
    batch: &mut Batch,
    max: usize,
    mut walk: impl FnMut(&mut R, &mut Batch, &mut usize) -> Option<Result<(), QueueError>>,
) {
    let mut empty = 0;
    while ring.fault().is_none()
        && batch.entries.len() < max.min(BATCH_CHAINS)
        && batch.slices.len() + empty < BATCH_SLICES
        && let Some(walked) = walk(ring, batch, &mut empty)
    {
        walked.unwrap_or_else(|fault| ring.latch_fault(fault));
    }
    batch.walked = batch.slices.len() + empty;
}

/// Pops the chains that a former process has popped and not returned, and puts them back. The
/// former process may have written to their buffers, so this marks their pages in the migration
/// log. False: a chain cannot be walked; the ring has a fault then.
pub(crate) fn touch_owed<R: Chains>(ring: &mut R) -> bool {
    let (mut batch, mut chains) = (Batch::new(), Vec::new());
    while ring.owed() > 0 && ring.pop_batch(&mut batch, BATCH_CHAINS) > 0 {
        chains.extend(batch.entries.iter_mut().filter_map(|entry| entry.chain.take()));
    }
    chains.into_iter().rev().for_each(|chain| ring.unpop(chain));
    !ring.is_faulted()
}

/// The numbers of the chains, the oldest first: at most as many as the ring has entries.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    numbers: VecDeque<u16>,
}

impl Aside {
    /// How many chains are set aside.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    pub(crate) fn count(&self) -> u16 {
        self.numbers.len() as u16
    }

    /// Adds a chain that is set aside now.
    pub(crate) fn push(&mut self, number: u16) {
        self.numbers.push_back(number);
    }

    /// The number of the chain that was set aside first; it stays.
    pub(crate) fn first(&self) -> Option<u16> {
        self.numbers.front().copied()
    }

    /// Removes the chain that was set aside first, and returns its number.
    pub(crate) fn take_first(&mut self) -> Option<u16> {
        self.numbers.pop_front()
    }

    /// True if `others` are exactly the chains that are set aside, in any order.
    pub(crate) fn are(&self, others: impl Iterator<Item = u16>) -> bool {
        // One bit for each number: a driver can have tens of thousands set aside, and a worker runs
        // this.
        let mut bits = vec![0u64; (usize::from(u16::MAX) + 1) / 64];
        let place = |number: u16| (usize::from(number / 64), 1u64 << (number % 64));
        for (word, bit) in self.numbers.iter().copied().map(place) {
            bits[word] |= bit;
        }
        let mut left = self.numbers.len();
        for (word, bit) in others.map(place) {
            if bits[word] & bit == 0 {
                return false;
            }
            bits[word] &= !bit;
            left -= 1;
        }
        left == 0
    }
}
