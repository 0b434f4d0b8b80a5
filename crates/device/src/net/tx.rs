//! transmitq: chain -> frame -> `PortTx::send` (virtio 1.3 §5.1.6.2).
//!
//! ```text
//! turn:   if the port has finished frames that it kept: push their chains         (late.rs)
//!         if no burst is held: pop a batch, and make a frame of each chain       (parse.rs)
//!         offer the burst to the port:
//!           the port took a group of frames: push and publish their chains
//!           the bound of a turn is reached: the rest waits for the next turn
//!           the port is full: the rest waits until the port has room
//!           the host has no memory: the rest waits for a millisecond, 100 times at most
//! let go: offer the burst once more, for one turn's bytes; drop the rest; push all chains
//! ```
//! 1. The frames of a burst stay in order: nothing is popped while a burst is held.
//! 2. A frame is a list of slices of guest memory, not a copy. Its chain is returned when the port
//!    has sent the frame. If the port keeps the slices, `late.rs` returns the chain later.
//! 3. A frame counts as passed when its burst is done and the port has not refused it. Counters are
//!    updated once for each burst.

mod late;
mod limited;
mod take;

use super::kept_buffers::Kept;
use super::tally::{Tally, count_gains};
use super::{NetTurn, Reclaim, Rules};
use crate::live::Live;
use crate::policy::burst::{self, BurstBounds, Spent};
use late::PortFrames;
use manyring_backend::net::{Frames, GROUP_BYTES, PortTx, Readiness, Sent, Stop};
use manyring_engine::stats::{Counter, QueueStats};
use manyring_engine::{Gate, Limit};
use manyring_memory::MemoryError;
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains};
use manyring_wire::host_size;
use manyring_wire::net::{HEADER_SIZE, Offloads};
use std::sync::Arc;

const _: () = assert!(burst::FRAMES_MAX == BATCH_CHAINS && burst::SHARED_BYTES == GROUP_BYTES);
/// Delay before sending is retried when the host is out of memory.
const NO_MEMORY_RETRY_NS: u64 = 1_000_000;
/// After so many attempts the frame is dropped.
const NO_MEMORY_TRIES: u32 = 100;

/// A transmitq, as its worker runs it.
#[derive(Debug)]
pub(crate) struct NetTx {
    pub(super) port: Box<dyn PortTx>,
    rules: Arc<Rules>,
    /// Where [`Self::refresh_rules`] loads the rules from.
    live: Option<Arc<Live<Rules>>>,
    /// The limit of the device as it was last loaded, and where to load it from; `None`: no limit.
    gate: Option<Box<Gate>>,
    limit: Option<Arc<Limit>>,
    /// The offloads that the guest may use in its frames.
    taken: Offloads,
    /// Bytes of the header before each of the guest's frames.
    header_size: usize,
    batch: Batch,
    /// The burst; the chains of its remaining frames, in order; and how many of its frames are
    /// done.
    frames: Frames,
    chains: Vec<Chain>,
    done: usize,
    /// Remaining frames that the port has sent before earlier ones ([`Sent::ahead`]), a bit for
    /// each.
    ahead: u64,
    stop: Option<Stop>,
    retry_at_ns: u64,
    tries: u32,
    /// Sums of the burst, and of those of its frames that were lost or that the port still has.
    last: Tally,
    lost: Tally,
    /// Limits the frames and bytes of a turn.
    pub(super) burst: BurstBounds,
    /// Frames that the port has taken and still uses; `None` until it keeps the first one.
    late: Option<Box<PortFrames>>,
    /// Buffers of sent frames that are returned in groups; `None`: each is returned at once.
    kept: Option<Box<Kept>>,
    /// The device's name and the queue's index, for log messages.
    pub(super) place: (String, usize),
}

impl NetTx {
    pub(crate) fn new(
        port: Box<dyn PortTx>,
        rules: Arc<Rules>,
        taken: Offloads,
    ) -> Result<Self, MemoryError> {
        Ok(Self {
            port,
            rules,
            live: None,
            gate: None,
            limit: None,
            taken,
            header_size: HEADER_SIZE,
            batch: Batch::new(),
            frames: Frames::new()?,
            chains: Vec::with_capacity(BATCH_CHAINS),
            done: 0,
            ahead: 0,
            stop: None,
            retry_at_ns: 0,
            tries: 0,
            last: Tally::default(),
            lost: Tally::default(),
            burst: BurstBounds::new(),
            late: None,
            kept: None,
            place: (String::new(), 0),
        })
    }

    /// Sets the size of the driver's headers. Must be called before the first turn.
    pub(crate) fn set_headers(&mut self, size: usize) {
        self.header_size = size;
    }

    /// Sets the device's name and the queue's index, for log messages.
    pub(crate) fn named(mut self, device: &str, index: usize) -> Self {
        self.place = (device.to_owned(), index);
        self
    }

    /// Sets where [`Self::refresh_rules`] loads the rules from.
    pub(crate) fn follow(mut self, live: Arc<Live<Rules>>) -> Self {
        self.live = Some(live);
        self
    }

    /// Sets when buffers are returned, as the operator configured.
    pub(crate) fn reclaiming(mut self, reclaim: Reclaim) -> Self {
        self.kept = (reclaim == Reclaim::Auto).then(|| Box::new(Kept::new()));
        self
    }

    /// Returns when the held buffers must be returned; `None`: none are held.
    pub(crate) fn kept_due_ns(&self) -> Option<u64> {
        self.kept.as_ref().and_then(|kept| kept.due_ns())
    }

    /// Loads the present rules and the present limit.
    pub(crate) fn refresh_rules(&mut self) {
        if let Some(live) = &self.live {
            self.rules = live.load();
        }
        self.take_limit();
    }

    #[cfg(test)]
    pub(crate) fn set_rules(&mut self, rules: Arc<Rules>) {
        self.rules = rules;
    }

    pub(crate) fn readiness(&self) -> Readiness<'_> {
        self.port.readiness()
    }

    /// True while frames wait that the port did not take.
    pub(crate) fn waits_for_port(&self) -> bool {
        self.stop.is_some()
    }

    /// True while frames wait, for the port or for the next turn.
    pub(crate) fn holds_frames(&self) -> bool {
        !self.chains.is_empty()
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.stop == Some(Stop::Blocked)
    }

    pub(crate) fn retry_at_ns(&self) -> Option<u64> {
        (self.stop == Some(Stop::NoMemory)).then_some(self.retry_at_ns)
    }

    /// Call when the port may have room again.
    pub(crate) fn on_port(&mut self) {
        if self.is_blocked() {
            self.retry_at_ns = 0;
        }
    }

    /// Pops a batch and sends it, or sends the rest of the last one. `now_ns` is the time at which
    /// the round began.
    #[inline]
    pub(crate) fn turn(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        is_enabled: bool,
        (now_ns, clock): (u64, impl Fn() -> u64),
    ) -> NetTurn {
        let mut turn = NetTurn::default();
        if self.late.is_some() {
            self.reap(queue, stats, now_ns, &mut turn);
        }
        if self.kept.is_some() {
            turn.used += self.settle_kept(queue, now_ns);
            turn.frames = turn.used;
        }
        if self.stop.is_some() {
            if now_ns < self.retry_at_ns && self.rules.link_up {
                return turn;
            }
        } else if self.chains.is_empty() {
            // Pop a full batch if its frames are to be dropped: that is quick, whatever their
            // length.
            let is_sent = is_enabled && self.rules.link_up;
            let frames_max = if is_sent { self.burst.frames_max() } else { burst::FRAMES_MAX };
            turn.packets = queue.pop_batch(&mut self.batch, frames_max);
            if self.gate.is_some() {
                turn.packets = self.admitted(queue, stats, (turn.packets, is_sent), now_ns);
            }
            if turn.packets == 0 {
                return turn;
            }
            turn.used += self.take_batch(queue, stats, turn.packets, is_enabled);
            if self.gate.is_some() {
                self.settle_limit(now_ns);
            }
            if let Some(kept) = &mut self.kept {
                kept.on_burst(now_ns, self.last.packets, self.last.bytes);
            }
        }
        self.send(queue, stats, (now_ns, clock), &mut turn);
        if self.kept.is_some() {
            turn.used += self.settle_kept(queue, now_ns);
        }
        turn.frames = turn.used;
        turn
    }

    /// Returns held buffers to the driver, if they are due. Returns their number.
    #[inline(never)]
    fn settle_kept(&mut self, queue: &mut impl Chains, now_ns: u64) -> usize {
        let is_stuck = self.stop.is_some();
        let Some(kept) = &mut self.kept else { return 0 };
        // While frames wait for the port, return the buffers of sent frames at once.
        if is_stuck { kept.give_back(queue) } else { kept.settle(queue, now_ns) }
    }

    /// Offers the remaining frames to the port, or drops them while the link is down.
    #[inline]
    fn send_rest(&mut self, stats: &QueueStats) -> Sent {
        if self.rules.link_up {
            let sent = self.port.send(&self.frames, self.done);
            self.ahead = sent.ahead;
            return sent;
        }
        self.drop_rest(&stats.dropped_link_down);
        Sent { taken: self.frames.count() - self.done, ..Sent::default() }
    }

    /// Counts the remaining frames as dropped, except those that the port has sent before earlier
    /// ones: these are counted already.
    #[cold]
    fn drop_rest(&mut self, cause: &Counter) {
        let ahead = self.ahead;
        for index in (self.done..self.frames.count()).filter(|index| ahead >> index & 1 == 0) {
            cause.add(1);
            self.lose(index);
        }
    }

    /// Sends the remaining frames, as many as a turn may send. A port that takes frames in groups
    /// is slow, so the driver sees each group before the next one is sent.
    #[inline]
    fn send(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        (now_ns, clock): (u64, impl Fn() -> u64),
        turn: &mut NetTurn,
    ) {
        let mut spent = Spent::default();
        loop {
            let first = self.done;
            if !self.send_group(queue, stats, now_ns, turn) {
                return;
            }
            queue.publish();
            let bytes = (first..self.done).map(|index| self.frames.len(index)).sum();
            if self.burst.is_over(&mut spent, bytes, &clock) {
                turn.has_more = true;
                return;
            }
        }
    }

    /// Offers the remaining frames to the port once. Returns true if the rest should be offered
    /// now, too.
    fn send_group(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
        turn: &mut NetTurn,
    ) -> bool {
        let sent = self.send_rest(stats);
        let taken = sent.taken.min(self.chains.len());
        if sent.later != 0 {
            turn.used += self.keep_late(queue, taken, sent.later);
        } else if self.kept.is_some() {
            turn.used += self.keep_or_return(queue, taken, stats);
        } else {
            for chain in self.chains.drain(..taken) {
                queue.push_used(chain, 0);
            }
            turn.used += taken;
        }
        self.done += taken;
        turn.memory_lost |= sent.faulted > 0;
        self.count_lost(&sent, stats);
        self.stop = sent.stop;
        match sent.stop {
            None if self.chains.is_empty() => {
                self.finish(stats);
                return false;
            }
            None => {
                assert!(taken > 0, "a port that takes nothing says why");
                self.tries = 0;
                return true;
            }
            Some(Stop::Blocked) => {
                stats.blocked.add(1);
                // No time: wait for the port's event.
                self.retry_at_ns = u64::MAX;
                if matches!(self.port.readiness(), Readiness::Always) {
                    self.retry_at_ns = now_ns;
                }
            }
            Some(Stop::NoMemory) => {
                self.tries = if taken > 0 { 0 } else { self.tries + 1 };
                self.retry_at_ns = now_ns + NO_MEMORY_RETRY_NS;
            }
        }
        if self.tries >= NO_MEMORY_TRIES
            && let Some(chain) = (!self.chains.is_empty()).then(|| self.chains.remove(0))
        {
            stats.dropped_no_memory.add(1);
            queue.push_used(chain, 0);
            self.lose(self.done);
            (self.tries, self.done, turn.used) = (0, self.done + 1, turn.used + 1);
        }
        if self.chains.is_empty() {
            self.stop = None;
            self.finish(stats);
        }
        false
    }

    /// Handles the buffers of the next `taken` frames: holds them for a group, if the policy says
    /// so, or returns them to the driver. Returns the number of returned ones.
    #[inline(never)]
    fn keep_or_return(
        &mut self,
        queue: &mut impl Chains,
        taken: usize,
        stats: &QueueStats,
    ) -> usize {
        let chains = self.chains.drain(..taken);
        if let Some(kept) = self.kept.as_mut().filter(|kept| kept.keeps()) {
            kept.add(chains, stats);
            return 0;
        }
        chains.for_each(|chain| queue.push_used(chain, 0));
        taken
    }

    /// Counts the frames that the port took and lost, by cause.
    #[inline]
    fn count_lost(&mut self, sent: &Sent, stats: &QueueStats) {
        if sent.merged.frames | sent.steered != 0 {
            count_gains(sent, stats);
        }
        if sent.lost != 0 {
            stats.dropped_refused.add(sent.refused as u64);
            stats.dropped_bad_header.add(sent.misplaced as u64);
            stats.dropped_port_down.add(sent.down as u64);
            stats.dropped_memory.add(sent.faulted as u64);
            let is_lost = |index: &usize| sent.lost >> index & 1 != 0;
            (0..self.frames.count()).filter(is_lost).for_each(|index| self.lose(index));
        }
    }

    /// Counts frame `index` of the burst as lost.
    #[cold]
    fn lose(&mut self, index: usize) {
        self.lost.add(&self.frames.header(index), self.frames.len(index));
    }

    /// Ends the burst, and adds its sums to the counters.
    #[inline]
    fn finish(&mut self, stats: &QueueStats) {
        let Tally { packets, bytes, gso } = std::mem::take(&mut self.last);
        let lost = std::mem::take(&mut self.lost);
        if let Some(mean) = host_size(bytes).checked_div(self.frames.count()) {
            self.burst.learn(mean);
        }
        stats.packets.add(packets - lost.packets);
        stats.bytes_passed.add(bytes - lost.bytes);
        if gso > 0 {
            stats.gso_packets.add(gso - lost.gso);
        }
        self.frames.clear();
        (self.done, self.ahead, self.tries, self.retry_at_ns) = (0, 0, 0, 0);
    }

    /// Offers the remaining frames to the port once more, drops those that it does not take, and
    /// returns all chains except those of frames that the port still has. Afterwards only these
    /// frames use guest memory.
    pub(crate) fn let_go(&mut self, queue: &mut impl Chains, stats: &QueueStats) {
        if let Some(kept) = &mut self.kept {
            kept.give_back(queue);
        }
        if !self.chains.is_empty() {
            self.give_up(queue, stats);
        }
        self.frames.release();
        self.batch.release();
    }

    /// Ends a burst that the port did not take (`is_in_burst`). If the port takes frames now, it
    /// gets those of one turn at most, so that no other guest's time is charged for more.
    fn give_up(&mut self, queue: &mut impl Chains, stats: &QueueStats) {
        let first = self.done;
        let bytes = |tx: &Self| (first..tx.done).map(|index| tx.frames.len(index)).sum::<usize>();
        while !self.chains.is_empty() && bytes(self) < burst::SHARED_BYTES {
            let sent = self.send_rest(stats);
            self.count_lost(&sent, stats);
            let taken = sent.taken.min(self.chains.len());
            self.keep_late(queue, taken, sent.later);
            self.done += taken;
            if taken == 0 || sent.stop.is_some() {
                break;
            }
        }
        self.drop_rest(&stats.dropped_port_full);
        for chain in self.chains.drain(..) {
            queue.push_used(chain, 0);
        }
        self.stop = None;
        self.finish(stats);
    }

    /// Returns the chains of the next `taken` frames to the driver, except those that the port
    /// keeps, which are counted when they come back. Returns the number of returned ones.
    #[cold]
    fn keep_late(&mut self, queue: &mut impl Chains, taken: usize, later: u64) -> usize {
        let mut returned = 0;
        for (index, chain) in (self.done..).zip(self.chains.drain(..taken)) {
            if later >> index & 1 == 0 {
                queue.push_used(chain, 0);
                returned += 1;
                continue;
            }
            let header = self.frames.header(index);
            self.lost.add(&header, self.frames.len(index));
            let late = self.late.get_or_insert_with(|| PortFrames::new(queue.memory().clone()));
            late.add(chain, &self.frames, index, header);
        }
        returned
    }
}
