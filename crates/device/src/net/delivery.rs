//! `Delivery`: applies the rules to a frame from the port, and delivers or drops it.
//!
//! A frame that a port lends is checked, copied into the guest's buffers and pushed here. A frame
//! that the port read (`rx.rs`) already lies in the guest's buffers; the same rules apply to it,
//! and its buffers are pushed in the same way.

use super::posted::Posted;
use super::rules::RxDecision;
use super::tally::Tally;
use super::{NetTurn, Rules};
use manyring_backend::net::Frames;
use manyring_engine::stats::QueueStats;
use manyring_memory::GuestSlice;
use manyring_queue::Chains;
use manyring_wire::net::{HEADER_SIZE, RawNetHeader};
use std::sync::Arc;
use zerocopy::transmute;

/// Size of an Ethernet header in bytes.
const ETHERNET_SIZE: usize = 14;

/// The rules of a receiveq, and the buffers that it fills.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) rules: Arc<Rules>,
    pub(super) posted: Posted,
    /// Bytes of a lent frame that waits until the driver posts more buffers; 0: none waits.
    pub(super) lacking: usize,
    /// The most frames to take at once from a port that lends frames.
    pub(super) lent_max: usize,
    /// Counts of the present turn, which are added to the queue's counters at its end.
    pub(super) tally: Tally,
    /// Number of buffer pieces that the present turn has filled. Frames that `Posted::push_plain`
    /// copied into a buffer of one piece are not counted.
    pub(super) pieces_filled: usize,
}

/// The frames and bytes of a turn so far.
#[derive(Debug, Default)]
pub(super) struct TurnProgress {
    pub(super) turn: NetTurn,
    bytes: usize,
}

impl TurnProgress {
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.turn.packets >= TURN_FRAMES || self.bytes >= TURN_BYTES
    }

    /// Counts a frame of `size` bytes that was taken from the port and fills `used` buffers of the
    /// guest.
    #[inline]
    pub(super) fn add(&mut self, size: usize, used: usize) {
        self.turn.packets += 1;
        self.bytes += size;
        self.add_used(used);
    }

    #[inline]
    pub(super) fn add_used(&mut self, used: usize) {
        self.turn.used += used;
        self.turn.frames += usize::from(used > 0);
    }
}

/// The most frames and bytes of a turn; the driver is notified when the turn ends.
pub(super) const TURN_FRAMES: usize = 64;
const TURN_BYTES: usize = 512 << 10;
/// The most buffer pieces that a turn may fill: after so many it begins no further frame. A guest
/// may post buffers whose descriptors have one byte each, and each such piece costs the worker as
/// much as a hundred bytes in one descriptor: a frame of 64 KiB takes half a millisecond. In the
/// buffers that Linux posts, such a frame has 44 pieces.
const TURN_PIECES: usize = 4096;

/// The result of delivering a lent frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lent {
    /// The frame was copied into this many buffers, or dropped (0): the port gets it back.
    Done(usize),
    /// The frame stays with the port until the driver posts more buffers.
    Stays,
}

impl Delivery {
    /// Returns true if the rules let a frame of `len` bytes pass. Counts the drop otherwise.
    #[inline]
    pub(super) fn admits(
        &self,
        header: &RawNetHeader,
        payload: &[GuestSlice<'_>],
        len: usize,
        stats: &QueueStats,
    ) -> bool {
        let cause = match self.rules.fate(header, payload, len) {
            RxDecision::Deliver => return true,
            RxDecision::Filtered => &stats.dropped_filtered,
            RxDecision::Offload => &stats.dropped_offload,
            RxDecision::LinkDown => &stats.dropped_link_down,
        };
        cause.add(1);
        false
    }

    /// Returns true if a frame of `len` bytes has a complete Ethernet header. Counts the drop
    /// otherwise.
    #[inline]
    pub(super) fn is_whole(len: usize, stats: &QueueStats) -> bool {
        let is_whole = len >= ETHERNET_SIZE;
        if !is_whole {
            stats.dropped_short.add(1);
        }
        is_whole
    }

    /// Writes the header of a frame of `len` bytes before its payload, and pushes the frame's
    /// buffers. Returns their number.
    #[inline]
    pub(super) fn push(
        &mut self,
        queue: &mut impl Chains,
        header: RawNetHeader,
        len: usize,
    ) -> usize {
        let takes_csum = self.rules.given.csum;
        self.tally.add(&header, len);
        if self.posted.header_size() > HEADER_SIZE {
            self.posted.write_hash(self.rules.hash.as_deref(), len);
        }
        let size = self.posted.header_size() + len;
        let before = self.posted.pieces().len();
        let used = self.posted.push_frame(queue, size, |count| header.to_driver(takes_csum, count));
        self.pieces_filled += before - self.posted.pieces().len();
        used
    }

    /// True if the turn has filled [`TURN_PIECES`] pieces.
    #[inline]
    pub(super) fn is_spent(&self) -> bool {
        self.pieces_filled >= TURN_PIECES
    }

    /// Delivers frames that a port lends: up to [`Self::lent_max`], while the turn is not over and
    /// buffers suffice. Returns how many frames the port gets back.
    #[inline]
    pub(super) fn take_group(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        frames: &Frames,
        progress: &mut TurnProgress,
    ) -> usize {
        self.lacking = 0;
        let takes_csum = self.rules.given.csum;
        let is_short = self.posted.header_size() != HEADER_SIZE;
        let plain_max = if is_short { 0 } else { self.rules.plain_max() };
        let count = frames.count().min(self.lent_max);
        for index in 0..count {
            if progress.is_over() || self.is_spent() {
                return index;
            }
            let len = frames.len(index);
            if (ETHERNET_SIZE..=plain_max).contains(&len)
                && self.posted.push_plain(queue, frames.slices(index), len, takes_csum)
            {
                self.tally.add_plain(len);
                progress.add(HEADER_SIZE + len, 1);
                continue;
            }
            match self.take_lent(queue, stats, frames.slices(index), len) {
                Lent::Done(used) => progress.add(HEADER_SIZE + len, used),
                Lent::Stays => return index,
            }
        }
        count
    }

    /// Copies a lent frame to the guest. `len` is its length with header and payload.
    ///
    /// The payload may lie in the memory of another guest, which can change it during the copy.
    /// Only the receive filter reads it, which serves the receiving guest's convenience and not its
    /// safety.
    #[inline]
    fn take_lent(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        frame: &[GuestSlice<'_>],
        len: usize,
    ) -> Lent {
        if self.posted.is_empty() {
            return Lent::Stays;
        }
        if frame.len() == 3 && self.take_headed(queue, frame, len) {
            return Lent::Done(1);
        }
        let size = self.posted.header_size() + len;
        let Some((header, payload)) = frame.split_first() else { return Lent::Done(0) };
        let Some(header) = header.read_array::<HEADER_SIZE>() else { return Lent::Done(0) };
        let header: RawNetHeader = transmute!(header);
        if !Self::is_whole(len, stats) || !self.admits(&header, payload, len, stats) {
            return Lent::Done(0);
        }
        if !self.posted.fits(size) && !self.make_room(queue, size) {
            let posted = &self.posted;
            let may_come = !posted.has_most() || posted.is_spent();
            if queue.is_faulted() || (posted.is_mergeable() && may_come) {
                self.lacking = size;
                return Lent::Stays;
            }
            stats.dropped_small_buffers.add(1);
            return Lent::Done(0);
        }
        self.posted.write_payload(payload);
        Lent::Done(self.push(queue, header, len))
    }

    /// Fast path for a frame whose first bytes lie apart from the rest. Returns false, and changes
    /// nothing, if the caller must take the general path.
    #[inline(never)]
    fn take_headed(
        &mut self,
        queue: &mut impl Chains,
        frame: &[GuestSlice<'_>],
        len: usize,
    ) -> bool {
        let is_plain = (ETHERNET_SIZE..=self.rules.plain_max()).contains(&len)
            && self.posted.header_size() == HEADER_SIZE
            && self.posted.push_headed(queue, frame, len, self.rules.given.csum);
        if is_plain {
            self.tally.add_plain(len);
        }
        is_plain
    }

    /// Pops buffers until a frame of `size` bytes fits. Returns false if the driver has posted too
    /// few.
    #[cold]
    fn make_room(&mut self, queue: &mut impl Chains, size: usize) -> bool {
        while self.posted.is_mergeable() && !self.posted.fits(size) {
            if !self.posted.pop(queue) {
                return false;
            }
        }
        self.posted.fits(size)
    }

    /// Puts every buffer back into the ring. A frame that waits with the port is lent again later.
    pub(super) fn let_go(&mut self, queue: &mut impl Chains) {
        self.lacking = 0;
        self.posted.let_go(queue);
    }
}
