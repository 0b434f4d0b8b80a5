//! `GuestMemory`: an immutable snapshot of the regions; address -> slice, last hit first.

use crate::error::MemoryError;
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use crate::region::Region;
use crate::shared::Words;
use rustix::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A guest physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddr(pub u64);

/// Where a region lies: in the guest, in the front-end, in its file. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub guest_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Address of the first byte in the front-end.
    pub user_addr: u64,
    /// Offset of the first byte in the file.
    pub mmap_offset: u64,
}

/// Where the last addresses were found: the last region first, then the one before it, since
/// requests and their data often lie in two. One per queue.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastHit {
    last: usize,
    before: usize,
}

impl LastHit {
    #[inline]
    fn note(&mut self, index: usize) {
        self.before = std::mem::replace(&mut self.last, index);
    }
}

/// The regions of a guest at one time. Immutable: a change makes a new snapshot, which shares the
/// mappings that stay.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// Sorted by guest address, free of overlap.
    regions: Vec<Region>,
    /// Names these regions and no others, for as long as the process lives; clones share it.
    id: u64,
}

/// The id of the next snapshot. That without regions is 0.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl GuestMemory {
    /// One region from guest address 0 on.
    #[must_use]
    pub fn of_mapping(mapping: Arc<Mapping>) -> Self {
        let size = mapping.size() as u64;
        let spec = RegionSpec { guest_addr: 0, size, user_addr: 0, mmap_offset: 0 };
        // The mapping is as long as itself.
        Self::of_regions(Region::new(spec, mapping).into_iter().collect())
    }

    fn of_regions(regions: Vec<Region>) -> Self {
        Self { regions, id: NEXT_ID.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The regions, by guest address.
    pub fn specs(&self) -> impl Iterator<Item = &RegionSpec> {
        self.regions.iter().map(Region::spec)
    }

    /// How many regions there are.
    #[must_use]
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// Bytes of all regions together.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.specs().map(|s| s.size).sum()
    }

    /// True once a region was cut away under us.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|r| r.mapping().is_broken())
    }

    /// A snapshot with `spec` of `file` added; the same snapshot if it is already there.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`], or why the file cannot be mapped.
    pub fn with_region(&self, spec: RegionSpec, file: impl AsFd) -> Result<Self, MemoryError> {
        if self.specs().any(|s| *s == spec) {
            return Ok(self.clone());
        }
        let mapping = Mapping::of_file(file, spec.mmap_offset, spec.size)?;
        self.with_mapping(spec, Arc::new(mapping))
    }

    /// A snapshot with `spec` added on a mapping that exists, of at least its size.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`], [`MemoryError::Overflow`], [`MemoryError::TooShort`].
    pub fn with_mapping(
        &self,
        spec: RegionSpec,
        mapping: Arc<Mapping>,
    ) -> Result<Self, MemoryError> {
        let end = spec.guest_addr.checked_add(spec.size).ok_or(MemoryError::Overflow)?;
        spec.user_addr.checked_add(spec.size).ok_or(MemoryError::Overflow)?;
        let region = Region::new(spec, mapping)?;
        let overlaps =
            |s: &RegionSpec| s.guest_addr < end && spec.guest_addr < s.guest_addr + s.size;
        if self.specs().any(overlaps) {
            return Err(MemoryError::Overlap { guest_addr: spec.guest_addr });
        }
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|r| r.spec().guest_addr < spec.guest_addr);
        regions.insert(at, region);
        Ok(Self::of_regions(regions))
    }

    /// A snapshot without the region at these addresses; the same snapshot if there is none.
    #[must_use]
    pub fn without_region(&self, spec: &RegionSpec) -> Self {
        let same = |s: &RegionSpec| {
            (s.guest_addr, s.size, s.user_addr) == (spec.guest_addr, spec.size, spec.user_addr)
        };
        Self::of_regions(self.regions.iter().filter(|r| !same(r.spec())).cloned().collect())
    }

    /// Appends the slices of `len` bytes at `addr` to `out`: one, or more where the bytes cross
    /// from a region into its neighbour. They stay mapped as long as this snapshot is borrowed.
    ///
    /// # Errors
    /// [`MemoryError::GuestRange`] if a byte is in no region; `out` is then unspecified.
    #[inline]
    pub fn slices<'m>(
        &'m self,
        addr: GuestAddr,
        len: u32,
        last: &mut LastHit,
        out: &mut Vec<GuestSlice<'m>>,
    ) -> Result<(), MemoryError> {
        self.each_slice(addr, len, last, |slice| out.push(slice))
    }

    /// Calls `each` for every slice of `len` bytes at `addr`, in order.
    #[inline]
    pub(crate) fn each_slice<'m>(
        &'m self,
        addr: GuestAddr,
        len: u32,
        last: &mut LastHit,
        mut each: impl FnMut(GuestSlice<'m>),
    ) -> Result<(), MemoryError> {
        if let Some(slice) = self.slice(addr, len, last) {
            each(slice);
            return Ok(());
        }
        self.slices_searched(addr, len.into(), last, each)
    }

    /// The `len` bytes at `addr`, if one of the last two regions that were hit holds them all.
    #[must_use]
    #[inline]
    pub fn slice<'m>(
        &'m self,
        addr: GuestAddr,
        len: u32,
        last: &mut LastHit,
    ) -> Option<GuestSlice<'m>> {
        let len = u64::from(len);
        if let Some(slice) = self.slice_in(last.last, addr, len) {
            return Some(slice);
        }
        let slice = self.slice_in(last.before, addr, len)?;
        last.note(last.before);
        Some(slice)
    }

    /// The slice, if all of it is in region `index`.
    #[inline]
    fn slice_in(&self, index: usize, addr: GuestAddr, len: u64) -> Option<GuestSlice<'_>> {
        self.regions.get(index)?.slice(addr, len)
    }

    /// The way past the last hits: search, and follow from region to region.
    fn slices_searched<'m>(
        &'m self,
        addr: GuestAddr,
        len: u64,
        last: &mut LastHit,
        mut each: impl FnMut(GuestSlice<'m>),
    ) -> Result<(), MemoryError> {
        let refused = MemoryError::GuestRange { addr: addr.0, len };
        let (mut at, mut left) = (addr.0, len);
        let mut index = self
            .regions
            .partition_point(|r| r.spec().guest_addr <= at)
            .checked_sub(1)
            .ok_or(refused)?;
        loop {
            let region = self.regions.get(index).ok_or(refused)?;
            let RegionSpec { guest_addr, size, .. } = *region.spec();
            let offset = at.wrapping_sub(guest_addr);
            if offset >= size {
                return Err(refused);
            }
            let n = left.min(size - offset);
            each(region.slice(GuestAddr(at), n).ok_or(refused)?);
            left -= n;
            if left == 0 {
                last.note(index);
                return Ok(());
            }
            at = at.checked_add(n).ok_or(refused)?;
            index += 1;
        }
    }

    /// The words of a ring: `len` bytes at the front-end's address `addr`, inside one region.
    ///
    /// # Errors
    /// [`MemoryError::UserRange`], [`MemoryError::Align`].
    pub fn words(&self, addr: u64, len: usize, align: u64) -> Result<Words, MemoryError> {
        let refused = MemoryError::UserRange { addr, len: len as u64 };
        let (region, offset) = self
            .regions
            .iter()
            .find_map(|r| {
                let RegionSpec { user_addr, size, .. } = *r.spec();
                let offset = addr.wrapping_sub(user_addr);
                let fits = offset < size && size - offset >= len as u64;
                fits.then_some((r, host_size(offset)))
            })
            .ok_or(refused)?;
        Words::new(region.mapping().clone(), offset, len, align)
            .ok_or(MemoryError::Align { addr, align })
    }
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        let region = |guest_addr, size, user_addr| {
            let spec = RegionSpec { guest_addr, size, user_addr, mmap_offset: 0 };
            (spec, Arc::new(Mapping::anonymous(size).unwrap()))
        };
        let (high, high_map) = region(0x10_0000, 0x4000, 0x9000_0000);
        let (low, low_map) = region(0, 0x2000, 0x7000_0000);
        let (next, next_map) = region(0x2000, 0x1000, 0x8000_0000);
        GuestMemory::default()
            .with_mapping(high, high_map)
            .and_then(|m| m.with_mapping(low, low_map))
            .and_then(|m| m.with_mapping(next, next_map))
            .unwrap()
    }

    fn lens(memory: &GuestMemory, addr: u64, len: u32) -> Result<Vec<usize>, MemoryError> {
        let mut out = Vec::new();
        memory.slices(GuestAddr(addr), len, &mut LastHit::default(), &mut out)?;
        Ok(out.iter().map(GuestSlice::len).collect())
    }

    #[test]
    fn a_range_that_crosses_into_the_next_region_becomes_two_slices() {
        assert_eq!(lens(&memory(), 0x1ff0, 0x20), Ok(vec![0x10, 0x10]));
        assert_eq!(lens(&memory(), 0x1000, 0x1000), Ok(vec![0x1000]));
    }

    #[test]
    fn ranges_outside_of_memory_are_refused() {
        for (addr, len) in [(0x3000, 1), (0x2ff0, 0x11), (u64::MAX, 2), (0x10_3fff, 2)] {
            assert!(lens(&memory(), addr, len).is_err(), "{addr:#x}+{len:#x}");
        }
        assert!(lens(&GuestMemory::default(), 0, 1).is_err());
    }

    #[test]
    fn the_last_hits_give_the_same_slices_as_the_search() {
        let memory = memory();
        let (mut last, mut out) = (LastHit::default(), Vec::new());
        for addr in [0x10_0000u64, 0x10_0008, 0x1000, 0x2010, 0x10_0010, 8] {
            memory.slices(GuestAddr(addr), 8, &mut last, &mut out).unwrap();
            let searched = {
                let mut out = Vec::new();
                memory
                    .slices(GuestAddr(addr), 8, &mut LastHit { last: 99, before: 99 }, &mut out)
                    .unwrap();
                out[0].address()
            };
            assert_eq!(out.last().unwrap().address(), searched);
        }
    }

    #[test]
    fn overlapping_regions_are_refused_and_identical_files_share() {
        let spec = RegionSpec { guest_addr: 0x1fff, size: 8, user_addr: 0, mmap_offset: 0 };
        let map = Arc::new(Mapping::anonymous(8).unwrap());
        assert!(matches!(memory().with_mapping(spec, map), Err(MemoryError::Overlap { .. })));
    }

    #[test]
    fn a_file_shorter_than_its_region_is_refused() {
        let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let spec = RegionSpec { guest_addr: 0, size: 8192, user_addr: 0, mmap_offset: 0 };
        let refused = GuestMemory::default().with_region(spec, &file);
        assert!(matches!(refused, Err(MemoryError::TooShort { .. })));
        let spec = RegionSpec { size: 4096, ..spec };
        let memory = GuestMemory::default().with_region(spec, &file).unwrap();
        assert_eq!(memory.with_region(spec, &file).unwrap().region_count(), 1);
        assert_eq!(memory.without_region(&spec).region_count(), 0);
    }

    #[test]
    fn ring_words_must_be_aligned_and_in_one_region() {
        let memory = memory();
        assert!(memory.words(0x7000_1000, 64, 16).is_ok());
        assert!(matches!(memory.words(0x7000_1008, 64, 16), Err(MemoryError::Align { .. })));
        assert!(matches!(memory.words(0x7000_1ff0, 64, 16), Err(MemoryError::UserRange { .. })));
    }
}
