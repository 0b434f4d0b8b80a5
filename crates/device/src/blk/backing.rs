//! `Backing`: the disk behind a device, its workers and its queues' counters. virtio-blk and Xen's
//! blkif have the same one.

use crate::StartError;
use manyring_backend::blk::{Disk, DiskQueue, Geometry};
use manyring_engine::stats::{Class, QueueStats};
use manyring_engine::{Pool, Route, aside};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;
use tokio::sync::watch;

/// Longest wait for the requests in flight before a disk is made smaller.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(10);

/// The disk behind a device.
#[derive(Debug)]
pub(super) struct Backing {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) pool: Arc<Pool>,
    geometry: Mutex<Geometry>,
    /// The logical block size that the operator has chosen; `None`: the disk's own.
    block_size: Option<u32>,
    /// The geometry was logged.
    is_told: AtomicBool,
    resizing: Mutex<()>,
    class: Class,
    /// Counters of the queues that the device offers, and of each that was started beyond them.
    stats: RwLock<Vec<Arc<QueueStats>>>,
    changes: watch::Sender<u64>,
}

impl Backing {
    /// `disk`, served by workers of `pool` on this many queues.
    pub(super) fn new(disk: Arc<dyn Disk>, pool: Arc<Pool>, queues: usize, class: Class) -> Self {
        Self {
            geometry: Mutex::new(disk.geometry()),
            disk,
            pool,
            block_size: None,
            is_told: AtomicBool::new(false),
            resizing: Mutex::default(),
            class,
            stats: RwLock::new((0..queues).map(|_| Arc::new(QueueStats::new(class))).collect()),
            changes: watch::Sender::new(0),
        }
    }

    /// Sets the logical block size that the guest is told; `None`: the disk's own.
    pub(super) fn with_block_size(mut self, block_size: Option<u32>) -> Self {
        self.block_size = block_size;
        let geometry = self.as_told(self.disk.geometry());
        *self.geometry.get_mut().unwrap_or_else(PoisonError::into_inner) = geometry;
        self
    }

    /// The disk's geometry, with the logical block size that the guest is told.
    fn as_told(&self, geometry: Geometry) -> Geometry {
        let block_size = self.block_size.unwrap_or(geometry.block_size);
        let physical_block_size = geometry.physical_block_size.max(block_size);
        let min_io_size = geometry.min_io_size.max(physical_block_size);
        Geometry { block_size, physical_block_size, min_io_size, ..geometry }
    }

    /// Logs the geometry that the guest is told, once.
    pub(super) fn tell_geometry(&self, device: &str) {
        if self.is_told.swap(true, Ordering::Relaxed) {
            return;
        }
        let Geometry { size, block_size, physical_block_size, min_io_size, opt_io_size, .. } =
            self.geometry();
        tracing::info!(
            device,
            size,
            logical_block_size = block_size,
            physical_block_size,
            min_io_size,
            opt_io_size,
            "the guest is told this geometry"
        );
    }

    /// The geometry that the guest is told, with the present size of the disk.
    pub(super) fn geometry(&self) -> Geometry {
        *self.geometry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue of the disk, for whichever worker will serve it. May block, so it must not be called
    /// on the control thread.
    pub(super) fn open_queue(&self) -> Result<Box<dyn DiskQueue>, StartError> {
        let has_ring = self.pool.has_ring().ok_or(StartError::NoWorker)?;
        Ok(self.disk.open_queue(has_ring)?)
    }

    /// As [`Self::open_queue`], without blocking the control thread: the host may have to open the
    /// file again, and the server of a network disk may hang.
    pub(super) async fn open_queue_aside(&self) -> Result<Box<dyn DiskQueue>, StartError> {
        let has_ring = self.pool.has_ring().ok_or(StartError::NoWorker)?;
        let disk = self.disk.clone();
        let opened = aside(move || disk.open_queue(has_ring)).await;
        Ok(opened.unwrap_or(Err(Errno::IO))?)
    }

    /// Counters of queue `index`.
    pub(super) fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.all_stats().get(index).cloned()
    }

    /// Counters of queue `index`, which is about to run. The device may offer fewer queues: a
    /// front-end may have got this one from a former process that offered more.
    pub(super) fn stats_to_run(&self, index: usize) -> Arc<QueueStats> {
        let mut all = self.stats.write().unwrap_or_else(PoisonError::into_inner);
        while all.len() <= index {
            all.push(Arc::new(QueueStats::new(self.class)));
        }
        all[index].clone()
    }

    /// Queues that have counters.
    pub(super) fn queue_count(&self) -> usize {
        self.all_stats().len()
    }

    fn all_stats(&self) -> RwLockReadGuard<'_, Vec<Arc<QueueStats>>> {
        self.stats.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A value that changes whenever the size of the disk does.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Changes the disk's size to `size`; without `size`, measures the disk again. Tells the guest.
    /// The queues check their requests against `capacity`. May block, so it must not be called on
    /// the control thread.
    ///
    /// A disk that shrinks is cut last: an earlier write in flight would make the file grow again.
    /// ```text
    /// lower the capacity: no request that is popped from now on reaches beyond it
    /// wait until every request that was popped before is done
    /// cut the disk
    /// ```
    ///
    /// # Errors
    /// `EBUSY`: requests in flight did not end within ten seconds; the size is unchanged. `EINVAL`:
    /// the size is not a multiple of the logical block size. Any other: the error of the disk.
    pub(super) fn resize(&self, capacity: &AtomicU64, size: Option<u64>) -> Result<u64, Errno> {
        let _one_at_a_time = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let old = capacity.load(Ordering::Relaxed);
        let block_size = u64::from(self.geometry().block_size);
        if size.is_some_and(|size| !size.is_multiple_of(block_size)) {
            return Err(Errno::INVAL);
        }
        let shrinks = size.is_some_and(|size| size < old);
        let resized = if shrinks {
            capacity.store(size.unwrap_or(old), Ordering::Relaxed);
            self.await_requests().and_then(|()| self.disk.resize(size))
        } else {
            self.disk.resize(size)
        };
        let measured = resized.map(|geometry| self.as_told(geometry)).and_then(|geometry| {
            let is_whole = geometry.size.is_multiple_of(block_size);
            if is_whole { Ok(geometry) } else { Err(Errno::INVAL) }
        });
        let geometry = measured.inspect_err(|_| {
            capacity.store(old, Ordering::Relaxed);
        })?;
        *self.geometry.lock().unwrap_or_else(PoisonError::into_inner) = geometry;
        capacity.store(geometry.size, Ordering::Relaxed);
        if old != geometry.size {
            self.changes.send_modify(|n| *n += 1);
        }
        Ok(geometry.size)
    }

    /// Waits until every request that a queue of this device has popped until now is done.
    fn await_requests(&self) -> Result<(), Errno> {
        let all = self.all_stats().clone();
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
