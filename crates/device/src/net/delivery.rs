//! `Delivery`: applies the rules to a frame from the port, and delivers or drops it.
//!
//! A frame that a port lends is checked, copied into the guest's buffers and returned here. A frame
//! that was read (`rx.rs`) already lies in the guest's buffers; the same rules apply to it, and its
//! buffers are returned in the same way.

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

/// An Ethernet header.
const ETHERNET_SIZE: usize = 14;

/// The rules of a receiveq, and the buffers that it fills.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) rules: Arc<Rules>,
    pub(super) posted: Posted,
    /// Bytes of the lent frame that waits for more buffers; 0: no frame waits.
    pub(super) lacking: usize,
    /// Frames that are taken at once from a port that lends them.
    pub(super) lent_max: usize,
    /// The counts of the present turn, which are added to the counters at its end.
    pub(super) tally: Tally,
    /// Pieces of the guest's buffers that the present turn has filled, without those of frames that
    /// `Posted::push_plain` copied into a buffer of one piece.
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

    /// Counts a frame of `size` bytes that was taken, and lies in `used` buffers of the guest.
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

/// Frames and bytes of a turn at most: the driver is called when the turn ends.
const TURN_FRAMES: usize = 64;
const TURN_BYTES: usize = 512 << 10;
/// Pieces of the guest's buffers that a turn may fill: after this many it begins no further frame.
/// A guest may post buffers whose descriptors have one byte each, and each such piece costs the
/// worker as much as a hundred bytes in one descriptor: a frame of 64 KiB takes half a millisecond.
/// In the buffers that Linux posts such a frame has 44 pieces.
const TURN_PIECES: usize = 4096;

/// The result of delivering a lent frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lent {
    /// The port gets the frame back. The number of the guest's buffers into which it was copied; 0:
    /// it was dropped.
    Done(usize),
    /// The frame stays with the port until the driver has posted more buffers.
    Stays,
}

impl Delivery {
    /// True if the rules let a frame of `len` bytes pass. If not, counts the reason.
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

    /// True if a frame of `len` bytes has a complete Ethernet header. If not, counts the drop.
    #[inline]
    pub(super) fn is_whole(len: usize, stats: &QueueStats) -> bool {
        let is_whole = len >= ETHERNET_SIZE;
        if !is_whole {
            stats.dropped_short.add(1);
        }
        is_whole
    }

    /// Writes the header of a frame of `len` bytes before its payload, and returns the buffers of
    /// the frame to the driver. The result is their number.
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

    /// Takes frames that a port lends: up to [`Self::lent_max`], while the turn is not over and
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

    /// Copies a lent frame of `len` bytes, header and payload, to the guest.
    ///
    /// The payload may lie in the memory of another guest, which can change it during the copy.
    /// Only the filter looks at it, which the receiving guest has for convenience, not for safety.
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
            stats.dropped_no_room.add(1);
            return Lent::Done(0);
        }
        self.posted.write_payload(payload);
        Lent::Done(self.push(queue, header, len))
    }

    /// The fast path of a frame whose first bytes lie apart from the rest. False: nothing has
    /// changed, and the caller must take the general path.
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

    /// Pops buffers until a frame of `size` bytes fits. False: the driver has posted too few.
    #[cold]
    fn make_room(&mut self, queue: &mut impl Chains, size: usize) -> bool {
        while self.posted.is_mergeable() && !self.posted.fits(size) {
            if !self.posted.pop(queue) {
                return false;
            }
        }
        self.posted.fits(size)
    }

    /// Puts every buffer back into the ring. A frame that waits with its port is lent again later.
    pub(super) fn let_go(&mut self, queue: &mut impl Chains) {
        self.lacking = 0;
        self.posted.let_go(queue);
    }
}
