//! `HostDisk`: a disk of the host, the geometry that its guest is told, and the subscribers to
//! changes of its size. A device whose queues run in this process has a `HostDisk`; so has the
//! supervisor for a disk whose queues a device process serves (docs/design/0029).

use manyring_backend::blk::{Disk, Geometry};
use rustix::io::Errno;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// A disk of the host, with the geometry that its guest is told.
#[derive(Debug)]
pub struct HostDisk {
    disk: Arc<dyn Disk>,
    geometry: Mutex<Geometry>,
    /// The size against which requests are checked: that of `geometry`, or a smaller one while the
    /// disk is being shrunk.
    size: AtomicU64,
    /// The logical block size that the operator configured; `None`: the disk's own.
    block_size: Option<u32>,
    read_only: bool,
    resizing: Mutex<()>,
    changes: watch::Sender<u64>,
}

/// Changes the size of a disk.
pub trait Resize: Debug + Send + Sync {
    /// Changes the disk's size to `size`; without `size`, measures the disk again. Tells the guest.
    /// A disk shrinks only once no request in flight reaches beyond the new end. May block, so it
    /// must not be called on the control thread.
    ///
    /// # Errors
    /// `EBUSY`: requests in flight did not end within ten seconds; the size is unchanged. `EINVAL`:
    /// the size is not a multiple of the logical block size. Any other: the error of the disk.
    fn resize(&self, size: Option<u64>) -> Result<u64, Errno>;
}

impl HostDisk {
    /// Makes a disk with the logical block size `block_size`; `None`: the disk's own.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, block_size: Option<u32>, read_only: bool) -> Self {
        let geometry = as_told(disk.geometry(), block_size);
        let read_only = read_only || geometry.read_only;
        let (resizing, changes) = (Mutex::default(), watch::Sender::new(0));
        let size = AtomicU64::new(geometry.size);
        let geometry = Mutex::new(geometry);
        Self { disk, geometry, size, block_size, read_only, resizing, changes }
    }

    /// Returns the disk itself.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// True if the guest may not write.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the geometry as the guest is told, with the present size.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        *self.geometry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of bytes of the disk, as the guest sees it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Returns a receiver that is notified whenever the size changes.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Changes the size as [`Resize::resize`] does. Calls `tell` with each size against which
    /// requests must be checked from then on: before the disk shrinks, with the smaller size, and
    /// at the end, with the disk's size. Calls `wait` in between, when the disk shrinks: it must
    /// return when no request in flight reaches beyond the smaller size, or fail.
    pub(super) fn resize_with(
        &self,
        size: Option<u64>,
        tell: impl Fn(u64),
        wait: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<u64, Errno> {
        let _one_at_a_time = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let Geometry { size: old, block_size, .. } = self.geometry();
        let is_whole = |size: u64| size.is_multiple_of(u64::from(block_size));
        if size.is_some_and(|size| !is_whole(size)) {
            return Err(Errno::INVAL);
        }
        let set = |size| {
            self.size.store(size, Ordering::Relaxed);
            tell(size);
        };
        // To shrink: first refuse new requests beyond the end, then wait for requests in flight,
        // and only then truncate the disk. To grow: first extend the disk, then admit requests
        // beyond `old`.
        let shrunk = size.filter(|size| *size < old);
        let begun = shrunk.map_or(Ok(()), |size| {
            set(size);
            wait()
        });
        let resized = begun.and_then(|()| self.disk.resize(size));
        let measured = resized.map(|geometry| as_told(geometry, self.block_size));
        let measured = measured.and_then(|geometry| {
            if is_whole(geometry.size) { Ok(geometry) } else { Err(Errno::INVAL) }
        });
        // After a failure, check requests against the old size again.
        let geometry = measured.inspect_err(|_| set(old))?;
        *self.geometry.lock().unwrap_or_else(PoisonError::into_inner) = geometry;
        set(geometry.size);
        if old != geometry.size {
            self.changes.send_modify(|n| *n += 1);
        }
        Ok(geometry.size)
    }
}

/// In the supervisor, for a disk that a device process serves. The supervisor shrinks it only while
/// no process serves it, so there are no requests to wait for.
impl Resize for HostDisk {
    fn resize(&self, size: Option<u64>) -> Result<u64, Errno> {
        self.resize_with(size, |_| {}, || Ok(()))
    }
}

/// Returns the geometry of a disk with the logical block size that the guest is told.
fn as_told(geometry: Geometry, block_size: Option<u32>) -> Geometry {
    let block_size = block_size.unwrap_or(geometry.block_size);
    let physical_block_size = geometry.physical_block_size.max(block_size);
    let min_io_size = geometry.min_io_size.max(physical_block_size);
    Geometry { block_size, physical_block_size, min_io_size, ..geometry }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_backend::blk::file::FileDisk;
    use manyring_backend::blk::{Image, ImageOptions};

    #[test]
    fn a_disk_that_another_process_serves_is_resized_and_tells_of_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let image = Image::open(file.path(), ImageOptions::default()).unwrap();
        let host = HostDisk::new(Arc::new(FileDisk::new(image)), Some(4096), true);
        let changes = host.changes();
        let Geometry { block_size, physical_block_size, .. } = host.geometry();
        assert_eq!((block_size, physical_block_size, host.is_read_only()), (4096, 4096, true));
        assert_eq!(host.resize(Some(4096 + 512)), Err(Errno::INVAL), "no whole block");
        assert_eq!((host.size(), changes.has_changed().unwrap()), (1 << 20, false));
        assert_eq!(host.resize(None), Ok(1 << 20));
        assert!(!changes.has_changed().unwrap(), "it is as large as it was");
        assert_eq!((host.resize(Some(2 << 20)), host.size()), (Ok(2 << 20), 2 << 20));
        assert!(changes.has_changed().unwrap());
        // Requests in flight may not end: the disk keeps its size.
        let told = std::cell::RefCell::new(Vec::new());
        let waits = || {
            assert_eq!(host.size(), 4096, "guest and operator see it already");
            Err(Errno::BUSY)
        };
        let refused = host.resize_with(Some(4096), |size| told.borrow_mut().push(size), waits);
        assert_eq!((refused, host.size()), (Err(Errno::BUSY), 2 << 20));
        assert_eq!(told.into_inner(), [4096, 2 << 20]);
    }
}
