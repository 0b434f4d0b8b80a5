//! Limits of a transmitq: how many frames of a batch are sent. A frame is charged with the length
//! that it had when it was added to the burst.

use super::NetTx;
use manyring_engine::limit::Passed;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Limit, Way};
use manyring_memory::total_len;
use manyring_queue::Chains;
use std::sync::Arc;

impl NetTx {
    /// Sets where to load the limit from, at each [`Self::refresh_rules`] and when the queue starts
    /// on a worker.
    pub(crate) fn limited(mut self, limit: Arc<Limit>) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Loads the present limit.
    pub(crate) fn take_limit(&mut self) {
        self.gate = self.limit.as_ref().and_then(Limit::gate);
    }

    /// Returns when the limit may admit a frame again. `None`: it refused none, or frames that the
    /// port did not take must be sent first.
    pub(crate) fn limited_until_ns(&self) -> Option<u64> {
        let gate = self.gate.as_ref().filter(|_| self.chains.is_empty());
        gate.and_then(|gate| gate.due_ns())
    }

    /// Returns how many frames of the batch the limit admits now; the others are put back into the
    /// ring. Frames that will be dropped because the link is down are always admitted.
    #[cold]
    #[inline(never)]
    pub(super) fn admitted(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        (popped, is_sent): (usize, bool),
        now_ns: u64,
    ) -> usize {
        let Some(gate) = &mut self.gate else { return popped };
        if !is_sent {
            gate.open();
            return popped;
        }
        let mut count = 0;
        if !gate.is_closed(now_ns) {
            gate.open();
            let header = self.header_size as u64;
            let batch = &self.batch;
            let bytes = |index| batch.peek(index).map_or(0, |(readable, _)| total_len(&readable));
            let mut admits =
                |index| gate.admits(Way::Read, bytes(index).saturating_sub(header), now_ns, stats);
            count = (0..popped).position(|index| !admits(index)).unwrap_or(popped);
        }
        self.batch.take_from(count).for_each(|chain| queue.unpop(chain));
        count
    }

    /// Charges the limit for the frames that the turn has popped, with their length at that time. A
    /// malformed frame is not charged.
    #[cold]
    #[inline(never)]
    pub(super) fn settle_limit(&mut self, now_ns: u64) {
        let Some(gate) = &mut self.gate else { return };
        let mut passed = Passed::default();
        passed[Way::Read as usize] = (self.last.packets, self.last.bytes);
        gate.settle(passed, now_ns);
    }
}
