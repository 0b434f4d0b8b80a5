//! `Slab`: the buffers of one queue, all of the same size, and which chain each of them is in.
//! Several queues may share the buffers of one `BufferPool`.

use crate::{Arena, DriverError};
use manyring_memory::{GuestAddr, GuestSlice, LastHit, Pieces, SliceList};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of a buffer: a cache line.
const ALIGN: u64 = 64;

/// A buffer of guest memory, which lies in one slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer<'a> {
    pub(super) addr: u64,
    pub(super) pieces: Pieces<'a>,
}

impl<'a> Buffer<'a> {
    /// The slice of the whole buffer.
    #[inline]
    pub(super) fn slice(self) -> GuestSlice<'a> {
        self.pieces.as_slices()[0]
    }
}

/// Buffers of the same size, for one queue or for several.
#[derive(Debug)]
pub(super) struct BufferPool {
    addrs: Vec<u64>,
    /// The slice of each buffer, by the buffer's number.
    slices: SliceList,
    size: u32,
    /// Numbers of the buffers that no queue has. The one freed last is on top, since it is in the
    /// cache.
    spare: Mutex<Vec<u16>>,
}

impl BufferPool {
    /// Allocates `count` buffers of `size` bytes.
    pub(super) fn new(arena: &Arena, count: u16, size: u32) -> Result<Self, DriverError> {
        let (mut addrs, mut slices) = (Vec::new(), SliceList::new());
        slices.restart(arena.memory());
        let mut last = LastHit::default();
        for _ in 0..count {
            let addr = arena.alloc(size.into(), ALIGN)?;
            slices.resolve(GuestAddr(addr), size, &mut last)?;
            addrs.push(addr);
        }
        // The slices are as many as the buffers: no buffer crosses into another region.
        assert_eq!(slices.len(), addrs.len(), "a buffer across two regions");
        Ok(Self { addrs, slices, size, spare: Mutex::new((0..count).rev().collect()) })
    }

    fn spare(&self) -> MutexGuard<'_, Vec<u16>> {
        // A thread that panicked while holding the lock has lost one buffer at most.
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The buffers of a queue, and the chains that they are in.
#[derive(Debug)]
pub(super) struct Slab {
    pool: Arc<BufferPool>,
    /// Other queues use this pool too: a buffer that comes back goes to the pool, not to this
    /// queue.
    is_shared: bool,
    free: Vec<u16>,
    /// The number of the buffer in each chain, by the chain's head.
    of_head: Vec<u16>,
    /// How many buffers are in chains.
    bound: usize,
}

impl Slab {
    /// Allocates `count` buffers of `size` bytes for this queue alone.
    pub(super) fn new(arena: &Arena, count: u16, size: u32) -> Result<Self, DriverError> {
        let pool = BufferPool::new(arena, count, size)?;
        let free = std::mem::take(&mut *pool.spare());
        Ok(Self { free, is_shared: false, ..Self::sharing(Arc::new(pool), count) })
    }

    /// Uses the buffers of `pool` for a ring of `count` entries; [`Self::refill`] takes them one by
    /// one.
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

    /// Takes a buffer from the pool if this queue has no free one.
    #[inline]
    pub(super) fn refill(&mut self) {
        if self.is_shared && self.free.is_empty() {
            self.free.extend(self.pool.spare().pop());
        }
    }

    /// A buffer of this queue that is in no chain.
    #[inline]
    pub(super) fn next_free(&self) -> Option<Buffer<'_>> {
        self.free.last().map(|slot| self.at(*slot))
    }

    #[inline]
    fn at(&self, slot: u16) -> Buffer<'_> {
        let slot = usize::from(slot);
        Buffer { addr: self.pool.addrs[slot], pieces: self.pool.slices.pieces(slot..slot + 1) }
    }

    /// Notes that the buffer of [`Self::next_free`] is in the chain `head` now.
    #[inline]
    pub(super) fn bind(&mut self, head: u16) {
        if let Some(slot) = self.free.pop() {
            self.of_head[usize::from(head)] = slot;
            self.bound += 1;
        }
    }

    /// The buffer in the chain `head`.
    #[inline]
    pub(super) fn buffer(&self, head: u16) -> Buffer<'_> {
        self.at(self.of_head[usize::from(head)])
    }

    /// Frees the buffer of the chain `head`, which has come back.
    #[inline]
    pub(super) fn release(&mut self, head: u16) {
        let slot = self.of_head[usize::from(head)];
        self.bound -= 1;
        if self.is_shared { self.pool.spare().push(slot) } else { self.free.push(slot) }
    }

    /// How many buffers of this queue are in no chain.
    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// How many buffers are in chains.
    pub(super) fn bound(&self) -> usize {
        self.bound
    }
}
