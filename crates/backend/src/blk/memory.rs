//! `memory`: a disk in anonymous memory, allocated as it is written, and lost when the disk is
//! closed. A request longer than a turn's quota is copied in pieces, one in each turn.

use super::task::{Backlog, Step, Task};
use super::{Burst, Completion, Disk, DiskQueue, Geometry, Op, Request};
use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, Mapping, MemoryError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, PoisonError};

/// A disk whose content is memory of this process.
#[derive(Debug)]
pub struct MemoryDisk {
    storage: Arc<Mapping>,
    /// The memfd with the disk's content, once it was passed to another process. From then on that
    /// process serves the disk, and this one no longer uses `storage`.
    given: Mutex<Option<OwnedFd>>,
}

impl MemoryDisk {
    /// Makes a disk of `size` bytes, all zero.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: the host has no address space or memory for the disk.
    pub fn new(size: u64) -> Result<Self, MemoryError> {
        Ok(Self { storage: Arc::new(Mapping::anonymous(size)?), given: Mutex::default() })
    }

    /// Makes a disk whose content is in `file`, from another process's [`Disk::hand_memory`].
    ///
    /// # Errors
    /// [`MemoryError`]: `file` does not lie in memory, is shorter than `size`, or cannot be mapped,
    /// or no descriptor is free.
    pub fn handed(file: impl AsFd, size: u64) -> Result<Self, MemoryError> {
        let given = rustix::io::fcntl_dupfd_cloexec(&file, 3).map_err(MemoryError::Map)?;
        let storage = Arc::new(Mapping::of_file(file, 0, size)?);
        Ok(Self { storage, given: Mutex::new(Some(given)) })
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        let size = self.storage.size() as u64;
        Geometry {
            size,
            block_size: 512,
            physical_block_size: 4096,
            min_io_size: 4096,
            opt_io_size: 0,
            read_only: false,
            discard_max: size,
            write_zeroes_max: size,
            secure_erase_max: 0,
        }
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        let storage = self.storage.clone();
        Ok(Box::new(MemoryQueue { storage, backlog: Backlog::default() }))
    }

    fn hand_memory(&self) -> Result<Option<OwnedFd>, Errno> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        // Keep the file even if the copy fails: its content is the disk's now, and no other process
        // may have it.
        let file = match &mut *given {
            Some(file) => file,
            none => none.insert(sealed(self.storage.size() as u64)?),
        };
        rustix::io::fcntl_dupfd_cloexec(file, 3).map(Some)
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        if size.is_some() { Err(Errno::OPNOTSUPP) } else { Ok(self.geometry()) }
    }

    fn kind(&self) -> &'static str {
        "memory"
    }
}

/// Makes a memfd whose size nobody can change. It takes memory as it is written.
fn sealed(size: u64) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("disk", flags)?;
    rustix::fs::ftruncate(&file, size)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

#[derive(Debug)]
struct MemoryQueue {
    storage: Arc<Mapping>,
    backlog: Backlog,
}

/// Serves `len` bytes of a request, at `offset` of the disk.
fn serve(
    storage: &Mapping,
    op: Op,
    offset: u64,
    len: u64,
    slices: &[GuestSlice],
) -> Result<(), Errno> {
    let range = |offset: u64, len: u64| {
        let offset = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        storage.slice(offset, len).ok_or(Errno::INVAL)
    };
    match op {
        Op::Read | Op::Write { .. } => {
            let (mut at, end) = (offset, offset + len);
            for slice in slices {
                let stored = range(at, (slice.len() as u64).min(end - at))?;
                if op == Op::Read {
                    slice.copy_from(&stored);
                } else {
                    stored.copy_from(slice);
                }
                at += stored.len() as u64;
                if at == end {
                    break;
                }
            }
            Ok(())
        }
        Op::Flush => Ok(()),
        Op::Discard | Op::WriteZeroes { .. } => {
            range(offset, len)?.fill_zero();
            Ok(())
        }
        Op::SecureErase => Err(Errno::OPNOTSUPP),
    }
}

/// Serves the next `bytes` bytes of a task.
fn piece(storage: &Mapping, task: &mut Task, bytes: u64) -> Step {
    match serve(storage, task.op, task.offset, bytes, task.rest.as_slices()) {
        Err(errno) => Step::Done(Err(errno)),
        Ok(()) => {
            task.went_on(bytes);
            task.step()
        }
    }
}

impl DiskQueue for MemoryQueue {
    /// Returns the number of requests of one page that the quota of a turn allows.
    fn burst_max(&self) -> usize {
        32
    }

    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, slices) in burst.iter() {
            let Request { token, op, offset, len, .. } = *request;
            if self.backlog.takes_at_once(len) {
                let result = serve(&self.storage, op, offset, len, &slices);
                done.push(Completion { token, result });
            } else {
                self.backlog.push(Task::new(request, slices));
            }
        }
    }

    fn recall(&mut self, token: u32, _ring: Option<&mut Ring>) -> bool {
        self.backlog.recall(token)
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let storage = &self.storage;
        self.backlog.run(done, |task, bytes| piece(storage, task, bytes))
    }
}
