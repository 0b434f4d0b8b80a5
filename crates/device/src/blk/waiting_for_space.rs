//! `SpaceWaiters`: decides when to retry requests for which the host has no space.

use super::IN_FLIGHT_MAX;
use super::host::HostErrors;
use super::pending::Kind;
use manyring_engine::stats::QueueStats;
use std::sync::Arc;

/// Delay before waiting requests are retried: 1 s.
const RETRY_NS: u64 = 1_000_000_000;

/// A queue's requests that wait for space; their chains are set aside in the ring.
///
/// ```text
/// a request fails for lack of space:   its chain is set aside; after a second ONE is retried
/// the retry succeeds:                  two are retried at once, then four, and so on
/// the retry fails:                     all waiting requests wait for another second
/// ```
/// A second is short for an operator who frees space, and costs the worker one request a second for
/// each waiting queue.
#[derive(Debug)]
pub(super) struct SpaceWaiters {
    host: Arc<HostErrors>,
    /// When to retry; `u64::MAX`: no request waits; 0: the last retry has succeeded, so retry now.
    retry_at_ns: u64,
    /// The time of the last retry, at which its requests were popped.
    tried_at_ns: u64,
    /// How many requests to retry at once.
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

    /// Returns when the queue needs a turn for a retry; `None`: no request waits.
    pub(super) fn due_ns(&self) -> Option<u64> {
        (self.retry_at_ns != u64::MAX).then_some(self.retry_at_ns)
    }

    /// Begins a retry. Returns how many requests it may have.
    pub(super) fn begin_retry(&mut self, now_ns: u64) -> usize {
        self.retry_at_ns = now_ns + RETRY_NS;
        self.tried_at_ns = now_ns;
        self.count
    }

    /// Counts a request that was set aside, and postpones the next retry.
    pub(super) fn waits(&mut self, now_ns: u64) {
        if !self.is_waiting {
            self.is_waiting = true;
            self.host.begin();
        }
        self.count = 1;
        self.retry_at_ns = now_ns + RETRY_NS;
    }

    /// True while requests are set aside, or are being retried.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Call when the host has completed a request that was popped at this time. If it belongs to
    /// the last retry, the next retry is due at once, with twice as many requests.
    #[cold]
    pub(super) fn had_space(&mut self, popped_at_ns: u64, kind: Kind) {
        let is_write = matches!(kind, Kind::Write | Kind::Range);
        if is_write && popped_at_ns == self.tried_at_ns && self.retry_at_ns != 0 {
            self.count = (self.count * 2).min(IN_FLIGHT_MAX.into());
            self.retry_at_ns = 0;
        }
    }

    /// Call after requests were answered or set aside; `aside` is the number of those set aside
    /// now. Returns true if some must be retried in the next turn.
    #[cold]
    pub(super) fn note(&mut self, aside: u16, stats: &QueueStats) -> bool {
        let has_space = self.retry_at_ns == 0;
        stats.waiting_for_space.set(aside.into());
        if aside > 0 {
            return has_space;
        }
        if has_space {
            self.end(true);
        }
        false
    }

    /// Call when no request waits any more. `served`: the host had space for them.
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
