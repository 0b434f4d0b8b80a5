//! `InflightRegion`: the memory in which a session's rings record their chains in flight.
//!
//! The front-end asks a session for a region (`GET_INFLIGHT_FD`), keeps it, and passes it to this
//! session and to the next ones (`SET_INFLIGHT_FD`), which other processes may serve.

use manyring_memory::{Mapping, MemoryError, Words};
use manyring_queue::{inflight_size, packed_inflight_size};
use manyring_wire::vhost_user::InflightArea;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use std::io;
use std::sync::Arc;

/// A region that the session itself has made, because the front-end's region has no place for a
/// ring. The process that resumes the session gets it.
#[derive(Clone, Debug)]
pub(super) struct OwnRegion {
    pub(super) region: InflightRegion,
    pub(super) area: InflightArea,
    pub(super) file: Arc<OwnedFd>,
}

/// The alignment of the rings' places in a region, in bytes.
const ALIGN: usize = 64;

/// An in-flight region that is mapped into this process.
#[derive(Clone, Debug)]
pub(super) struct InflightRegion {
    mapping: Arc<Mapping>,
    queues: u16,
    queue_size: u16,
    is_packed: bool,
}

impl InflightRegion {
    /// Maps as many bytes of the front-end's file as its rings need. May block.
    ///
    /// # Errors
    /// [`MemoryError`]: the file may not be mapped, or is too short.
    pub(super) fn map(
        area: InflightArea,
        is_packed: bool,
        file: impl AsFd,
    ) -> Result<Self, MemoryError> {
        let InflightArea { offset, queues, queue_size, .. } = area;
        let needed = size_of(queues, queue_size, is_packed);
        if area.size < needed {
            return Err(MemoryError::TooShort { file_size: area.size, end: needed });
        }
        let mapping = Arc::new(Mapping::of_file(file, offset, needed)?);
        Ok(Self { mapping, queues, queue_size, is_packed })
    }

    /// True if the region was made for packed rings.
    pub(super) fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// Returns the number of entries of the largest ring for which a place of the region has room.
    pub(super) fn queue_size(&self) -> u16 {
        self.queue_size
    }

    /// Returns the place of a ring with this many entries. `None`: no place fits the ring.
    pub(super) fn fitting(&self, index: usize, size: u16, is_packed: bool) -> Option<Words> {
        if size > self.queue_size { None } else { self.place(index, is_packed) }
    }

    /// Returns the place for the ring of this index, even if it is too small for the ring. `None`:
    /// the region has no place for this index, or was made for the other ring format.
    pub(super) fn place(&self, index: usize, is_packed: bool) -> Option<Words> {
        if index >= usize::from(self.queues) || is_packed != self.is_packed {
            return None;
        }
        let stride = stride(self.queue_size, is_packed);
        let size = place_size(self.queue_size, is_packed);
        Words::new(self.mapping.clone(), index * stride, size, 8)
    }
}

/// Makes a region of zeroes for a front-end with packed or split rings. Its file is sealed, so that
/// nobody can make it shorter or longer.
///
/// # Errors
/// The kernel has no memory or no file descriptor left.
pub(super) fn make(area: InflightArea, is_packed: bool) -> io::Result<(InflightArea, OwnedFd)> {
    let file = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let size = size_of(area.queues, area.queue_size, is_packed);
    ftruncate(&file, size)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let InflightArea { queues, queue_size, padding, .. } = area;
    Ok((InflightArea { size, offset: 0, queues, queue_size, padding }, file))
}

/// Zeroes the place of a ring in the file of a region that [`make`] has made, so that the next ring
/// there begins without chains in flight. If the kernel has no memory for that, the ring finds the
/// record of another ring, and does not start.
pub(super) fn forget(file: impl AsFd, area: InflightArea, index: usize, is_packed: bool) {
    let stride = stride(area.queue_size, is_packed) as u64;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _ = fallocate(file, flags, index as u64 * stride, stride);
}

/// Returns the size of the place of a ring with this many entries, in bytes.
fn place_size(queue_size: u16, is_packed: bool) -> usize {
    if is_packed { packed_inflight_size(queue_size) } else { inflight_size(queue_size) }
}

/// Returns bytes from the place of a ring to that of the next one.
fn stride(queue_size: u16, is_packed: bool) -> usize {
    place_size(queue_size, is_packed).next_multiple_of(ALIGN)
}

/// Returns the size of a region with a place for each of this many rings, in bytes.
fn size_of(queues: u16, queue_size: u16, is_packed: bool) -> u64 {
    u64::from(queues) * stride(queue_size, is_packed) as u64
}
