//! `Chain`: a popped buffer, a token that must be returned; `Batch`: chains and their slices.

use manyring_memory::{GuestMemory, Pieces, SliceList};
use std::ops::Range;
use std::sync::Arc;

/// Most chains of one batch.
pub const BATCH_CHAINS: usize = 64;
/// A batch stops growing when it holds this many slices and empty descriptors (a single chain may
/// exceed it). The ring's size does not bound the cost of a batch, since a driver can let several
/// chains share descriptors.
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

    /// A number below the ring's size that no other chain in flight has. A handler keeps the
    /// chain's state under this number. In a split ring it is the index of the chain's first
    /// descriptor, which is the chain's id in the used ring.
    #[must_use]
    #[inline]
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Ends the token and returns its slot, when the chain is pushed, put back or discarded.
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

/// Most slices of one chain. A chain has one slice for each descriptor, and one more wherever a
/// buffer crosses into the next memory region. Empty descriptors count.
pub(crate) const CHAIN_SLICES: usize = 2048;

/// One chain of a batch: the token and where its slices lie. A quarter of a cache line in release
/// builds, because an entry is written and read again for every chain.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) chain: Option<Chain>,
    start: u32,
    border: u32,
    end: u32,
}

impl Entry {
    /// The slices `start..border` of the batch are readable, `border..end` writable. A batch has at
    /// most [`BATCH_SLICES`] + [`CHAIN_SLICES`] slices.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a few thousand")]
    pub(crate) fn new(chain: Chain, start: usize, border: usize, end: usize) -> Self {
        let [start, border, end] = [start, border, end].map(|at| at as u32);
        Self { chain: Some(chain), start, border, end }
    }

    #[inline]
    fn readable(&self) -> Range<usize> {
        self.start as usize..self.border as usize
    }

    #[inline]
    pub(crate) fn writable(&self) -> Range<usize> {
        self.border as usize..self.end as usize
    }
}

/// Chains popped together. All their slices lie in one list, which keeps their snapshot of guest
/// memory mapped. A batch is reused, so it allocates nothing once it has grown.
#[derive(Debug, Default)]
pub struct Batch {
    pub(crate) entries: Vec<Entry>,
    pub(crate) slices: SliceList,
    /// Slices and empty descriptors of the last pop that found chains.
    pub(crate) walked: usize,
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

    /// Slices and empty descriptors of the last pop that found chains: a measure of its cost. The
    /// driver chooses this number, and the ring's size does not bound it. A turn that pops several
    /// batches adds the numbers up.
    #[must_use]
    #[inline]
    pub fn walked(&self) -> usize {
        self.walked
    }

    /// Takes the chain at `index`, with its readable and its writable slices. `None` if it was
    /// taken already.
    #[inline]
    pub fn take(&mut self, index: usize) -> Option<(Chain, Pieces<'_>, Pieces<'_>)> {
        let entry = self.entries.get_mut(index)?;
        let chain = entry.chain.take()?;
        let (readable, writable) = (entry.readable(), entry.writable());
        Some((chain, self.slices.pieces(readable), self.slices.pieces(writable)))
    }

    /// The readable and the writable slices of the chain at `index`, which stays; `None` if it was
    /// taken.
    #[must_use]
    pub fn peek(&self, index: usize) -> Option<(Pieces<'_>, Pieces<'_>)> {
        let entry = self.entries.get(index).filter(|entry| entry.chain.is_some())?;
        Some((self.slices.pieces(entry.readable()), self.slices.pieces(entry.writable())))
    }

    /// Takes the chains from `index` on that were not taken yet, the last one first.
    #[cold]
    pub fn take_from(&mut self, index: usize) -> impl Iterator<Item = Chain> {
        self.entries[index..].iter_mut().rev().filter_map(|entry| entry.chain.take())
    }

    /// The slices of all chains in order, if no chain has readable ones. The slices of a chain that
    /// was refused while it was popped are not among them.
    #[must_use]
    #[inline]
    pub fn all_writable(&self) -> Option<Pieces<'_>> {
        let is_writable = |entry: &Entry| entry.start == entry.border;
        let end = self.entries.last().map_or(0, |entry| entry.end as usize);
        self.entries.iter().all(is_writable).then(|| self.slices.pieces(0..end))
    }

    /// Empties the batch and drops its snapshot of guest memory, which may then be unmapped.
    pub fn release(&mut self) {
        self.clear();
        self.slices.release();
    }

    /// Empties the batch, and prepares it for chains of the snapshot `memory`.
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
