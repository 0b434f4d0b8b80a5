//! `EntrySlots`: limits the requests of each disk that kernel threads serve at a time.
//!
//! The threads of a ring are limited, and take its entries in one order, of whichever guest: a
//! guest with thousands of long requests would make the flush of another guest wait for all of
//! them. So each disk has two slots, and a request that finds its slot full waits here. The narrow
//! slot is for requests that occupy their thread (copies, flushes), the wide slot for those that
//! free their thread as soon as the device has them.
//!
//! Flushes wait as well, and each is a call of its own, although one call would make the data of
//! several durable: the host reports a loss of bytes once to each open file description, so a flush
//! that was served by another description's call could report success after a loss. Only the queue
//! of the flushes knows which of them can share a call (`blk/flushes.rs`).

use std::collections::{HashMap, VecDeque};

/// The kind of a slot: how many entries of one disk kernel threads may have at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Width {
    /// For entries that occupy their threads: four at a time.
    Narrow,
    /// For entries that free their threads when the device has them: 32 at a time.
    Wide,
}

/// Few, because every busy thread competes with the workers for CPUs.
const NARROW_MAX: usize = 4;
/// The usual depth of guests' queues, so that the device sees all requests.
const WIDE_MAX: usize = 32;

/// How many of the last waiting entries [`EntrySlots::recall`] searches: those of a queue that
/// stops are the last ones, apart from those of the disk's other queues.
const RECALL_REACH: usize = 4096;

impl Width {
    pub(super) const fn max(self) -> usize {
        match self {
            Self::Narrow => NARROW_MAX,
            Self::Wide => WIDE_MAX,
        }
    }
}

/// A slot: the number of its disk, and its width.
pub(super) type SlotId = (u64, Width);

/// The slots of a ring; `T` is a waiting entry.
#[derive(Debug)]
pub(super) struct EntrySlots<T> {
    slots: HashMap<SlotId, Slot<T>>,
    /// The slot of each entry that a kernel thread serves, by `user_data`.
    under_way: HashMap<u64, SlotId>,
}

#[derive(Debug)]
struct Slot<T> {
    under_way: usize,
    waiting: VecDeque<T>,
}

impl<T> Default for EntrySlots<T> {
    fn default() -> Self {
        Self { slots: HashMap::new(), under_way: HashMap::new() }
    }
}

impl<T> EntrySlots<T> {
    /// Returns the number of entries that kernel threads serve, in all slots.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Counts the entry `user_data` as under way. Returns false if its slot is full: the caller
    /// must then call [`Self::wait`].
    pub(super) fn enter(&mut self, slot: SlotId, user_data: u64) -> bool {
        let fresh = || Slot { under_way: 0, waiting: VecDeque::new() };
        let entry = self.slots.entry(slot).or_insert_with(fresh);
        let enters = entry.under_way < slot.1.max();
        if enters {
            entry.under_way += 1;
            self.under_way.insert(user_data, slot);
        }
        enters
    }

    /// Adds an entry to the waiting ones of a slot that was full.
    pub(super) fn wait(&mut self, slot: SlotId, task: T) {
        if let Some(slot) = self.slots.get_mut(&slot) {
            slot.waiting.push_back(task);
        }
    }

    /// Removes the waiting entry of a disk for which `is_it` is true. Only the last
    /// [`RECALL_REACH`] entries of each slot are searched.
    pub(super) fn recall(&mut self, disk: u64, is_it: impl Fn(&T) -> bool) -> Option<T> {
        [Width::Narrow, Width::Wide].into_iter().find_map(|width| {
            let waiting = &mut self.slots.get_mut(&(disk, width))?.waiting;
            let last = waiting.iter().enumerate().rev().take(RECALL_REACH);
            let at = { last }.find(|(_, task)| is_it(task))?.0;
            waiting.remove(at)
        })
    }

    /// Ends the entry `user_data`. Returns a waiting entry for which the caller may [`Self::enter`]
    /// the slot now.
    #[inline]
    pub(super) fn leave(&mut self, user_data: u64) -> Option<T> {
        if self.under_way.is_empty() {
            return None;
        }
        let number = self.under_way.remove(&user_data)?;
        let slot = self.slots.get_mut(&number)?;
        slot.under_way -= 1;
        let next = slot.waiting.pop_front();
        if next.is_none() && slot.under_way == 0 {
            self.slots.remove(&number);
        }
        next
    }
}

#[cfg(test)]
impl<T> EntrySlots<T> {
    pub(super) fn waiting(&self) -> usize {
        self.slots.values().map(|slot| slot.waiting.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_slot_lets_one_in_for_each_that_leaves_and_stops_no_other_slot() {
        for width in [Width::Narrow, Width::Wide] {
            let mut slots = EntrySlots::default();
            let (max, mine) = (width.max() as u64, (1, width));
            assert!((0..max).all(|n| slots.enter(mine, n)));
            for n in [max, max + 1] {
                assert!(!slots.enter(mine, n));
                slots.wait(mine, n);
            }
            let other = if width == Width::Narrow { Width::Wide } else { Width::Narrow };
            assert!(slots.enter((2, width), 100), "another disk");
            assert!(slots.enter((1, other), 101), "what leaves its thread, or does not");
            assert_eq!((slots.leave(100), slots.leave(101)), (None, None));
            for n in 0..2 {
                assert_eq!(slots.leave(n), Some(max + n), "in order");
                assert!(slots.enter(mine, max + n));
            }
            assert!((2..max + 2).all(|n| slots.leave(n).is_none()));
            assert!(slots.slots.is_empty() && slots.under_way.is_empty());
            assert_eq!(slots.leave(7), None, "it has no slot");
        }
    }
}
