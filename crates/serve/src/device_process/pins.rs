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

    /// Sets the workers for queues that start from now on. A process to which the kernel refused
    /// io_urings has fewer workers than usual; a choice of a worker that does not exist is ignored
    /// with a warning.
    pub(super) fn choose(&mut self, device: &str, queue_workers: Vec<u16>) {
        let queue_workers: Vec<_> = queue_workers.into_iter().map(usize::from).collect();
        let workers = self.workers_max;
        if queue_workers.iter().any(|worker| *worker >= workers) {
            tracing::warn!(
                device,
                workers,
                "queue_workers is ignored: the device process has too few workers"
            );
        } else if !queue_workers.is_empty() {
            self.chosen.insert(device.to_owned(), queue_workers);
            self.pool.set_queue_workers(self.chosen.clone());
        }
    }

    /// Removes the choice for a device that is removed.
    pub(super) fn forget(&mut self, device: &str) {
        if self.chosen.remove(device).is_some() {
            self.pool.set_queue_workers(self.chosen.clone());
        }
    }
}
