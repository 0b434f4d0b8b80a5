//! `Slots`: the numbers of the requests that were taken from a ring, and which numbers are free.
//!
//! ```text
//! |  free ...  |  answered ...  |      one list; slots in flight are not in it
//! take:      from the end of the free ones
//! answer:    to the end of the list
//! publish:   the answered slots become free: only the border between both parts moves
//! ```
//! The slot that was freed last is taken first, since its journal record is still in the cache. A
//! turn takes requests, answers some and publishes the answers, in this order. So the list has only
//! free slots when requests are taken, and no slot has to be moved.

/// The slots of a ring.
#[derive(Debug)]
pub(super) struct Slots {
    list: Vec<u16>,
    /// The first `free` slots of the list are free.
    free: usize,
}

impl Slots {
    /// One slot for each entry of the ring; all are free.
    pub(super) fn new(size: u16) -> Self {
        Self { list: (0..size).rev().collect(), free: size.into() }
    }

    /// Removes the slots `taken`, of requests that a former back-end has taken, from the free ones.
    /// Called before any slot is taken.
    pub(super) fn take_away(&mut self, taken: &[u16]) {
        self.list.retain(|slot| !taken.contains(slot));
        self.free = self.list.len();
    }

    /// How many slots are free.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.free
    }

    /// The `count` free slots that [`Self::take`] will take, in that order.
    ///
    /// # Panics
    /// If fewer are free.
    #[inline]
    pub(super) fn next(&self, count: usize) -> impl Iterator<Item = &u16> {
        self.list[self.free - count..self.free].iter().rev()
    }

    /// Takes the next `count` free slots.
    ///
    /// # Panics
    /// If fewer are free.
    #[inline]
    pub(super) fn take(&mut self, count: usize) {
        let end = self.free;
        self.free -= count;
        if end == self.list.len() {
            self.list.truncate(self.free);
        } else {
            self.take_before_answered(end);
        }
    }

    #[cold]
    fn take_before_answered(&mut self, end: usize) {
        self.list.drain(self.free..end);
    }

    /// Frees the slot that was taken last: its request was put back untouched.
    pub(super) fn put_back(&mut self, slot: u16) {
        self.list.insert(self.free, slot);
        self.free += 1;
    }

    /// Appends `slot`, whose request is answered. It is not free yet: the front cannot see the
    /// response.
    #[inline]
    pub(super) fn answer(&mut self, slot: u16) {
        self.list.push(slot);
    }

    /// The front can see all responses now: frees the slots of the answered requests.
    #[inline]
    pub(super) fn publish(&mut self) {
        self.free = self.list.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(slots: &mut Slots, count: usize) -> Vec<u16> {
        let taken = slots.next(count).copied().collect();
        slots.take(count);
        taken
    }

    #[test]
    fn a_slot_is_taken_again_only_when_its_answer_was_published() {
        let mut slots = Slots::new(4);
        assert_eq!(take(&mut slots, 3), [0, 1, 2]);
        slots.answer(1);
        slots.answer(0);
        assert_eq!(slots.free_count(), 1, "nobody has seen the answers");
        assert_eq!(take(&mut slots, 1), [3]);
        assert_eq!((slots.free_count(), take(&mut slots, 0)), (0, vec![]));
        slots.publish();
        assert_eq!(slots.free_count(), 2);
        assert_eq!(take(&mut slots, 2), [0, 1], "the one that was answered last comes first");
    }

    #[test]
    fn a_slot_that_is_put_back_comes_next_though_answers_wait() {
        let mut slots = Slots::new(4);
        slots.take_away(&[2]);
        assert_eq!(take(&mut slots, 2), [0, 1]);
        slots.answer(0);
        slots.put_back(1);
        assert_eq!((slots.free_count(), take(&mut slots, 1)), (2, vec![1]));
        slots.publish();
        assert_eq!(take(&mut slots, 2), [0, 3]);
    }
}
