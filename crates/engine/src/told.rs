//! What workers tell the balance of themselves: one is saturated, or one mostly sleeps.
//!
//! Nothing here ticks. A worker that is busy compares the time once a turn, one that sleeps once
//! a sleep; a worker that nobody wakes tells nothing, and an idle daemon has nothing to gather.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// A worker looks back on so much time, to say that it mostly sleeps.
const REST_NS: u64 = 1_000_000_000;
/// The same, where it was said again and again, and nothing came of it.
const REST_NS_MAX: u64 = 64_000_000_000;

/// What all workers of a pool have told.
#[derive(Debug)]
pub(crate) struct Told {
    said: Notify,
    is_saturated: AtomicBool,
    /// Workers that have queues.
    serving: AtomicUsize,
    rest_ns: AtomicU64,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            said: Notify::new(),
            is_saturated: AtomicBool::new(false),
            serving: AtomicUsize::new(0),
            rest_ns: AtomicU64::new(REST_NS),
        }
    }
}

impl Told {
    /// A worker has not slept for a while, and has more than one queue to serve.
    pub(crate) fn saturated(&self) {
        self.is_saturated.store(true, Ordering::Release);
        self.said.notify_one();
    }

    /// A worker mostly sleeps.
    pub(crate) fn resting(&self) {
        if self.serving.load(Ordering::Relaxed) > 1 {
            self.said.notify_one();
        }
    }

    /// A worker has its first queue.
    pub(crate) fn begin_to_serve(&self) {
        self.serving.fetch_add(1, Ordering::Relaxed);
    }

    /// A worker has given its last queue away.
    pub(crate) fn end_to_serve(&self) {
        self.serving.fetch_sub(1, Ordering::Relaxed);
    }

    /// How long a worker looks back before it says that it mostly sleeps.
    #[inline]
    pub(crate) fn rest_ns(&self) -> u64 {
        self.rest_ns.load(Ordering::Relaxed)
    }

    /// Something has come of what was said, or nothing: then it is said half as often.
    pub(crate) fn note_outcome(&self, moved: bool) {
        let longer_ns = (self.rest_ns() * 2).min(REST_NS_MAX);
        self.rest_ns.store(if moved { REST_NS } else { longer_ns }, Ordering::Relaxed);
    }

    /// Returns when something is said: true if a worker is saturated.
    pub(crate) async fn hear(&self) -> bool {
        self.said.notified().await;
        self.is_saturated.swap(false, Ordering::AcqRel)
    }

    /// Returns when a worker is saturated.
    pub(crate) async fn hear_saturated(&self) {
        while !self.hear().await {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_to_nothing_is_said_less_and_less() {
        let told = Told::default();
        (0..20).for_each(|_| told.note_outcome(false));
        assert_eq!(told.rest_ns(), REST_NS_MAX);
        told.note_outcome(true);
        assert_eq!(told.rest_ns(), REST_NS);
    }
}
