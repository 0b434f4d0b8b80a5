//! `MappedRegion`, a piece of guest memory with its mapping, `Regions`, those of one snapshot, and
//! `Place`, where the bytes of one lie: here a guest address is checked, once.
#![allow(unsafe_code, reason = "allow-listed: a checked guest address becomes a slice")]

use crate::error::MemoryError;
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A guest physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddr(pub u64);

/// The addresses of a region in the guest, the front-end and its file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front-end.
    pub user_addr: u64,
    /// Offset of the first byte in the file.
    pub mmap_offset: u64,
}

/// A region of a snapshot: its bytes are the first `spec.size` of its mapping.
#[derive(Clone, Debug)]
pub(crate) struct MappedRegion {
    spec: RegionSpec,
    /// The host address of the first byte, stored beside the range: one cache line holds both.
    base: NonNull<u8>,
    mapping: Arc<Mapping>,
}

// SAFETY: `base` is an address in `mapping`, which may be used from any thread and is held.
unsafe impl Send for MappedRegion {}
// SAFETY: as above.
unsafe impl Sync for MappedRegion {}

impl MappedRegion {
    /// The region `spec` on `mapping`.
    ///
    /// # Errors
    /// [`MemoryError::TooShort`] if the mapping is shorter.
    pub(crate) fn new(spec: RegionSpec, mapping: Arc<Mapping>) -> Result<Self, MemoryError> {
        let file_size = mapping.size() as u64;
        if file_size < spec.size {
            return Err(MemoryError::TooShort { file_size, end: spec.size });
        }
        Ok(Self { spec, base: mapping.address(0), mapping })
    }

    #[inline]
    pub(crate) fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

/// The regions of one snapshot of guest memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions {
    /// The regions, sorted by guest address, without overlap.
    list: Vec<MappedRegion>,
    /// The id of these regions, unique in this process; clones share it.
    id: u64,
}

/// The id of the next snapshot. A snapshot without regions has the id 0.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Regions {
    /// Makes a snapshot of regions that are sorted by guest address and do not overlap.
    pub(crate) fn of(list: Vec<MappedRegion>) -> Self {
        Self { list, id: NEXT_ID.fetch_add(1, Ordering::Relaxed) }
    }

    #[inline]
    pub(crate) fn list(&self) -> &[MappedRegion] {
        &self.list
    }

    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
}

/// Where the bytes of a region lie, by value: a caller that resolves many addresses keeps it, and a
/// further address in the same region costs no look at the list of regions.
///
/// It holds nothing: its region may be unmapped while it lives. So it gives slices out only to a
/// caller who shows the snapshot that it came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    guest_addr: u64,
    size: u64,
    base: NonNull<u8>,
    /// The id of the snapshot of this region.
    snapshot: u64,
}

// SAFETY: a place is an address, used only while a snapshot that maps it is borrowed.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

/// The default is a place without bytes.
impl Default for Place {
    fn default() -> Self {
        Self { guest_addr: 0, size: 0, base: NonNull::dangling(), snapshot: 0 }
    }
}

impl Place {
    /// Returns the place of region `index` of a snapshot.
    pub(crate) fn of(regions: &Regions, index: usize) -> Option<Self> {
        let MappedRegion { spec, base, .. } = regions.list.get(index)?;
        let RegionSpec { guest_addr, size, .. } = *spec;
        Some(Self { guest_addr, size, base: *base, snapshot: regions.id })
    }

    /// Returns how many bytes of the region follow guest address `addr`.
    pub(crate) fn bytes_from(&self, addr: u64) -> u64 {
        self.size.saturating_sub(addr.wrapping_sub(self.guest_addr))
    }

    /// Returns the slice of `len` bytes at `addr`, if all are in this region of `regions`.
    #[inline]
    pub(crate) fn slice<'m>(
        &self,
        regions: &'m Regions,
        addr: GuestAddr,
        len: u64,
    ) -> Option<GuestSlice<'m>> {
        let offset = addr.0.wrapping_sub(self.guest_addr);
        let is_inside = offset < self.size && self.size - offset >= len;
        if !is_inside || self.snapshot != regions.id {
            return None;
        }
        // SAFETY: offset < size <= bytes of the mapping (`MappedRegion::new`): the address lies
        // inside.
        let start = unsafe { self.base.add(host_size(offset)) };
        // SAFETY: offset + len <= size <= bytes of the mapping. `of` took this place from a
        // snapshot of the same id as `regions`, which therefore hold the same mapping, and keep it
        // mapped while they are borrowed.
        Some(unsafe { GuestSlice::new(start, host_size(len)) })
    }
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}
