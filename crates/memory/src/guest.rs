//! `GuestMemory`: an immutable snapshot of the regions; address -> slice, last hit first.
//!
//! ```text
//! slice(addr, len):  the region that begins last at or before addr; addr + len lies inside
//! ```
//! Instead of a search for each address: (1) the caller keeps where the last two regions lie by
//! value, and most addresses are found there; (2) with more than two regions a table says for each
//! 2 MiB of guest addresses which region the search would find; (3) the search remains for the 2
//! MiB in which a region begins, for addresses past the table, and for bytes that cross from a
//! region into the next.

use crate::bounds::BYTES_MAX;
use crate::dirty::{DirtyLog, DirtyPages, Logged};
use crate::error::MemoryError;
use crate::files::{MemoryFiles, MemoryRules};
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use crate::region::{GuestAddr, MappedRegion, Place, RegionSpec, Regions};
use crate::shared::Words;
use rustix::fd::AsFd;
use std::sync::Arc;

/// The regions in which a queue found its last addresses: two, since requests and their data often
/// lie in two. A region of one snapshot is never used with another snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastHit {
    first: Place,
    second: Place,
}

impl LastHit {
    /// Stores a region in the place of the region that was found longer ago.
    fn note(&mut self, place: Place) {
        self.second = std::mem::replace(&mut self.first, place);
    }
}

/// The size of a block of guest addresses as a power of two: a table has one entry for each block.
const BLOCK_SHIFT: u32 = 21;
/// The maximum number of the table's entries: for guest addresses up to 128 GiB.
const BLOCKS_MAX: u64 = 1 << 16;
/// The entry of a block whose addresses must be searched.
const SEARCH: u8 = u8::MAX;
/// A snapshot with at most this many regions has no table: a [`LastHit`] stores all of them.
const REMEMBERED: usize = 2;

/// The regions of a guest at one time, immutable: a change makes a new snapshot, which shares
/// mappings.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    regions: Regions,
    /// For each block of addresses, the region that [`Self::searched`] finds for all its addresses.
    blocks: Box<[u8]>,
    /// The log in which written pages are marked, with the regions' addresses; `None`: no log.
    logged: Option<Arc<Logged>>,
}

impl GuestMemory {
    /// Makes memory of one region, from guest address 0 on.
    #[must_use]
    pub fn of_mapping(mapping: Arc<Mapping>) -> Self {
        let size = mapping.size() as u64;
        let spec = RegionSpec { guest_addr: 0, size, user_addr: 0, mmap_offset: 0 };
        // The mapping is exactly as long as the region, so this cannot fail.
        Self::of_regions(MappedRegion::new(spec, mapping).into_iter().collect())
    }

    fn of_regions(regions: Vec<MappedRegion>) -> Self {
        let (blocks, logged) = (blocks(&regions), None);
        Self { regions: Regions::of(regions), blocks, logged }
    }

    /// A snapshot of the same regions in which written pages are marked in `log`, or not at all
    /// without one. Writes through an older snapshot are marked in the log of that one, if it has
    /// one.
    ///
    /// # Errors
    /// [`MemoryError::LogShort`].
    pub fn with_log(&self, log: Option<Arc<DirtyLog>>) -> Result<Self, MemoryError> {
        Self::of_regions(self.regions.list().to_vec()).logged(log)
    }

    fn logged(mut self, log: Option<Arc<DirtyLog>>) -> Result<Self, MemoryError> {
        let logged = log.map(|log| Logged::new(log, self.regions.list())).transpose()?;
        self.logged = logged.map(Arc::new);
        Ok(self)
    }

    /// Returns the log in which written pages are marked.
    #[must_use]
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.logged.as_deref().map(Logged::log)
    }

    /// Appends the pages of this snapshot's slices to `pages`, if the snapshot has a log.
    pub fn dirty_pages(&self, slices: &[GuestSlice<'_>], pages: &mut Vec<DirtyPages>) {
        if let Some(logged) = &self.logged {
            logged.pages(slices, pages);
        }
    }

    /// Returns the guest address of the front-end's address `addr`; `None` if it is in no region.
    #[must_use]
    pub fn guest_address(&self, addr: u64) -> Option<u64> {
        self.specs().find_map(|spec| {
            let offset = addr.wrapping_sub(spec.user_addr);
            (offset < spec.size).then(|| spec.guest_addr + offset)
        })
    }

    /// Returns an id that no other snapshot of this process has, except one with the same regions;
    /// 0: there are no regions.
    #[must_use]
    #[inline]
    pub fn id(&self) -> u64 {
        self.regions.id()
    }

    /// Returns the mappings of the regions, sorted by guest address.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.regions.list().iter().map(MappedRegion::mapping)
    }

    /// Returns the regions, sorted by guest address.
    pub fn specs(&self) -> impl Iterator<Item = &RegionSpec> {
        self.regions.list().iter().map(MappedRegion::spec)
    }

    /// Returns the number of regions.
    #[must_use]
    pub fn region_count(&self) -> usize {
        self.regions.list().len()
    }

    /// Returns the size of all regions together, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.specs().map(|s| s.size).sum()
    }

    /// True once the file of a region or of the log was truncated while it was mapped.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.regions.list().iter().any(|r| r.mapping().is_broken())
            || self.log().is_some_and(|log| log.is_broken())
    }

    /// A snapshot with `spec` of `file`, which lies in memory, added; the same snapshot if it is
    /// already there.
    ///
    /// # Errors
    /// [`MemoryError::Overlap`], [`MemoryError::Vast`], [`MemoryError::LogShort`], or why the file
    /// cannot be mapped.
    pub fn with_region(&self, spec: RegionSpec, file: impl AsFd) -> Result<Self, MemoryError> {
        self.with_region_in(MemoryFiles::InMemory, spec, file)
    }

    /// A snapshot with `spec` of `file` added, as by [`Self::with_region`], within the operator's
    /// `rules`.
    ///
    /// # Errors
    /// Those of [`Self::with_region`], and [`MemoryError::MemoryMax`].
    pub fn with_region_in(
        &self,
        rules: impl Into<MemoryRules>,
        spec: RegionSpec,
        file: impl AsFd,
    ) -> Result<Self, MemoryError> {
        self.with_regions_in(rules, [(spec, file)])
    }

    /// A snapshot with all regions of `added`, each of its own file; the same snapshot if all of
    /// them are already there. The table is made once.
    ///
    /// # Errors
    /// Those of [`Self::with_region_in`], for the first region that is refused.
    pub fn with_regions_in<F: AsFd>(
        &self,
        rules: impl Into<MemoryRules>,
        added: impl IntoIterator<Item = (RegionSpec, F)>,
    ) -> Result<Self, MemoryError> {
        let rules = rules.into();
        let mut regions = self.regions.list().to_vec();
        for (spec, file) in added {
            if regions.iter().any(|r| *r.spec() == spec) {
                continue;
            }
            let size: u64 = regions.iter().map(|r| r.spec().size).sum();
            if spec.size > BYTES_MAX.saturating_sub(size) {
                return Err(MemoryError::Vast { max: BYTES_MAX });
            }
            if spec.size > rules.bytes_max.saturating_sub(size) {
                return Err(MemoryError::MemoryMax { max: rules.bytes_max });
            }
            let mapping = Mapping::of_file_in(rules.files, file, spec.mmap_offset, spec.size)?;
            insert(&mut regions, spec, Arc::new(mapping))?;
        }
        if regions.len() == self.regions.list().len() {
            return Ok(self.clone());
        }
        Self::of_regions(regions).logged(self.log().cloned())
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
        let mut regions = self.regions.list().to_vec();
        insert(&mut regions, spec, mapping)?;
        Self::of_regions(regions).logged(self.log().cloned())
    }

    /// Returns a snapshot without the region of these addresses; the same one if there is none.
    #[must_use]
    pub fn without_region(&self, spec: &RegionSpec) -> Self {
        let same = |s: &RegionSpec| {
            (s.guest_addr, s.size, s.user_addr) == (spec.guest_addr, spec.size, spec.user_addr)
        };
        let left: Vec<_> =
            self.regions.list().iter().filter(|r| !same(r.spec())).cloned().collect();
        // The log has a bit for each page of the former regions, so it has one for these.
        let unlogged = Self::of_regions(left);
        unlogged.clone().logged(self.log().cloned()).unwrap_or(unlogged)
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

    /// Calls `each` for every slice of the `len` bytes at `addr`, in order.
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

    /// Returns the `len` bytes at `addr`, if one of the two regions in `last` contains all of them.
    #[must_use]
    #[inline]
    pub fn slice<'m>(
        &'m self,
        addr: GuestAddr,
        len: u32,
        last: &mut LastHit,
    ) -> Option<GuestSlice<'m>> {
        let len = u64::from(len);
        let known = last.first.slice(&self.regions, addr, len);
        known.or_else(|| last.second.slice(&self.regions, addr, len))
    }

    /// Returns the index of the region that begins last at or before `addr`, by table or search.
    fn region_at(&self, addr: u64) -> Option<usize> {
        let block = usize::try_from(addr >> BLOCK_SHIFT).ok()?;
        match self.blocks.get(block) {
            Some(&index) if index != SEARCH => Some(index.into()),
            _ => searched(self.regions.list(), addr),
        }
    }

    /// Finds the region of `addr` without the last hits, and appends the slices of it and of the
    /// regions behind it.
    #[cold]
    fn slices_searched<'m>(
        &'m self,
        addr: GuestAddr,
        len: u64,
        last: &mut LastHit,
        mut each: impl FnMut(GuestSlice<'m>),
    ) -> Result<(), MemoryError> {
        let refused = MemoryError::GuestRange { addr: addr.0, len };
        let (mut at, mut left) = (addr.0, len);
        let mut index = self.region_at(at).ok_or(refused)?;
        loop {
            let place = Place::of(&self.regions, index).ok_or(refused)?;
            let n = left.min(place.bytes_from(at));
            each(place.slice(&self.regions, GuestAddr(at), n).ok_or(refused)?);
            left -= n;
            if left == 0 {
                last.note(place);
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
            .list()
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

/// Returns the index of the region that begins last at or before `addr`, by a binary search.
fn searched(regions: &[MappedRegion], addr: u64) -> Option<usize> {
    regions.partition_point(|r| r.spec().guest_addr <= addr).checked_sub(1)
}

/// Inserts a region in the order of guest addresses. Fails if it overlaps another region.
fn insert(
    regions: &mut Vec<MappedRegion>,
    spec: RegionSpec,
    mapping: Arc<Mapping>,
) -> Result<(), MemoryError> {
    let end = spec.guest_addr.checked_add(spec.size).ok_or(MemoryError::Overflow)?;
    spec.user_addr.checked_add(spec.size).ok_or(MemoryError::Overflow)?;
    let region = MappedRegion::new(spec, mapping)?;
    let overlaps = |s: &RegionSpec| s.guest_addr < end && spec.guest_addr < s.guest_addr + s.size;
    if regions.iter().map(MappedRegion::spec).any(overlaps) {
        return Err(MemoryError::Overlap { guest_addr: spec.guest_addr });
    }
    let at = regions.partition_point(|r| r.spec().guest_addr < spec.guest_addr);
    regions.insert(at, region);
    Ok(())
}

/// The region that [`searched`] finds in each block of addresses; [`SEARCH`] where a region begins
/// inside the block, so that its addresses differ.
///
/// Plainly: search for the first and for the last address of each block. A front-end can have a
/// table of 65536 blocks made by each of its messages, so it is filled region by region instead:
/// the search finds a region from its first address to the first of the next, so it finds it in
/// the blocks that lie wholly between these two.
fn blocks(regions: &[MappedRegion]) -> Box<[u8]> {
    let Some(RegionSpec { guest_addr, size, .. }) = regions.last().map(MappedRegion::spec).copied()
    else {
        return Box::default();
    };
    if regions.len() <= REMEMBERED {
        return Box::default();
    }
    let count = ((guest_addr + size) >> BLOCK_SHIFT).min(BLOCKS_MAX - 1) + 1;
    let mut blocks = vec![SEARCH; host_size(count)].into_boxed_slice();
    let begin = |region: &MappedRegion| region.spec().guest_addr;
    let nexts = regions.iter().skip(1).map(|next| begin(next) >> BLOCK_SHIFT).chain([count]);
    for ((index, region), to) in (0..SEARCH).zip(regions).zip(nexts) {
        let from = host_size(begin(region).div_ceil(1 << BLOCK_SHIFT));
        if let Some(whole) = blocks.get_mut(from..host_size(to.min(count))) {
            whole.fill(index);
        }
    }
    blocks
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}

#[cfg(test)]
mod tests;
