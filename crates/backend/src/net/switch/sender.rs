//! `SwitchTx`: the sending half of a pair: finds the destination of each frame, and has a channel
//! to each of them.
//!
//! ```text
//! send:  the same addresses as the frame before? the same destination
//!        else judge the frame; a destination that is one port has a channel, made at its first use
//!        the channel can take it? add it to the channel's burst (its first bytes are copied)
//!        it cannot, and no frame of this queue is in it? copy the frame to the copy queue
//!        else drop it
//!        at the end: the bursts go into their channels, and each receiver is rung once
//! reap:  a burst is back: its frames are done
//!        a channel's oldest burst is out for too long: take its frames back, copy them to the
//!        copy queue, and use the channel again when the receiver has read the copies and rested
//! ```
//! **Credit.** At most [`CREDIT`] frames of a queue are lent at any time, over all channels. A
//! channel that its receiver does not serve is emptied after [`HOLD_MS`], or after [`RELIEVE_MS`]
//! when all credit is used: a receiver that sleeps, cheats or was removed holds a guest's buffers
//! no longer than that.

mod back;
mod own;

use super::channel::{Channel, LentFrames};
use super::copy_path::CopyPath;
use super::copy_queue::CHANNELS;
use super::verdict::Verdict;
use super::vlan_rules::{Change, ETHERNET};
use super::{PortId, Shared, Switch, SwitchTime, TAKES_ALL};
use crate::net::frames::{Added, INLINE_MAX};
use crate::net::{Frames, PortTx, Readiness, Returned, Sent};
use crate::ready::Doorbell;
use manyring_memory::copy_from_slices;
use manyring_wire::net::flow::FLOW_BYTES;
use manyring_wire::net::sender::{LOOK_MAX, needs_look};
use manyring_wire::net::{FRAME_SIZE_MAX, HEADER_SIZE, RawNetHeader};
use own::{CachedDestination, OwnChannel, OwnWay};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most frames of one queue that are lent to receivers: half of the ring of a Linux guest.
const CREDIT: usize = 128;
/// The most bursts of a queue: memory of 8 KiB each, allocated when needed.
const BURSTS_MAX: usize = 32;
/// The most channels of a queue.
const CHANNELS_MAX: usize = 32;
/// Milliseconds after which a channel that its receiver does not serve is emptied: always, and when
/// all credit is used. A guest with `IN_ORDER` stalls for as long, since its chains are used in the
/// order of the ring.
const HOLD_MS: u64 = 50;
const RELIEVE_MS: u64 = 20;
/// The bytes that one call of `send` copies; the device sends the other frames by a later call.
const SPENT_MAX: usize = 256 << 10;

/// Returns the first bytes of frame `index`, from which its flow is computed, and their number. If
/// the guest changes them later, only the choice of a queue changes.
fn start_of(frames: &Frames, index: usize) -> ([u8; FLOW_BYTES], usize) {
    let mut start = [0; FLOW_BYTES];
    let payload = frames.slices(index).get(1..).unwrap_or_default();
    let len = copy_from_slices(payload, &mut start);
    (start, len)
}

/// The sending half of a queue pair of a port.
#[derive(Debug)]
pub(super) struct SwitchTx {
    copy_path: CopyPath,
    doorbell: Arc<Doorbell>,
    channels: Vec<OwnChannel>,
    last: Option<CachedDestination>,
    now: SwitchTime,
    #[allow(clippy::vec_box, reason = "bursts move between threads as they are")]
    free: Vec<Box<LentFrames>>,
    made: usize,
    /// The number of frames that are lent to receivers now.
    lent: usize,
    /// Frames that ended without being lent: copied to the copy queue, dropped, or refused.
    done: Vec<Returned>,
    /// Buffer for the copy of a frame.
    frame_copy: Vec<u8>,
    /// True if the guest may send with one source address only, which is checked for each frame.
    is_guarded: bool,
}

impl SwitchTx {
    /// Makes the half.
    ///
    /// # Errors
    /// Those of [`Doorbell::new`].
    pub(super) fn new(switch: Arc<Switch>, own: Arc<Shared>, index: usize) -> Result<Self, Errno> {
        let is_guarded = own.options.only.is_some();
        Ok(Self {
            copy_path: CopyPath::new(switch, own, index),
            doorbell: Arc::new(Doorbell::new()?),
            channels: Vec::new(),
            last: None,
            now: SwitchTime::default(),
            free: Vec::new(),
            made: 0,
            lent: 0,
            done: Vec::new(),
            frame_copy: Vec::new(),
            is_guarded,
        })
    }

    /// Fast path: passes frames on from index `first`, while each has the addresses of the frame
    /// before, needs no offload and lies in one piece. The checks that these frames share are made
    /// once. Returns the number of these frames; the caller passes the next one on by
    /// [`Self::pass`].
    #[inline]
    fn pass_plain(&mut self, frames: &Frames, first: usize, sent: &mut Sent) -> usize {
        let Some(way) = self.last else { return 0 };
        let own = &mut self.channels[way.channel];
        if !own.is_served(self.now) || self.copy_path.own.uses_several() {
            return 0;
        }
        let Some(burst) = &mut own.open else { return 0 };
        let is_guarded = self.is_guarded;
        let admits = |head: &[u8; ETHERNET], header: &[u8; HEADER_SIZE]| {
            way.is_of(head) && !(is_guarded && needs_look(head)) && way.takes(header)
        };
        for index in first..frames.count() {
            match burst.frames.push_plain(frames, index, self.lent < CREDIT, admits) {
                Added::Nothing => return index - first,
                Added::Copied => {}
                Added::Lent => {
                    self.lent += 1;
                    sent.later |= 1 << index;
                }
            }
        }
        frames.count() - first
    }

    /// Passes frame `index` of the burst on, to the destination of the frame before if the
    /// addresses are the same.
    #[inline]
    fn pass(&mut self, frames: &Frames, index: usize, sent: &mut Sent) {
        let CopyPath { own, .. } = &self.copy_path;
        if own.uses_several() {
            let (start, len) = start_of(frames, index);
            own.steer.note(&start[..len], self.copy_path.index, self.now.second());
        }
        let first = frames.slices(index).get(1);
        if let (Some(way), Some(head)) =
            (self.last, first.and_then(|first| first.read_array::<ETHERNET>()))
            && way.is_of(&head)
            && !(self.is_guarded && needs_look(&head))
        {
            self.lend(frames, index, (&head, way), sent);
            return;
        }
        self.pass_anew(frames, index, sent);
    }

    /// Decides about a frame whose addresses differ from those of the frame before, and sends it.
    fn pass_anew(&mut self, frames: &Frames, index: usize, sent: &mut Sent) {
        let mut bytes = [0; LOOK_MAX];
        let Some((_, payload)) = frames.slices(index).split_first() else { return };
        let look = if self.is_guarded { LOOK_MAX } else { ETHERNET + 4 };
        let len = copy_from_slices(payload, &mut bytes[..look.min(frames.len(index))]);
        let head = &bytes[..len];
        // If the port is not guarded, only the Ethernet header and a tag are judged. The device has
        // checked that no partial checksum lies there, and later changes by the guest do not
        // matter.
        let header = if self.is_guarded { frames.header(index) } else { RawNetHeader::default() };
        let CopyPath { switch, own, map, .. } = &self.copy_path;
        let (verdict, vlan, tag) = switch.judge(own, map, (&header, head), self.now.second());
        match verdict {
            Verdict::Drop { refused } => {
                if refused {
                    sent.refused += 1;
                    sent.lost |= 1 << index;
                }
            }
            Verdict::Flood => {
                self.copy(frames, index, head);
                let frame_copy = std::mem::take(&mut self.frame_copy);
                self.copy_path.flood(&frame_copy, vlan, tag);
                self.frame_copy = frame_copy;
            }
            Verdict::To(to, Change::None) => match self.way(to, frames, index) {
                Some(OwnWay { channel, takes_all, is_steered }) => {
                    let mut addresses = [0; 12];
                    addresses.copy_from_slice(&head[..12]);
                    let way = CachedDestination { addresses, channel, takes_all };
                    // Do not cache a steered destination: the next frame to these addresses may
                    // belong to another flow.
                    self.last = (!tag.is_tagged && !is_steered).then_some(way);
                    self.lend(frames, index, (head, way), sent);
                }
                None => self.copy_to(frames, index, (head, to, Change::None)),
            },
            Verdict::To(to, change) => self.copy_to(frames, index, (head, to, change)),
        }
    }

    /// Returns the channel to a port for frame `index`; makes one if fewer than [`CHANNELS_MAX`]
    /// exist.
    fn way(&mut self, to: PortId, frames: &Frames, index: usize) -> Option<OwnWay> {
        let map = self.copy_path.map.clone();
        let destination = map.get(to)?;
        let is_steered = destination.is_steered();
        let (start, len) = if is_steered { start_of(frames, index) } else { ([0; FLOW_BYTES], 0) };
        let (pair, inbox) = destination.inbox(self.copy_path.index, &start[..len])?;
        let takes_all = destination.port.takes() == TAKES_ALL;
        let way = |channel| OwnWay { channel, takes_all, is_steered };
        let is_it = |own: &OwnChannel| own.to == to && own.pair == pair && !own.inbox.is_closed();
        if let Some(at) = self.channels.iter().position(is_it) {
            return Some(way(at));
        }
        if self.channels.len() == CHANNELS_MAX {
            let idle = self.channels.iter().position(OwnChannel::is_empty)?;
            self.leave(idle);
        }
        let used = self.channels.iter().fold(0, |bits, own| bits | own.channel.back_bit);
        let back_bit = 1 << (!used).trailing_zeros();
        let channel = Channel::new(inbox.channel_bit(), back_bit, self.doorbell.clone());
        if !inbox.add_channel(&channel) {
            return None;
        }
        self.channels.push(OwnChannel {
            channel,
            inbox: inbox.clone(),
            to,
            pair,
            open: None,
            handed: VecDeque::new(),
            must_ring: false,
            // Before this channel existed, frames went by the copy queue: the receiver must read
            // these first.
            mailed: inbox.last(),
            rests_until: SwitchTime(destination.port.rests_until.load(Ordering::Relaxed)),
        });
        Some(way(self.channels.len() - 1))
    }

    /// Removes a channel that is empty.
    fn leave(&mut self, at: usize) {
        let own = self.channels.swap_remove(at);
        own.channel.is_left.store(true, Ordering::Release);
        own.inbox.doorbell.post(CHANNELS);
        self.last = None;
    }

    /// Adds a frame to the burst of its channel. If the channel is full, calls [`Self::divert`].
    #[inline]
    fn lend(
        &mut self,
        frames: &Frames,
        index: usize,
        (head, way): (&[u8], CachedDestination),
        sent: &mut Sent,
    ) {
        let is_long = frames.len(index) > INLINE_MAX;
        let own = &self.channels[way.channel];
        let is_as_taken = way.takes_all || self.is_as_taken(frames, index, own.to);
        let may_lend = is_as_taken && own.is_served(self.now);
        let has_credit = !is_long || self.lent < CREDIT;
        if may_lend && has_credit && self.add(frames, index, (head, way.channel)) {
            if is_long {
                self.lent += 1;
                sent.later |= 1 << index;
            }
            return;
        }
        self.divert(frames, index, (head, way.channel), is_as_taken && !has_credit);
    }

    /// True if the guest of a port accepts a frame unchanged, with its offloads.
    fn is_as_taken(&self, frames: &Frames, index: usize, to: PortId) -> bool {
        let destination = self.copy_path.map.get(to);
        destination.is_some_and(|to| to.port.takes_all_of(&frames.header(index)))
    }

    #[inline]
    fn add(&mut self, frames: &Frames, index: usize, (head, channel): (&[u8], usize)) -> bool {
        if let Some(burst) = &mut self.channels[channel].open
            && burst.frames.takes_from(frames)
        {
            return burst.frames.push_lent(frames, index, head);
        }
        if !self.open(frames, channel) {
            return false;
        }
        let open = &mut self.channels[channel].open;
        open.as_mut().is_some_and(|burst| burst.frames.push_lent(frames, index, head))
    }

    /// Opens a burst to which frames can be added: the newest one in the channel, if it has room,
    /// or an empty one. Returns false if there is none.
    fn open(&mut self, frames: &Frames, channel: usize) -> bool {
        self.hand_over(channel);
        let own = &mut self.channels[channel];
        if let Some(burst) = own.channel.full.take_last() {
            if burst.is_untouched() && burst.frames.takes_from(frames) {
                own.open = Some(burst);
                return true;
            }
            // Put the burst back to its place, unless the receiver has skipped that place.
            if let Err(burst) = own.channel.full.put(burst) {
                self.lose(channel, burst);
            }
        }
        if !self.channels[channel].channel.full.has_room() {
            return false;
        }
        let Some(burst) = self.free.pop().or_else(|| self.make()) else { return false };
        let own = &mut self.channels[channel];
        own.open = Some(burst);
        own.handed.push_back(self.now);
        true
    }

    #[cold]
    fn make(&mut self) -> Option<Box<LentFrames>> {
        if self.made == BURSTS_MAX {
            return None;
        }
        let burst = LentFrames::new().ok()?;
        self.made += 1;
        Some(burst)
    }

    /// Puts the open burst into its channel, for the receiver.
    fn hand_over(&mut self, channel: usize) {
        let own = &mut self.channels[channel];
        let Some(burst) = own.open.take() else { return };
        match own.channel.full.put(burst) {
            Ok(()) => own.must_ring = true,
            Err(burst) => self.lose(channel, burst),
        }
    }

    /// Handles a burst that does not fit into its channel: its frames are lost. This cannot happen,
    /// because the channel had room when the burst was opened.
    #[cold]
    fn lose(&mut self, channel: usize, burst: Box<LentFrames>) {
        debug_assert!(false, "a burst without a place");
        self.take_back(channel, burst);
    }

    /// Handles a frame that its channel cannot take: copies it to the copy queue if no frame of
    /// this queue is in the channel, so that the order of frames is kept; otherwise drops it.
    #[cold]
    fn divert(
        &mut self,
        frames: &Frames,
        index: usize,
        (head, channel): (&[u8], usize),
        lacks_credit: bool,
    ) {
        if lacks_credit {
            self.copy_path.own.counters.credit_out.add(1);
            self.relieve(RELIEVE_MS);
        }
        let own = &self.channels[channel];
        let may_copy = own.is_empty() || !self.is_as_taken(frames, index, own.to);
        let to = own.to;
        if may_copy && own.inbox.is_full(HEADER_SIZE + frames.len(index)) {
            // Check before the copy is made: a full receiver must not cost its senders time.
            if let Some(destination) = self.copy_path.map.get(to) {
                destination.port.counters.dropped_full.add(1);
            }
            self.channels[channel].mailed = self.channels[channel].inbox.last();
        } else if may_copy {
            self.copy_to(frames, index, (head, to, Change::None));
            self.channels[channel].mailed = self.channels[channel].inbox.last();
        } else {
            self.copy_path.own.counters.dropped_credit.add(1);
        }
    }

    /// Copies a frame to the copy queue of a port.
    fn copy_to(
        &mut self,
        frames: &Frames,
        index: usize,
        (head, to, change): (&[u8], PortId, Change),
    ) {
        self.copy(frames, index, head);
        self.copy_path.copy_to(to, &self.frame_copy, change);
    }

    /// Copies a frame and its header into `frame_copy`, and writes `head`, its checked first bytes,
    /// over the copy.
    fn copy(&mut self, frames: &Frames, index: usize, head: &[u8]) {
        let len = frames.len(index).min(FRAME_SIZE_MAX);
        self.frame_copy.resize(HEADER_SIZE + len, 0);
        let copied = copy_from_slices(frames.slices(index), &mut self.frame_copy);
        self.frame_copy.truncate(copied);
        if let Some(start) = self.frame_copy.get_mut(HEADER_SIZE..HEADER_SIZE + head.len()) {
            start.copy_from_slice(head);
        }
    }
}

impl PortTx for SwitchTx {
    #[inline]
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        self.collect();
        let now = self.copy_path.switch.clock.now();
        if self.copy_path.refresh() || now.second() != self.now.second() {
            // Forget the cached destination: the ports, their addresses or the offloads of their
            // guests may have changed.
            self.last = None;
            self.leave_closed();
        }
        self.now = now;
        self.copy_path.spent = 0;
        let mut sent = Sent::default();
        while first + sent.taken < frames.count() && self.copy_path.spent < SPENT_MAX {
            sent.taken += self.pass_plain(frames, first + sent.taken, &mut sent);
            if first + sent.taken < frames.count() {
                self.pass(frames, first + sent.taken, &mut sent);
                sent.taken += 1;
            }
        }
        for at in 0..self.channels.len() {
            self.hand_over(at);
            let own = &mut self.channels[at];
            if std::mem::take(&mut own.must_ring) {
                own.inbox.doorbell.post(own.channel.bit);
            }
        }
        self.copy_path.tell();
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Always
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        self.collect();
        if self.copy_path.refresh() {
            self.last = None;
        }
        if self.lent > 0 {
            self.leave_closed();
            self.relieve(HOLD_MS);
            self.copy_path.tell();
        }
        done.append(&mut self.done);
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        self.collect();
        (0..self.channels.len()).for_each(|at| self.recall_channel(at));
        done.append(&mut self.done);
        self.lent
    }

    fn done(&self) -> Readiness<'_> {
        Readiness::Doorbell(&self.doorbell)
    }
}

impl Drop for SwitchTx {
    fn drop(&mut self) {
        for at in (0..self.channels.len()).rev() {
            self.recall_channel(at);
            self.leave(at);
        }
    }
}
