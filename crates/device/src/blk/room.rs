//! `SpaceWaiters`: decides when requests for which the host has no space are retried.

use super::IN_FLIGHT_MAX;
use super::host::HostErrors;
use super::pending::Kind;
use manyring_engine::stats::QueueStats;
use std::sync::Arc;

/// Pause before a waiting request is retried: 1 s.
const RETRY_NS: u64 = 1_000_000_000;

/// The requests of a queue that wait for space; their chains are set aside in the ring.
///
/// ```text
/// a request fails for lack of space:   its chain is set aside; after a second ONE is retried
/// the retry succeeds:                  two are retried at once, then four, and so on
/// the retry fails:                     all waiting requests wait for another second
/// ```
/// A second is soon enough for an operator who frees space, and costs the worker one request a
/// second for each waiting queue.
#[derive(Debug)]
pub(super) struct SpaceWaiters {
    host: Arc<HostErrors>,
    /// When requests are retried; `u64::MAX`: none wait; 0: the last retry has succeeded.
    retry_at_ns: u64,
    /// The time at which the requests of the last retry were popped.
    tried_at_ns: u64,
    /// How many requests are retried at once.
    count: usize,
    is_waiting: bool,
}

impl SpaceWaiters {
    pub(super) fn new(host: Arc<HostErrors>) -> Self {
        Self { host, retry_at_ns: u64::MAX, tried_at_ns: 0, count: 1, is_waiting: false }
    }

    pub(super) fn host(&self) -> &HostErrors {
        &self.host
    }

    /// True if a retry is due.
    #[inline]
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.retry_at_ns
    }

    /// When the queue needs a turn for a retry.
    pub(super) fn due_ns(&self) -> Option<u64> {
        (self.retry_at_ns != u64::MAX).then_some(self.retry_at_ns)
    }

    /// Begins a retry. Returns how many requests may be retried.
    pub(super) fn begin_retry(&mut self, now_ns: u64) -> usize {
        self.retry_at_ns = now_ns + RETRY_NS;
        self.tried_at_ns = now_ns;
        self.count
    }

    /// Counts a request that is set aside, and postpones the next retry.
    pub(super) fn waits(&mut self, now_ns: u64) {
        if !self.is_waiting {
            self.is_waiting = true;
            self.host.begin();
        }
        self.count = 1;
        self.retry_at_ns = now_ns + RETRY_NS;
    }

    /// True while requests are set aside, or retried and not answered.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Called when the host has completed a request that was popped at this time. If the request
    /// belongs to the last retry, the next retry is due at once, with twice as many requests.
    #[cold]
    pub(super) fn had_room(&mut self, popped_at_ns: u64, kind: Kind) {
        let is_write = matches!(kind, Kind::Write | Kind::Range);
        if is_write && popped_at_ns == self.tried_at_ns && self.retry_at_ns != 0 {
            self.count = (self.count * 2).min(IN_FLIGHT_MAX.into());
            self.retry_at_ns = 0;
        }
    }

    /// Called when requests were answered or set aside, and `aside` are left. Returns true if some
    /// must be retried in the next turn.
    #[cold]
    pub(super) fn note(&mut self, aside: u16, stats: &QueueStats) -> bool {
        let has_room = self.retry_at_ns == 0;
        stats.waiting_for_room.set(aside.into());
        if aside > 0 {
            return has_room;
        }
        if has_room {
            self.end(true);
        }
        false
    }

    /// Called when no request waits any more. `served`: the host had space for them.
    #[cold]
    pub(super) fn end(&mut self, served: bool) {
        self.retry_at_ns = u64::MAX;
        self.count = 1;
        if std::mem::take(&mut self.is_waiting) {
            self.host.end(served);
        }
    }
}

impl Drop for SpaceWaiters {
    fn drop(&mut self) {
        if self.is_waiting {
            self.host.end(false);
        }
    }
}
