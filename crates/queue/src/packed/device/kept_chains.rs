//! `KeptChains`: the descriptors of the chains of a packed ring that were popped and not returned.
//!
//! A slot holds the first descriptors of its chain. The further ones lie in one list that all slots
//! share, until their chain is returned. At most the ring's size of descriptors is in flight, so
//! the list is never longer than the ring, even if a driver uses long chains in every slot in turn.

use crate::place::Place;
use crate::record::packed::Recorded;

/// Descriptors that a slot itself holds: a disk request has three, or one with an indirect table.
pub(super) const FEW: usize = 4;

/// Stands for "no slot": no ring has so many.
const NONE: u16 = u16::MAX;

/// The kept chains by their slots. The free slots form a linked list through `next_free`, because a
/// chain that begins or ends touches its slot anyhow.
#[derive(Debug)]
pub(super) struct KeptChains {
    /// One entry for each slot up to the highest one that was used.
    kept: Vec<Kept>,
    /// The slot for the next chain: the one that was freed last.
    first_free: u16,
    further: Further,
}

impl Default for KeptChains {
    fn default() -> Self {
        Self { kept: Vec::new(), first_free: NONE, further: Further::default() }
    }
}

impl KeptChains {
    /// The slot for the next chain, which [`Self::begin`] gives to it.
    #[inline]
    pub(super) fn next(&mut self) -> u16 {
        if self.first_free == NONE {
            self.add();
        }
        self.first_free
    }

    /// Adds a slot. Slots are added on demand: the driver of a large, mostly idle ring uses few.
    #[cold]
    #[allow(clippy::cast_possible_truncation, reason = "one for each descriptor, and one more")]
    fn add(&mut self) {
        self.first_free = self.kept.len() as u16;
        self.kept.push(Kept { next_free: NONE, ..Kept::default() });
    }

    /// Gives the slot of [`Self::next`] to a chain, which lies at the place `at` in the ring, or
    /// nowhere. Returns the slot's entry, and the store for the further descriptors
    /// ([`Kept::keep`]).
    #[inline]
    pub(super) fn begin(&mut self, at: Option<Place>) -> (&mut Kept, &mut Further) {
        let kept = &mut self.kept[usize::from(self.first_free)];
        self.first_free = kept.next_free;
        kept.at = at;
        (kept, &mut self.further)
    }

    /// The entry of a slot in use, and the store for the further descriptors.
    pub(super) fn go_on(&mut self, slot: u16) -> (&mut Kept, &mut Further) {
        (&mut self.kept[usize::from(slot)], &mut self.further)
    }

    /// Frees a slot whose chain is in the ring again, was given up or was refused.
    pub(super) fn free(&mut self, slot: u16) {
        self.free_further(slot);
        self.free_used(slot);
    }

    /// Frees the slot of a chain that was returned. Returns the chain's id and number of
    /// descriptors.
    #[inline]
    pub(super) fn free_used(&mut self, slot: u16) -> (u16, u16) {
        let kept = &mut self.kept[usize::from(slot)];
        let (id, count) = (kept.id, kept.count);
        kept.next_free = self.first_free;
        self.first_free = slot;
        if usize::from(count) > FEW {
            self.free_further(slot);
        }
        (id, count)
    }

    #[cold]
    fn free_further(&mut self, slot: u16) {
        if let Some(list) = self.kept[usize::from(slot)].further.take() {
            self.further.free(list);
        }
    }

    /// The entry of the chain in a slot.
    #[inline]
    pub(super) fn kept(&self, slot: u16) -> &Kept {
        &self.kept[usize::from(slot)]
    }

    /// The entry of the chain in a slot, mutable.
    #[inline]
    pub(super) fn kept_mut(&mut self, slot: u16) -> &mut Kept {
        &mut self.kept[usize::from(slot)]
    }

    /// The descriptors of the chain in a slot, as two words each.
    pub(super) fn descs(&self, slot: u16) -> impl Iterator<Item = &(u64, u64)> {
        let kept = self.kept(slot);
        kept.few.iter().chain(self.further.of(kept.further)).take(kept.count.into())
    }
}

/// What is kept of one chain: one slot.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The chain's id: that of its last descriptor (§2.8.6).
    pub(super) id: u16,
    count: u16,
    /// The chain's place in the ring; `None` for a chain that a former process has taken.
    at: Option<Place>,
    pub(super) recorded: Recorded,
    /// The chain was owed by a former process and was popped again.
    pub(super) is_again: bool,
    /// The first descriptors of the chain, as two words each.
    pub(super) few: [(u64, u64); FEW],
    /// The descriptors behind `few`.
    further: Option<List>,
    /// The next free slot, while this slot is free.
    next_free: u16,
}

impl Kept {
    /// Keeps descriptor `n` of the chain, with the words `low` and `high`. The caller passes the
    /// descriptors in order, from 0 on, for a slot that was just given out.
    #[inline]
    pub(super) fn keep(&mut self, n: u16, low: u64, high: u64, further: &mut Further) {
        match self.few.get_mut(usize::from(n)) {
            Some(place) => *place = (low, high),
            None => self.keep_further(low, high, further),
        }
    }

    /// Keeps a descriptor that does not fit in `few`.
    #[inline]
    pub(super) fn keep_further(&mut self, low: u64, high: u64, further: &mut Further) {
        further.add(&mut self.further, low, high);
    }

    /// Ends the chain: it has `count` descriptors and the id `id`.
    #[inline]
    pub(super) fn end(&mut self, count: u16, id: u16) {
        (self.count, self.id) = (count, id);
    }

    /// The chain's place in the ring; `None` for a chain that a former process has taken.
    pub(super) fn place(&self) -> Option<Place> {
        self.at
    }

    /// The number of the chain's descriptors.
    #[inline]
    pub(super) fn count(&self) -> u16 {
        self.count
    }
}

/// A linked list of one chain's descriptors in [`Further`]: its first and its last place.
#[derive(Clone, Copy, Debug)]
struct List {
    first: u16,
    last: u16,
}

/// The descriptors that do not fit in the slots.
#[derive(Debug, Default)]
pub(super) struct Further {
    /// The two words of each descriptor, and the place of the next one in its list.
    places: Vec<((u64, u64), u16)>,
    /// The list of free places.
    free: Option<List>,
}

impl Further {
    /// Appends a descriptor to `list`.
    #[cold]
    fn add(&mut self, list: &mut Option<List>, low: u64, high: u64) {
        let at = self.take();
        self.places[usize::from(at)] = ((low, high), at);
        match list {
            Some(list) => {
                self.places[usize::from(list.last)].1 = at;
                list.last = at;
            }
            None => *list = Some(List { first: at, last: at }),
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "fewer than the ring's descriptors")]
    fn take(&mut self) -> u16 {
        let Some(List { first, last }) = self.free else {
            self.places.push(((0, 0), 0));
            return (self.places.len() - 1) as u16;
        };
        let next = self.places[usize::from(first)].1;
        self.free = (first != last).then_some(List { first: next, last });
        first
    }

    #[cold]
    fn free(&mut self, list: List) {
        let last = self.free.map_or(list.last, |free| {
            self.places[usize::from(list.last)].1 = free.first;
            free.last
        });
        self.free = Some(List { first: list.first, last });
    }

    /// The descriptors of `list`. The iterator does not end by itself: the caller knows their
    /// number.
    fn of(&self, list: Option<List>) -> impl Iterator<Item = &(u64, u64)> {
        let next = |at: &u16| Some(self.places[usize::from(*at)].1);
        let places = std::iter::successors(list.map(|list| list.first), next);
        places.map(|at| &self.places[usize::from(at)].0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a slot for a chain of `count` descriptors, the words of each a number from `from` on.
    fn keep(slots: &mut KeptChains, count: u16, from: u64) -> u16 {
        let slot = slots.next();
        let (kept, further) = slots.begin(None);
        (0..count).zip(from..).for_each(|(n, word)| kept.keep(n, word, word, further));
        kept.end(count, 7);
        slot
    }

    fn are(slots: &KeptChains, slot: u16, count: u16, from: u64) -> bool {
        let expected = (from..).take(count.into()).map(|word| (word, word));
        slots.descs(slot).copied().eq(expected)
    }

    #[test]
    fn each_chain_keeps_its_descriptors_though_others_come_and_go() {
        let mut slots = KeptChains::default();
        let counts = [1, 4, 5, 40, 6];
        let chains: Vec<_> = counts.map(|n| keep(&mut slots, n, u64::from(n) * 100)).into();
        assert_eq!(slots.free_used(chains[3]), (7, 40));
        slots.free_used(chains[2]);
        let later = keep(&mut slots, 30, 9000);
        for (slot, count) in [(chains[0], 1), (chains[1], 4), (chains[4], 6)] {
            assert!(are(&slots, slot, count, u64::from(count) * 100), "{count} descriptors");
        }
        assert!(are(&slots, later, 30, 9000));
    }

    #[test]
    fn long_chains_in_every_slot_need_room_for_the_longest_alone() {
        let mut slots = KeptChains::default();
        let mut short = Vec::new();
        for _ in 0..64 {
            let long = keep(&mut slots, 64, 0);
            slots.free_used(long);
            short.push(keep(&mut slots, 1, 0));
        }
        assert_eq!((slots.kept.len(), slots.further.places.len()), (64, 64 - FEW));
    }
}
