//! `PortFrames`: frames whose memory a port still uses after `send`, and the waits for their
//! return.
//!
//! ```text
//! add              the port has taken a frame and still uses its memory
//! reap             in every turn: push the chains of frames that the port has finished, in any
//!                  order
//! recall           the driver must get its memory back: take back frames that the port has not
//!                  begun to send, and drop them
//! retire, barrier  after a change of memory, or when the queue is disabled or stops: acknowledge
//!                  when the port has returned all frames
//! ```
//! A queue whose port finishes every frame in `send` has no `PortFrames`.

use super::{NetTurn, NetTx};
use crate::net::tally::Tally;
use manyring_backend::net::{Frames, Outcome, PortTx, Readiness, Returned};
use manyring_engine::stats::QueueStats;
use manyring_engine::{Epochs, Fence, Table};
use manyring_memory::GuestMemory;
use manyring_queue::{Chain, Chains};
use manyring_wire::net::RawNetHeader;
use std::sync::Arc;

/// For a port that cannot report finished frames: `reap` is called this long after the last call,
/// while the port has frames.
const ASK_NS: u64 = 50_000;
/// For a port that rings when frames are finished: `reap` is called at least this often, so that
/// the port can take frames back from a receiver that holds them too long.
const LOOK_NS: u64 = 50_000_000;
/// A wait for frames of a port that takes longer than this is logged.
const TIMEOUT_NS: u64 = 1_000_000_000;

/// A frame that the port still uses.
#[derive(Debug)]
struct Held {
    chain: Chain,
    header: RawNetHeader,
    len: usize,
}

/// A wait until the port has returned the frames of this queue.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since_ns: u64,
    is_told: bool,
}

/// The frames of a transmitq that its port still uses.
#[derive(Debug)]
pub(super) struct PortFrames {
    frames: Table<Held>,
    count: usize,
    /// Keeps the memory of the frames mapped until they are back.
    epochs: Epochs,
    returned: Vec<Returned>,
    memory_lost: bool,
    asked_at_ns: u64,
    waiting: Option<Waiting>,
}

impl PortFrames {
    /// Makes the table for a queue in guest memory `memory`; it has no frames yet.
    #[cold]
    pub(super) fn new(memory: Arc<GuestMemory>) -> Box<Self> {
        Box::new(Self {
            frames: Table::new(),
            count: 0,
            epochs: Epochs::new(memory),
            returned: Vec::new(),
            memory_lost: false,
            asked_at_ns: 0,
            waiting: None,
        })
    }

    /// Adds frame `index` of the burst, which the port has taken and still uses.
    pub(super) fn add(
        &mut self,
        chain: Chain,
        frames: &Frames,
        index: usize,
        header: RawNetHeader,
    ) {
        let epoch = self.epochs.begin();
        debug_assert!(
            frames.payload(index).is_some_and(|payload| std::ptr::eq(
                Arc::as_ptr(payload.memory()),
                self.epochs.memory(epoch)
            )),
            "a frame of another snapshot"
        );
        let len = frames.len(index);
        self.frames.insert(chain.slot(), epoch, Held { chain, header, len });
        self.count += 1;
    }

    /// Returns the chains of frames that the port has finished to the driver.
    pub(super) fn reap(
        &mut self,
        port: &mut dyn PortTx,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
        turn: &mut NetTurn,
    ) {
        self.asked_at_ns = now_ns;
        if self.count > 0 {
            port.reap(&mut self.returned);
            turn.used += self.finish(queue, stats);
            turn.frames = turn.used;
        }
        turn.memory_lost |= std::mem::take(&mut self.memory_lost);
    }

    /// Takes back the frames that the port has not begun to send. Returns true if chains were
    /// returned to the driver.
    pub(super) fn recall(
        &mut self,
        port: &mut dyn PortTx,
        queue: &mut impl Chains,
        stats: &QueueStats,
    ) -> bool {
        port.reap(&mut self.returned);
        let left = port.recall(&mut self.returned);
        let used = self.finish(queue, stats);
        debug_assert_eq!(left, self.count, "frames that the port knows nothing of");
        used > 0
    }

    /// Returns the chains of all frames that have come back to the driver, and counts the frames by
    /// their outcome. Returns the number of chains.
    fn finish(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> usize {
        let (mut used, mut passed) = (0, Tally::default());
        for Returned { token, outcome } in self.returned.drain(..) {
            let Some((epoch, held)) = self.frames.take(token.into()) else {
                debug_assert!(false, "the port returns a frame that it has not: {token}");
                continue;
            };
            match outcome {
                Outcome::Passed => passed.add(&held.header, held.len),
                Outcome::Refused => stats.dropped_refused.add(1),
                Outcome::Down => stats.dropped_port_down.add(1),
                Outcome::Recalled => stats.dropped_port_full.add(1),
                Outcome::Faulted => {
                    stats.dropped_memory.add(1);
                    self.memory_lost = true;
                }
            }
            queue.push_used(held.chain, 0);
            self.epochs.end(epoch);
            used += 1;
        }
        self.count -= used;
        passed.store(stats);
        used
    }

    /// Serves the queue in `memory` from now on; answers `fence` when the port has no frame in
    /// older memory any more.
    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.epochs.retire(memory, fence);
    }

    /// Answers `fence` when the port has returned every frame that it has now.
    pub(super) fn barrier(&mut self, fence: Fence) {
        self.epochs.barrier(fence);
    }

    /// Answers the fences that waited for chains which are published now.
    #[cold]
    pub(super) fn acknowledge(&mut self) {
        self.epochs.acknowledge();
        if !self.epochs.is_waited_for() {
            self.waiting = None;
        }
    }

    /// Returns the number of frames that the port has, if a fence has waited for them too long;
    /// `None` if not, or if this wait was reported before.
    pub(super) fn overdue(&mut self, now_ns: u64) -> Option<usize> {
        if !self.epochs.is_waited_for() {
            return None;
        }
        let fresh = Waiting { since_ns: now_ns, is_told: false };
        let waiting = self.waiting.get_or_insert(fresh);
        let is_long = now_ns.saturating_sub(waiting.since_ns) >= TIMEOUT_NS;
        (is_long && !std::mem::replace(&mut waiting.is_told, true)).then_some(self.count)
    }

    /// Returns when the queue needs a turn without an event, to call `reap` or to log a long wait;
    /// `None`: never.
    pub(super) fn due_ns(&self, port: &dyn PortTx) -> Option<u64> {
        let pause_ns = match port.done() {
            Readiness::Fd(_) => None,
            Readiness::Doorbell(_) => Some(LOOK_NS),
            Readiness::Always | Readiness::Never => Some(ASK_NS),
        };
        let pause_ns = pause_ns.filter(|_| self.count > 0);
        let asks_at_ns = pause_ns.map(|pause_ns| self.asked_at_ns + pause_ns);
        let waiting = self.waiting.filter(|waiting| !waiting.is_told);
        let tells_at_ns = waiting.map(|waiting| waiting.since_ns + TIMEOUT_NS);
        [asks_at_ns, tells_at_ns].into_iter().flatten().min()
    }

    /// Ends the queue. Memory that the port may still read stays mapped for ever.
    pub(super) fn abandon(mut self, port: &mut dyn PortTx, queue: &mut impl Chains) {
        port.reap(&mut self.returned);
        port.recall(&mut self.returned);
        for Returned { token, .. } in self.returned.drain(..) {
            if let Some((_, held)) = self.frames.take(token.into()) {
                queue.discard(held.chain);
                self.count -= 1;
            }
        }
        self.frames.drain().for_each(|held| queue.discard(held.chain));
        if self.count > 0 {
            self.epochs.leak();
        }
    }

    /// Returns the number of frames that the port has.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.count
    }
}

/// A transmitq's functions for frames that its port has.
impl NetTx {
    /// Returns the chains of frames that the port has finished to the driver.
    #[cold]
    pub(crate) fn reap(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
        turn: &mut NetTurn,
    ) {
        let Some(late) = &mut self.late else { return };
        late.reap(&mut *self.port, queue, stats, now_ns, turn);
        if let Some(frames) = late.overdue(now_ns) {
            let (device, queue) = (&self.place.0, self.place.1);
            tracing::warn!(
                device,
                queue,
                frames,
                "the port has held frames for over a second; the guest waits for their buffers"
            );
        }
    }

    /// Takes back the frames that the port has not begun to send, and drops them. True if chains
    /// were returned to the driver.
    pub(crate) fn recall(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> bool {
        let Some(late) = &mut self.late else { return false };
        late.recall(&mut *self.port, queue, stats)
    }

    /// Serves the queue in `memory` from now on; answers `fence` when the port has no frame in
    /// older memory any more.
    pub(crate) fn retire(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.port.forget();
        match &mut self.late {
            Some(late) => late.retire(memory, fence),
            None => {
                drop(memory);
                let _ = fence.send(Ok(()));
            }
        }
    }

    /// Answers `fence` when the port has returned every frame that it has now.
    pub(crate) fn barrier(&mut self, fence: Fence) {
        match &mut self.late {
            Some(late) => late.barrier(fence),
            None => drop(fence.send(Ok(()))),
        }
    }

    /// Call when the returned chains are published.
    #[inline]
    pub(crate) fn acknowledge(&mut self) {
        if let Some(late) = &mut self.late {
            late.acknowledge();
        }
    }

    /// Returns when the queue needs a turn for frames that the port has; `None`: never.
    pub(crate) fn late_due_ns(&self) -> Option<u64> {
        self.late.as_ref()?.due_ns(&*self.port)
    }

    /// Returns the event by which the port reports finished frames.
    pub(crate) fn done(&self) -> Readiness<'_> {
        self.port.done()
    }

    /// Arms the port's doorbell. Returns false if frames are finished already: then the queue must
    /// not sleep.
    pub(crate) fn may_sleep(&self) -> bool {
        let has_frames = self.late.as_ref().is_some_and(|late| late.count > 0);
        !has_frames || self.port.done().doorbell().is_none_or(|doorbell| doorbell.alarm().arm())
    }

    /// Ends the queue: discards the chains of the frames that the port has.
    pub(crate) fn abandon(&mut self, queue: &mut impl Chains) {
        if let Some(late) = self.late.take() {
            late.abandon(&mut *self.port, queue);
        }
    }

    /// Returns the number of frames that the port has.
    #[cfg(test)]
    pub(crate) fn late_count(&self) -> usize {
        self.late.as_ref().map_or(0, |late| late.count())
    }
}
