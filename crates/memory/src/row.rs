//! `Row`: a queue in one piece of memory. Items are added at the end and removed at the front.

/// The least number of removed items whose space is reclaimed by moving the others.
const GAP_MIN: usize = 64;

/// A queue whose items lie one behind the other: the front is a place in a vector, and no access
/// asks where a circle ends. It is made for items that come many at once and go until none is left:
/// then nothing is moved. If some are always left they are moved to the start now and then, each
/// once at most for every item that was taken.
///
/// An item that was taken is dropped when the row is empty, or when the others are moved.
#[derive(Debug)]
pub struct Row<T> {
    items: Vec<T>,
    /// The index of the front; 0 in an empty row.
    first: usize,
}

impl<T> Default for Row<T> {
    fn default() -> Self {
        Self { items: Vec::new(), first: 0 }
    }
}

impl<T> Row<T> {
    /// Makes an empty row.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an item at the end.
    #[inline]
    pub fn push(&mut self, item: T) {
        if self.items.len() == self.items.capacity() {
            self.make_room();
        }
        self.items.push(item);
    }

    /// Adds items at the end.
    #[inline]
    pub fn extend(&mut self, items: impl ExactSizeIterator<Item = T>) {
        if self.items.capacity() - self.items.len() < items.len() {
            self.make_room();
        }
        self.items.extend(items);
    }

    #[cold]
    fn make_room(&mut self) {
        if self.first >= GAP_MIN && self.first >= self.items.len() / 2 {
            self.items.drain(..self.first);
            self.first = 0;
        }
    }

    /// Returns all items, from the front.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[T] {
        self.items.get(self.first..).unwrap_or_default()
    }

    /// Returns the first item.
    #[must_use]
    #[inline]
    pub fn front(&self) -> Option<&T> {
        self.items.get(self.first)
    }

    /// Returns the first item, to be changed.
    #[inline]
    pub fn front_mut(&mut self) -> Option<&mut T> {
        self.items.get_mut(self.first)
    }

    /// Removes `count` items from the front, or all if there are fewer.
    #[inline]
    pub fn drop_front(&mut self, count: usize) {
        self.first = self.first.saturating_add(count);
        if self.first >= self.items.len() {
            self.clear();
        }
    }

    /// Removes and returns the last item.
    pub fn pop_back(&mut self) -> Option<T> {
        let last = if self.is_empty() { None } else { self.items.pop() };
        if self.is_empty() {
            self.clear();
        }
        last
    }

    /// Removes all items.
    #[inline]
    pub fn clear(&mut self) {
        self.items.clear();
        self.first = 0;
    }

    /// Returns the number of items.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.items.len() - self.first
    }

    /// True if the row has no items.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push(usize),
        Extend(usize),
        DropFront(usize),
        PopBack,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0usize..100).prop_map(Step::Push),
            (0usize..100).prop_map(Step::Extend),
            (0usize..100).prop_map(Step::DropFront),
            Just(Step::PopBack),
        ]
    }

    proptest! {
        #[test]
        fn a_row_is_a_queue(steps in prop::collection::vec(step(), 0..60)) {
            let (mut row, mut queue, mut next) = (Row::new(), VecDeque::new(), 0usize);
            for step in steps {
                match step {
                    Step::Push(count) => for _ in 0..count {
                        row.push(next);
                        queue.push_back(next);
                        next += 1;
                    },
                    Step::Extend(count) => {
                        row.extend(next..next + count);
                        queue.extend(next..next + count);
                        next += count;
                    }
                    Step::DropFront(count) => {
                        row.drop_front(count);
                        queue.drain(..count.min(queue.len()));
                    }
                    Step::PopBack => prop_assert_eq!(row.pop_back(), queue.pop_back()),
                }
                prop_assert_eq!((row.len(), row.is_empty()), (queue.len(), queue.is_empty()));
                prop_assert_eq!(row.as_slice(), &*queue.make_contiguous());
                prop_assert_eq!(row.front(), queue.front());
                prop_assert_eq!(row.front_mut().copied(), queue.front().copied());
            }
        }
    }

    #[test]
    fn a_row_that_is_never_empty_stays_short_and_moves_no_item_often() {
        let mut row = Row::new();
        (0..100).for_each(|n| row.push(n));
        for n in 100..1_000_000 {
            row.push(n);
            row.drop_front(1);
        }
        assert_eq!((row.len(), row.front()), (100, Some(&999_900)));
        assert!(row.items.capacity() <= 512, "{}", row.items.capacity());
    }
}
