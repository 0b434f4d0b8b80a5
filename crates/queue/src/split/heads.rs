//! `Heads`: which heads of a split ring are in flight.
//!
//! A driver could make a head available again before its chain is returned. Then two chains in
//! flight would have the same slot, and a device that keeps requests by slot would lose the first.

/// A mark for each descriptor: true while the descriptor is the head of a chain in flight. A mark
/// is a byte, since a bit takes twice the instructions. The list is as long as the highest head
/// that was used, because the driver of a large, mostly idle ring uses few heads.
#[derive(Debug, Default)]
pub(super) struct Heads(Vec<bool>);

impl Heads {
    /// Marks a head, which must be below the ring's size. False: the head was marked already.
    #[inline]
    pub(super) fn mark(&mut self, head: u16) -> bool {
        match self.0.get_mut(usize::from(head)) {
            Some(mark) => !std::mem::replace(mark, true),
            None => self.mark_further(head),
        }
    }

    /// Marks a head that is higher than all before: the list grows.
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
