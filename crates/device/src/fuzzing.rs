//! Queues without a worker, for fuzz targets `blk_request`, `net_tx`, `net_rx` and `ctrl_command`.

pub use crate::net::{SoloControl, SoloRx, SoloTx, passes};

use crate::blk::{BlkDevice, BlkOptions, BlkQueue};
use manyring_backend::blk::Disk;
use manyring_engine::Moderation;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Pool, PoolOptions};
use manyring_queue::DeviceQueue;
use rustix::io::Errno;
use std::sync::Arc;

/// A queue of a block device without a worker: the caller takes the turns.
#[derive(Debug)]
pub struct SoloQueue {
    queue: DeviceQueue,
    blk: BlkQueue,
    stats: QueueStats,
}

impl SoloQueue {
    /// Serves `queue` from `disk`, which must complete requests in `submit`.
    ///
    /// # Errors
    /// The disk cannot open a queue.
    pub fn new(queue: DeviceQueue, disk: Arc<dyn Disk>, read_only: bool) -> Result<Self, Errno> {
        let options = BlkOptions {
            name: "solo".to_owned(),
            queue_size: queue.size(),
            serial: "solo-serial".to_owned(),
            read_only,
            moderation: Moderation::Off,
            ..BlkOptions::default()
        };
        let disk_queue = disk.open_queue(false)?;
        // No thread runs: the pool starts one only with a queue.
        let device = BlkDevice::new(options, disk, Pool::new(PoolOptions::default()));
        let blk = device.solo(disk_queue, queue.memory().clone());
        Ok(Self { queue, blk, stats: QueueStats::default() })
    }

    /// Pops a batch, serves it and returns it to the driver. Returns the numbers popped and
    /// completed.
    pub fn turn(&mut self) -> (usize, usize) {
        let popped = self.blk.pop_and_submit(&mut self.queue, None, (0, usize::MAX));
        let mut completed = 0;
        loop {
            let ended = self.blk.complete(&mut self.queue, &self.stats, || 0);
            completed += ended.count;
            if !ended.has_more {
                break;
            }
        }
        self.queue.publish();
        self.queue.needs_notification();
        (popped, completed)
    }

    /// Returns the device side of the ring.
    #[must_use]
    pub fn queue(&self) -> &DeviceQueue {
        &self.queue
    }
}

impl Drop for SoloQueue {
    fn drop(&mut self) {
        self.blk.discard_all(&mut self.queue);
    }
}
