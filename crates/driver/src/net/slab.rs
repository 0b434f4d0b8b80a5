//! `Slab`: the buffers of one queue, of equal size, each with the chain it is in.

use crate::{Arena, DriverError};
use manyring_memory::GuestSlice;
use std::sync::Arc;

/// Alignment of a buffer: a cache line.
const ALIGN: u64 = 64;

/// A buffer of guest memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) addr: u64,
    pub(super) slice: GuestSlice,
}

/// As many buffers as the ring has entries; which are in no chain; which chain has which.
#[derive(Debug)]
pub(super) struct Slab {
    buffers: Vec<Buffer>,
    free: Vec<u16>,
    /// The buffer of each chain, by its head.
    of_head: Vec<u16>,
    size: u32,
    /// Keeps the slices valid.
    _arena: Arc<Arena>,
}

impl Slab {
    /// `count` buffers of `size` bytes.
    pub(super) fn new(arena: &Arc<Arena>, count: u16, size: u32) -> Result<Self, DriverError> {
        let buffer = |_| {
            let addr = arena.alloc(size.into(), ALIGN)?;
            Ok(Buffer { addr, slice: arena.slice(addr, size as usize)? })
        };
        Ok(Self {
            buffers: (0..count).map(buffer).collect::<Result<_, DriverError>>()?,
            free: (0..count).rev().collect(),
            of_head: vec![0; count.into()],
            size,
            _arena: arena.clone(),
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
    pub(super) fn next_free(&self) -> Option<Buffer> {
        self.free.last().map(|slot| self.buffers[usize::from(*slot)])
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
    pub(super) fn buffer(&self, head: u16) -> Buffer {
        self.buffers[usize::from(self.of_head[usize::from(head)])]
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
