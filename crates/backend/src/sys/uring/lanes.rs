//! `Lanes`: how much of one disk the kernel's threads may have at a time.
//!
//! The threads of a ring are few, and take its entries in one order, whosever they are: a guest
//! that gives them thousands of long ones would let the flush of another guest wait for all of
//! those. So each disk has a lane, and what finds its lane full waits here.

use std::collections::{HashMap, VecDeque};

/// Entries of one disk that threads of the kernel have at a time: half of the threads that a host
/// of two CPUs has for a ring.
const LANE_MAX: usize = 4;

/// The lanes of a ring; `T` is what waits.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    lanes: HashMap<u64, Lane<T>>,
    /// The lane of each entry that a thread has.
    under_way: HashMap<u64, u64>,
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
    /// Makes the entry `user_data` one of those under way. False: its lane is full, it must
    /// [`Self::wait`].
    pub(super) fn enter(&mut self, lane: u64, user_data: u64) -> bool {
        let fresh = || Lane { under_way: 0, waiting: VecDeque::new() };
        let entry = self.lanes.entry(lane).or_insert_with(fresh);
        let enters = entry.under_way < LANE_MAX;
        if enters {
            entry.under_way += 1;
            self.under_way.insert(user_data, lane);
        }
        enters
    }

    /// Puts what found its lane full at that lane's end.
    pub(super) fn wait(&mut self, lane: u64, task: T) {
        if let Some(lane) = self.lanes.get_mut(&lane) {
            lane.waiting.push_back(task);
        }
    }

    /// The entry `user_data` has ended. Returns what may [`Self::enter`] this lane now.
    #[inline]
    pub(super) fn leave(&mut self, user_data: u64) -> Option<(u64, T)> {
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
        next.map(|task| (number, task))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_lets_one_in_for_each_that_leaves_and_stops_no_other_lane() {
        let mut lanes = Lanes::default();
        let max = LANE_MAX as u64;
        assert!((0..max).all(|n| lanes.enter(1, n)));
        for n in [max, max + 1] {
            assert!(!lanes.enter(1, n));
            lanes.wait(1, n);
        }
        assert!(lanes.enter(2, 100), "another disk");
        assert_eq!(lanes.leave(100), None);
        for n in 0..2 {
            assert_eq!(lanes.leave(n), Some((1, max + n)), "in order");
            assert!(lanes.enter(1, max + n));
        }
        assert!((2..max + 2).all(|n| lanes.leave(n).is_none()));
        assert!(lanes.lanes.is_empty() && lanes.under_way.is_empty());
        assert_eq!(lanes.leave(7), None, "it has no lane");
    }
}
