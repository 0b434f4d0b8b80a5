//! `SimGrants`: grants of the simulated Xen, the back-end's half.
//!
//! The memory of a simulated domain is one file of shared memory. It begins with the domain's grant
//! table, one 64-bit word for each reference; the rest is pages, counted from the start of the
//! file. The domain writes the entries, and a process that maps a page marks its entry, as the
//! hypervisor does:
//!
//! ```text
//! bits  0-15  the domain that may map the page        16  granted     17  read-only
//!      20-43  the page                                44-63  how often it is mapped: 5 bits a seat
//! ```
//! A **seat** is a process that maps pages of the domain; the server gives one of four to each, and
//! clears its marks when its connection ends, so that a back-end that was killed leaves none.
//! Everything changes by one compare-and-swap of the whole word, so domain, page and marks are
//! always those of one entry:
//!
//! * Mapping needs `granted` and our domain, and increments the mark. An entry without them, past
//!   the table, or of a page past the file is [`GrantError::NotGranted`].
//! * Ending access is **refused** while a mark is set, as by Linux's
//!   `gnttab_end_foreign_access_ref` on real Xen: [`GrantEntry::ended`] gives nothing then. A
//!   domain that overwrites its entry all the same has ended nothing: the page stays mapped until
//!   it is unmapped, as on real Xen. The domain may name another page in the entry at once; later
//!   mappings find that one.
//!
//! The table is the domain's to spoil, and it spoils its own grants only. The file is sealed by the
//! server against being shortened, as the memory of a guest is.

use crate::error::MemoryError;
use crate::kept::Lends;
use crate::lot::{GrantAccess, GrantError, GrantRef, Lot};
use crate::mapping::{Mapping, PAGE};
use crate::shared::Words;
use crate::window::Window;
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// The size of an entry in bytes.
pub const GRANT_ENTRY_SIZE: usize = 8;
/// The most processes that can map pages of one domain at a time.
pub const SEATS: u8 = 4;
/// How often a seat can map one reference at a time.
pub const PINS_MAX: u32 = (1 << SEAT_BITS) - 1;

const GRANTED: u64 = 1 << 16;
const READ_ONLY: u64 = 1 << 17;
const PAGE_SHIFT: u32 = 20;
const PAGE_MASK: u64 = (1 << 24) - 1;
const SEATS_SHIFT: u32 = 44;
const SEAT_BITS: u32 = 5;
/// How often a change of an entry is tried while its domain changes the entry, too. It bounds what
/// a domain achieves that changes its table all the time.
const TRIES_MAX: usize = 1000;

/// An entry of a simulated domain's grant table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantEntry(pub u64);

impl GrantEntry {
    /// An entry that grants nothing.
    pub const FREE: Self = Self(0);

    /// Makes the entry that lends `page` to `domain`; `None`: an entry cannot name that page.
    #[must_use]
    pub fn new(domain: u16, page: u32, access: GrantAccess) -> Option<Self> {
        let page = u64::from(page);
        let read_only = if access == GrantAccess::Read { READ_ONLY } else { 0 };
        let word = u64::from(domain) | GRANTED | read_only | page << PAGE_SHIFT;
        (page <= PAGE_MASK).then_some(Self(word))
    }

    /// Returns the page that the entry lends.
    #[must_use]
    pub const fn page(self) -> u64 {
        self.0 >> PAGE_SHIFT & PAGE_MASK
    }

    /// True while a process has the page mapped.
    #[must_use]
    pub const fn is_mapped(self) -> bool {
        self.0 >> SEATS_SHIFT != 0
    }

    /// Returns the entry without its grant, for the end of access; `None` while the page is mapped.
    #[must_use]
    pub const fn ended(self) -> Option<Self> {
        if self.is_mapped() { None } else { Some(Self::FREE) }
    }

    /// Returns the entry without the marks of `seat`, whose process has ended.
    #[must_use]
    pub const fn without(self, seat: u8) -> Self {
        Self(self.0 & !(((1 << SEAT_BITS) - 1) << shift(seat)))
    }

    /// Returns how often `seat` has the page mapped.
    const fn pins(self, seat: u8) -> u64 {
        self.0 >> shift(seat) & ((1 << SEAT_BITS) - 1)
    }

    /// True if the entry lends the page to `domain`.
    const fn lends_to(self, domain: u16) -> bool {
        self.0 & GRANTED != 0 && self.0 & 0xffff == domain as u64
    }
}

/// Returns the first bit of a seat's marks.
const fn shift(seat: u8) -> u32 {
    SEATS_SHIFT + (seat % SEATS) as u32 * SEAT_BITS
}

/// The grant table of a simulated domain: the words of its entries.
#[derive(Clone, Debug)]
pub struct GrantTable {
    words: Words,
}

impl GrantTable {
    /// Maps the table of `entries` entries at the start of a domain's file.
    ///
    /// # Errors
    /// That of the mapping.
    pub fn of_file(file: &OwnedFd, entries: u32) -> Result<Self, MemoryError> {
        let size = entries as usize * GRANT_ENTRY_SIZE;
        let mapping = Arc::new(Mapping::of_file(file, 0, size as u64)?);
        let words = Words::new(mapping, 0, size, GRANT_ENTRY_SIZE as u64);
        Ok(Self { words: words.ok_or(MemoryError::Overflow)? })
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.words.size() / GRANT_ENTRY_SIZE).unwrap_or(u32::MAX)
    }

    /// True if the table has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True once the table was truncated while it was mapped.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.words.is_broken()
    }

    /// Returns the entry of a reference; `None` past the end of the table.
    #[must_use]
    pub fn entry(&self, gref: GrantRef) -> Option<GrantEntry> {
        (gref.0 < self.len()).then(|| GrantEntry(self.words.load_u64_acquire(place(gref))))
    }

    /// Replaces the entry of a reference by the result of `change`, in one step; tries again with
    /// the newer entry if another process changes it at the same time. Returns the entry that was
    /// replaced.
    ///
    /// # Errors
    /// The error of `change`; [`GrantError::NotGranted`] past the end of the table, and for an
    /// entry that another process changes all the time.
    pub fn update(
        &self,
        gref: GrantRef,
        mut change: impl FnMut(GrantEntry) -> Result<GrantEntry, GrantError>,
    ) -> Result<GrantEntry, GrantError> {
        let refused = GrantError::NotGranted { gref: gref.0 };
        let mut entry = self.entry(gref).ok_or(refused)?;
        for _ in 0..TRIES_MAX {
            let changed = change(entry)?;
            match self.words.compare_exchange_u64(place(gref), entry.0, changed.0) {
                Ok(_) => return Ok(entry),
                Err(newer) => entry = GrantEntry(newer),
            }
        }
        Err(refused)
    }

    /// Clears the marks of a seat whose process has ended.
    pub fn clear_seat(&self, seat: u8) {
        for gref in (0..self.len()).map(GrantRef) {
            // This cannot fail: the change refuses nothing, and the reference is inside.
            let _ = self.update(gref, |entry| Ok(entry.without(seat)));
        }
    }
}

/// Returns the byte offset of a reference's entry.
fn place(gref: GrantRef) -> usize {
    gref.0 as usize * GRANT_ENTRY_SIZE
}

/// The grants of one simulated domain, for a back-end that has a seat. The queues of the domain's
/// disks share it.
#[derive(Debug)]
pub struct SimGrants {
    file: OwnedFd,
    /// The file with the domain's memory.
    lends: Lends,
    /// The number of pages of the file.
    pages: u64,
    table: GrantTable,
    /// The domain on whose behalf this process maps.
    domain: u16,
    seat: u8,
}

impl SimGrants {
    /// The grants to `domain` (ours) in a domain's file, whose table has `entries` entries, from
    /// the seat that the server gave us.
    ///
    /// # Errors
    /// [`GrantError::Memory`].
    pub fn new(file: OwnedFd, entries: u32, domain: u16, seat: u8) -> Result<Self, GrantError> {
        let table = GrantTable::of_file(&file, entries)?;
        let found = rustix::fs::fstat(&file).map_err(MemoryError::Map)?;
        let pages = u64::try_from(found.st_size).unwrap_or(0) / PAGE as u64;
        let lends = Lends::Memory(found.st_dev, found.st_ino);
        Ok(Self { file, lends, pages, table, domain, seat })
    }

    /// Returns the domain that lends the pages.
    pub(crate) fn lends(&self) -> Lends {
        self.lends
    }

    /// Adds a mark of this seat to the entry of a reference. Returns the reference's page.
    fn pin(&self, gref: GrantRef, access: GrantAccess) -> Result<u64, GrantError> {
        let entry = self.table.update(gref, |entry| {
            let gref = gref.0;
            if !entry.lends_to(self.domain) || entry.page() >= self.pages {
                return Err(GrantError::NotGranted { gref });
            }
            if access == GrantAccess::Write && entry.0 & READ_ONLY != 0 {
                return Err(GrantError::ReadOnly { gref });
            }
            if entry.pins(self.seat) == u64::from(PINS_MAX) {
                return Err(GrantError::Pinned { gref, max: PINS_MAX });
            }
            Ok(GrantEntry(entry.0 + (1 << shift(self.seat))))
        })?;
        Ok(entry.page())
    }

    /// Removes one mark of this seat from the entry of a reference whose page was unmapped. A
    /// domain that has overwritten the entry has already removed the mark.
    pub(crate) fn unpin(&self, gref: GrantRef) {
        let _ = self.table.update(gref, |entry| {
            let has_mark = entry.pins(self.seat) > 0;
            Ok(GrantEntry(entry.0 - if has_mark { 1 << shift(self.seat) } else { 0 }))
        });
    }

    /// Maps a lot, with one result for each reference. Pages that are adjacent in the file are
    /// mapped by one call.
    pub(crate) fn map(
        &self,
        window: &mut Window,
        lot: &Lot<'_>,
        results: &mut Vec<Result<(), GrantError>>,
    ) {
        let is_writable = lot.access == GrantAccess::Write;
        let mut put = |first: usize, page: u64, grefs: &[GrantRef]| {
            let (pages, offset) = (first..first + grefs.len(), page * PAGE as u64);
            let put = window.put(pages, &self.file, offset, is_writable);
            if put.is_err() {
                grefs.iter().for_each(|gref| self.unpin(*gref));
            }
            put.map_err(GrantError::Memory)
        };
        let mut left = (lot.page as usize, lot.grefs);
        while let (first, Some((gref, rest))) = (left.0, left.1.split_first()) {
            let page = match self.pin(*gref, lot.access) {
                Ok(page) => page,
                Err(error) => {
                    results.push(Err(error));
                    left = (first + 1, rest);
                    continue;
                }
            };
            let follows = |(ahead, gref): (u64, &GrantRef)| {
                self.pin(*gref, lot.access).is_ok_and(|next| {
                    if next != page + ahead {
                        self.unpin(*gref);
                    }
                    next == page + ahead
                })
            };
            let count = 1 + (1..).zip(rest).take_while(|at| follows(*at)).count();
            let (run, rest) = left.1.split_at(count);
            let result = put(first, page, run);
            results.extend(run.iter().map(|_| result));
            left = (first + count, rest);
        }
    }
}
