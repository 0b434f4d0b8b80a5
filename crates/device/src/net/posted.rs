//! `Posted`: receive buffers that were popped ahead, and wait in order until frames fill them.

use manyring_memory::{GuestSlice, Row, SliceQueue, copy_between, total_len};
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains, QueueError};
use manyring_wire::net::flow::FLOW_BYTES;
use manyring_wire::net::rss::{Hash, Hasher};
use manyring_wire::net::{HEADER_SIZE, LEGACY_HEADER_SIZE, RawNetHeader};

/// The most pieces of one receive buffer: together with the spill they must fit one system call
/// (`IOV_MAX`).
const PIECES_MAX: usize = 512;

/// The most slices and empty descriptors that a turn may pop: after so many it pops no further
/// buffers. A guest may post buffers of twelve bytes that have two thousand descriptors each, and a
/// frame of 64 KiB needs thousands of such buffers. In the buffers that Linux posts, all frames of
/// a turn have some four hundred.
const WALKED_MAX: usize = 4096;

/// A receive buffer of the guest that waits for a frame.
#[derive(Debug)]
struct PostedBuffer {
    /// `None` once the buffer was returned to the driver.
    chain: Option<Chain>,
    /// Number of the buffer's pieces in [`Posted::pieces`]: most often one.
    pieces: usize,
    size: usize,
}

/// The buffers that were popped and not yet filled.
#[derive(Debug)]
pub(super) struct Posted {
    /// True if a frame may fill several buffers (`VIRTIO_NET_F_MRG_RXBUF`).
    is_mergeable: bool,
    /// Bytes of the header before each frame in the guest's buffers.
    header_size: usize,
    ring_size: usize,
    batch: Batch,
    buffers: Row<PostedBuffer>,
    /// The pieces of all buffers, in order.
    pieces: SliceQueue,
    /// Bytes of all buffers.
    size: usize,
    /// Number of slices and empty descriptors that the present turn has popped.
    walked: usize,
}

impl Posted {
    pub(super) fn new(is_mergeable: bool, ring_size: u16) -> Self {
        Self {
            is_mergeable,
            header_size: HEADER_SIZE,
            ring_size: usize::from(ring_size),
            batch: Batch::new(),
            buffers: Row::new(),
            pieces: SliceQueue::new(),
            size: 0,
            walked: 0,
        }
    }

    /// Sets the header size. No buffer may be posted yet.
    pub(super) fn set_header_size(&mut self, size: usize) {
        self.header_size = size;
    }

    /// Begins a turn.
    #[inline]
    pub(super) fn begin_turn(&mut self) {
        self.walked = 0;
    }

    /// True if the present turn has popped [`WALKED_MAX`] slices: it may pop no more buffers.
    #[inline]
    pub(super) fn is_spent(&self) -> bool {
        self.walked >= WALKED_MAX
    }

    #[inline]
    pub(super) fn is_mergeable(&self) -> bool {
        self.is_mergeable
    }

    /// Returns the number of bytes of the header before each frame in the guest's buffers.
    #[inline]
    pub(super) fn header_size(&self) -> usize {
        self.header_size
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// Returns the number of bytes of all buffers.
    #[inline]
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Returns the numbers of pieces and bytes of each buffer, in order.
    pub(super) fn buffers(&self) -> impl Iterator<Item = (usize, usize)> {
        self.buffers.as_slice().iter().map(|buffer| (buffer.pieces, buffer.size))
    }

    /// Returns the numbers of pieces and bytes of the next buffer.
    #[inline]
    pub(super) fn front(&self) -> Option<(usize, usize)> {
        self.buffers.front().map(|buffer| (buffer.pieces, buffer.size))
    }

    /// Returns the pieces of all buffers, in order.
    #[inline]
    pub(super) fn pieces(&self) -> &SliceQueue {
        &self.pieces
    }

    /// True if a frame of `size` bytes, header included, fits the popped buffers.
    #[inline]
    pub(super) fn fits(&self, size: usize) -> bool {
        if self.is_mergeable {
            return size <= self.size;
        }
        self.buffers.front().is_some_and(|buffer| size <= buffer.size)
    }

    /// True if the posted buffers have at least half as many pieces as the ring has entries: then
    /// the driver may have no more to post, so a frame must not wait for more.
    pub(super) fn has_most(&self) -> bool {
        self.pieces.len() >= self.ring_size / 2
    }

    /// Pops further buffers. Returns false if the ring has none or is broken, or the turn is spent.
    #[inline]
    pub(super) fn pop(&mut self, queue: &mut impl Chains) -> bool {
        if self.is_spent() {
            return false;
        }
        let popped = queue.pop_batch(&mut self.batch, BATCH_CHAINS);
        if popped == 0 {
            return false;
        }
        self.walked += self.batch.walked();
        let writable = self.batch.all_writable();
        let is_apart = writable.is_none();
        if let Some(writable) = writable {
            self.pieces.extend(writable);
        }
        for index in 0..popped {
            self.post_one(queue, index, is_apart);
        }
        !queue.is_faulted()
    }

    /// Posts the chain at `index` of the batch. With `is_apart` also adds its pieces; without,
    /// [`Self::pop`] has added the pieces of all chains at once.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a call costs 4 % of a received frame")]
    fn post_one(&mut self, queue: &mut impl Chains, index: usize, is_apart: bool) {
        let Some((chain, _, writable)) = self.batch.take(index) else { return };
        let size = total_len(&writable);
        if size < self.header_size as u64 {
            queue.latch_fault(QueueError::Request("receive buffer shorter than a header"));
        }
        if writable.len() > PIECES_MAX {
            queue.latch_fault(QueueError::Request("receive buffer in more than 512 pieces"));
        }
        // After a fault this buffer is never filled; it is put back when the queue ends.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if let Some(first) = writable.first() {
            first.prefetch_for_write();
        }
        if is_apart {
            self.pieces.extend(writable);
        }
        self.size = self.size.saturating_add(size);
        self.buffers.push(PostedBuffer { chain: Some(chain), pieces: writable.len(), size });
    }

    /// Copies the payload of a frame to the next buffers, behind the space for its header. The
    /// frame must fit.
    #[inline]
    pub(super) fn write_payload(&self, payload: &[GuestSlice<'_>]) {
        // The common case: a payload of one piece that fits the first piece of a buffer.
        if let [payload] = payload
            && let Some(first) = self.pieces.piece(0)
            && let first = first[0]
            && first.len() >= self.header_size + payload.len()
        {
            first.split_at(self.header_size).1.copy_from(payload);
            return;
        }
        copy_between(self.pieces.iter(), self.header_size, payload);
    }

    /// Fast path of most frames: copies a finished frame with `len` bytes of payload to the first
    /// posted buffer and returns that buffer to the driver. Returns false, and changes nothing, if
    /// the frame must take the general path: it is unfinished, its header or its payload lies in
    /// several slices, or the buffer is too small or has several pieces. For headers of
    /// [`HEADER_SIZE`] only.
    ///
    /// It stores little on the stack, on purpose. A CPU holds some sixty stores that have not
    /// reached the cache yet, and a store to the guest's buffer is among them until the driver's
    /// CPU has given up the cache line. The fewer other stores a frame has, the more frames can
    /// wait for their lines at the same time.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as in `push_frame`")]
    pub(super) fn push_plain(
        &mut self,
        queue: &mut impl Chains,
        frame: &[GuestSlice<'_>],
        len: usize,
        takes_csum: bool,
    ) -> bool {
        let [header, payload] = frame else { return false };
        self.push_one(queue, header, HEADER_SIZE + len, takes_csum, |target| {
            target.copy_from(payload);
        })
    }

    /// [`Self::push_plain`] for a frame of another guest, whose first bytes were copied when they
    /// were checked, and so lie apart from the rest. A function of its own, because this case would
    /// add fifteen instructions to the frames of all other ports.
    #[inline(never)]
    pub(super) fn push_headed(
        &mut self,
        queue: &mut impl Chains,
        frame: &[GuestSlice<'_>],
        len: usize,
        takes_csum: bool,
    ) -> bool {
        let [header, head, payload] = frame else { return false };
        self.push_one(queue, header, HEADER_SIZE + len, takes_csum, |target| {
            let copied = target.copy_from(head);
            target.split_at(copied).1.copy_from(payload);
        })
    }

    /// Writes `header` to the first buffer, calls `write` for the payload, and returns the buffer
    /// to the driver. Returns false, and changes nothing, if the frame must take the general path.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as in `push_frame`")]
    fn push_one(
        &mut self,
        queue: &mut impl Chains,
        header: &GuestSlice<'_>,
        size: usize,
        takes_csum: bool,
        write: impl FnOnce(GuestSlice<'_>),
    ) -> bool {
        let Some(buffer) = self.buffers.front_mut() else { return false };
        if buffer.pieces != 1 || size > buffer.size {
            return false;
        }
        let Some(bytes) = header.read_array::<HEADER_SIZE>() else { return false };
        let Some(bytes) = RawNetHeader::plain_to_driver(bytes, takes_csum) else { return false };
        let Some(target) = self.pieces.piece(0) else { return false };
        let Some(chain) = buffer.chain.take() else { return false };
        target[0].write_array(&bytes);
        write(target[0].split_at(HEADER_SIZE).1);
        self.size -= buffer.size;
        self.buffers.drop_front(1);
        self.pieces.drop_front(1);
        queue.push_used(chain, u32::try_from(size).unwrap_or(u32::MAX));
        true
    }

    /// Returns the buffers of a frame of `size` bytes, header included, to the driver. First writes
    /// the header, which `header` makes for the number of buffers. The driver sees all buffers at
    /// once, when the ring is published. Returns their number.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a call costs 6 % of a received frame")]
    pub(super) fn push_frame(
        &mut self,
        queue: &mut impl Chains,
        size: usize,
        header: impl FnOnce(u16) -> [u8; HEADER_SIZE],
    ) -> usize {
        if self.buffers.front().is_some_and(|front| size <= front.size) {
            self.write_header(&header(1));
            self.push_front(queue, size);
            return 1;
        }
        let count = self.count_for(size);
        self.write_header(&header(u16::try_from(count).unwrap_or(u16::MAX)));
        self.push_several(queue, size, count)
    }

    /// Returns the first buffer to the driver, with at most `left` bytes in it. Returns how many
    /// bytes these are.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "as above")]
    fn push_front(&mut self, queue: &mut impl Chains, left: usize) -> usize {
        let Some(buffer) = self.buffers.front_mut() else { return 0 };
        let (chain, pieces, size) = (buffer.chain.take(), buffer.pieces, buffer.size);
        self.buffers.drop_front(1);
        self.pieces.drop_front(pieces);
        self.size -= size;
        let filled = left.min(size);
        if let Some(chain) = chain {
            queue.push_used(chain, u32::try_from(filled).unwrap_or(u32::MAX));
        }
        filled
    }

    /// Returns the first `count` buffers, which together hold a frame of `size` bytes, to the
    /// driver.
    #[inline(never)]
    fn push_several(&mut self, queue: &mut impl Chains, size: usize, count: usize) -> usize {
        let mut left = size;
        for _ in 0..count {
            left -= self.push_front(queue, left);
        }
        count
    }

    /// Returns the number of buffers that a frame of `size` bytes fills.
    fn count_for(&self, size: usize) -> usize {
        let (mut left, mut count) = (size, 0);
        for buffer in self.buffers.as_slice() {
            count += 1;
            left = left.saturating_sub(buffer.size);
            if left == 0 {
                break;
            }
        }
        count
    }

    /// Writes the header in front of the next frame in the guest's buffers.
    #[inline]
    fn write_header(&self, header: &[u8; HEADER_SIZE]) {
        // A posted buffer is at least as long as a header, which most often fits its first piece.
        let Some(first) = self.pieces.piece(0) else { return };
        let is_written = if self.header_size >= HEADER_SIZE {
            first[0].write_array(header)
        } else {
            let (short, _num_buffers) = header.split_at(LEGACY_HEADER_SIZE);
            <&[u8; LEGACY_HEADER_SIZE]>::try_from(short).is_ok_and(|b| first[0].write_array(b))
        };
        if is_written {
            return;
        }
        self.write_at(0, &header[..self.header_size.min(HEADER_SIZE)]);
    }

    /// Writes bytes to the posted buffers, beginning at offset `at`.
    fn write_at(&self, at: usize, mut bytes: &[u8]) {
        for piece in self.pieces_from(at) {
            bytes = &bytes[piece.write_from(bytes)..];
            if bytes.is_empty() {
                break;
            }
        }
    }

    /// Returns the pieces of the posted buffers, beginning at offset `at`.
    fn pieces_from(&self, at: usize) -> impl Iterator<Item = GuestSlice<'_>> {
        let mut skip = at;
        self.pieces.iter().map(move |piece| {
            let (skipped, rest) = piece.split_at(skip);
            skip -= skipped.len();
            rest
        })
    }

    /// Writes the hash of the frame of `len` bytes in the first buffers, behind `num_buffers`
    /// (§5.1.6). Reads the frame from the driver's buffers: a driver that changes it meanwhile gets
    /// a wrong hash.
    #[cold]
    #[inline(never)]
    pub(super) fn write_hash(&self, hasher: Option<&Hasher>, len: usize) {
        let (mut start, mut known) = ([0; FLOW_BYTES], 0);
        for piece in self.pieces_from(self.header_size) {
            known += piece.read_into(&mut start[known..]);
            if known == start.len() {
                break;
            }
        }
        let known = &start[..known.min(len)];
        let hash = hasher.map_or(Hash::default(), |hasher| hasher.hash_of(known));
        self.write_at(HEADER_SIZE, &hash.emit());
    }

    /// Puts every buffer back into the ring, the newest first. Afterwards no reference to guest
    /// memory is left.
    pub(super) fn let_go(&mut self, queue: &mut impl Chains) {
        while let Some(buffer) = self.buffers.pop_back() {
            if let Some(chain) = buffer.chain {
                queue.unpop(chain);
            }
        }
        self.pieces.release();
        self.batch.release();
        self.size = 0;
    }
}
