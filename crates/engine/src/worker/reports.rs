//! Reports of workers to the balance: that a worker is saturated, or that one mostly sleeps.
//!
//! No timer is needed for this. A busy worker compares the time once a round, and a worker that
//! sleeps compares it after each sleep. A worker that no event wakes reports nothing: an idle
//! daemon would gain nothing by a move.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// The period over which a worker measures whether it mostly sleeps, at first.
const REST_NS: u64 = 1_000_000_000;
/// The maximum of that period: each report that moves no queue doubles it.
const REST_NS_MAX: u64 = 64_000_000_000;

/// The reports of the workers of a pool to its balance.
#[derive(Debug)]
pub(crate) struct Reports {
    /// Signalled at each report.
    said: Notify,
    /// True if a worker was saturated since the balance last read this.
    is_saturated: AtomicBool,
    /// The number of workers that have queues.
    serving: AtomicUsize,
    rest_ns: AtomicU64,
}

impl Default for Reports {
    fn default() -> Self {
        Self {
            said: Notify::new(),
            is_saturated: AtomicBool::new(false),
            serving: AtomicUsize::new(0),
            rest_ns: AtomicU64::new(REST_NS),
        }
    }
}

impl Reports {
    /// Reports that a worker has not slept for a while, and has more than one hot queue.
    pub(crate) fn saturated(&self) {
        self.is_saturated.store(true, Ordering::Release);
        self.said.notify_one();
    }

    /// Reports that a worker mostly sleeps, if other workers have queues as well: only then can
    /// queues be gathered on fewer workers.
    pub(crate) fn resting(&self) {
        if self.serving.load(Ordering::Relaxed) > 1 {
            self.said.notify_one();
        }
    }

    /// Counts a worker that had no queue and now has one.
    pub(crate) fn begin_to_serve(&self) {
        self.serving.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a worker whose last queue has left.
    pub(crate) fn end_to_serve(&self) {
        self.serving.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the period over which a worker measures whether it mostly sleeps.
    #[inline]
    pub(crate) fn rest_ns(&self) -> u64 {
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// Call when a report has led to a move or to none; after none, workers report half as often
    /// that they mostly sleep.
    pub(crate) fn note_outcome(&self, moved: bool) {
        let longer_ns = (self.rest_ns() * 2).min(REST_NS_MAX);
        self.rest_ns.store(if moved { REST_NS } else { longer_ns }, Ordering::Relaxed);
    }

    /// Waits until a worker reports. Returns true if a worker is saturated.
    pub(crate) async fn hear(&self) -> bool {
        self.said.notified().await;
        self.is_saturated.swap(false, Ordering::AcqRel)
    }

    /// Waits until a worker reports that it is saturated.
    pub(crate) async fn hear_saturated(&self) {
        while !self.hear().await {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_to_nothing_is_said_less_and_less() {
        let reports = Reports::default();
        (0..20).for_each(|_| reports.note_outcome(false));
        assert_eq!(reports.rest_ns(), REST_NS_MAX);
        reports.note_outcome(true);
        assert_eq!(reports.rest_ns(), REST_NS);
    }
}
