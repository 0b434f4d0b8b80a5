//! `Table`: the handler's state of each chain in flight, under the chain's slot.
//!
//! A slot is a number below the ring's size that no other chain in flight has. Therefore the table
//! needs no list of free entries, and the slot is also the token by which a disk or a port names
//! its work.

use crate::running::epoch::Epoch;

/// The state of the chains in flight, each with the epoch of the memory that it uses. The table
/// grows up to the highest slot that is used, to the ring's size at most, and allocates nothing
/// after that.
#[derive(Debug)]
pub struct Table<T>(Vec<Option<(Epoch, T)>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Table<T> {
    /// Makes an empty table: nothing is in flight.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Stores the state of the chain in `slot`.
    #[inline]
    pub fn insert(&mut self, slot: u16, epoch: Epoch, what: T) {
        let slot = usize::from(slot);
        if slot >= self.0.len() {
            self.grow(slot + 1);
        }
        debug_assert!(self.0[slot].is_none(), "slot {slot} is in flight");
        self.0[slot] = Some((epoch, what));
    }

    #[cold]
    fn grow(&mut self, len: usize) {
        self.0.resize_with(len, || None);
    }

    /// Returns the state of the chain in `slot`.
    pub fn get(&self, slot: u32) -> Option<&T> {
        let (_, what) = self.0.get(slot as usize)?.as_ref()?;
        Some(what)
    }

    /// Removes and returns the state of the chain in `slot`. `None` if there is none: the disk or
    /// port has named a wrong token, which no guest can cause.
    #[inline]
    pub fn take(&mut self, slot: u32) -> Option<(Epoch, T)> {
        self.0.get_mut(slot as usize)?.take()
    }

    /// Returns the states of all chains in flight, with their slots.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.0).filter_map(|(slot, entry)| Some((slot, &entry.as_ref()?.1)))
    }

    /// Removes and returns the states of all chains in flight.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.0.drain(..).flatten().map(|(_, what)| what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::running::epoch::Epochs;
    use std::sync::Arc;

    #[test]
    fn each_slot_keeps_its_own_until_it_is_taken_once() {
        let epoch = Epochs::new(Arc::default()).current();
        let mut table = Table::new();
        for slot in [7, 0, 1023, 3] {
            table.insert(slot, epoch, slot);
        }
        assert_eq!(table.take(5), None);
        assert_eq!((table.take(7), table.take(7)), (Some((epoch, 7)), None));
        assert_eq!((table.take(1024), table.take(u32::MAX)), (None, None));
        table.insert(7, epoch, 70);
        assert_eq!(table.drain().collect::<Vec<_>>(), [0, 3, 70, 1023]);
        assert_eq!(table.take(0), None);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "slot 2 is in flight")]
    fn a_slot_that_is_in_flight_is_not_given_away_again() {
        let epoch = Epochs::new(Arc::default()).current();
        let mut table = Table::new();
        table.insert(2, epoch, ());
        table.insert(2, epoch, ());
    }
}
