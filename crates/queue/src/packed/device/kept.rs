//! `Kept`: what a packed ring keeps of a chain that was popped and has not gone back.

use crate::packed::place::Place;
use crate::record::packed::Recorded;

/// Descriptors that lie in the slot itself: a request of a disk has three, or one with a table.
const FEW: usize = 4;

/// What is kept of a chain: one slot.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The chain's id, which is that of its last descriptor (§2.8.6).
    pub(super) id: u16,
    count: u16,
    /// Where it lay in the ring; `None` for a chain that a former process has taken.
    pub(super) at: Option<Place>,
    pub(super) recorded: Recorded,
    /// A former process has taken it; it was popped again.
    pub(super) is_again: bool,
    /// Its descriptors, as the two words of each.
    few: [(u64, u64); FEW],
    more: Vec<(u64, u64)>,
}

impl Kept {
    /// Keeps the descriptor `n` of the chain, whose two words are `low` and `high`. The caller
    /// gives the descriptors in the order of the chain.
    #[inline]
    pub(super) fn keep(&mut self, n: u16, low: u64, high: u64) {
        match self.few.get_mut(usize::from(n)) {
            Some(place) => *place = (low, high),
            None => self.keep_more(n, low, high),
        }
    }

    #[cold]
    fn keep_more(&mut self, n: u16, low: u64, high: u64) {
        self.more.truncate(usize::from(n) - FEW);
        self.more.push((low, high));
    }

    /// The chain has `count` descriptors, and this id.
    #[inline]
    pub(super) fn end(&mut self, count: u16, id: u16) {
        (self.count, self.id) = (count, id);
    }

    /// How many descriptors the chain has.
    #[inline]
    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// Its descriptors.
    pub(super) fn descs(&self) -> impl Iterator<Item = &(u64, u64)> {
        self.few.iter().chain(&self.more).take(self.count.into())
    }
}
