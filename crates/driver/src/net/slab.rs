//! `Slab`: the buffers of one queue, of equal size, each with the chain it is in. They may be those
//! of a `BufferPool` that several queues have.

use crate::{Arena, DriverError};
use manyring_memory::{GuestAddr, GuestSlice, LastHit, Pieces, SliceList};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// Buffers of equal size, for one queue or for several.
#[derive(Debug)]
pub(super) struct BufferPool {
    addrs: Vec<u64>,
    /// One of each buffer.
    slices: SliceList,
    size: u32,
    /// Buffers that no queue has. The one that came back last is on top: it is in the cache.
    spare: Mutex<Vec<u16>>,
}

impl BufferPool {
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
        // Each allocation lies in one region.
        assert_eq!(slices.len(), addrs.len(), "a buffer across two regions");
        Ok(Self { addrs, slices, size, spare: Mutex::new((0..count).rev().collect()) })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<u16>> {
        // A thread that panicked while it had the lock has at most lost a buffer.
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The buffers of a queue; which are in no chain; which chain has which.
#[derive(Debug)]
pub(super) struct Slab {
    pool: Arc<BufferPool>,
    /// Other queues have buffers of this pool as well: one that comes back is for all of them.
    is_shared: bool,
    free: Vec<u16>,
    /// The buffer of each chain, by its head.
    of_head: Vec<u16>,
    /// Buffers in chains.
    bound: usize,
}

impl Slab {
    /// `count` buffers of `size` bytes for this queue alone.
    pub(super) fn new(arena: &Arena, count: u16, size: u32) -> Result<Self, DriverError> {
        let pool = BufferPool::new(arena, count, size)?;
        let free = std::mem::take(&mut *pool.spare());
        Ok(Self { free, is_shared: false, ..Self::sharing(Arc::new(pool), count) })
    }

    /// Buffers of `pool`, for a ring of `count` entries: none until [`Self::refill`].
    pub(super) fn sharing(pool: Arc<BufferPool>, count: u16) -> Self {
        let of_head = vec![0; count.into()];
        Self { pool, is_shared: true, free: Vec::new(), of_head, bound: 0 }
    }

    /// Bytes of arena for `count` buffers of `size` bytes.
    pub(super) fn arena_size(count: u16, size: u32) -> u64 {
        u64::from(count) * u64::from(size).next_multiple_of(ALIGN) + ALIGN
    }

    /// Bytes of a buffer.
    pub(super) fn size(&self) -> u32 {
        self.pool.size
    }

    /// Has a buffer that is in no chain, if there is one.
    #[inline]
    pub(super) fn refill(&mut self) {
        if self.is_shared && self.free.is_empty() {
            self.free.extend(self.pool.spare().pop());
        }
    }

    /// A buffer that is in no chain.
    #[inline]
    pub(super) fn next_free(&self) -> Option<Buffer<'_>> {
        self.free.last().map(|slot| self.at(*slot))
    }

    #[inline]
    fn at(&self, slot: u16) -> Buffer<'_> {
        let slot = usize::from(slot);
        Buffer { addr: self.pool.addrs[slot], pieces: self.pool.slices.pieces(slot..slot + 1) }
    }

    /// The buffer that [`Self::next_free`] named is in the chain `head` now.
    #[inline]
    pub(super) fn bind(&mut self, head: u16) {
        if let Some(slot) = self.free.pop() {
            self.of_head[usize::from(head)] = slot;
            self.bound += 1;
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
        let slot = self.of_head[usize::from(head)];
        self.bound -= 1;
        if self.is_shared { self.pool.spare().push(slot) } else { self.free.push(slot) }
    }

    /// Buffers of this queue in no chain.
    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Buffers in chains.
    pub(super) fn bound(&self) -> usize {
        self.bound
    }
}
