//! `Requests`: requests of a blkif ring that were popped together.

use crate::chain::Chain;
use manyring_wire::xen::blkif::{Abi, ENTRY_WORDS, RawRequest};

/// Requests popped together. The list is reused, and allocates nothing once it has grown.
#[derive(Debug, Default)]
pub struct Requests {
    /// The first `len` entries are the last batch; the others are kept for larger batches.
    entries: Vec<(Option<Chain>, RawRequest)>,
    len: usize,
}

impl Requests {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many requests the batch has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the batch has no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes the request at `index`: its token and its copy. `None` if it was taken already.
    #[inline]
    pub fn take(&mut self, index: usize) -> Option<(Chain, &RawRequest)> {
        let (chain, request) = self.entries[..self.len].get_mut(index)?;
        Some((chain.take()?, request))
    }

    /// The copy of the request at `index`, which stays; `None` if it was taken already.
    #[must_use]
    pub fn peek(&self, index: usize) -> Option<&RawRequest> {
        let (chain, request) = self.entries[..self.len].get(index)?;
        chain.as_ref().map(|_| request)
    }

    /// Takes the tokens of all requests that are left, the last one first.
    #[cold]
    pub fn take_all(&mut self) -> impl Iterator<Item = Chain> {
        self.entries[..self.len].iter_mut().rev().filter_map(|(chain, _)| chain.take())
    }

    /// Makes room for a batch of `len` requests of the layout of `abi`.
    #[inline]
    pub(super) fn restart(&mut self, len: usize, abi: Abi) -> &mut [(Option<Chain>, RawRequest)] {
        let are_taken = self.entries.iter().all(|(chain, _)| chain.is_none());
        debug_assert!(are_taken, "a request was not taken");
        if self.entries.len() < len || self.entries.first().is_some_and(|(_, r)| r.abi() != abi) {
            self.grow(len, abi);
        }
        self.len = len;
        &mut self.entries[..len]
    }

    #[cold]
    fn grow(&mut self, len: usize, abi: Abi) {
        self.entries.clear();
        self.entries.resize_with(len, || (None, RawRequest::new(abi, [0; ENTRY_WORDS])));
    }
}
