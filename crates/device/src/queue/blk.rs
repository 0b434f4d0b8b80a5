//! What a running block queue does beyond: its disk's completions, the rest of long requests, and
//! a bound for what it takes out of its ring.

use super::{Handler, MemoryReply, RunningQueue};
use crate::blk::Completed;
use crate::wait::{Source, Wait};

impl RunningQueue {
    /// Watches what the disk does aside from the ring, here or after the kernel ended the watch.
    pub(crate) fn watch_disk(&mut self, wait: &mut Wait, slot: u32, generation: u32) {
        if let Handler::Blk(blk) = &self.handler
            && let Some(fd) = blk.readiness()
        {
            wait.watch(fd, Source::Offload { slot, generation });
        }
    }

    /// A disk request of this queue has an event.
    pub(crate) fn on_disk(&mut self, token: u32, result: i32, wait: &mut Wait) {
        if let Handler::Blk(blk) = &mut self.handler {
            blk.on_event(token, result, wait.ring());
        }
    }

    #[inline]
    pub(super) fn turn_blk(&mut self, wait: &mut Wait, now_ns: u64) -> bool {
        let mut popped = 0;
        if self.may_pop() {
            if let Handler::Blk(blk) = &mut self.handler {
                popped = blk.pop_and_submit(&mut self.queue, wait.ring(), now_ns);
            }
            if popped > 0 {
                self.count_batch(popped, now_ns);
            }
            self.looked_at_ns = now_ns;
        }
        let was_full = self.is_full();
        let completed = self.complete(wait, popped > 0);
        // The rest of a long request needs no kick and no event, but the next turn. A completion of
        // a full queue makes room for what waits in the ring, for which no kick was asked.
        if self.has_more || (was_full && completed > 0) {
            self.make_hot(now_ns);
        }
        popped > 0 || completed > 0 || self.has_more
    }

    /// True if a block queue has taken so much of its ring that the rest must wait in it. Only the
    /// disk can change that: the driver is not asked for kicks meanwhile.
    pub(super) fn is_full(&self) -> bool {
        matches!(&self.handler, Handler::Blk(blk) if blk.is_full(&self.queue))
    }

    /// Returns what is done to the driver, and tells it if it wants to know.
    #[inline]
    fn complete(&mut self, wait: &Wait, submitted: bool) -> usize {
        let Handler::Blk(blk) = &mut self.handler else { return 0 };
        let Completed { count: completed, lost, has_more } =
            blk.complete(&mut self.queue, &self.stats, || wait.now_ns());
        self.has_more = has_more;
        if lost {
            self.lose_memory();
        }
        if submitted || completed > 0 {
            self.stats.in_flight.set(u64::from(self.queue.in_flight()));
        }
        if completed > 0 {
            self.queue.publish();
            if self.queue.needs_notification() {
                self.ring_call();
            } else {
                self.stats.calls_suppressed.add(1);
            }
        }
        completed
    }

    /// `reply` is told when every request that was popped until now is done.
    pub(crate) fn barrier(&mut self, reply: MemoryReply) {
        match &mut self.handler {
            Handler::Blk(blk) => blk.barrier(reply),
            Handler::Tx(_) | Handler::Rx(_) => drop(reply.send(Ok(()))),
        }
    }
}
