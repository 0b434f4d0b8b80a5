//! `memory`: a disk in anonymous memory, allocated as it is written, gone at the end.

use super::{Burst, Completion, Disk, DiskQueue, Geometry, Op, Request};
use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, Mapping, MemoryError};
use rustix::io::Errno;
use std::sync::Arc;

/// The disk.
#[derive(Debug)]
pub struct MemoryDisk {
    storage: Arc<Mapping>,
}

impl MemoryDisk {
    /// A disk of `size` bytes, all zero.
    ///
    /// # Errors
    /// [`MemoryError::Map`] if the address space does not hold it.
    pub fn new(size: u64) -> Result<Self, MemoryError> {
        Ok(Self { storage: Arc::new(Mapping::anonymous(size)?) })
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        let size = self.storage.size() as u64;
        Geometry {
            size,
            block_size: 512,
            physical_block_size: 4096,
            read_only: false,
            discard_max: size,
            write_zeroes_max: size,
            secure_erase_max: 0,
        }
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(MemoryQueue { storage: self.storage.clone() }))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        if size.is_some() { Err(Errno::OPNOTSUPP) } else { Ok(self.geometry()) }
    }

    fn kind(&self) -> &'static str {
        "memory"
    }
}

#[derive(Debug)]
struct MemoryQueue {
    storage: Arc<Mapping>,
}

impl MemoryQueue {
    fn serve(&self, request: &Request, slices: &[GuestSlice]) -> Result<(), Errno> {
        let range = |offset: u64, len: u64| {
            let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
            let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
            self.storage.slice(offset, len).ok_or(Errno::INVAL)
        };
        match request.op {
            Op::Read | Op::Write { .. } => {
                let mut at = request.offset;
                for slice in slices {
                    let stored = range(at, slice.len() as u64)?;
                    if request.op == Op::Read {
                        slice.copy_from(&stored);
                    } else {
                        stored.copy_from(slice);
                    }
                    at += slice.len() as u64;
                }
                Ok(())
            }
            Op::Flush => Ok(()),
            Op::Discard | Op::WriteZeroes { .. } => {
                range(request.offset, request.len)?.fill_zero();
                Ok(())
            }
            Op::SecureErase => Err(Errno::OPNOTSUPP),
        }
    }
}

impl DiskQueue for MemoryQueue {
    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, slices) in burst.iter() {
            done.push(Completion { token: request.token, result: self.serve(request, slices) });
        }
    }
}
