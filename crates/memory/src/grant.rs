//! Grants: pages that another Xen domain lends us by reference. `GrantMapper`, `GrantPages`.
//!
//! ```text
//! GrantMapper     who maps: Xen's grant device, or the simulated Xen, for one domain
//! GrantPages      the pages of a queue: addresses reserved once, a reference mapped to any of them
//! PersistentGrants    which references stay mapped, and which go with their request
//! ```
//! A page that is mapped belongs to a snapshot of guest memory as the memory of a virtio guest
//! does: [`GrantPages::memory`] is one [`GuestMemory`] of one region, whose guest address 4096 * n
//! is page n. Slices, lists, epochs and disks treat it like any other. **What outlives what**:
//! every address of that snapshot stays mapped until nobody holds the snapshot any more. A page
//! that was unmapped holds zeroed private memory, so a slice that is used too late (by mistake)
//! reads and writes that, and never another guest's memory. A page that its owner cuts away
//! (SIGBUS) costs the [`GrantPages`] it is in, which are one queue's.

use crate::gntdev::GrantDevice;
use crate::guest::{GuestMemory, LastHit};
use crate::kept::Lends;
use crate::list::SliceList;
use crate::lot::{GrantAccess, GrantError, GrantRef, Lot, pages_of};
use crate::mapping::{Mapping, PAGE};
use crate::region::GuestAddr;
use crate::simgrant::SimGrants;
use crate::window::Window;
use std::ops::Range;
use std::sync::Arc;

/// The size of a granted page in bytes.
pub const GRANT_PAGE_SIZE: usize = PAGE;

/// Maps the references of one domain: through Xen's grant device or through the simulated Xen.
#[derive(Clone, Debug)]
pub enum GrantMapper {
    /// Xen's grant device.
    Device {
        /// The grant device, which serves many domains.
        device: Arc<GrantDevice>,
        /// The domain that lends the pages.
        domain: u16,
    },
    /// A domain of the simulated Xen.
    Simulated(Arc<SimGrants>),
}

impl GrantMapper {
    /// Maps a lot. Appends one result for each of its references to `results`.
    fn map(&self, window: &mut Window, lot: &Lot<'_>, results: &mut Vec<Result<(), GrantError>>) {
        match self {
            Self::Device { device, domain } => device.map(window, *domain, lot, results),
            Self::Simulated(grants) => grants.map(window, lot, results),
        }
    }

    /// Returns the domain that lends the pages.
    pub(crate) fn lends(&self) -> Lends {
        match self {
            Self::Device { domain, .. } => Lends::Domain(*domain),
            Self::Simulated(grants) => grants.lends(),
        }
    }

    /// Returns the most mappings of the process that a lot of this many references can take.
    fn pieces_of_lot(&self, grefs: usize) -> usize {
        match self {
            // The lot is one mapping, unless Xen refuses one of its references.
            Self::Device { .. } => 1,
            Self::Simulated(_) => grefs,
        }
    }

    /// Removes the mark of a reference whose page was unmapped.
    fn forget(&self, gref: GrantRef) {
        match self {
            // Xen itself notices the unmapping.
            Self::Device { .. } => {}
            Self::Simulated(grants) => grants.unpin(gref),
        }
    }
}

/// The pages of a queue, and the grant reference that is mapped to each. Drop unmaps all pages.
#[derive(Debug)]
pub struct GrantPages {
    mapper: GrantMapper,
    window: Window,
    memory: Arc<GuestMemory>,
    /// For each page, the reference that is mapped to it, and the access.
    mapped: Vec<Option<(GrantRef, GrantAccess)>>,
    /// The results of the last call of [`Self::map`], kept to reuse the allocation.
    results: Vec<Result<(), GrantError>>,
}

impl GrantPages {
    /// Reserves addresses for `pages` pages, without memory: no reference is mapped to them yet.
    ///
    /// # Errors
    /// [`GrantError::Memory`].
    pub fn new(mapper: GrantMapper, pages: usize) -> Result<Self, GrantError> {
        Self::with_promise(mapper, pages, 0)
    }

    /// As [`Self::new`]; in addition, `pieces` mappings (pieces of the process's address space,
    /// which are limited) can be made whatever other queues of the process hold.
    ///
    /// # Errors
    /// [`GrantError::Memory`]; `MemoryError::Pieces`: too many are promised to others.
    pub(crate) fn with_promise(
        mapper: GrantMapper,
        pages: usize,
        pieces: usize,
    ) -> Result<Self, GrantError> {
        let window = Window::new(pages, pieces)?;
        let memory = Arc::new(GuestMemory::of_mapping(window.mapping().clone()));
        Ok(Self { mapper, window, memory, mapped: vec![None; pages], results: Vec::new() })
    }

    /// Maps all of `grefs`, writable, to pages that follow each other: a ring, for which there is
    /// room whatever other queues of the process have.
    ///
    /// # Errors
    /// That of the first reference that cannot be mapped; no reference is mapped then.
    /// `MemoryError::Pieces`: the queues of the process hold all pieces that may be promised.
    pub fn of_ring(mapper: GrantMapper, grefs: &[GrantRef]) -> Result<Self, GrantError> {
        let pieces = mapper.pieces_of_lot(grefs.len());
        let mut pages = Self::with_promise(mapper, grefs.len(), pieces)?;
        let lot = Lot { page: 0, access: GrantAccess::Write, grefs };
        let mut results = Vec::with_capacity(grefs.len());
        pages.map(std::iter::once(lot), &mut results);
        results.into_iter().collect::<Result<(), GrantError>>()?;
        Ok(pages)
    }

    /// Returns the pages as guest memory. Page n has the guest address 4096 * n.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns the mapping of all pages, for the words of a ring.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.window.mapping()
    }

    /// True once a page's owner has truncated its memory: from then on all pages read as zeroes.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.mapping().is_broken()
    }

    /// Returns the number of pages, mapped or not.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapped.len()
    }

    /// True if no reference is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapped.is_empty()
    }

    /// Returns the number of pages to which a reference is mapped.
    #[must_use]
    pub fn mapped_count(&self) -> usize {
        self.mapped.iter().flatten().count()
    }

    /// Maps lots: all that a burst of requests needs, by one call. For each reference, in order,
    /// one result is appended to `results`; the failure of one is not that of another.
    ///
    /// # Panics
    /// If a page is past the end or has a reference already.
    pub fn map<'a>(
        &mut self,
        lots: impl Iterator<Item = Lot<'a>>,
        results: &mut Vec<Result<(), GrantError>>,
    ) {
        for lot in lots {
            let places = &mut self.mapped[pages_of(&lot)];
            assert!(places.iter().all(Option::is_none), "two references for one page");
            self.results.clear();
            self.mapper.map(&mut self.window, &lot, &mut self.results);
            debug_assert_eq!(self.results.len(), lot.grefs.len(), "a result for each reference");
            for ((place, gref), result) in places.iter_mut().zip(lot.grefs).zip(&self.results) {
                *place = result.is_ok().then_some((*gref, lot.access));
            }
            results.append(&mut self.results);
        }
    }

    /// Unmaps all references of `pages`, which must be whole lots, including references that could
    /// not be mapped. Adjacent ranges are unmapped by one system call.
    pub fn unmap(&mut self, pages: impl Iterator<Item = Range<u32>>) {
        let mut run = 0..0;
        for range in pages {
            let range = range.start as usize..range.end as usize;
            if range.start != run.end {
                self.unmap_run(run);
                run = range.start..range.start;
            }
            run.end = range.end;
        }
        self.unmap_run(run);
    }

    fn unmap_run(&mut self, run: Range<usize>) {
        let places = &mut self.mapped[run.clone()];
        if places.iter().all(Option::is_none) {
            return;
        }
        // Unmap the page before the mark is removed: then the owner may reuse the page.
        self.window.clear(run);
        for (gref, _) in places.iter_mut().filter_map(Option::take) {
            self.mapper.forget(gref);
        }
    }

    /// Adds the slice of `len` bytes at `offset` of a page to `list`, which must lie in
    /// [`Self::memory`]. The direction is checked here: a page that its owner
    /// granted read-only is never given out to be written.
    ///
    /// # Errors
    /// [`GrantError::NotMapped`], [`GrantError::ReadOnly`], [`GrantError::Outside`].
    #[inline]
    pub fn resolve(
        &self,
        page: u32,
        (offset, len): (u32, u32),
        access: GrantAccess,
        last: &mut LastHit,
        list: &mut SliceList,
    ) -> Result<(), GrantError> {
        let mapped = self.mapped.get(page as usize).copied().flatten();
        let (gref, mapped_for) = mapped.ok_or(GrantError::NotMapped { page })?;
        if access == GrantAccess::Write && mapped_for == GrantAccess::Read {
            return Err(GrantError::ReadOnly { gref: gref.0 });
        }
        let end = offset.checked_add(len).filter(|end| *end as usize <= PAGE);
        end.ok_or(GrantError::Outside { offset, len })?;
        let addr = u64::from(page) * PAGE as u64 + u64::from(offset);
        Ok(list.resolve(GuestAddr(addr), len, last)?)
    }

    /// Leaves all pages mapped for ever, because the kernel or a thread may still use them. No page
    /// can be resolved from then on.
    pub fn leak(&mut self) {
        self.mapped.clear();
        std::mem::forget(self.memory.clone());
    }
}

impl Drop for GrantPages {
    fn drop(&mut self) {
        self.unmap_run(0..self.mapped.len());
    }
}

#[cfg(test)]
pub(crate) mod tests;
