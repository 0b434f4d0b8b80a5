//! `Backing`: the disk behind a device, its workers and its queues' counters. virtio-blk and Xen's
//! blkif share this code.

use super::HostDisk;
use crate::{DeviceStats, StartError};
use manyring_backend::blk::{Disk, DiskQueue, Geometry};
use manyring_engine::stats::QueueClass;
use manyring_engine::{Pool, Route, aside};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest wait for the requests in flight before a disk is made smaller.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// The disk behind a device.
#[derive(Debug)]
pub(super) struct Backing {
    pub(super) host: Arc<HostDisk>,
    pub(super) pool: Arc<Pool>,
    /// True once the geometry was logged.
    is_told: AtomicBool,
    pub(super) stats: Arc<DeviceStats>,
}

impl Backing {
    /// Makes the backing: `host`, served by workers of `pool` on this many queues.
    pub(super) fn new(host: HostDisk, pool: Arc<Pool>, queues: usize, class: QueueClass) -> Self {
        Self {
            host: Arc::new(host),
            pool,
            is_told: AtomicBool::new(false),
            stats: Arc::new(DeviceStats::new(class, queues)),
        }
    }

    /// Logs the geometry of the disk, as its guest sees it. Later calls do nothing.
    pub(super) fn tell_geometry(&self, device: &str) {
        if self.is_told.swap(true, Ordering::Relaxed) {
            return;
        }
        let Geometry { size, block_size, physical_block_size, min_io_size, opt_io_size, .. } =
            self.host.geometry();
        tracing::info!(
            device,
            size,
            logical_block_size = block_size,
            physical_block_size,
            min_io_size,
            opt_io_size,
            "reporting this geometry to the guest"
        );
    }

    pub(super) fn disk(&self) -> &Arc<dyn Disk> {
        self.host.disk()
    }

    /// Opens a queue of the disk that any worker can serve. May block, so it must not be called on
    /// the control thread.
    pub(super) fn open_queue(&self) -> Result<Box<dyn DiskQueue>, StartError> {
        let has_ring = self.pool.has_ring().ok_or(StartError::NoWorker)?;
        Ok(self.disk().open_queue(has_ring)?)
    }

    /// Opens a queue of the disk on another thread: the host may have to open the file again, and
    /// the server of a network disk may hang.
    pub(super) async fn open_queue_aside(&self) -> Result<Box<dyn DiskQueue>, StartError> {
        let has_ring = self.pool.has_ring().ok_or(StartError::NoWorker)?;
        let disk = self.disk().clone();
        let opened = aside(move || disk.open_queue(has_ring)).await;
        Ok(opened.unwrap_or(Err(Errno::IO))?)
    }

    /// Changes the disk's size to `size`; without `size`, measures the disk again. Tells the guest.
    /// `capacity` is the size against which the queues check requests. May block, so it must not be
    /// called on the control thread.
    ///
    /// When a disk shrinks, the file is truncated last: an earlier write in flight would make the
    /// file grow again.
    /// ```text
    /// lower the capacity: no request that is popped from now on reaches beyond it
    /// wait until every request that was popped before is done
    /// truncate the file
    /// ```
    ///
    /// # Errors
    /// As [`Resize::resize`](super::Resize::resize).
    pub(super) fn resize(&self, capacity: &AtomicU64, size: Option<u64>) -> Result<u64, Errno> {
        let tell = |size| capacity.store(size, Ordering::Relaxed);
        self.host.resize_with(size, tell, || self.await_requests())
    }

    /// Waits until every request is done that a queue of this device has popped before this call.
    fn await_requests(&self) -> Result<(), Errno> {
        let all = self.stats.all().clone();
        let is_ours = |route: &Arc<Route>| {
            all.iter().any(|stats| std::ptr::eq(Arc::as_ptr(stats), route.stats()))
        };
        let routes: Vec<_> = self.pool.routes().into_iter().filter(is_ours).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|_| Errno::NOMEM)?;
        runtime.block_on(async {
            let deadline = tokio::time::Instant::now() + RESIZE_TIMEOUT;
            for route in routes {
                let done = tokio::time::timeout_at(deadline, route.fence()).await;
                done.map_err(|_| Errno::BUSY)?;
            }
            Ok(())
        })
    }
}
