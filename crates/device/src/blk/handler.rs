//! `Handler` of a virtio-blk queue: how the engine runs it.

use super::BlkQueue;
use super::requests::Completed;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Done, Fence, Handler, QueueIo, Turn, TurnMode, Waits};
use manyring_memory::GuestMemory;
use manyring_queue::Chains;
use std::sync::Arc;

impl<R: Chains> Handler<R> for BlkQueue {
    const HAS_DISK: bool = true;

    fn attach(&mut self, io: &mut QueueIo<'_>) {
        self.take_limit();
        self.requests.attach(io);
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        self.requests.detach(io);
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        self.requests.watch(io);
    }

    #[inline]
    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        let mut popped = 0;
        if turn.mode == TurnMode::Serve {
            let now_ns = turn.io.now_ns();
            let (mut limit, mut is_charged) = (usize::MAX, false);
            if self.gate.is_some() {
                (limit, is_charged) = self.admitted(queue, now_ns, turn.stats);
            }
            popped = self.pop_and_submit(queue, turn.io.ring(), (now_ns, limit));
            if is_charged {
                self.settle_limit(popped, now_ns);
            }
        }
        let Completed { count, lost, has_more, .. } = if self.requests.are_recalled() {
            let has_more = self.recall(queue, turn.io.ring());
            self.answer(queue, turn.stats, || turn.io.read_clock_ns(), has_more)
        } else {
            self.complete(queue, turn.stats, || turn.io.read_clock_ns())
        };
        Done { popped, used: count, told: count, memory_lost: lost, has_more }
    }

    #[inline]
    fn published(&mut self) {
        self.requests.acknowledge();
    }

    /// A full queue takes no request before the disk completes one: so it asks the driver for no
    /// kicks and retries nothing. At a completion it asks for kicks again, and checks the ring for
    /// requests that the driver has added meanwhile.
    fn waits(&self, queue: &R) -> Waits {
        let has_place = !self.is_full(queue);
        let limited_ns = self.limited_until_ns();
        let times = [self.requests.waiters.due_ns(), limited_ns];
        let at_ns = times.into_iter().flatten().min().filter(|_| has_place);
        Waits { driver: has_place && limited_ns.is_none(), at_ns, ..Waits::default() }
    }

    fn is_stuck(&self) -> bool {
        self.limited_until_ns().is_some()
    }

    fn refresh(&mut self) {
        self.take_limit();
    }

    fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        self.requests.on_event(token, result, io);
    }

    fn retire_memory(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.retire(memory, fence);
    }

    fn give_up_aside(&mut self, queue: &mut R, stats: &QueueStats) -> (usize, bool) {
        Self::give_up_aside(self, queue, stats)
    }

    fn fence(&mut self, fence: Fence) {
        self.requests.barrier(fence);
    }

    fn stop(&mut self, queue: &R) {
        if !queue.is_faulted() {
            self.requests.begin_recall();
        }
    }

    fn abandon(&mut self, queue: &mut R) {
        self.discard_all(queue);
    }
}
