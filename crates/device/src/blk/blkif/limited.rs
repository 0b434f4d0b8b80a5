//! Limits of a Xen disk's queue: how many requests a turn may pop, as in `blk/limited.rs`.

use super::queue::BlkifQueue;
use crate::blk::limited::{LOOKS_MAX, before_looking};
use manyring_engine::Way;
use manyring_engine::stats::QueueStats;
use manyring_queue::blkif::{BackRing, Requests as Popped};
use manyring_wire::xen::blkif::{DataOp, Kind as Asked, Limits, PAGE_SIZE, RawRequest, Request};

impl BlkifQueue {
    /// Loads the present limit of the device.
    pub(super) fn take_limit(&mut self) {
        self.gate = self.shared.limit.gate();
    }

    /// True if the limit has refused a request, and the next attempt is not due.
    pub(super) fn is_limited(&self) -> bool {
        self.limited_until_ns().is_some()
    }

    /// Returns when the limit may admit a request again; `None`: it refused none.
    pub(super) fn limited_until_ns(&self) -> Option<u64> {
        self.gate.as_ref().and_then(|gate| gate.due_ns())
    }

    /// Returns how many requests the turn may pop, and true if [`Self::settle_limit`] must charge
    /// them.
    #[cold]
    #[inline(never)]
    pub(super) fn admitted(
        &mut self,
        (ring, batch): (&mut BackRing, &mut Popped),
        now_ns: u64,
        stats: &QueueStats,
    ) -> (usize, bool) {
        let is_waiting = self.is_waiting() && !self.is_retry_due(now_ns);
        let Some(gate) = &mut self.gate else { return (usize::MAX, false) };
        if self.requests.waiters.is_due(now_ns) || is_waiting {
            return (usize::MAX, false);
        }
        if let Some(answer) = before_looking(gate, ring.owed_count() > 0, now_ns) {
            return answer;
        }
        let popped = ring.pop_batch(batch, LOOKS_MAX);
        let limits = &self.limits;
        let mut admits = |index| match batch.peek(index).and_then(|raw| peek(raw, limits)) {
            Some((way, bytes)) => gate.admits(way, bytes, now_ns, stats),
            None => true,
        };
        let count = (0..popped).position(|index| !admits(index)).unwrap_or(popped);
        batch.take_all().for_each(|chain| ring.unpop(chain));
        (count, true)
    }

    /// Charges the limit for the requests that the turn has popped, as they were parsed.
    #[cold]
    #[inline(never)]
    pub(super) fn settle_limit(&mut self, popped: usize, now_ns: u64) {
        let Some(gate) = &mut self.gate else { return };
        gate.settle(self.requests.newest(popped), now_ns);
    }
}

/// Returns the direction and bytes of a request; `None` if no limit counts it. The segments of an
/// indirect request are not read yet, so it counts as if each segment were a whole page.
fn peek(raw: &RawRequest, limits: &Limits) -> Option<(Way, u64)> {
    let way = |op| if op == DataOp::Read { Way::Read } else { Way::Write };
    match Request::parse(raw, limits).ok()?.kind {
        Asked::Data(data) => {
            let bytes = data.segments().map(|segment| segment.len() as u64).sum();
            Some((way(data.op), bytes))
        }
        Asked::Indirect(indirect) => {
            let pages = u64::from(indirect.segment_count());
            Some((way(indirect.op), pages * PAGE_SIZE as u64))
        }
        Asked::Discard { .. } => Some((Way::Write, 0)),
        Asked::Flush | Asked::Barrier => None,
    }
}
