//! `Handler`: what a device brings to serve the chains of a queue, and what the engine asks of it.
//!
//! The engine knows when a queue takes a turn, when it sleeps and who must be told; a handler knows
//! what a chain means. A handler never sleeps, watches nothing, and rings nobody.

use crate::io::QueueIo;
use crate::orders::Fence;
use crate::stats::QueueStats;
use manyring_backend::net::Readiness;
use manyring_memory::GuestMemory;
use manyring_queue::Ring;
use std::sync::Arc;

/// What a turn may do with the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Take chains and serve them.
    Serve,
    /// Take chains and drop them: the queue is disabled, and its driver goes on.
    Drop,
    /// Take none; finish what has been taken.
    Rest,
}

/// What a turn goes by.
#[derive(Debug)]
pub struct Turn<'a, 'w> {
    /// What the worker lends.
    pub io: &'a mut QueueIo<'w>,
    /// The queue's counters.
    pub stats: &'a QueueStats,
    /// What may be done with the ring.
    pub mode: Mode,
}

/// What a turn did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Requests or frames that it took, from the driver or from a port.
    pub popped: usize,
    /// Chains that it returned; the engine publishes them.
    pub used: usize,
    /// What the driver counts in them: requests or frames, of which a long one fills several
    /// chains.
    pub told: usize,
    /// Guest memory was cut away.
    pub memory_lost: bool,
    /// There is more to do in the next turn, without a kick and without an event.
    pub has_more: bool,
}

/// What would make a further turn worth it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// The driver makes buffers available.
    pub driver: bool,
    /// The port has this.
    pub port: Option<Awaited>,
    /// This time has come.
    pub at_ns: Option<u64>,
    /// The port is down, detached or gone.
    pub is_gone: bool,
}

/// What a port is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// It has something to receive.
    Input,
    /// It takes something again.
    Output,
}

/// What serves the chains of one queue, whose ring is an `R`. Owned by the queue's worker.
pub trait Handler<R: Ring>: Send + std::fmt::Debug + 'static {
    /// A driver that disables the queue may go on filling it: what it holds is dropped
    /// (vhost-user, "Ring states": transmitqs).
    const DROPS_WHEN_DISABLED: bool = false;

    /// What is in flight is served by a disk, and comes back from it by itself.
    const HAS_DISK: bool = false;

    /// Gets ready on a worker.
    fn attach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Lets go of the worker. Nothing is in flight.
    fn detach(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Watches what reports aside from the worker's ring: at [`Self::attach`], and again when the
    /// kernel has ended the watch.
    fn watch(&mut self, io: &mut QueueIo<'_>) {
        let _ = io;
    }

    /// Takes chains as far as the mode allows, serves them, and returns those that are done. The
    /// chains that are returned need not be published.
    fn turn(&mut self, ring: &mut R, turn: &mut Turn<'_, '_>) -> Done;

    /// What the last turn returned, if anything, is published, and the driver was told if it wanted
    /// to know.
    /// Who waits for the end of that hears of it now, and not before: the ring may be somebody
    /// else's memory as soon as they do.
    fn published(&mut self) {}

    /// What would make the next turn worth it.
    fn waits(&self, ring: &R) -> Waits;

    /// What would make the next turn worth it of a queue that takes no chains: that something which
    /// it took before is done.
    fn waits_at_rest(&self) -> Waits {
        Waits::default()
    }

    /// Where its port tells what [`Self::waits`] names.
    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }

    /// True if it has work and cannot go on before its port reports: the queue should settle at
    /// once, also beside others that are busy.
    fn is_stuck(&self) -> bool {
        false
    }

    /// The worker's ring has completed what was submitted with this token.
    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        let _ = (token, result, io);
    }

    /// Its port has reported; `is_broken`: and has nothing but an error.
    fn on_port(&mut self, is_broken: bool) {
        let _ = is_broken;
    }

    /// The driver has enabled the queue.
    fn revive(&mut self) {}

    /// True if memory was cut away that it uses beside the snapshot in which its ring lies.
    fn is_broken(&self) -> bool {
        false
    }

    /// What it goes by has changed.
    fn refresh(&mut self) {}

    /// True while it holds frames that [`Self::let_go`] would drop.
    fn holds_frames(&self) -> bool {
        false
    }

    /// True while it holds frames that the port can take: it sends them in its next turns.
    fn is_in_burst(&self) -> bool {
        false
    }

    /// Gives chains back that nobody has begun to serve. True if some of them were returned to the
    /// driver; others are as if they had never been taken.
    fn let_go(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Takes back from its port what nobody has begun with, since the driver is to get its memory
    /// back: it is not served any more. True if chains were returned to the driver.
    fn recall(&mut self, ring: &mut R, stats: &QueueStats) -> bool {
        let _ = (ring, stats);
        false
    }

    /// Serves the queue in `memory` from now on; `fence` is told when nothing uses older memory.
    fn retire_memory(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        drop(memory);
        let _ = fence.send(Ok(()));
    }

    /// `fence` is told when everything that has been taken until now is done.
    fn fence(&mut self, fence: Fence) {
        let _ = fence.send(Ok(()));
    }

    /// Gives up what is in flight, when the queue ends.
    fn abandon(&mut self, ring: &mut R);
}
