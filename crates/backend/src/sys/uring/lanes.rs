//! `Lanes`: bounds the requests of each disk that the kernel's threads have at a time.
//!
//! The threads of a ring are bounded, and take its entries in one order, of whichever guest: a
//! guest with thousands of long requests would make the flush of another guest wait for all of
//! them. So each disk has two lanes, and a request that finds its lane full waits here. The narrow
//! lane is for requests that occupy their thread (copies, flushes), the wide lane for those that
//! free their thread as soon as the device has them.
//!
//! Flushes wait as well, and each is a call of its own, although one call would make the data of
//! several durable: the host reports a loss of bytes once to each open file description, so a flush
//! that ended with another description's call could report success after a loss. Only the queue of
//! the flushes knows which ones may be one call (`blk/flushes.rs`).

use std::collections::{HashMap, VecDeque};

/// The kind of a lane: how many entries of one disk kernel threads may have at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Width {
    /// Entries that keep their threads: four at a time.
    Narrow,
    /// Entries that leave their threads when the device has them: 32 at a time.
    Wide,
}

/// Few, because every busy thread competes with the workers for CPUs.
const NARROW_MAX: usize = 4;
/// As deep as most guests' queues are used, so that the device sees all requests.
const WIDE_MAX: usize = 32;

/// How many of the last entries [`Lanes::recall`] searches: the entries of a queue that stops are
/// the last ones, apart from those of the disk's other queues.
const RECALL_REACH: usize = 4096;

impl Width {
    pub(super) const fn max(self) -> usize {
        match self {
            Self::Narrow => NARROW_MAX,
            Self::Wide => WIDE_MAX,
        }
    }
}

/// A lane: the number of its disk, and its width.
pub(super) type LaneId = (u64, Width);

/// The lanes of a ring; `T` is an entry that waits.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    lanes: HashMap<LaneId, Lane<T>>,
    /// The lane of each entry that a kernel thread has, by `user_data`.
    under_way: HashMap<u64, LaneId>,
}

#[derive(Debug)]
struct Lane<T> {
    under_way: usize,
    waiting: VecDeque<T>,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self { lanes: HashMap::new(), under_way: HashMap::new() }
    }
}

impl<T> Lanes<T> {
    /// Entries that kernel threads have, of all lanes.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Counts the entry `user_data` as under way. False: its lane is full, and the caller must call
    /// [`Self::wait`].
    pub(super) fn enter(&mut self, lane: LaneId, user_data: u64) -> bool {
        let fresh = || Lane { under_way: 0, waiting: VecDeque::new() };
        let entry = self.lanes.entry(lane).or_insert_with(fresh);
        let enters = entry.under_way < lane.1.max();
        if enters {
            entry.under_way += 1;
            self.under_way.insert(user_data, lane);
        }
        enters
    }

    /// Appends an entry that found its lane full to that lane's waiting ones.
    pub(super) fn wait(&mut self, lane: LaneId, task: T) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.waiting.push_back(task);
        }
    }

    /// Removes the waiting entry of a disk for which `is_it` is true. Only the last
    /// [`RECALL_REACH`] entries of each lane are searched.
    pub(super) fn recall(&mut self, disk: u64, is_it: impl Fn(&T) -> bool) -> Option<T> {
        [Width::Narrow, Width::Wide].into_iter().find_map(|width| {
            let waiting = &mut self.lanes.get_mut(&(disk, width))?.waiting;
            let last = waiting.iter().enumerate().rev().take(RECALL_REACH);
            let at = { last }.find(|(_, task)| is_it(task))?.0;
            waiting.remove(at)
        })
    }

    /// Ends the entry `user_data`. Returns a waiting entry that may [`Self::enter`] the lane now.
    #[inline]
    pub(super) fn leave(&mut self, user_data: u64) -> Option<T> {
        if self.under_way.is_empty() {
            return None;
        }
        let number = self.under_way.remove(&user_data)?;
        let lane = self.lanes.get_mut(&number)?;
        lane.under_way -= 1;
        let next = lane.waiting.pop_front();
        if next.is_none() && lane.under_way == 0 {
            self.lanes.remove(&number);
        }
        next
    }
}

#[cfg(test)]
impl<T> Lanes<T> {
    pub(super) fn waiting(&self) -> usize {
        self.lanes.values().map(|lane| lane.waiting.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_lets_one_in_for_each_that_leaves_and_stops_no_other_lane() {
        for width in [Width::Narrow, Width::Wide] {
            let mut lanes = Lanes::default();
            let (max, mine) = (width.max() as u64, (1, width));
            assert!((0..max).all(|n| lanes.enter(mine, n)));
            for n in [max, max + 1] {
                assert!(!lanes.enter(mine, n));
                lanes.wait(mine, n);
            }
            let other = if width == Width::Narrow { Width::Wide } else { Width::Narrow };
            assert!(lanes.enter((2, width), 100), "another disk");
            assert!(lanes.enter((1, other), 101), "what leaves its thread, or does not");
            assert_eq!((lanes.leave(100), lanes.leave(101)), (None, None));
            for n in 0..2 {
                assert_eq!(lanes.leave(n), Some(max + n), "in order");
                assert!(lanes.enter(mine, max + n));
            }
            assert!((2..max + 2).all(|n| lanes.leave(n).is_none()));
            assert!(lanes.lanes.is_empty() && lanes.under_way.is_empty());
            assert_eq!(lanes.leave(7), None, "it has no lane");
        }
    }
}
