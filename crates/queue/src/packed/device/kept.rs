//! `Slots`: what a packed ring keeps of each chain that was popped and has not gone back.
//!
//! A slot has room for a short chain. The further descriptors of longer ones lie in one list that
//! all slots share, and leave it when their chain goes back. Descriptors in flight are at most as
//! many as the ring has, and so is the list: a driver that uses long chains in every slot, one
//! after the other, makes it no longer.

use crate::place::Place;
use crate::record::packed::Recorded;

/// Descriptors that lie in the slot itself: a request of a disk has three, or one with a table.
pub(super) const FEW: usize = 4;

/// The chains that have not gone back, by their slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Reaches as far as the highest slot that was used.
    kept: Vec<Kept>,
    free: Vec<u16>,
    further: Further,
}

impl Slots {
    /// A slot that no chain has.
    #[inline]
    pub(super) fn take(&mut self) -> u16 {
        match self.free.pop() {
            Some(slot) => slot,
            None => self.take_new(),
        }
    }

    /// A slot that was not used before. The driver of a large ring that is mostly idle uses few.
    #[cold]
    #[allow(clippy::cast_possible_truncation, reason = "one for each descriptor, and one more")]
    fn take_new(&mut self) -> u16 {
        self.kept.push(Kept::default());
        (self.kept.len() - 1) as u16
    }

    /// The chain of a slot lies in the ring again, or is given up.
    pub(super) fn free(&mut self, slot: u16) {
        self.free_further(slot);
        self.free.push(slot);
    }

    /// The chain of a slot, of `count` descriptors, has gone back.
    #[inline]
    pub(super) fn free_used(&mut self, slot: u16, count: u16) {
        if usize::from(count) > FEW {
            self.free_further(slot);
        }
        self.free.push(slot);
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

    /// The entry of the chain in a slot, and the store of its further descriptors ([`Kept::keep`]).
    #[inline]
    pub(super) fn begin(&mut self, slot: u16) -> (&mut Kept, &mut Further) {
        (&mut self.kept[usize::from(slot)], &mut self.further)
    }

    /// The descriptors of the chain of a slot, as the two words of each.
    pub(super) fn descs(&self, slot: u16) -> impl Iterator<Item = &(u64, u64)> {
        let kept = self.kept(slot);
        kept.few.iter().chain(self.further.of(kept.further)).take(kept.count.into())
    }
}

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
    /// Its first descriptors, as the two words of each.
    pub(super) few: [(u64, u64); FEW],
    /// Those behind them.
    further: Option<List>,
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
    fn keep(slots: &mut Slots, count: u16, from: u64) -> u16 {
        let slot = slots.take();
        let (kept, further) = slots.begin(slot);
        (0..count).zip(from..).for_each(|(n, word)| kept.keep(n, word, word, further));
        kept.end(count, 7);
        slot
    }

    fn are(slots: &Slots, slot: u16, count: u16, from: u64) -> bool {
        let expected = (from..).take(count.into()).map(|word| (word, word));
        slots.descs(slot).copied().eq(expected)
    }

    #[test]
    fn each_chain_keeps_its_descriptors_though_others_come_and_go() {
        let mut slots = Slots::default();
        let counts = [1, 4, 5, 40, 6];
        let chains: Vec<_> = counts.map(|n| keep(&mut slots, n, u64::from(n) * 100)).into();
        slots.free_used(chains[3], 40);
        slots.free_used(chains[2], 5);
        let later = keep(&mut slots, 30, 9000);
        for (slot, count) in [(chains[0], 1), (chains[1], 4), (chains[4], 6)] {
            assert!(are(&slots, slot, count, u64::from(count) * 100), "{count} descriptors");
        }
        assert!(are(&slots, later, 30, 9000));
    }

    #[test]
    fn long_chains_in_every_slot_need_room_for_the_longest_alone() {
        let mut slots = Slots::default();
        let mut short = Vec::new();
        for _ in 0..64 {
            let long = keep(&mut slots, 64, 0);
            slots.free_used(long, 64);
            short.push(keep(&mut slots, 1, 0));
        }
        assert_eq!((slots.kept.len(), slots.further.places.len()), (64, 64 - FEW));
    }
}
