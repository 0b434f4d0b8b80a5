//! `Handler`: what a device implements to serve a queue's chains, and the functions by which the
//! engine asks for its state.
//!
//! The engine decides when a queue takes a turn, when its worker sleeps, and when the driver gets a
//! used buffer notification; a handler knows what a chain means. A handler never sleeps, never
//! polls a file descriptor, and never sends a notification.

use crate::io::QueueIo;
use crate::running::orders::Fence;
use crate::stats::QueueStats;
use manyring_backend::net::Readiness;
use manyring_memory::GuestMemory;
use manyring_queue::Ring;
use std::sync::Arc;

/// What a turn may do with the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnMode {
    /// Take chains and serve them.
    Serve,
    /// Take chains and return them unserved: the queue is disabled, and its driver still fills it
    /// (vhost-user, "Ring states").
    Drop,
    /// Take no chains; finish those that were taken before.
    Rest,
}

/// What the engine lends a handler for one turn.
#[derive(Debug)]
pub struct Turn<'a, 'w> {
    /// The worker's io_uring, watches and time, lent for this turn.
    pub io: &'a mut QueueIo<'w>,
    /// The queue's counters.
    pub stats: &'a QueueStats,
    /// How the ring may be used.
    pub mode: TurnMode,
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// The number of requests or frames that the turn took, from the driver or from a port.
    pub popped: usize,
    /// The number of chains that the turn returned; the engine publishes them.
    pub used: usize,
    /// How many requests or frames the returned chains hold, for notification coalescing: a
    /// received frame may fill several chains (mergeable buffers).
    pub told: usize,
    /// The turn found that guest memory was truncated (the front-end truncated its file).
    pub memory_lost: bool,
    /// The handler can do more in the next turn: the queue must stay hot, since no kick and no
    /// event will announce this work.
    pub has_more: bool,
}

/// The events and times for which a queue waits: after each of these a further turn is useful.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// True if the queue waits until its driver makes buffers available.
    pub driver: bool,
    /// The state of its port for which the queue waits.
    pub port: Option<Awaited>,
    /// The time at which the queue wants a turn.
    pub at_ns: Option<u64>,
    /// True if reading the port costs little and finds frames that another thread of the process
    /// left there: the worker then reads the port as often as a ring.
    pub looks: bool,
    /// True if the port is down, detached or deleted: the session gets an event.
    pub is_gone: bool,
}

impl Waits {
    /// True if polling memory, without a system call, finds the event for which the queue waits.
    pub(crate) fn can_be_looked_for(&self) -> bool {
        self.driver || self.looks
    }
}

/// The state of a port for which a queue waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The port has a frame to receive.
    Input,
    /// The port, which was full, takes frames again.
    Output,
}

/// A handler serves the chains of one queue, whose ring is an `R`. The queue's worker owns it.
pub trait Handler<R: Ring>: Send + std::fmt::Debug + 'static {
    /// True for a handler (a transmitq's) whose driver may continue to fill a queue that it has
    /// disabled: the back-end must then drop the chains in the ring (vhost-user, "Ring states").
    const DROPS_WHEN_DISABLED: bool = false;

    /// True if chains in flight are at a disk, whose completions wake the worker.
    const HAS_DISK: bool = false;

    /// True for a handler (a receiveq's) that returns a chain only when a frame arrives, which may
    /// be never.
    const WAITS_FOR_INPUT: bool = false;

    /// Prepares the handler on a worker: the queue starts, or comes from another worker.
    fn attach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Detaches the handler from its worker, when nothing is in flight.
    fn detach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Begins to watch the descriptor by which a disk or port signals work that it finished outside
    /// the worker's io_uring. Called after [`Self::attach`], and again when the kernel has ended
    /// the watch.
    fn watch(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Takes chains as far as the mode allows, serves them, and returns those that are done. The
    /// engine publishes the returned chains after the turn; the handler may publish some earlier.
    fn turn(&mut self, ring: &mut R, turn: &mut Turn<'_, '_>) -> Done;

    /// Called after each turn, when the returned chains are published and the driver has its used
    /// buffer notification, if one was due. Only now may the handler answer fences that waited for
    /// these chains: a front-end may reuse the ring's memory as soon as its fence is answered.
    fn published(&mut self) {}

    /// Returns the events and times for which a queue waits that takes chains.
    fn waits(&self, ring: &R) -> Waits;

    /// Returns the events and times for which a queue waits that takes no chains
    /// ([`TurnMode::Rest`]): the end of the requests or frames in flight.
    fn waits_at_rest(&self) -> Waits {
        Waits::default()
    }

    /// Returns how the port signals the state that [`Waits::port`] names.
    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }

    /// Called when the queue is about to sleep. Returns false if the queue must not sleep, since
    /// the port has already finished frames. After true, each frame that the port finishes wakes
    /// the worker.
    fn arm(&self) -> bool {
        true
    }

    /// True if the handler has work and can do none of it before its port signals: the queue then
    /// settles at once, even while its worker is busy with other queues.
    fn is_stuck(&self) -> bool {
        false
    }

    /// Called when the worker's io_uring has completed the entry with this token.
    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        let _ = (token, result, io);
    }

    /// Called when the watched port has signalled. `is_broken`: it signalled an error, and is ready
    /// for nothing.
    fn on_port(&mut self, is_broken: bool) {
        let _ = is_broken;
    }

    /// Called when the front-end has enabled the queue: a port that was lost may be back.
    fn revive(&mut self) {}

    /// True if memory was truncated that the handler uses in addition to the ring's snapshot, such
    /// as the granted pages of a Xen guest.
    fn is_broken(&self) -> bool {
        false
    }

    /// Called when the handler's rules (link, offloads, filter) have changed: it reads them anew.
    fn refresh(&mut self) {}

    /// True while the handler holds frames that [`Self::let_go`] may have to drop.
    fn holds_frames(&self) -> bool {
        false
    }

    /// True while the handler holds frames that the port can take: its next turns send them.
    fn is_in_burst(&self) -> bool {
        false
    }

    /// Gives up all chains that the handler has not begun to serve: each is put back into the ring,
    /// as if it had never been popped, or returned to the driver. Returns true if some were
    /// returned.
    fn let_go(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Takes back the frames that the port has not begun to send, unsent, because the driver must
    /// get its memory back. Returns true if chains were returned to the driver.
    fn recall(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Gives up chains that were set aside ([`Ring::aside`]), because the driver must get its
    /// memory back: puts all of them back into the ring, or returns a batch of them. Called when
    /// nothing is in flight. Returns how many were returned, and true if another call has more to
    /// give up.
    fn give_up_aside(&mut self, ring: &mut R, stats: &QueueStats) -> (usize, bool) {
        let _ = (ring, stats);
        (0, false)
    }

    /// Called when the queue stops, and no chain is taken any more: from its next turn on the
    /// handler may put back the chains that were popped last, as if they had never been popped.
    fn stop(&mut self, ring: &R) {
        let _ = ring;
    }

    /// Sets the memory in which the handler serves the queue from now on. The handler answers
    /// `fence` when nothing in flight uses older memory; this default is right only for a handler
    /// that keeps nothing in flight.
    fn retire_memory(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        drop(memory);
        let _ = fence.send(Ok(()));
    }

    /// Answers `fence` when everything that has been taken until now is done. This default is right
    /// only for a handler that keeps nothing in flight.
    fn fence(&mut self, fence: Fence) {
        let _ = fence.send(Ok(()));
    }

    /// Discards the chains in flight, when the queue ends.
    fn abandon(&mut self, ring: &mut R);
}
