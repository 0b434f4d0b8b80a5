//! `DeviceStats`: the counters of a device's queues, shared by the device and the code that shows
//! them. Each counter is defined in `engine/src/stats.rs`.

use manyring_engine::QueueStats;
use manyring_engine::stats::QueueClass;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// The counters of the queues that a device offers, and of queues with higher indexes that were
/// started anyway (see [`Self::to_run`]).
#[derive(Debug)]
pub struct DeviceStats {
    class: QueueClass,
    all: RwLock<Vec<Arc<QueueStats>>>,
}

impl DeviceStats {
    /// Makes the counters of this many queues.
    #[must_use]
    pub fn new(class: QueueClass, queues: usize) -> Self {
        let all = (0..queues).map(|_| Arc::new(QueueStats::new(class))).collect();
        Self { class, all: RwLock::new(all) }
    }

    /// Returns the counters of queue `index`; `None` if there are none yet.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.all().get(index).cloned()
    }

    /// Returns the counters of queue `index`, which is about to run. The index may be higher than
    /// the device offers: a former process may have offered more queues to this front-end.
    #[must_use]
    pub fn to_run(&self, index: usize) -> Arc<QueueStats> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        while all.len() <= index {
            all.push(Arc::new(QueueStats::new(self.class)));
        }
        all[index].clone()
    }

    /// Returns the number of queues that have counters.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all().len()
    }

    /// Returns the counters of each queue, in the order of the queues.
    pub fn all(&self) -> RwLockReadGuard<'_, Vec<Arc<QueueStats>>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner)
    }
}
