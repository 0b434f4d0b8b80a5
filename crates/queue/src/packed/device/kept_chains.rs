//! `KeptChains`: the descriptors of each chain of a packed ring that was popped and has not gone
//! back.
//!
//! A slot has room for a short chain. The further descriptors of longer ones lie in one list that
//! all slots share, and leave it when their chain goes back. The list is never longer than the
//! ring, because no more descriptors can be in flight: a driver that uses long chains in every
//! slot, one after the other, makes it no longer.

use crate::place::Place;
use crate::record::packed::Recorded;

/// Descriptors that lie in the slot itself: a request of a disk has three, or one with a table.
pub(super) const FEW: usize = 4;

/// No slot: there are fewer.
const NONE: u16 = u16::MAX;

/// The chains that have not gone back, by their slots. The free slots form a list, in which each
/// one names the next: a chain that begins or ends touches its slot anyhow.
#[derive(Debug)]
pub(super) struct KeptChains {
    /// Reaches as far as the highest slot that was used.
    kept: Vec<Kept>,
    /// The slot that the next chain gets, which is the one that was freed last.
    first_free: u16,
    further: Further,
}

impl Default for KeptChains {
    fn default() -> Self {
        Self { kept: Vec::new(), first_free: NONE, further: Further::default() }
    }
}

impl KeptChains {
    /// The slot that the next chain gets ([`Self::begin`]).
    #[inline]
    pub(super) fn next(&mut self) -> u16 {
        if self.first_free == NONE {
            self.add();
        }
        self.first_free
    }

    /// Adds a slot. The driver of a large ring that is mostly idle uses few.
    #[cold]
    #[allow(clippy::cast_possible_truncation, reason = "one for each descriptor, and one more")]
    fn add(&mut self) {
        self.first_free = self.kept.len() as u16;
        self.kept.push(Kept { next_free: NONE, ..Kept::default() });
    }

    /// Gives the slot that [`Self::next`] has named to a chain that lies at a place, if it does:
    /// its entry, and the store of its further descriptors ([`Kept::keep`]).
    #[inline]
    pub(super) fn begin(&mut self, at: Option<Place>) -> (&mut Kept, &mut Further) {
        let kept = &mut self.kept[usize::from(self.first_free)];
        self.first_free = kept.next_free;
        kept.at = at;
        (kept, &mut self.further)
    }

    /// The entry of a slot that a chain has, and the store of its further descriptors.
    pub(super) fn go_on(&mut self, slot: u16) -> (&mut Kept, &mut Further) {
        (&mut self.kept[usize::from(slot)], &mut self.further)
    }

    /// The chain of a slot lies in the ring again, is given up, or was refused.
    pub(super) fn free(&mut self, slot: u16) {
        self.free_further(slot);
        self.free_used(slot);
    }

    /// The chain of a slot has gone back. Gives its id, and how many descriptors it has.
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

    /// The kept descriptors and facts of the chain in a slot.
    #[inline]
    pub(super) fn kept(&self, slot: u16) -> &Kept {
        &self.kept[usize::from(slot)]
    }

    /// The entry of the chain in a slot, to be changed.
    #[inline]
    pub(super) fn kept_mut(&mut self, slot: u16) -> &mut Kept {
        &mut self.kept[usize::from(slot)]
    }

    /// The descriptors of the chain of a slot, as the two words of each.
    pub(super) fn descs(&self, slot: u16) -> impl Iterator<Item = &(u64, u64)> {
        let kept = self.kept(slot);
        kept.few.iter().chain(self.further.of(kept.further)).take(kept.count.into())
    }
}

/// The descriptors and facts that are kept of one chain: one slot.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The chain's id, which is that of its last descriptor (§2.8.6).
    pub(super) id: u16,
    count: u16,
    /// Where it lay in the ring; `None` for a chain that a former process has taken.
    at: Option<Place>,
    pub(super) recorded: Recorded,
    /// A former process has taken it; it was popped again.
    pub(super) is_again: bool,
    /// Its first descriptors, as the two words of each.
    pub(super) few: [(u64, u64); FEW],
    /// Those behind them.
    further: Option<List>,
    /// The free slot behind this one, while no chain has it.
    next_free: u16,
}

impl Kept {
    /// Keeps the descriptor `n` of the chain, whose two words are `low` and `high`. The caller
    /// gives the descriptors in the order of the chain, and a slot that was just taken.
    #[inline]
    pub(super) fn keep(&mut self, n: u16, low: u64, high: u64, further: &mut Further) {
        match self.few.get_mut(usize::from(n)) {
            Some(place) => *place = (low, high),
            None => self.keep_further(low, high, further),
        }
    }

    /// Keeps a descriptor behind those for which the slot has room.
    #[inline]
    pub(super) fn keep_further(&mut self, low: u64, high: u64, further: &mut Further) {
        further.add(&mut self.further, low, high);
    }

    /// The chain has `count` descriptors, and this id.
    #[inline]
    pub(super) fn end(&mut self, count: u16, id: u16) {
        (self.count, self.id) = (count, id);
    }

    /// Where it lay in the ring; `None` for a chain that a former process has taken.
    pub(super) fn place(&self) -> Option<Place> {
        self.at
    }

    /// How many descriptors the chain has.
    #[inline]
    pub(super) fn count(&self) -> u16 {
        self.count
    }
}

/// Descriptors of a chain in [`Further`]: its first and its last place there.
#[derive(Clone, Copy, Debug)]
struct List {
    first: u16,
    last: u16,
}

/// The descriptors for which the slots have no room.
#[derive(Debug, Default)]
pub(super) struct Further {
    /// The two words of each, and the place of the next one of its list.
    places: Vec<((u64, u64), u16)>,
    /// The places that nobody has.
    free: Option<List>,
}

impl Further {
    /// Adds a descriptor to a list.
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

    /// The descriptors of a list; without an end, since who asks knows how many they are.
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
