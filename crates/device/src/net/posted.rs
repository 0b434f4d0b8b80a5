//! Receive buffers that were popped ahead: they wait in the driver's order until frames fill them.

use manyring_memory::{GuestSlice, SliceQueue, copy_between, total_len};
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains, QueueError};
use manyring_wire::net::{HEADER_SIZE, RawHeader};
use std::collections::VecDeque;
use zerocopy::transmute;

/// Pieces of one receive buffer at most: they must fit one system call with the spill.
const PIECES_MAX: usize = 512;

/// A receive buffer of the guest that waits for a frame.
#[derive(Debug)]
struct Buffer {
    chain: Chain,
    /// How many of [`Posted::pieces`] are its own: most often one.
    pieces: usize,
    size: usize,
}

/// The buffers that were popped and not yet filled.
#[derive(Debug)]
pub(super) struct Posted {
    /// A frame may fill several buffers.
    is_mergeable: bool,
    ring_size: usize,
    batch: Batch,
    buffers: VecDeque<Buffer>,
    /// The pieces of all buffers, in order.
    pieces: SliceQueue,
    /// Bytes of all buffers.
    size: usize,
}

impl Posted {
    pub(super) fn new(is_mergeable: bool, ring_size: u16) -> Self {
        Self {
            is_mergeable,
            ring_size: usize::from(ring_size),
            batch: Batch::new(),
            buffers: VecDeque::new(),
            pieces: SliceQueue::new(),
            size: 0,
        }
    }

    #[inline]
    pub(super) fn is_mergeable(&self) -> bool {
        self.is_mergeable
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// Bytes of all buffers.
    #[inline]
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Pieces and bytes of each buffer, in order.
    pub(super) fn buffers(&self) -> impl Iterator<Item = (usize, usize)> {
        self.buffers.iter().map(|buffer| (buffer.pieces, buffer.size))
    }

    /// Pieces and bytes of the next buffer.
    #[inline]
    pub(super) fn front(&self) -> Option<(usize, usize)> {
        self.buffers.front().map(|buffer| (buffer.pieces, buffer.size))
    }

    /// The pieces of all buffers, in order.
    #[inline]
    pub(super) fn pieces(&self) -> &SliceQueue {
        &self.pieces
    }

    /// True if a frame of `size` bytes with its header fits what was popped.
    #[inline]
    pub(super) fn fits(&self, size: usize) -> bool {
        if self.is_mergeable {
            return size <= self.size;
        }
        self.buffers.front().is_some_and(|buffer| size <= buffer.size)
    }

    /// True if so much of the ring is posted that a driver may have nothing to add.
    pub(super) fn has_most(&self) -> bool {
        self.pieces.len() >= self.ring_size / 2
    }

    /// Pops further buffers. False: there are none, or the ring is broken.
    #[inline]
    pub(super) fn pop(&mut self, queue: &mut impl Chains) -> bool {
        let popped = queue.pop_batch(&mut self.batch, BATCH_CHAINS);
        for index in 0..popped {
            self.post_one(queue, index);
        }
        popped > 0 && !queue.is_faulted()
    }

    fn post_one(&mut self, queue: &mut impl Chains, index: usize) {
        let Some((chain, _, writable)) = self.batch.take(index) else { return };
        let size = total_len(&writable);
        let wrong = if size < HEADER_SIZE as u64 {
            Some("receive buffer shorter than a header of 12 bytes")
        } else if writable.len() > PIECES_MAX {
            Some("receive buffer in more than 512 pieces")
        } else {
            None
        };
        if let Some(wrong) = wrong {
            queue.latch_fault(QueueError::Request(wrong));
        }
        // Behind a fault nothing is filled any more; the buffer is put back when the queue ends.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if let Some(first) = writable.first() {
            first.prefetch_for_write();
        }
        self.pieces.extend(writable);
        self.size = self.size.saturating_add(size);
        self.buffers.push_back(Buffer { chain, pieces: writable.len(), size });
    }

    /// Copies the payload of a frame that fits into the next buffers, behind where its header goes.
    #[inline]
    pub(super) fn write_payload(&self, payload: &[GuestSlice<'_>]) {
        // Most often a frame lies in one piece and fits the first of a buffer.
        if let [payload] = payload
            && let Some(first) = self.pieces.piece(0)
            && let first = first[0]
            && first.len() >= HEADER_SIZE + payload.len()
        {
            first.split_at(HEADER_SIZE).1.copy_from(payload);
            return;
        }
        copy_between(self.pieces.iter(), HEADER_SIZE, payload);
    }

    /// Returns the buffers that hold a frame of `size` bytes with its `header`, which is written
    /// first: the driver sees all of them at once, when the ring is published. Returns how many.
    #[inline]
    pub(super) fn push_frame(
        &mut self,
        queue: &mut impl Chains,
        mut header: RawHeader,
        size: usize,
    ) -> usize {
        let count = self.count_for(size);
        header.num_buffers = u16::try_from(count).unwrap_or(u16::MAX).into();
        self.write_header(&transmute!(header));
        let mut left = size;
        for _ in 0..count {
            let Some(buffer) = self.buffers.pop_front() else { break };
            let filled = left.min(buffer.size);
            left -= filled;
            self.pieces.drop_front(buffer.pieces);
            self.size -= buffer.size;
            queue.push_used(buffer.chain, u32::try_from(filled).unwrap_or(u32::MAX));
        }
        count
    }

    /// How many buffers a frame of `size` bytes fills.
    #[inline]
    fn count_for(&self, size: usize) -> usize {
        if self.buffers.front().is_some_and(|buffer| size <= buffer.size) {
            return 1;
        }
        let (mut left, mut count) = (size, 0);
        for buffer in &self.buffers {
            count += 1;
            left = left.saturating_sub(buffer.size);
            if left == 0 {
                break;
            }
        }
        count
    }

    /// Writes the header to where the next frame begins in the guest.
    #[inline]
    fn write_header(&self, header: &[u8; HEADER_SIZE]) {
        // A posted buffer is not shorter than a header, which most often lies in its first piece.
        if self.pieces.piece(0).is_some_and(|first| first[0].write_array(header)) {
            return;
        }
        let mut rest = &header[..];
        for piece in self.pieces.iter() {
            rest = &rest[piece.write_from(rest)..];
            if rest.is_empty() {
                break;
            }
        }
    }

    /// Puts every buffer back into the ring, the newest first, and holds nothing of guest memory
    /// after that.
    pub(super) fn let_go(&mut self, queue: &mut impl Chains) {
        while let Some(buffer) = self.buffers.pop_back() {
            queue.unpop(buffer.chain);
        }
        self.pieces.release();
        self.batch.release();
        self.size = 0;
    }
}
