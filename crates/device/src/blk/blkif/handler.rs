//! A queue of a Xen disk as the engine runs it.

use super::queue::BlkifQueue;
use crate::blk::requests::Completed;
use manyring_engine::{Done, Fence, Handler, QueueIo, Turn, TurnMode, Waits};
use manyring_queue::blkif::{BackRing, Requests};

/// The queue, and the requests that it popped last. The requests are not a field of the queue, so
/// that the queue can be changed while they are borrowed.
#[derive(Debug)]
pub(super) struct BlkifHandler {
    queue: BlkifQueue,
    batch: Requests,
}

impl BlkifHandler {
    pub(super) fn new(queue: BlkifQueue) -> Self {
        Self { queue, batch: Requests::new() }
    }
}

impl Handler<BackRing> for BlkifHandler {
    const HAS_DISK: bool = true;

    fn attach(&mut self, io: &mut QueueIo<'_>) {
        self.queue.take_limit();
        self.queue.requests.attach(io);
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        self.queue.requests.detach(io);
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        self.queue.requests.watch(io);
    }

    #[inline]
    fn turn(&mut self, ring: &mut BackRing, turn: &mut Turn<'_, '_>) -> Done {
        let (mut popped, now_ns) = (0, turn.io.now_ns());
        if turn.mode == TurnMode::Serve {
            let batch = &mut self.batch;
            let (mut limit, mut is_charged) = (usize::MAX, false);
            if self.queue.gate.is_some() {
                (limit, is_charged) = self.queue.admitted((ring, batch), now_ns, turn.stats);
            }
            popped = self.queue.pop_and_submit((ring, batch), turn.io.ring(), (now_ns, limit));
            if is_charged {
                self.queue.settle_limit(popped, now_ns);
            }
        }
        let clock = || turn.io.read_clock_ns();
        let (completed, is_busy) = self.queue.complete(ring, turn.stats, (now_ns, clock));
        let goes_on = is_busy && self.queue.go_on(turn.io.ring());
        let Completed { count, freed, lost, has_more } = completed;
        self.queue.tend(popped > 0 || freed > 0, now_ns, turn.stats);
        let has_more = has_more || goes_on;
        Done { popped, used: count, told: count, memory_lost: lost, has_more }
    }

    #[inline]
    fn published(&mut self) {
        self.queue.requests.acknowledge();
    }

    /// A queue that cannot pop before one of its requests completes asks for no kicks.
    fn waits(&self, _: &BackRing) -> Waits {
        Waits {
            driver: !self.queue.is_waiting() && !self.queue.is_limited(),
            at_ns: self.queue.due_ns(),
            ..Waits::default()
        }
    }

    fn is_stuck(&self) -> bool {
        self.queue.is_limited()
    }

    fn refresh(&mut self) {
        self.queue.take_limit();
    }

    fn is_broken(&self) -> bool {
        self.queue.is_broken()
    }

    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        self.queue.requests.on_event(token, result, io);
    }

    fn fence(&mut self, fence: Fence) {
        self.queue.requests.barrier(fence);
    }

    fn abandon(&mut self, ring: &mut BackRing) {
        self.queue.discard_all(ring);
    }
}
