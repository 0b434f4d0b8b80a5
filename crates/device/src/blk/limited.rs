//! Limits of a virtio-blk queue: how many requests a turn may pop.
//!
//! Before the turn, this module pops requests, asks the limit about each, and puts all of them
//! back; the turn then pops as many as the limit admits. So the code that serves requests need not
//! know about limits. The guest can change its requests between the two steps: so the limit is
//! charged for the requests as the turn has parsed them.

use super::pending::Kind;
use super::{BlkQueue, IN_FLIGHT_MAX};
use manyring_engine::Way;
use manyring_engine::limit::{Gate, Passed};
use manyring_engine::stats::QueueStats;
use manyring_memory::{GuestSlice, copy_from_slices, total_len};
use manyring_queue::Chains;
use manyring_wire::blk::{
    HEADER_SIZE, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_SECURE_ERASE, VIRTIO_BLK_T_WRITE_ZEROES,
};

/// The most requests that are examined before one turn.
pub(super) const LOOKS_MAX: usize = 64;

impl BlkQueue {
    /// Loads the present limit of the device.
    pub(super) fn take_limit(&mut self) {
        self.gate = self.shared.limit.gate();
    }

    /// Returns when the limit may admit a request again; `None`: it refused none.
    pub(super) fn limited_until_ns(&self) -> Option<u64> {
        self.gate.as_ref().and_then(|gate| gate.due_ns())
    }

    /// Returns how many requests the turn may pop, and true if [`Self::settle_limit`] must charge
    /// them. A request that a former process took cannot be put back, so it is admitted at once. A
    /// request that is retried was charged before.
    #[cold]
    #[inline(never)]
    pub(super) fn admitted(
        &mut self,
        queue: &mut impl Chains,
        now_ns: u64,
        stats: &QueueStats,
    ) -> (usize, bool) {
        let Some(gate) = &mut self.gate else { return (usize::MAX, false) };
        let is_full = queue.in_flight() >= IN_FLIGHT_MAX || self.requests.are_many_bytes();
        if is_full || self.requests.waiters.is_due(now_ns) {
            return (usize::MAX, false);
        }
        if let Some(answer) = before_looking(gate, queue.owed() > 0, now_ns) {
            return answer;
        }
        let popped = queue.pop_batch(&mut self.batch, LOOKS_MAX);
        let batch = &self.batch;
        let mut admits =
            |index| match batch.peek(index).and_then(|(read, write)| peek(&read, &write)) {
                Some((way, bytes)) => gate.admits(way, bytes, now_ns, stats),
                None => true,
            };
        let count = (0..popped).position(|index| !admits(index)).unwrap_or(popped);
        self.batch.take_from(0).for_each(|chain| queue.unpop(chain));
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

/// Returns how many requests the turn may pop, and true if they are charged, when that is known
/// without examining them; `None`: they must be examined, for which the gate is opened. `is_owed`:
/// the ring has requests that a former process took; these are popped whatever the limit says.
pub(super) fn before_looking(gate: &mut Gate, is_owed: bool, now_ns: u64) -> Option<(usize, bool)> {
    match (is_owed, gate.is_closed(now_ns)) {
        (true, _) => Some((usize::MAX, true)),
        (false, true) => Some((0, false)),
        (false, false) => {
            gate.open();
            None
        }
    }
}

/// Returns the direction and bytes of a request; `None` if no limit counts it. A flush is free, and
/// a discard counts as no bytes.
fn peek(readable: &[GuestSlice<'_>], writable: &[GuestSlice<'_>]) -> Option<(Way, u64)> {
    let mut kind = [0; 4];
    copy_from_slices(readable, &mut kind);
    match u32::from_le_bytes(kind) {
        VIRTIO_BLK_T_IN => Some((Way::Read, total_len(writable).saturating_sub(1))),
        VIRTIO_BLK_T_OUT => {
            Some((Way::Write, total_len(readable).saturating_sub(HEADER_SIZE as u64)))
        }
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES | VIRTIO_BLK_T_SECURE_ERASE => {
            Some((Way::Write, 0))
        }
        _ => None,
    }
}

impl<R> super::requests::QueueRequests<R> {
    /// Returns the number and the bytes of the last `count` requests, by direction.
    pub(super) fn newest(&self, count: usize) -> Passed {
        let mut passed = Passed::default();
        for request in self.last_requests(count) {
            let way = match request.kind {
                Kind::Flush | Kind::Other => continue,
                Kind::Read => Way::Read,
                Kind::Write | Kind::Range | Kind::OrderedWrite => Way::Write,
            };
            let (count, bytes) = &mut passed[way as usize];
            (*count, *bytes) = (*count + 1, *bytes + u64::from(request.len));
        }
        passed
    }
}
