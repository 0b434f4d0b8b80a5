//! `SpscQueue`: passes at most eight items from one thread (the giver) to another (the taker), in
//! order. No thread waits.
//!
//! ```text
//! put        (giver)   the next place becomes full
//! take       (taker)   the oldest full place; the item is out, and its place stays taken
//! put_back   (taker)   the item that is out goes back to its place, as the oldest
//! finish     (taker)   the item that is out is done: its place is free
//! recall     (giver)   every full place becomes empty: the giver has those items again
//! take_last  (giver)   the newest item, if its place is still full: to add to it, and put it again
//! ```
//! 1. Each place has a lock of its own. The two counts make sure that only one side uses a place at
//!    a time, unless the giver recalls. So a lock is free whenever nothing is recalled, and it is
//!    only ever *tried*: a side that finds it locked tries again later.
//! 2. A recall leaves empty places between full ones. The taker skips an empty place while it holds
//!    the place's lock. The giver holds the same lock when it fills the place again, and so knows
//!    whether the taker has skipped it.

#[cfg(loom)]
use loom::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

/// The most items that are in the queue at a time.
const PLACES: usize = 8;

#[derive(Debug, Default)]
enum Place<T> {
    #[default]
    Empty,
    Full(T),
    /// The taker has the item, or has finished it.
    Out,
}

/// The result of [`SpscQueue::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeResult<T> {
    /// The oldest item.
    Thing(T),
    /// The queue is empty.
    Nothing,
    /// The giver holds the lock of the oldest place: call `take` again.
    Busy,
}

/// A queue of items from a giver to a taker; at any time, one thread is the giver and one the
/// taker.
#[derive(Debug)]
pub struct SpscQueue<T> {
    places: [Mutex<Place<T>>; PLACES],
    /// How many items were put (`put`), and how many places the taker has finished or skipped
    /// (`done`). Both counts wrap around.
    put: AtomicUsize,
    done: AtomicUsize,
}

impl<T> SpscQueue<T> {
    /// Makes an empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self {
            places: std::array::from_fn(|_| Mutex::new(Place::Empty)),
            put: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
        }
    }

    fn place(&self, at: usize) -> &Mutex<Place<T>> {
        &self.places[at % PLACES]
    }

    /// For the giver: true if [`Self::put`] finds room.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let (put, done) = (self.put.load(Ordering::Relaxed), self.done.load(Ordering::Acquire));
        put.wrapping_sub(done) < PLACES
    }

    /// For the giver: puts `thing` behind all other items.
    ///
    /// # Errors
    /// There is no room; returns the item.
    pub fn put(&self, thing: T) -> Result<(), T> {
        let (put, done) = (self.put.load(Ordering::Relaxed), self.done.load(Ordering::Acquire));
        if put != done
            && let Ok(mut place) = self.place(put.wrapping_sub(1)).try_lock()
            && matches!(*place, Place::Empty)
            && self.done.load(Ordering::Acquire) != put
        {
            // The newest item was taken back, and the taker has not skipped its place yet: reuse
            // the place.
            *place = Place::Full(thing);
            return Ok(());
        }
        // The taker may have freed a place since `done` was read: read `done` again.
        if put.wrapping_sub(self.done.load(Ordering::Acquire)) >= PLACES {
            return Err(thing);
        }
        let Ok(mut place) = self.place(put).try_lock() else { return Err(thing) };
        *place = Place::Full(thing);
        drop(place);
        self.put.store(put.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// For the giver: takes the newest item back, if the taker has not taken it.
    pub fn take_last(&self) -> Option<T> {
        let (put, done) = (self.put.load(Ordering::Relaxed), self.done.load(Ordering::Acquire));
        if put == done {
            return None;
        }
        empty(&mut *self.place(put.wrapping_sub(1)).try_lock().ok()?)
    }

    /// For the giver: takes back all items that the taker has not taken, the oldest first.
    pub fn recall(&self, mut each: impl FnMut(T)) {
        let (put, mut at) = (self.put.load(Ordering::Relaxed), self.done.load(Ordering::Acquire));
        while at != put {
            if let Ok(mut place) = self.place(at).try_lock()
                && let Some(thing) = empty(&mut *place)
            {
                each(thing);
            }
            at = at.wrapping_add(1);
        }
    }

    /// For the taker: takes the oldest item. The taker must have finished the item before, or put
    /// it back.
    pub fn take(&self) -> TakeResult<T> {
        loop {
            let done = self.done.load(Ordering::Relaxed);
            if done == self.put.load(Ordering::Acquire) {
                return TakeResult::Nothing;
            }
            let Ok(mut place) = self.place(done).try_lock() else { return TakeResult::Busy };
            match std::mem::replace(&mut *place, Place::Out) {
                Place::Full(thing) => return TakeResult::Thing(thing),
                // Point 2 above: skip the place while its lock is held.
                Place::Empty | Place::Out => {
                    *place = Place::Empty;
                    self.done.store(done.wrapping_add(1), Ordering::Release);
                }
            }
        }
    }

    /// For the taker: puts the item that it has taken back to its place, as the oldest.
    ///
    /// # Errors
    /// The giver holds the lock of that place; returns the item, which the taker keeps.
    pub fn put_back(&self, thing: T) -> Result<(), T> {
        let Ok(mut place) = self.place(self.done.load(Ordering::Relaxed)).try_lock() else {
            return Err(thing);
        };
        *place = Place::Full(thing);
        Ok(())
    }

    /// For the taker: frees the place of the item that it has taken.
    pub fn finish(&self) {
        let done = self.done.load(Ordering::Relaxed);
        self.done.store(done.wrapping_add(1), Ordering::Release);
    }
}

impl<T> Default for SpscQueue<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Empties a place, and returns the item if the place was full.
fn empty<T>(place: &mut Place<T>) -> Option<T> {
    match std::mem::take(place) {
        Place::Full(thing) => Some(thing),
        other => {
            *place = other;
            None
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn take_all(handoff: &SpscQueue<u32>) -> Vec<u32> {
        let one = || match handoff.take() {
            TakeResult::Thing(thing) => {
                handoff.finish();
                Some(thing)
            }
            TakeResult::Nothing | TakeResult::Busy => None,
        };
        std::iter::from_fn(one).collect()
    }

    #[test]
    fn things_arrive_in_order_and_no_more_than_there_is_room_for() {
        let handoff = SpscQueue::new();
        for lap in 0..3 {
            for n in 0..8 {
                handoff.put(lap * 10 + n).unwrap();
            }
            assert_eq!(handoff.put(99), Err(99));
            assert_eq!(take_all(&handoff), (0..8).map(|n| lap * 10 + n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_put_back_is_the_oldest_again_and_what_is_recalled_never_arrives() {
        let handoff = SpscQueue::new();
        (0..4).for_each(|n| handoff.put(n).unwrap());
        assert_eq!(handoff.take(), TakeResult::Thing(0));
        let mut recalled = Vec::new();
        handoff.recall(|thing| recalled.push(thing));
        assert_eq!(recalled, [1, 2, 3], "0 is out");
        handoff.put_back(0).unwrap();
        handoff.put(4).unwrap();
        assert_eq!(take_all(&handoff), [0, 4]);
        handoff.recall(|_| panic!("nothing is left"));
    }

    #[test]
    fn the_newest_can_be_added_to_until_it_is_taken() {
        let handoff = SpscQueue::new();
        assert_eq!(handoff.take_last(), None);
        handoff.put(1).unwrap();
        assert_eq!(handoff.take_last(), Some(1));
        handoff.put(2).unwrap();
        assert_eq!(handoff.take(), TakeResult::Thing(2));
        assert_eq!(handoff.take_last(), None, "it is out");
        handoff.finish();
        // The taker skips the place of a thing that was taken back; the next one goes behind it.
        handoff.put(3).unwrap();
        assert_eq!(handoff.take_last(), Some(3));
        assert_eq!(handoff.take(), TakeResult::Nothing);
        handoff.put(4).unwrap();
        assert_eq!(take_all(&handoff), [4]);
    }

    #[test]
    fn a_taker_that_does_not_come_leaves_no_room_until_it_does() {
        let handoff = SpscQueue::new();
        (0..8).for_each(|n| handoff.put(n).unwrap());
        let mut count = 0;
        handoff.recall(|_| count += 1);
        // The newest place is reused; the taker skips the seven before it.
        assert_eq!((count, handoff.put(8), handoff.put(9)), (8, Ok(()), Err(9)));
        assert_eq!(take_all(&handoff), [8]);
        handoff.put(10).unwrap();
        assert_eq!(take_all(&handoff), [10]);
    }
}
