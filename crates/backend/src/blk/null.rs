//! `null`: a disk that stores nothing. A read does not change the guest's memory.

use super::{Burst, Completion, Disk, DiskQueue, Geometry};
use crate::sys::uring::Ring;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// A disk that stores no bytes: a request is done as soon as it is submitted.
#[derive(Debug)]
pub struct NullDisk {
    size: AtomicU64,
}

impl NullDisk {
    /// Makes a null disk of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self { size: AtomicU64::new(size) }
    }
}

impl Disk for NullDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size.load(Ordering::Relaxed),
            block_size: 512,
            physical_block_size: 4096,
            min_io_size: 4096,
            opt_io_size: 0,
            read_only: false,
            discard_max: u64::MAX,
            write_zeroes_max: u64::MAX,
            secure_erase_max: 0,
        }
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(NullQueue))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        if let Some(size) = size {
            self.size.store(size, Ordering::Relaxed);
        }
        Ok(self.geometry())
    }

    fn kind(&self) -> &'static str {
        "null"
    }
}

#[derive(Debug)]
struct NullQueue;

impl DiskQueue for NullQueue {
    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        done.extend(burst.iter().map(|(r, _)| Completion { token: r.token, result: Ok(()) }));
    }
}
