//! `Late`: frames that a port still uses when `send` has returned; their chains, and who waits.
//!
//! ```text
//! add              the port has taken a frame and goes on using its memory
//! reap             in every turn: frames that the port has finished go back to the driver, in any
//!                  order
//! recall           the driver is to get its memory back: frames that the port has not begun to
//!                  send go back at once, and are not sent
//! retire, barrier  a change of memory; a disabled queue or a stop: acknowledged when all frames
//!                  that are with the port are back
//! ```
//! A queue whose port finishes every frame in `send` has no `Late`.

use super::tally::Tally;
use super::{NetTx, Turn};
use manyring_backend::net::{Frames, Outcome, PortTx, Readiness, Returned};
use manyring_engine::stats::QueueStats;
use manyring_engine::{Epochs, Fence, Table};
use manyring_memory::GuestMemory;
use manyring_queue::{Chain, Chains};
use manyring_wire::net::RawHeader;
use std::sync::Arc;

/// A port that has frames and cannot tell when it is done with them is asked again this long after
/// it was last asked.
const ASK_NS: u64 = 50_000;
/// A port that rings when it is done with frames is asked after this long: only so that it sees
/// whoever holds frames for too long.
const LOOK_NS: u64 = 50_000_000;
/// After this long a wait for frames that are with the port is logged.
const PATIENCE_NS: u64 = 1_000_000_000;

/// A frame that is with the port.
#[derive(Debug)]
struct Held {
    chain: Chain,
    header: RawHeader,
    len: usize,
}

/// Somebody waits for frames of this queue to come back.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since_ns: u64,
    is_told: bool,
}

/// The frames of a transmitq that are with its port.
#[derive(Debug)]
pub(super) struct Late {
    frames: Table<Held>,
    count: usize,
    /// The memory that the frames lie in stays mapped until they are back.
    epochs: Epochs,
    returned: Vec<Returned>,
    memory_lost: bool,
    asked_at_ns: u64,
    waiting: Option<Waiting>,
}

impl Late {
    /// No frame is with the port of a queue that lies in `memory`.
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

    /// The port has taken frame `index` of the burst, which has this header, and keeps it.
    pub(super) fn add(&mut self, chain: Chain, frames: &Frames, index: usize, header: RawHeader) {
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

    /// Returns what the port has finished to the driver.
    pub(super) fn reap(
        &mut self,
        port: &mut dyn PortTx,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
        turn: &mut Turn,
    ) {
        self.asked_at_ns = now_ns;
        if self.count > 0 {
            port.reap(&mut self.returned);
            turn.used += self.finish(queue, stats);
            turn.frames = turn.used;
        }
        turn.memory_lost |= std::mem::take(&mut self.memory_lost);
    }

    /// Takes back the frames that the port has not begun to send. True if chains went back to the
    /// driver.
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

    /// Pushes the chains of all frames that the port has returned, and counts what became of the
    /// frames. Returns how many chains these are.
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

    /// Serves the queue in `memory` from now on; `fence` is told when no frame that is with the
    /// port lies in older memory.
    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.epochs.retire(memory, fence);
    }

    /// `fence` is told when every frame that is with the port now is back.
    pub(super) fn barrier(&mut self, fence: Fence) {
        self.epochs.barrier(fence);
    }

    /// Chains that came back have been published: answers the fences that waited for them.
    #[cold]
    pub(super) fn acknowledge(&mut self) {
        self.epochs.acknowledge();
        if !self.epochs.is_waited_for() {
            self.waiting = None;
        }
    }

    /// How many frames are with the port, if a fence has waited for them long enough to be logged.
    /// Once for each wait.
    pub(super) fn overdue(&mut self, now_ns: u64) -> Option<usize> {
        if !self.epochs.is_waited_for() {
            return None;
        }
        let fresh = Waiting { since_ns: now_ns, is_told: false };
        let waiting = self.waiting.get_or_insert(fresh);
        let is_long = now_ns.saturating_sub(waiting.since_ns) >= PATIENCE_NS;
        (is_long && !std::mem::replace(&mut waiting.is_told, true)).then_some(self.count)
    }

    /// When the queue must take a turn without an event: to ask the port, or to log a long wait.
    pub(super) fn due_ns(&self, port: &dyn PortTx) -> Option<u64> {
        let pause_ns = match port.done() {
            Readiness::Fd(_) => None,
            Readiness::Bell(_) => Some(LOOK_NS),
            Readiness::Always | Readiness::Never => Some(ASK_NS),
        };
        let pause_ns = pause_ns.filter(|_| self.count > 0);
        let asks_at_ns = pause_ns.map(|pause_ns| self.asked_at_ns + pause_ns);
        let waiting = self.waiting.filter(|waiting| !waiting.is_told);
        let tells_at_ns = waiting.map(|waiting| waiting.since_ns + PATIENCE_NS);
        [asks_at_ns, tells_at_ns].into_iter().flatten().min()
    }

    /// The queue ends. Memory that the port may still read stays mapped for ever.
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

    /// How many frames are with the port.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.count
    }
}

/// What a transmitq does with the frames that are with its port.
impl NetTx {
    /// Gives the chains of frames that the port has finished back to the driver.
    #[cold]
    pub(crate) fn reap(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
        turn: &mut Turn,
    ) {
        let Some(late) = &mut self.late else { return };
        late.reap(&mut *self.port, queue, stats, now_ns, turn);
        if let Some(frames) = late.overdue(now_ns) {
            let (device, queue) = (&self.place.0, self.place.1);
            tracing::warn!(
                device,
                queue,
                frames,
                "the port holds frames since a second: the driver waits to get their memory back"
            );
        }
    }

    /// Takes back the frames that the port has not begun to send: they are lost. True if chains
    /// went back to the driver.
    pub(crate) fn recall(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> bool {
        let Some(late) = &mut self.late else { return false };
        late.recall(&mut *self.port, queue, stats)
    }

    /// Serves the queue in `memory` from now on; `fence` is told when no frame that is with the
    /// port lies in older memory.
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

    /// `fence` is told when every frame that is with the port now is back.
    pub(crate) fn barrier(&mut self, fence: Fence) {
        match &mut self.late {
            Some(late) => late.barrier(fence),
            None => drop(fence.send(Ok(()))),
        }
    }

    /// Chains that came back have been published.
    #[inline]
    pub(crate) fn acknowledge(&mut self) {
        if let Some(late) = &mut self.late {
            late.acknowledge();
        }
    }

    /// When the queue must take a turn for frames that are with the port.
    pub(crate) fn late_due_ns(&self) -> Option<u64> {
        self.late.as_ref()?.due_ns(&*self.port)
    }

    /// What tells that the port has finished frames.
    pub(crate) fn done(&self) -> Readiness<'_> {
        self.port.done()
    }

    /// False if the port has finished frames that it kept. If not, it rings when it has.
    pub(crate) fn may_sleep(&self) -> bool {
        let has_frames = self.late.as_ref().is_some_and(|late| late.count > 0);
        !has_frames || self.port.done().bell().is_none_or(|bell| bell.alarm().arm())
    }

    /// The queue ends: gives up the frames that are with the port.
    pub(crate) fn abandon(&mut self, queue: &mut impl Chains) {
        if let Some(late) = self.late.take() {
            late.abandon(&mut *self.port, queue);
        }
    }

    /// How many frames are with the port.
    #[cfg(test)]
    pub(crate) fn late_count(&self) -> usize {
        self.late.as_ref().map_or(0, |late| late.count())
    }
}
