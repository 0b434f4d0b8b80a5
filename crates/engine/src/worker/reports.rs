//! Reports of workers to the balance: that one of them is saturated, or that one mostly sleeps.
//!
//! No timer is needed for this. A busy worker compares the time once a round, and a worker that
//! sleeps compares it after each sleep. A worker that nothing wakes reports nothing: an idle
//! daemon would gain nothing by a move.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// How far a worker looks back to find that it mostly sleeps, at first.
const REST_NS: u64 = 1_000_000_000;
/// The longest that it looks back: each report that moves no queue doubles the time.
const REST_NS_MAX: u64 = 64_000_000_000;

/// The reports of the workers of a pool to its balance.
#[derive(Debug)]
pub(crate) struct Reports {
    /// Some worker has reported something.
    said: Notify,
    /// A worker was saturated since the balance last looked.
    is_saturated: AtomicBool,
    /// Workers that have queues.
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
    /// Tells the balance that a worker has not slept for a while, and has more than one hot queue.
    pub(crate) fn saturated(&self) {
        self.is_saturated.store(true, Ordering::Release);
        self.said.notify_one();
    }

    /// Tells the balance that a worker mostly sleeps, if other workers have queues as well: only
    /// then can queues be gathered on fewer workers.
    pub(crate) fn resting(&self) {
        if self.serving.load(Ordering::Relaxed) > 1 {
            self.said.notify_one();
        }
    }

    /// Counts a worker that had no queue and now has one.
    pub(crate) fn begin_to_serve(&self) {
        self.serving.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts out a worker whose last queue has left.
    pub(crate) fn end_to_serve(&self) {
        self.serving.fetch_sub(1, Ordering::Relaxed);
    }

    /// How long a worker looks back before it says that it mostly sleeps.
    #[inline]
    pub(crate) fn rest_ns(&self) -> u64 {
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// A report has led to a move, or to none: then workers report half as often that they rest.
    pub(crate) fn note_outcome(&self, moved: bool) {
        let longer_ns = (self.rest_ns() * 2).min(REST_NS_MAX);
        self.rest_ns.store(if moved { REST_NS } else { longer_ns }, Ordering::Relaxed);
    }

    /// Returns when a worker reports something: true if one is saturated.
    pub(crate) async fn hear(&self) -> bool {
        self.said.notified().await;
        self.is_saturated.swap(false, Ordering::AcqRel)
    }

    /// Returns when a worker reports that it is saturated.
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
