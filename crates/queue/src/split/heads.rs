//! `Heads`: which heads of a split ring are in flight.
//!
//! A driver that makes a head available again before its chain has come back would have two chains
//! under one number: whoever keeps a request under the number of its chain would lose the first.

/// A mark for each descriptor: set while it is the head of a chain in flight. A byte each: a bit
/// each takes twice the instructions. A driver uses few heads of a large ring that idles: the marks
/// reach as far as the highest head that was used.
#[derive(Debug, Default)]
pub(super) struct Heads(Vec<bool>);

impl Heads {
    /// Marks a head, which the caller has found to be below the ring's size. False: it was marked
    /// already.
    #[inline]
    pub(super) fn mark(&mut self, head: u16) -> bool {
        match self.0.get_mut(usize::from(head)) {
            Some(mark) => !std::mem::replace(mark, true),
            None => self.mark_further(head),
        }
    }

    /// Marks a head that is higher than all before.
    #[cold]
    fn mark_further(&mut self, head: u16) -> bool {
        self.0.resize((usize::from(head) + 1).next_power_of_two(), false);
        self.0[usize::from(head)] = true;
        true
    }

    /// Clears the mark of a head.
    #[inline]
    pub(super) fn clear(&mut self, head: u16) {
        if let Some(mark) = self.0.get_mut(usize::from(head)) {
            *mark = false;
        }
    }
}
