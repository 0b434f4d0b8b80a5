//! `Heads`: which heads of a split ring are in flight.
//!
//! A driver that makes a head available again before its chain has come back would have two chains
//! under one number: whoever keeps a request under the number of its chain would lose the first.

/// A mark for each descriptor: set while it is the head of a chain in flight. A byte each: a bit
/// each takes twice the instructions.
#[derive(Debug)]
pub(super) struct Heads(Box<[bool]>);

impl Heads {
    /// None of `size` descriptors is in flight.
    pub(super) fn new(size: u16) -> Self {
        Self(vec![false; size.into()].into())
    }

    /// Marks a head. False: it was marked already.
    #[inline]
    pub(super) fn mark(&mut self, head: u16) -> bool {
        !std::mem::replace(&mut self.0[usize::from(head)], true)
    }

    /// Clears the mark of a head.
    #[inline]
    pub(super) fn clear(&mut self, head: u16) {
        self.0[usize::from(head)] = false;
    }
}
