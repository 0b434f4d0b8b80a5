//! `QueueWorkers`: the workers that the operator has chosen for queues of the process's devices.

use manyring_engine::Pool;
use std::collections::HashMap;
use std::sync::Arc;

/// The workers of queues, by device.
pub(super) struct QueueWorkers {
    pool: Arc<Pool>,
    workers_max: usize,
    chosen: HashMap<String, Vec<usize>>,
}

impl QueueWorkers {
    pub(super) fn new(pool: Arc<Pool>, workers_max: usize) -> Self {
        Self { pool, workers_max, chosen: HashMap::new() }
    }

    /// Chooses the workers of queues that begin from now on. A kernel that has given this
    /// process few io_urings has left it fewer workers than the operator has counted on.
    pub(super) fn choose(&mut self, device: &str, queue_workers: Vec<u16>) {
        let queue_workers: Vec<_> = queue_workers.into_iter().map(usize::from).collect();
        let workers = self.workers_max;
        if queue_workers.iter().any(|worker| *worker >= workers) {
            tracing::warn!(device, workers, "queue_workers is not followed: too few workers");
        } else if !queue_workers.is_empty() {
            self.chosen.insert(device.to_owned(), queue_workers);
            self.pool.set_queue_workers(self.chosen.clone());
        }
    }

    /// The device is gone.
    pub(super) fn forget(&mut self, device: &str) {
        if self.chosen.remove(device).is_some() {
            self.pool.set_queue_workers(self.chosen.clone());
        }
    }
}
