//! `Arena`: guest memory in files, most of them memfds, and a bump allocator of guest addresses.

use crate::DriverError;
use manyring_memory::{
    GuestAddr, GuestMemory, GuestSlice, LastHit, MemoryFiles, RegionSpec, Words, copy_from_slices,
    copy_to_slices,
};
use manyring_wire::vhost_user::Region;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One entry of a memory table: where the region lies, and its file.
pub type TableEntry<'a> = (Region, BorrowedFd<'a>);

/// Guest address of the first region: not zero, so that a zeroed descriptor points nowhere.
const FIRST_ADDR: u64 = 0x10_0000;
/// Added to a guest address to get the front-end's address, so that the two cannot be confused.
const USER_OFFSET: u64 = 0x7a00_0000_0000;
/// Bytes between two regions.
const GAP: u64 = 0x1000_0000;
const PAGE: u64 = 4096;

/// Guest memory: one region or more, each a file. Shared by threads; allocation never frees.
#[derive(Debug)]
pub struct Arena {
    files: Vec<(RegionSpec, OwnedFd)>,
    memory: Arc<GuestMemory>,
    /// The next free guest address, which always lies in the newest region.
    next: AtomicU64,
    end: u64,
}

impl Arena {
    /// Memory of one region of `size` bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn new(size: u64) -> Result<Self, DriverError> {
        Self::in_file(memfd_create("guest", MemfdFlags::CLOEXEC)?, size)
    }

    /// Memory of one region of `size` bytes in a file of the caller's choice, on a local disk too.
    ///
    /// # Errors
    /// [`DriverError::System`] if the file cannot get this length, [`DriverError::Memory`] if it
    /// cannot be mapped or lies on FUSE or a network file system.
    pub fn in_file(file: OwnedFd, size: u64) -> Result<Self, DriverError> {
        let memory = Arc::default();
        let mut arena = Self { files: Vec::new(), memory, next: AtomicU64::new(0), end: 0 };
        arena.add_file(file, size)?;
        Ok(arena)
    }

    /// Adds a region of `size` bytes, from which further memory is allocated. Returns it as
    /// messages name it.
    ///
    /// # Errors
    /// The system's.
    pub fn add_region(&mut self, size: u64) -> Result<Region, DriverError> {
        self.add_file(memfd_create("guest", MemfdFlags::CLOEXEC)?, size)
    }

    fn add_file(&mut self, file: OwnedFd, size: u64) -> Result<Region, DriverError> {
        let size = size.next_multiple_of(PAGE);
        ftruncate(&file, size)?;
        let guest_addr = if self.files.is_empty() { FIRST_ADDR } else { self.end + GAP };
        let user_addr = guest_addr + USER_OFFSET;
        let spec = RegionSpec { guest_addr, size, user_addr, mmap_offset: 0 };
        let memory = self.memory.with_region_in(MemoryFiles::LocalDisk, spec, &file)?;
        self.memory = Arc::new(memory);
        self.files.push((spec, file));
        self.end = guest_addr + size;
        self.next.store(guest_addr, Ordering::Relaxed);
        Ok(region(&spec))
    }

    /// The regions and their files, as a memory table names them.
    #[must_use]
    pub fn table(&self) -> Vec<TableEntry<'_>> {
        self.files.iter().map(|(spec, file)| (region(spec), file.as_fd())).collect()
    }

    /// The guest memory, mapped into this process.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Allocates the next `len` bytes of the newest region, aligned to `align` (a power of two).
    /// Returns their guest address.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`].
    pub fn alloc(&self, len: u64, align: u64) -> Result<u64, DriverError> {
        let fit = |next: u64| {
            let addr = next.next_multiple_of(align);
            let after = addr.checked_add(len)?;
            (after <= self.end).then_some(after)
        };
        let next = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit);
        next.map(|n| n.next_multiple_of(align)).map_err(|_| DriverError::ArenaFull { len })
    }

    /// The front-end's address of guest address `addr`.
    #[must_use]
    pub const fn user_addr(&self, addr: u64) -> u64 {
        addr.wrapping_add(USER_OFFSET)
    }

    /// The words at guest address `addr`: `len` bytes aligned to `align`.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn words(&self, addr: u64, len: usize, align: u64) -> Result<Words, DriverError> {
        Ok(self.memory.words(self.user_addr(addr), len, align)?)
    }

    /// Copies bytes into guest memory.
    ///
    /// # Errors
    /// [`DriverError::Memory`] if a byte is in no region.
    pub fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), DriverError> {
        copy_to_slices(&self.slices(addr, bytes.len())?, bytes);
        Ok(())
    }

    /// Copies bytes out of guest memory.
    ///
    /// # Errors
    /// [`DriverError::Memory`] if a byte is in no region.
    pub fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        copy_from_slices(&self.slices(addr, bytes.len())?, bytes);
        Ok(())
    }

    fn slices(&self, addr: u64, len: usize) -> Result<Vec<GuestSlice<'_>>, DriverError> {
        let mut slices = Vec::with_capacity(1);
        if len > 0 {
            let len32 = u32::try_from(len);
            let len = len32.map_err(|_| DriverError::TooLong { len, max: u32::MAX as usize })?;
            self.memory.slices(GuestAddr(addr), len, &mut LastHit::default(), &mut slices)?;
        }
        Ok(slices)
    }
}

fn region(spec: &RegionSpec) -> Region {
    Region {
        guest_addr: spec.guest_addr,
        size: spec.size,
        user_addr: spec.user_addr,
        mmap_offset: spec.mmap_offset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_read_back_and_neighbours_stay() {
        let arena = Arena::new(8192).unwrap();
        let (a, b) = (arena.alloc(100, 1).unwrap(), arena.alloc(64, 64).unwrap());
        assert!(b >= a + 100 && b.is_multiple_of(64));
        arena.write(a, &[7; 100]).unwrap();
        let mut out = [1; 101];
        arena.read(a, &mut out).unwrap();
        assert_eq!((&out[..100], out[100]), (&[7; 100][..], 0));
    }

    #[test]
    fn allocation_ends_with_the_region_and_goes_on_in_the_next() {
        let mut arena = Arena::new(4096).unwrap();
        arena.alloc(4096, 1).unwrap();
        assert!(matches!(arena.alloc(1, 1), Err(DriverError::ArenaFull { len: 1 })));
        let region = arena.add_region(4096).unwrap();
        assert_eq!(arena.alloc(1, 1).unwrap(), region.guest_addr);
        assert_eq!(arena.table().len(), 2);
    }
}
