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

    /// Chooses the workers of queues that begin from now on. If the kernel gave this process few
    /// io_urings, it has fewer workers than the operator counted on: then the choice is not
    /// followed.
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

    /// Forgets the choice for a device that is removed.
    pub(super) fn forget(&mut self, device: &str) {
        if self.chosen.remove(device).is_some() {
            self.pool.set_queue_workers(self.chosen.clone());
        }
    }
}
