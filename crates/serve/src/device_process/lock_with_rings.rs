//! `RingLocked`: a disk that has the supervisor lock the image while rings of its guest run
//! (`lock_with_rings`).

use crate::supervisor_client::SupervisorClient;
use manyring_backend::blk::{Disk, DiskQueue, Geometry, Image, ImageError};
use rustix::io::Errno;
use std::path::PathBuf;
use std::sync::Arc;

/// A disk whose image is locked while rings run.
#[derive(Debug)]
pub(super) struct RingLocked {
    pub(super) inner: Arc<dyn Disk>,
    pub(super) supervisor: SupervisorClient,
}

impl Disk for RingLocked {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        self.inner.open_queue(has_ring)
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.inner.resize(size)
    }

    fn measure(&self) -> Result<u64, Errno> {
        self.inner.measure()
    }

    fn acquire(&self) -> Result<(), ImageError> {
        let path = || self.inner.image().map_or_else(PathBuf::new, |image| image.path().into());
        self.supervisor.lock(true).map_err(|errno| match errno {
            Errno::BUSY | Errno::AGAIN | Errno::ACCESS => {
                ImageError::InUse { path: path(), holder: None }
            }
            errno => ImageError::Lock { path: path(), errno },
        })
    }

    fn release(&self) {
        // The supervisor flushes the image before it unlocks it; it can do so because both
        // processes share the page cache.
        let _ = self.supervisor.lock(false);
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn image(&self) -> Option<&Image> {
        self.inner.image()
    }
}
