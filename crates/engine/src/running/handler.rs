//! `Handler`: a device's part in serving a queue's chains, and the questions of the engine to it.
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

/// A turn's permission to use the ring.
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

/// The things that a handler is lent for one turn.
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
    /// Requests or frames that the turn took, from the driver or from a port.
    pub popped: usize,
    /// Chains that the turn returned; the engine publishes them.
    pub used: usize,
    /// How many requests or frames the returned chains hold, for notification coalescing: a
    /// received frame may fill several chains (mergeable buffers).
    pub told: usize,
    /// The turn found that guest memory was cut away (a file of the front-end was truncated).
    pub memory_lost: bool,
    /// The handler can go on in the next turn: the queue must stay hot, since no kick and no event
    /// will announce this work.
    pub has_more: bool,
}

/// The events and times for which a queue waits: each of these makes a further turn useful.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// True if the queue waits until its driver makes buffers available.
    pub driver: bool,
    /// The state of its port for which the queue waits.
    pub port: Option<Awaited>,
    /// The time at which the queue wants a turn.
    pub at_ns: Option<u64>,
    /// True if a look at the port costs little and finds frames that another thread of the process
    /// left there: the worker then looks at the port as often as at a ring.
    pub looks: bool,
    /// True if the port is down, detached or gone: the session is told.
    pub is_gone: bool,
}

impl Waits {
    /// True if a look, which costs no system call, finds the event for which the queue waits.
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
    /// True for a handler (a transmitq's) whose driver may go on filling a queue that it has
    /// disabled: the back-end must then drop the chains in the ring (vhost-user, "Ring states").
    const DROPS_WHEN_DISABLED: bool = false;

    /// True if chains in flight are with a disk, whose completions wake the worker.
    const HAS_DISK: bool = false;

    /// True for a handler (a receiveq's) that returns a chain only when something comes from
    /// outside, which may be never.
    const WAITS_FOR_INPUT: bool = false;

    /// Prepares the handler on a worker: the queue starts, or comes from another worker.
    fn attach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Takes the handler off its worker, when nothing is in flight.
    fn detach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Watches the fd by which a disk or port reports what it finished outside the worker's
    /// io_uring. Called after [`Self::attach`], and again when the kernel has ended the watch.
    fn watch(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Takes chains as far as the mode allows, serves them, and returns those that are done. The
    /// engine publishes the returned chains after the turn; the handler may publish some earlier.
    fn turn(&mut self, ring: &mut R, turn: &mut Turn<'_, '_>) -> Done;

    /// Called after each turn, when the returned chains are published and the driver has its used
    /// buffer notification, if one was due. Only now may the handler answer fences that waited for
    /// these chains: a front-end may take the ring's memory back as soon as its fence is answered.
    fn published(&mut self) {}

    /// The events and times for which a queue waits that takes chains.
    fn waits(&self, ring: &R) -> Waits;

    /// The events and times for which a queue waits that takes no chains ([`TurnMode::Rest`]): the
    /// end of the requests or frames in flight.
    fn waits_at_rest(&self) -> Waits {
        Waits::default()
    }

    /// How the port reports what [`Waits::port`] names.
    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }

    /// The queue is about to sleep. False: it must not, since the port has already finished frames
    /// that it kept. True: whatever the port finishes from now on wakes the worker.
    fn arm(&self) -> bool {
        true
    }

    /// True if the handler holds work and can do none of it before its port reports: the queue then
    /// settles at once, even while its worker is busy with other queues.
    fn is_stuck(&self) -> bool {
        false
    }

    /// The worker's io_uring has completed the entry that was submitted with this token.
    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        let _ = (token, result, io);
    }

    /// The watched port has reported. `is_broken`: it reported an error, and is ready for nothing.
    fn on_port(&mut self, is_broken: bool) {
        let _ = is_broken;
    }

    /// The front-end has enabled the queue: a port that was lost may be back.
    fn revive(&mut self) {}

    /// True if memory was cut away that the handler uses beside the ring's snapshot, such as the
    /// granted pages of a Xen guest.
    fn is_broken(&self) -> bool {
        false
    }

    /// The rules that the handler serves by (link, offloads, filter) have changed: takes the new
    /// ones.
    fn refresh(&mut self) {}

    /// True while the handler holds frames that [`Self::let_go`] may have to drop.
    fn holds_frames(&self) -> bool {
        false
    }

    /// True while the handler holds frames that the port can take: its next turns send them.
    fn is_in_burst(&self) -> bool {
        false
    }

    /// Gives up all chains that nobody has begun to serve: each is put back into the ring, as if it
    /// had never been popped, or returned to the driver. True if some were returned.
    fn let_go(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Takes back the frames that the port has not begun to send, unsent, because the driver is to
    /// get its memory back. True if chains were returned to the driver.
    fn recall(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Gives up chains that were set aside ([`Ring::aside`]), because the driver is to get its
    /// memory back: puts all of them back into the ring, or returns a batch of them. Nothing is in
    /// flight. Returns how many were returned, and if there are more for another call.
    fn give_up_aside(&mut self, ring: &mut R, stats: &QueueStats) -> (usize, bool) {
        let _ = (ring, stats);
        (0, false)
    }

    /// The queue stops, and no chain is taken any more: from its next turn on the handler may put
    /// back the chains that were popped last, as if they had never been popped.
    fn stop(&mut self, ring: &R) {
        let _ = ring;
    }

    /// Serves the queue in `memory` from now on. The handler answers `fence` when nothing in flight
    /// uses older memory; this default is right only for a handler that keeps nothing in flight.
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
