//! A queue of a Xen disk as the engine runs it.

use super::queue::BlkifQueue;
use crate::blk::requests::Completed;
use manyring_engine::{Done, Fence, Handler, Mode, QueueIo, Turn, Waits};
use manyring_queue::blkif::BackRing;

impl Handler<BackRing> for BlkifQueue {
    const HAS_DISK: bool = true;

    fn attach(&mut self, io: &mut QueueIo<'_>) {
        self.requests.attach(io);
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        self.requests.detach(io);
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        self.requests.watch(io);
    }

    #[inline]
    fn turn(&mut self, ring: &mut BackRing, turn: &mut Turn<'_, '_>) -> Done {
        let (mut popped, now_ns) = (0, turn.io.now_ns());
        if turn.mode == Mode::Serve {
            popped = self.pop_and_submit(ring, turn.io.ring(), now_ns);
        }
        let was_waiting = self.is_waiting();
        let clock = || turn.io.read_clock_ns();
        let Completed { count, lost, has_more } = self.complete(ring, turn.stats, (now_ns, clock));
        let goes_on = self.go_on(turn.io.ring());
        self.tend(popped > 0 || count > 0, now_ns, turn.stats);
        // A completion lets go of what requests in the ring wait for, for which no kick was asked.
        let has_more = has_more || goes_on || (was_waiting && count > 0);
        Done { popped, used: count, told: count, memory_lost: lost, has_more }
    }

    #[inline]
    fn published(&mut self) {
        self.requests.acknowledge();
    }

    /// A queue that pops nothing before one of its requests is done asks the driver for nothing.
    fn waits(&self, _: &BackRing) -> Waits {
        Waits { driver: !self.is_waiting(), at_ns: self.due_ns(), ..Waits::default() }
    }

    fn is_broken(&self) -> bool {
        Self::is_broken(self)
    }

    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        self.requests.on_event(token, result, io);
    }

    fn fence(&mut self, fence: Fence) {
        self.requests.barrier(fence);
    }

    fn abandon(&mut self, ring: &mut BackRing) {
        self.discard_all(ring);
    }
}
