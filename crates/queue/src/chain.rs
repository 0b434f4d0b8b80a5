//! `Chain`: a popped buffer, a token that must be returned; `Batch`: chains and their slices.

use manyring_memory::{GuestMemory, Pieces, SliceList};
use std::ops::Range;
use std::sync::Arc;

/// Most chains of one batch.
pub const BATCH_CHAINS: usize = 64;
/// A batch stops growing when it holds this many slices and empty descriptors (a single chain may
/// exceed it): chains of a large ring can share their descriptors, so that its size is no bound
/// for what a batch of them costs.
pub(crate) const BATCH_SLICES: usize = 1024;

/// A descriptor chain, or a request of a Xen ring, that was popped. It must be pushed, or put back,
/// exactly once; debug builds panic if one is dropped.
#[derive(Debug)]
pub struct Chain {
    slot: u16,
    #[cfg(debug_assertions)]
    armed: bool,
}

impl Chain {
    pub(crate) fn new(slot: u16) -> Self {
        Self {
            slot,
            #[cfg(debug_assertions)]
            armed: true,
        }
    }

    /// A number below the ring's size that no other chain in flight has: whoever serves the chain
    /// keeps what belongs to it under this number. That of a split ring is the chain's head, the
    /// index of its first descriptor and its id in the used ring.
    #[must_use]
    #[inline]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Gives the chain up, after it was pushed or put back.
    #[allow(unused_mut, reason = "mutated in debug builds only")]
    pub(crate) fn finish(mut self) -> u16 {
        #[cfg(debug_assertions)]
        {
            self.armed = false;
        }
        self.slot
    }
}

#[cfg(debug_assertions)]
impl Drop for Chain {
    fn drop(&mut self) {
        assert!(!self.armed || std::thread::panicking(), "chain {} was not returned", self.slot);
    }
}

/// Slices of one chain at most: its descriptors, and the crossings between memory regions. Empty
/// descriptors count.
pub(crate) const CHAIN_SLICES: usize = 2048;

/// One chain of a batch: the token and where its slices lie.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) chain: Option<Chain>,
    pub(crate) readable: Range<usize>,
    pub(crate) writable: Range<usize>,
}

/// Chains popped together, with their slices in one list, which keeps the snapshot that they lie
/// in. Reused: no allocation once it has grown.
#[derive(Debug, Default)]
pub struct Batch {
    pub(crate) entries: Vec<Entry>,
    pub(crate) slices: SliceList,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Chains in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there is no chain.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes the chain at `index` and lends its slices: what the device reads, what it writes.
    /// `None` if it was taken before.
    #[inline]
    pub fn take(&mut self, index: usize) -> Option<(Chain, Pieces<'_>, Pieces<'_>)> {
        let entry = self.entries.get_mut(index)?;
        let chain = entry.chain.take()?;
        let (readable, writable) = (entry.readable.clone(), entry.writable.clone());
        Some((chain, self.slices.pieces(readable), self.slices.pieces(writable)))
    }

    /// Empties the batch and lets go of the snapshot that its chains came from, which may be
    /// unmapped then.
    pub fn release(&mut self) {
        self.clear();
        self.slices.release();
    }

    /// Empties the batch, for chains that lie in `memory`.
    #[inline]
    pub(crate) fn restart(&mut self, memory: &Arc<GuestMemory>) {
        self.clear();
        self.slices.restart(memory);
    }

    #[inline]
    fn clear(&mut self) {
        debug_assert!(self.entries.iter().all(|e| e.chain.is_none()), "a chain was not taken");
        self.entries.clear();
    }
}
