//! `Slab`: the buffers of one queue, of equal size, each with the chain it is in.

use crate::{Arena, DriverError};
use manyring_memory::{GuestAddr, GuestSlice, LastHit, Pieces, SliceList};

/// Alignment of a buffer: a cache line.
const ALIGN: u64 = 64;

/// A buffer of guest memory: where it lies, as one slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer<'a> {
    pub(super) addr: u64,
    pub(super) pieces: Pieces<'a>,
}

impl<'a> Buffer<'a> {
    /// All its bytes.
    #[inline]
    pub(super) fn slice(self) -> GuestSlice<'a> {
        self.pieces.as_slices()[0]
    }
}

/// As many buffers as the ring has entries; which are in no chain; which chain has which.
#[derive(Debug)]
pub(super) struct Slab {
    addrs: Vec<u64>,
    /// One of each buffer.
    slices: SliceList,
    free: Vec<u16>,
    /// The buffer of each chain, by its head.
    of_head: Vec<u16>,
    size: u32,
}

impl Slab {
    /// `count` buffers of `size` bytes.
    pub(super) fn new(arena: &Arena, count: u16, size: u32) -> Result<Self, DriverError> {
        let (mut addrs, mut slices) = (Vec::new(), SliceList::new());
        slices.restart(arena.memory());
        let mut last = LastHit::default();
        for _ in 0..count {
            let addr = arena.alloc(size.into(), ALIGN)?;
            slices.resolve(GuestAddr(addr), size, &mut last)?;
            addrs.push(addr);
        }
        // What is allocated lies in one region.
        assert_eq!(slices.len(), addrs.len(), "a buffer across two regions");
        Ok(Self {
            addrs,
            slices,
            free: (0..count).rev().collect(),
            of_head: vec![0; count.into()],
            size,
        })
    }

    /// Bytes of arena for `count` buffers of `size` bytes.
    pub(super) fn arena_size(count: u16, size: u32) -> u64 {
        u64::from(count) * u64::from(size).next_multiple_of(ALIGN) + ALIGN
    }

    /// Bytes of a buffer.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// A buffer that is in no chain.
    #[inline]
    pub(super) fn next_free(&self) -> Option<Buffer<'_>> {
        self.free.last().map(|slot| self.at(*slot))
    }

    #[inline]
    fn at(&self, slot: u16) -> Buffer<'_> {
        let slot = usize::from(slot);
        Buffer { addr: self.addrs[slot], pieces: self.slices.pieces(slot..slot + 1) }
    }

    /// The buffer that [`Self::next_free`] named is in the chain `head` now.
    #[inline]
    pub(super) fn bind(&mut self, head: u16) {
        if let Some(slot) = self.free.pop() {
            self.of_head[usize::from(head)] = slot;
        }
    }

    /// The buffer of chain `head`.
    #[inline]
    pub(super) fn buffer(&self, head: u16) -> Buffer<'_> {
        self.at(self.of_head[usize::from(head)])
    }

    /// The chain `head` has come back: its buffer is in no chain.
    #[inline]
    pub(super) fn release(&mut self, head: u16) {
        self.free.push(self.of_head[usize::from(head)]);
    }

    /// Buffers in no chain.
    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }
}
