//! `Aside`: the numbers of chains that were popped and then set aside, to be popped again later.
//!
//! A disk on a full file system refuses a write, and the write is tried again when there may be
//! room. Until then nobody has its chain: it is neither in flight nor in the ring. Only its number
//! is kept, so that neither guest memory nor a bounce buffer waits with it.

use crate::chain::{BATCH_CHAINS, BATCH_SLICES, Batch};
use crate::error::QueueError;
use crate::ring::{Chains, Ring};
use std::collections::VecDeque;

/// Pops chains again that do not lie in the ring, and adds them to the batch: `walk` walks the next
/// one, or returns `None` if none is left, and adds the number of its empty descriptors to the
/// count that it is given. A chain that cannot be walked is a fault of the ring, and ends this.
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

/// Pops the chains that a former process has taken, and puts them back: so their pages are marked
/// in a migration log, as of any chain that is put back. Whoever took them may have written to
/// them. False: one of them cannot be walked, which is a fault of the ring.
pub(crate) fn touch_owed<R: Chains>(ring: &mut R) -> bool {
    let (mut batch, mut chains) = (Batch::new(), Vec::new());
    while ring.owed() > 0 && ring.pop_batch(&mut batch, BATCH_CHAINS) > 0 {
        chains.extend(batch.entries.iter_mut().filter_map(|entry| entry.chain.take()));
    }
    chains.into_iter().rev().for_each(|chain| ring.unpop(chain));
    !ring.is_faulted()
}

/// The numbers, the oldest first: no more than the ring has entries.
#[derive(Debug, Default)]
pub(crate) struct Aside {
    numbers: VecDeque<u16>,
}

impl Aside {
    /// How many there are.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    pub(crate) fn count(&self) -> u16 {
        self.numbers.len() as u16
    }

    /// Adds a chain that is set aside now.
    pub(crate) fn push(&mut self, number: u16) {
        self.numbers.push_back(number);
    }

    /// The chain that was set aside first.
    pub(crate) fn first(&self) -> Option<u16> {
        self.numbers.front().copied()
    }

    /// Takes the chain that was set aside first.
    pub(crate) fn take_first(&mut self) -> Option<u16> {
        self.numbers.pop_front()
    }

    /// True if these are all of `others`, in any order.
    pub(crate) fn are(&self, others: impl Iterator<Item = u16>) -> bool {
        // A bit for each: the driver may have chosen tens of thousands, and a worker compares them.
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
