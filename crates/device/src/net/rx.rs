//! receiveq: a port's frames -> the guest's buffers -> chains (virtio 1.3 §5.1.6.3, §5.1.6.4).
//!
//! The plain version: pop buffers, take the next frame, copy it into them, push them. The
//! optimizations, and why they are right:
//! 1. Buffers are popped ahead and kept until frames fill them (`posted.rs`), so that the ring is
//!    read once for many frames. A queue that stops puts unused buffers back.
//! 2. A port that reads (a tap) reads a frame straight into the next buffers, but its header into
//!    the daemon's memory. The header is written to the guest once, when the frame is complete:
//!    reading it back from the guest would wait for the cache line, and a legacy driver's header is
//!    shorter than a port's. The read continues into a *spill* behind the buffers: a frame that is
//!    longer than the buffers runs into the spill, and is copied from there into further buffers;
//!    it waits in the spill while the driver has posted none. While frames are short, only one
//!    buffer is offered to a read: each makes the system call a little slower.
//! 3. A port whose frames lie in memory lends a group of them by one call, and each is copied into
//!    the next buffers (`delivery.rs`). A frame that needs more buffers than are posted stays with
//!    the port, which lends it again: it needs no spill, and is not lost when the buffers must be
//!    returned.
//! 4. The driver sees frames in groups of sixteen. Lent frames are released to the port only then,
//!    so that their sender learns of their arrival only after the driver can see them.
//!
//! One function applies the rules (link, offloads, MTU, filter) to frames of both kinds.

mod limited;

use super::delivery::{Delivery, TurnProgress};
use super::posted::Posted;
use super::tally::Tally;
use super::{NetTurn, Rules, moves};
use crate::live::Live;
use limited::Passing;
use manyring_backend::net::{FRAMES_MAX, GROUP_FRAMES, Incoming, PortRx, Readiness};
use manyring_engine::stats::QueueStats;
use manyring_engine::{Gate, Limit};
use manyring_memory::{Gather, Mapping, MemoryError, copy_from_slices};
use manyring_queue::Chains;
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, RawNetHeader};
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Offset of the spill in the offer's own memory, where the header comes first.
const SPILL_AT: usize = 64;
/// The largest header and frame together, in bytes.
const SIZE_MAX: usize = HEADER_SIZE + FRAME_SIZE_MAX;
/// The most pieces that are passed to one read.
const OFFER_PIECES: usize = 1000;
/// After `SMALL_ROW` frames in a row of at most `SMALL_FRAME` bytes, a read is offered one buffer
/// only.
const SMALL_FRAME: usize = 2048;
const SMALL_ROW: u32 = 32;
/// If so many reads in a row fail because of the frame, the port is considered broken.
const REFUSALS_MAX: u32 = 64;

/// A receiveq, as its worker runs it.
#[derive(Debug)]
pub(crate) struct NetRx {
    port: Box<dyn PortRx>,
    to: Delivery,
    /// Where [`Self::refresh_rules`] loads the rules from.
    live: Option<Arc<Live<Rules>>>,
    /// The limit of the device as it was last loaded, and where to load it from; `None`: no limit.
    gate: Option<Box<Gate>>,
    limit: Option<Arc<Limit>>,
    passing: Passing,
    /// The most frames that become visible to the driver together.
    group_max: usize,
    /// The slices of the next read; they stay laid out while their buffers stay posted. The offer's
    /// own memory holds the frame's header and the spill.
    offer: Gather,
    offered: Offered,
    /// Bytes of a frame that was read and waits for more buffers; 0: none waits.
    waiting: usize,
    /// True if the port lent frames at the last call; false: its frames must be read.
    lends: bool,
    short_row: u32,
    /// Whether frames may be taken now, and how many of the next ones must come before those of
    /// other pairs.
    open: Arc<moves::Gate>,
    older: u32,
    /// True if the port is down, detached or deleted.
    broken: bool,
    refusals: u32,
    /// True if the driver had posted too few buffers when the ring was last checked.
    is_out: bool,
}

/// The number of the guest's buffers that were last offered to the port, and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Offered {
    buffers: usize,
    size: usize,
}

impl NetRx {
    pub(crate) fn new(
        port: Box<dyn PortRx>,
        rules: Arc<Rules>,
        is_mergeable: bool,
        ring_size: u16,
    ) -> Result<Self, MemoryError> {
        let posted = Posted::new(is_mergeable, ring_size);
        Ok(Self {
            port,
            to: Delivery {
                rules,
                posted,
                lacking: 0,
                lent_max: FRAMES_MAX,
                tally: Tally::default(),
                pieces_filled: 0,
            },
            live: None,
            gate: None,
            limit: None,
            passing: Passing::default(),
            group_max: GROUP_FRAMES,
            offer: Gather::new(Arc::new(Mapping::anonymous((SPILL_AT + SIZE_MAX) as u64)?)),
            offered: Offered::default(),
            waiting: 0,
            lends: false,
            short_row: 0,
            open: Arc::default(),
            older: 0,
            broken: false,
            refusals: 0,
            is_out: false,
        })
    }

    /// Sets the size of the driver's headers. Must be called before the first turn.
    pub(crate) fn set_headers(&mut self, size: usize) {
        self.to.posted.set_header_size(size);
    }

    /// Sets where [`Self::refresh_rules`] loads the rules from.
    pub(crate) fn follow(mut self, live: Arc<Live<Rules>>) -> Self {
        self.live = Some(live);
        self
    }

    /// Sets the gate, which says when frames may be taken.
    pub(crate) fn gated(mut self, gate: Arc<moves::Gate>) -> Self {
        self.open = gate;
        self
    }

    /// True if no frame may be taken now; an order ends that.
    pub(crate) fn is_held(&self) -> bool {
        self.open.look().is_none()
    }

    /// Loads the present rules and the present limit.
    pub(crate) fn refresh_rules(&mut self) {
        if let Some(live) = &self.live {
            self.set_rules(live.load());
        }
        self.take_limit();
    }

    pub(crate) fn set_rules(&mut self, rules: Arc<Rules>) {
        self.to.rules = rules;
        // Forget the length of the frame that waits with the port: the new rules may drop it.
        self.to.lacking = 0;
    }

    pub(crate) fn readiness(&self) -> Readiness<'_> {
        self.port.readiness()
    }

    /// Call when the port is down, detached or deleted: the queue then does not wait for it.
    pub(crate) fn on_broken(&mut self) {
        self.broken = true;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Call when the port may work again.
    pub(crate) fn revive(&mut self) {
        (self.broken, self.refusals) = (false, 0);
    }

    /// True if the queue may take a frame from the port: buffers are posted, and enough for a frame
    /// that waits with the port.
    pub(crate) fn has_room(&self) -> bool {
        let Delivery { posted, lacking, .. } = &self.to;
        let is_enough = *lacking == 0 || posted.size() >= *lacking || posted.has_most();
        !posted.is_empty() && self.waiting == 0 && is_enough
    }

    /// True if no more buffers need to be popped for the next frame: those posted suffice for the
    /// longest frame that may be read, or for the frame that the port has lent. Without mergeable
    /// buffers one buffer must do.
    #[inline]
    fn has_plenty(&self) -> bool {
        let posted = &self.to.posted;
        let wanted =
            if self.lends { self.to.lacking } else { HEADER_SIZE + self.to.rules.room_size };
        !posted.is_empty() && (posted.size() >= wanted || !posted.is_mergeable())
    }

    /// Delivers frames that have arrived, up to the bounds of a turn. Not inlined, because queues
    /// of other kinds would pay for its registers.
    #[inline(never)]
    pub(crate) fn turn(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> NetTurn {
        let mut progress = TurnProgress::default();
        let Some(older) = self.open.look().filter(|_| !queue.is_faulted() && !self.broken) else {
            return progress.turn;
        };
        self.older = older;
        self.to.pieces_filled = 0;
        self.to.posted.begin_turn();
        if self.waiting > 0 {
            self.resume(queue, stats, &mut progress);
        }
        while !progress.is_over() && !self.to.is_spent() {
            if self.gate.is_some() && !self.admits(stats) {
                break;
            }
            if !self.post(queue, stats) {
                break;
            }
            match self.port.incoming(self.group_max) {
                Incoming::Read => {
                    self.lends = false;
                    if !self.read_group(queue, stats, &mut progress) {
                        break;
                    }
                    queue.publish();
                }
                Incoming::Lent(frames) => {
                    if !std::mem::replace(&mut self.lends, true) {
                        // Lay the next read out anew: lent frames have used the buffers that were
                        // offered.
                        self.offered = Offered::default();
                    }
                    if frames.count() == 0 {
                        break;
                    }
                    let taken = self.to.take_group(queue, stats, frames, &mut progress);
                    queue.publish();
                    self.port.release(taken);
                    if taken == 0 {
                        // The first lent frame needs more buffers than are posted, or than this
                        // turn may pop.
                        if !self.to.posted.is_spent() {
                            self.note_out(stats);
                        }
                        break;
                    }
                }
            }
        }
        if self.gate.is_some() {
            self.charge_delivered();
        }
        self.open.note(older, self.older);
        let Tally { packets, bytes, gso } = std::mem::take(&mut self.to.tally);
        if packets > 0 {
            stats.packets.add(packets);
            stats.bytes_passed.add(bytes);
            stats.gso_packets.add(gso);
        }
        // The turn stopped popping: the ring may have more buffers, for which no kick will come.
        progress.turn.has_more |= self.to.posted.is_spent() && !queue.is_faulted();
        progress.turn
    }

    /// Delivers the frame in the spill, if enough buffers are posted now.
    #[cold]
    fn resume(&mut self, queue: &mut impl Chains, stats: &QueueStats, progress: &mut TurnProgress) {
        let size = std::mem::take(&mut self.waiting);
        let used = self.take_frame(queue, stats, size);
        progress.add_used(used);
    }

    /// Pops buffers until they suffice for the next frame, or the ring has no more. Returns false
    /// if no frame can be taken: no buffer is posted, a frame waits for more, or the turn may pop
    /// no more.
    #[inline]
    fn post(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> bool {
        while self.waiting == 0 && !self.has_plenty() {
            if !self.to.posted.pop(queue) {
                break;
            }
        }
        if queue.is_faulted() {
            return false;
        }
        if self.to.posted.is_spent() && !self.has_plenty() {
            // The next turn pops further buffers.
            return false;
        }
        if !self.has_room() {
            self.note_out(stats);
            return false;
        }
        self.is_out = false;
        true
    }

    /// Counts that the driver has posted too few buffers; once until it has posted some.
    #[cold]
    fn note_out(&mut self, stats: &QueueStats) {
        if !std::mem::replace(&mut self.is_out, true) {
            stats.out_of_buffers.add(1);
        }
    }

    /// Reads frames until a group should be published. Returns false if no further frame has
    /// arrived.
    fn read_group(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        progress: &mut TurnProgress,
    ) -> bool {
        let mut left = self.group_max;
        loop {
            if !self.read_one(queue, stats, progress) {
                return false;
            }
            left -= 1;
            if left == 0 || progress.is_over() || self.to.is_spent() {
                return true;
            }
            if !self.post(queue, stats) {
                return false;
            }
        }
    }

    /// Reads one frame into the popped buffers. Returns false if no frame has arrived.
    #[inline]
    fn read_one(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        progress: &mut TurnProgress,
    ) -> bool {
        self.make_offer();
        let size = match self.port.recv(self.offer.as_slices()) {
            Ok(size) => size.min(SIZE_MAX),
            Err(Errno::AGAIN) => {
                self.older = 0;
                return false;
            }
            Err(Errno::INTR) => return false,
            Err(Errno::FAULT) => {
                // EFAULT: guest memory was truncated. The frame is lost.
                stats.dropped_memory.add(1);
                progress.turn.memory_lost = true;
                return false;
            }
            // EINVAL: the kernel cannot make a virtio-net header for this frame. The frame is lost;
            // the next read may succeed.
            Err(Errno::INVAL) if self.refusals < REFUSALS_MAX => {
                stats.dropped_refused.add(1);
                self.refusals += 1;
                progress.add(0, 0);
                return true;
            }
            Err(_) => {
                self.broken = true;
                return false;
            }
        };
        self.refusals = 0;
        self.older = self.older.saturating_sub(1);
        let used = self.take_frame(queue, stats, size);
        progress.add(size, used);
        true
    }

    /// Lays out the slices of the next read: header, buffers for the frame, spill.
    #[inline]
    fn make_offer(&mut self) {
        if self.offered.buffers > 0 {
            return;
        }
        // The common case, short frames that fill one buffer of one piece: replace that piece only.
        let posted = &self.to.posted;
        if self.short_row >= SMALL_ROW
            && self.offer.len() == 3
            && let Some((1, size)) = posted.front()
            && size > posted.header_size()
            && let Some(first) = posted.pieces().piece(0)
        {
            self.offer.replace(1, first, posted.header_size());
            self.offered = Offered { buffers: 1, size };
            return;
        }
        self.lay_out();
    }

    fn lay_out(&mut self) {
        let posted = &self.to.posted;
        let wanted = match posted.is_mergeable() {
            true if self.short_row < SMALL_ROW => HEADER_SIZE + self.to.rules.room_size,
            _ => 0,
        };
        self.offer.clear();
        self.offer.push_own(0, HEADER_SIZE);
        let (mut offered, mut count, mut skip) = (Offered::default(), 0, posted.header_size());
        for (pieces, size) in posted.buffers() {
            if (offered.buffers > 0 && offered.size >= wanted)
                || count + pieces > OFFER_PIECES
                || (offered.buffers == 1 && !posted.is_mergeable())
            {
                break;
            }
            offered.buffers += 1;
            offered.size += size;
            for piece in (count..count + pieces).filter_map(|at| posted.pieces().piece(at)) {
                self.offer.extend(piece, skip);
                skip = skip.saturating_sub(piece[0].len());
            }
            count += pieces;
        }
        self.offer.push_own(SPILL_AT, SIZE_MAX);
        self.offered = offered;
    }

    /// Delivers or drops a frame that was read; `size` includes the port's header. Returns how many
    /// buffers went to the driver.
    fn take_frame(&mut self, queue: &mut impl Chains, stats: &QueueStats, size: usize) -> usize {
        self.short_row = if size <= SMALL_FRAME { self.short_row.saturating_add(1) } else { 0 };
        let len = size.saturating_sub(HEADER_SIZE);
        if !Delivery::is_whole(len, stats) {
            return 0;
        }
        let mut header = RawNetHeader::default();
        let (own, payload) = self.offer.as_slices().split_at(1);
        copy_from_slices(own, header.as_mut_bytes());
        if !self.to.admits(&header, payload, len, stats) {
            return 0;
        }
        let in_guest = self.to.posted.header_size() + len;
        let spilled = in_guest.saturating_sub(self.offered.size);
        if spilled > 0 && !self.unspill(queue, spilled) {
            let posted = &self.to.posted;
            let may_come = !posted.has_most() || posted.is_spent();
            if posted.is_mergeable() && !queue.is_faulted() && may_come {
                self.waiting = size;
            } else {
                stats.dropped_small_buffers.add(1);
            }
            return 0;
        }
        self.offered = Offered::default();
        self.to.push(queue, header, len)
    }

    /// Copies the bytes in the spill into further buffers. Returns false if too few are posted.
    fn unspill(&mut self, queue: &mut impl Chains, spilled: usize) -> bool {
        let posted = &mut self.to.posted;
        if !posted.is_mergeable() {
            return false;
        }
        while posted.size() - self.offered.size < spilled {
            if !posted.pop(queue) {
                return false;
            }
        }
        let Some(mut rest) = self.offer.own().slice(SPILL_AT, spilled) else { return false };
        let offered = posted.buffers().take(self.offered.buffers).map(|(pieces, _)| pieces);
        for target in posted.pieces().iter().skip(offered.sum()) {
            if rest.is_empty() {
                break;
            }
            let copied = target.copy_from(&rest);
            rest = rest.split_at(copied).1;
        }
        true
    }

    /// True while a frame waits for more buffers.
    pub(crate) fn holds_frame(&self) -> bool {
        self.waiting > 0
    }

    /// Puts every buffer back into the ring. A frame in the spill is dropped, since its beginning
    /// lies in those buffers. Afterwards no reference to guest memory is left.
    pub(crate) fn let_go(&mut self, queue: &mut impl Chains, stats: &QueueStats) {
        if std::mem::take(&mut self.waiting) > 0 {
            stats.dropped_small_buffers.add(1);
        }
        self.to.let_go(queue);
        self.offer.release();
        self.offered = Offered::default();
    }
}
