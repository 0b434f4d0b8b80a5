//! receiveq: `PortRx::recv` -> chains (virtio 1.3 §5.1.6.3, §5.1.6.4).
//!
//! Buffers are popped ahead and kept until frames fill them. A frame is read straight into the next
//! of them; its header comes to memory of ours, and is written to the guest once, when it is whole:
//! reading it back from there would wait for the cache line. Behind the buffers lies a spill, so
//! that a frame that is longer than what was offered is seen, and copied into further buffers, or
//! waits there until the driver posts some. While frames are short one buffer is offered: each
//! costs the system call a little.

use super::rules::FILTER_SIZE;
use super::tx::Tally;
use super::{Rules, Turn};
use crate::live::Live;
use crate::stats::QueueStats;
use manyring_backend::net::{PortRx, Readiness};
use manyring_memory::{
    Gather, GuestSlice, Mapping, MemoryError, SliceQueue, copy_from_slices, total_len,
};
use manyring_queue::{BATCH_CHAINS, Batch, Chain, DeviceQueue, QueueError};
use manyring_wire::net::{
    FRAME_SIZE_MAX, HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6,
    HDR_GSO_UDP_L4, HEADER_SIZE, Offloads, RawHeader,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Where the spill lies in our memory, behind the header.
const SPILL_AT: usize = 64;
/// Header and frame at most.
const SIZE_MAX: usize = HEADER_SIZE + FRAME_SIZE_MAX;
/// Frames of one turn at most, and bytes: the driver hears of them when the turn ends.
const TURN_FRAMES: usize = 64;
const TURN_BYTES: usize = 512 << 10;
/// Frames after which the driver may see what is there.
const PUBLISH_FRAMES: usize = 32;
/// Pieces of one receive buffer at most: they must fit one system call with the spill.
const PIECES_MAX: usize = 512;
/// Pieces offered at once at most.
const OFFER_PIECES: usize = 1000;
/// One buffer is offered while frames are short: so long at most, so many in a row.
const SMALL_FRAME: usize = 2048;
const SMALL_ROW: u32 = 32;
/// An Ethernet header.
const ETHERNET_SIZE: usize = 14;
/// Frames in a row that the host cannot hand out before its port counts as gone.
const REFUSALS_MAX: u32 = 64;

/// A receive buffer of the guest that waits for a frame.
#[derive(Debug)]
struct Posted {
    chain: Chain,
    /// How many of [`NetRx::pieces`] are its own: most often one.
    pieces: usize,
    size: usize,
}

/// A receiveq, as its worker runs it.
#[derive(Debug)]
pub(crate) struct NetRx {
    port: Box<dyn PortRx>,
    rules: Arc<Rules>,
    /// Where they come from.
    live: Option<Arc<Live<Rules>>>,
    /// A frame may fill several buffers.
    is_mergeable: bool,
    batch: Batch,
    posted: VecDeque<Posted>,
    /// The pieces of all posted buffers, in order.
    pieces: SliceQueue,
    posted_size: usize,
    /// What the next frame is read into, while nothing about it changes. Its memory of ours takes
    /// the header of the frame, and what goes past the offered buffers.
    offer: Gather,
    offered: Offered,
    /// Bytes of the frame that waits in the offer and the spill for more buffers; 0: none does.
    waiting: usize,
    short_row: u32,
    /// What a turn adds to the counters.
    tally: Tally,
    /// The port is down, detached or gone.
    broken: bool,
    refusals: u32,
    /// The guest had too few buffers when it was last looked.
    is_out: bool,
    ring_size: usize,
}

/// How far the offer reaches: buffers, their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Offered {
    buffers: usize,
    size: usize,
}

/// What becomes of a frame.
enum Fate {
    Deliver,
    Filtered,
    Offload,
    LinkDown,
}

impl NetRx {
    pub(crate) fn new(
        port: Box<dyn PortRx>,
        rules: Arc<Rules>,
        is_mergeable: bool,
        ring_size: u16,
    ) -> Result<Self, MemoryError> {
        Ok(Self {
            port,
            rules,
            live: None,
            is_mergeable,
            batch: Batch::new(),
            posted: VecDeque::new(),
            pieces: SliceQueue::new(),
            posted_size: 0,
            offer: Gather::new(Arc::new(Mapping::anonymous((SPILL_AT + SIZE_MAX) as u64)?)),
            offered: Offered::default(),
            waiting: 0,
            short_row: 0,
            tally: Tally::default(),
            broken: false,
            refusals: 0,
            is_out: false,
            ring_size: usize::from(ring_size),
        })
    }

    /// The same, going by what `live` says whenever it is told to look.
    pub(crate) fn follow(mut self, live: Arc<Live<Rules>>) -> Self {
        self.live = Some(live);
        self
    }

    /// Goes by the rules as they are now.
    pub(crate) fn refresh_rules(&mut self) {
        if let Some(live) = &self.live {
            self.rules = live.load();
        }
    }

    #[cfg(test)]
    pub(crate) fn set_rules(&mut self, rules: Arc<Rules>) {
        self.rules = rules;
    }

    pub(crate) fn readiness(&self) -> Readiness<'_> {
        self.port.readiness()
    }

    /// The port has nothing to wait for: it is down, detached or gone.
    pub(crate) fn on_broken(&mut self) {
        self.broken = true;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// The port may be there again.
    pub(crate) fn revive(&mut self) {
        (self.broken, self.refusals) = (false, 0);
    }

    /// Bytes that must be posted before a frame is read.
    fn room_needed(&self) -> usize {
        HEADER_SIZE + self.rules.room_size
    }

    /// True if a frame may be read: one that does not fit what there is will wait.
    pub(crate) fn has_room(&self) -> bool {
        !self.posted.is_empty() && self.waiting == 0
    }

    /// True if the longest frame fits what was popped, or it is as good as it gets.
    #[inline]
    fn has_plenty(&self) -> bool {
        self.posted_size >= self.room_needed() || (!self.is_mergeable && !self.posted.is_empty())
    }

    /// True if so much of the ring is posted that a driver may have nothing to add.
    fn has_most(&self) -> bool {
        self.pieces.len() >= self.ring_size / 2
    }

    /// Receives what there is, within a budget.
    #[inline]
    pub(crate) fn turn(&mut self, queue: &mut DeviceQueue, stats: &QueueStats) -> Turn {
        let mut turn = Turn::default();
        if queue.fault().is_some() || self.broken {
            return turn;
        }
        if self.waiting > 0 {
            self.resume(queue, stats, &mut turn);
        }
        let (mut bytes, mut unpublished) = (0, 0);
        while turn.packets < TURN_FRAMES && bytes < TURN_BYTES {
            if !self.post(queue) {
                if queue.fault().is_none() && !std::mem::replace(&mut self.is_out, true) {
                    stats.out_of_buffers.add(1);
                }
                break;
            }
            self.is_out = false;
            self.make_offer();
            let size = match self.port.recv(self.offer.as_slices()) {
                Ok(size) => size.min(SIZE_MAX),
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(Errno::FAULT) => {
                    // The frame is gone, and so is guest memory: the kernel is the first to see it.
                    stats.dropped_memory.add(1);
                    turn.memory_lost = true;
                    break;
                }
                // A frame that the host has no header for is gone; the port is not.
                Err(Errno::INVAL) if self.refusals < REFUSALS_MAX => {
                    stats.dropped_refused.add(1);
                    self.refusals += 1;
                    turn.packets += 1;
                    continue;
                }
                Err(_) => {
                    self.broken = true;
                    break;
                }
            };
            self.refusals = 0;
            turn.packets += 1;
            bytes += size;
            let used = self.take_frame(queue, stats, size);
            turn.used += used;
            turn.frames += usize::from(used > 0);
            unpublished += usize::from(used > 0);
            if unpublished >= PUBLISH_FRAMES {
                queue.publish();
                unpublished = 0;
            }
        }
        let Tally { packets, bytes, gso } = std::mem::take(&mut self.tally);
        if packets > 0 {
            stats.packets.add(packets);
            stats.bytes_passed.add(bytes);
            stats.gso_packets.add(gso);
        }
        turn
    }

    /// Gives the driver the frame that waits, if there is room by now.
    #[cold]
    fn resume(&mut self, queue: &mut DeviceQueue, stats: &QueueStats, turn: &mut Turn) {
        let size = std::mem::take(&mut self.waiting);
        let used = self.take_frame(queue, stats, size);
        turn.used += used;
        turn.frames += usize::from(used > 0);
    }

    /// Pops buffers until there is room for the longest frame, or no more. False: there are none,
    /// or a frame waits for more.
    #[inline]
    fn post(&mut self, queue: &mut DeviceQueue) -> bool {
        while self.waiting == 0 && !self.has_plenty() {
            let popped = queue.pop_batch(&mut self.batch, BATCH_CHAINS);
            for index in 0..popped {
                self.post_one(queue, index);
            }
            if popped == 0 || queue.fault().is_some() {
                break;
            }
        }
        queue.fault().is_none() && self.has_room()
    }

    fn post_one(&mut self, queue: &mut DeviceQueue, index: usize) {
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
        // Behind a fault nothing is filled any more; it is put back when the queue ends.
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if let Some(first) = writable.first() {
            first.prefetch_for_write();
        }
        self.pieces.extend(writable);
        self.posted_size = self.posted_size.saturating_add(size);
        self.posted.push_back(Posted { chain, pieces: writable.len(), size });
    }

    /// Lays out what the next frame is read into: buffers for it, then the spill.
    #[inline]
    fn make_offer(&mut self) {
        if self.offered.buffers > 0 {
            return;
        }
        // Most often short frames come, one to a buffer of one piece.
        if self.short_row >= SMALL_ROW
            && self.offer.len() == 3
            && let Some(&Posted { pieces: 1, size, .. }) = self.posted.front()
            && size > HEADER_SIZE
            && let Some(first) = self.pieces.piece(0)
        {
            self.offer.replace(1, first, HEADER_SIZE);
            self.offered = Offered { buffers: 1, size };
            return;
        }
        self.lay_out();
    }

    fn lay_out(&mut self) {
        let wanted = match self.is_mergeable {
            true if self.short_row < SMALL_ROW => self.room_needed(),
            _ => 0,
        };
        self.offer.clear();
        self.offer.push_own(0, HEADER_SIZE);
        let (mut offered, mut count, mut skip) = (Offered::default(), 0, HEADER_SIZE);
        for posted in &self.posted {
            if (offered.buffers > 0 && offered.size >= wanted)
                || count + posted.pieces > OFFER_PIECES
                || (offered.buffers == 1 && !self.is_mergeable)
            {
                break;
            }
            offered.buffers += 1;
            offered.size += posted.size;
            for piece in (count..count + posted.pieces).filter_map(|at| self.pieces.piece(at)) {
                self.offer.extend(piece, skip);
                skip = skip.saturating_sub(piece[0].len());
            }
            count += posted.pieces;
        }
        self.offer.push_own(SPILL_AT, SIZE_MAX);
        self.offered = offered;
    }

    /// Gives the driver a frame of `size` bytes with its header, or drops it. Returns how many
    /// buffers went back.
    fn take_frame(&mut self, queue: &mut DeviceQueue, stats: &QueueStats, size: usize) -> usize {
        self.short_row = if size <= SMALL_FRAME { self.short_row.saturating_add(1) } else { 0 };
        if size < HEADER_SIZE + ETHERNET_SIZE {
            stats.dropped_short.add(1);
            return 0;
        }
        let mut header = RawHeader::default();
        copy_from_slices(&self.offer.as_slices()[..1], header.as_mut_bytes());
        let cause = match self.fate(&header, size) {
            Fate::Deliver => None,
            Fate::Filtered => Some(&stats.dropped_filtered),
            Fate::Offload => Some(&stats.dropped_offload),
            Fate::LinkDown => Some(&stats.dropped_link_down),
        };
        if let Some(cause) = cause {
            cause.add(1);
            return 0;
        }
        let spilled = size.saturating_sub(self.offered.size);
        if spilled > 0 && !self.unspill(queue, spilled) {
            if self.is_mergeable && queue.fault().is_none() && !self.has_most() {
                self.waiting = size;
            } else {
                stats.dropped_no_room.add(1);
            }
            return 0;
        }
        if !self.rules.given.csum {
            header.flags = 0;
        }
        self.tally.add(&header, size - HEADER_SIZE);
        self.push_frame(queue, header, size)
    }

    /// Whether the guest gets the frame that was just read. What it does not take unfinished comes
    /// only from before it said so.
    #[inline]
    fn fate(&self, header: &RawHeader, size: usize) -> Fate {
        let (rules, flags, gso_type) = (&*self.rules, header.flags, header.gso_type);
        if !rules.link_up {
            return Fate::LinkDown;
        }
        if flags & HDR_F_NEEDS_CSUM != 0 && !rules.given.csum {
            return Fate::Offload;
        }
        if gso_type == HDR_GSO_NONE {
            if size - HEADER_SIZE > rules.frame_size_max {
                return Fate::Filtered;
            }
        } else if !takes(rules.given, gso_type) {
            return Fate::Offload;
        }
        let Some(filter) = &rules.filter else { return Fate::Deliver };
        let start = read_start::<FILTER_SIZE>(&self.offer.as_slices()[1..]);
        let seen = start.len().min(size - HEADER_SIZE);
        if filter.passes(&start[..seen]) { Fate::Deliver } else { Fate::Filtered }
    }

    /// Copies what went past the offered buffers into further ones. False: there are none.
    fn unspill(&mut self, queue: &mut DeviceQueue, spilled: usize) -> bool {
        if !self.is_mergeable {
            return false;
        }
        while self.posted_size - self.offered.size < spilled {
            let popped = queue.pop_batch(&mut self.batch, BATCH_CHAINS);
            for index in 0..popped {
                self.post_one(queue, index);
            }
            if popped == 0 || queue.fault().is_some() {
                return false;
            }
        }
        let Some(mut rest) = self.offer.own().slice(SPILL_AT, spilled) else { return false };
        let offered = self.posted.iter().take(self.offered.buffers).map(|posted| posted.pieces);
        for target in self.pieces.iter().skip(offered.sum()) {
            let copied = target.copy_from(&rest);
            rest = rest.split_at(copied).1;
        }
        self.offered.buffers = 0;
        true
    }

    /// Returns the buffers that hold the frame, all of them before any can be seen.
    fn push_frame(&mut self, queue: &mut DeviceQueue, mut header: RawHeader, size: usize) -> usize {
        let (mut left, mut count) = (size, 0);
        for posted in &self.posted {
            count += 1;
            left = left.saturating_sub(posted.size);
            if left == 0 {
                break;
            }
        }
        header.num_buffers = u16::try_from(count).unwrap_or(u16::MAX).into();
        self.write_header(header.as_bytes());
        let mut left = size;
        for _ in 0..count {
            let Some(posted) = self.posted.pop_front() else { break };
            let filled = left.min(posted.size);
            left -= filled;
            self.pieces.drop_front(posted.pieces);
            self.posted_size -= posted.size;
            queue.push_used(posted.chain, u32::try_from(filled).unwrap_or(u32::MAX));
        }
        self.offered = Offered::default();
        count
    }

    /// Writes the header to where the frame begins in the guest.
    #[inline]
    fn write_header(&self, header: &[u8]) {
        let mut rest = header;
        // A posted buffer is not shorter than a header, which most often lies in its first piece.
        for piece in self.pieces.iter() {
            rest = &rest[piece.write_from(rest)..];
            if rest.is_empty() {
                break;
            }
        }
    }

    /// True while a frame waits for more buffers.
    pub(crate) fn holds_frame(&self) -> bool {
        self.waiting > 0
    }

    /// Puts every buffer back into the ring, the newest first. A frame that waits for more is
    /// dropped: a part of it lies in those. Nothing of guest memory is held after that.
    pub(crate) fn let_go(&mut self, queue: &mut DeviceQueue, stats: &QueueStats) {
        if std::mem::take(&mut self.waiting) > 0 {
            stats.dropped_no_room.add(1);
        }
        while let Some(posted) = self.posted.pop_back() {
            queue.unpop(posted.chain);
        }
        self.pieces.release();
        self.offer.release();
        self.batch.release();
        self.posted_size = 0;
        self.offered = Offered::default();
    }
}

/// The first `N` bytes of what was read.
#[inline]
fn read_start<const N: usize>(slices: &[GuestSlice]) -> [u8; N] {
    slices.first().and_then(GuestSlice::read_array::<N>).unwrap_or_else(|| {
        let mut bytes = [0; N];
        copy_from_slices(slices, &mut bytes);
        bytes
    })
}

fn takes(given: Offloads, gso_type: u8) -> bool {
    let kind = match gso_type & !HDR_GSO_ECN {
        HDR_GSO_TCPV4 => given.tso4,
        HDR_GSO_TCPV6 => given.tso6,
        HDR_GSO_UDP_L4 => given.uso4 || given.uso6,
        _ => false,
    };
    kind && (gso_type & HDR_GSO_ECN == 0 || given.ecn)
}
