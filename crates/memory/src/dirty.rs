//! `DirtyLog`: the pages of a guest that were written, one bit each, for a front-end that copies
//! the guest to another host (vhost-user, "Migration"). `Places`: which guest page a byte is in.
//!
//! ```text
//! bit n % 8 of byte n / 8:  the page of 4 KiB at guest address n * 4096 was written
//! mark:    bits that are set already?  nothing is stored; else an atomic OR
//! ```
//! The front-end takes bits out while we put them in: it exchanges a word for zero, and copies the
//! pages whose bits it got. So we write a page first, then comes a full fence, and then we look at
//! the page's bit. If the bit is set, the front-end has not copied the page yet.

use crate::error::MemoryError;
use crate::iov::GuestSlice;
use crate::mapping::Mapping;
use crate::region::MappedRegion;
use crate::shared::Words;
use rustix::fd::AsFd;
use std::sync::Arc;

/// Bytes of guest memory for which one bit stands, whatever the host's page size is.
pub const LOG_PAGE: u64 = 4096;
/// Bytes of guest memory for which one byte of the log stands.
const BYTE_SPAN: u64 = LOG_PAGE * 8;
/// The maximum size of a log in bytes: for guest addresses of 47 bits.
const BYTES_MAX: u64 = 1 << 32;

/// The log of a front-end, mapped into this process.
#[derive(Clone, Debug)]
pub struct DirtyLog(Words);

/// A range of guest pages: the numbers of the first and of the last page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyPages {
    first: u64,
    last: u64,
}

impl DirtyPages {
    /// Returns the pages of `len` bytes at guest address `addr`; `None` if `len` is 0.
    #[must_use]
    pub fn of(addr: u64, len: u64) -> Option<Self> {
        let last = addr.checked_add(len.checked_sub(1)?)?;
        Some(Self { first: addr / LOG_PAGE, last: last / LOG_PAGE })
    }

    /// Returns the range of these pages and `next`; `None` if there is a page between the two.
    fn joined(self, next: Self) -> Option<Self> {
        let (first, last) = (self.first.min(next.first), self.last.max(next.last));
        let touches = next.first <= self.last + 1 && self.first <= next.last + 1;
        touches.then_some(Self { first, last })
    }
}

impl DirtyLog {
    /// Maps `size` bytes of `file`, which lies in memory, from `offset` on. May block.
    ///
    /// # Errors
    /// [`MemoryError::LogSize`], or why the file cannot be mapped.
    pub fn map(file: impl AsFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
        if size == 0 || size > BYTES_MAX {
            return Err(MemoryError::LogSize { size, max: BYTES_MAX });
        }
        let mapping = Arc::new(Mapping::of_file(file, offset, size)?);
        let len = mapping.size();
        let words = Words::new(mapping, 0, len, 1);
        words.map(Self).ok_or(MemoryError::LogSize { size, max: BYTES_MAX })
    }

    /// True if the log has a bit for each page before guest address `end`.
    pub(crate) fn covers(&self, end: u64) -> bool {
        end.div_ceil(BYTE_SPAN) <= self.0.size() as u64
    }

    /// True once the log's file was truncated while it was mapped.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.0.is_broken()
    }

    /// Marks pages that were written. The caller has put a full fence ([`crate::fence_full`])
    /// between the writes and this call. Pages without a bit in the log are skipped. A snapshot
    /// with a log has no such pages ([`crate::GuestMemory::with_log`]).
    pub fn mark(&self, pages: DirtyPages) {
        let DirtyPages { first, last } = pages;
        for byte in first / 8..=last / 8 {
            let Ok(offset) = usize::try_from(byte) else { return };
            if offset >= self.0.size() {
                return;
            }
            let from = if byte == first / 8 { first % 8 } else { 0 };
            let to = if byte == last / 8 { last % 8 } else { 7 };
            self.0.set_bits(offset, (0xff_u8 << from) & (0xff_u8 >> (7 - to)));
        }
    }
}

/// The log of a snapshot, and the host addresses of the snapshot's regions.
#[derive(Debug)]
pub(crate) struct Logged {
    log: Arc<DirtyLog>,
    /// The host address, size in bytes and guest address of each region, sorted by host address.
    places: Box<[(usize, usize, u64)]>,
}

impl Logged {
    /// Of these regions.
    ///
    /// # Errors
    /// [`MemoryError::LogShort`] if the log has no bit for some of their pages.
    pub(crate) fn new(log: Arc<DirtyLog>, regions: &[MappedRegion]) -> Result<Self, MemoryError> {
        let end = regions.iter().map(|r| r.spec().guest_addr + r.spec().size).max().unwrap_or(0);
        if !log.covers(end) {
            return Err(MemoryError::LogShort { size: log.0.size() as u64, end });
        }
        let place = |region: &MappedRegion| {
            let base = region.mapping().address(0).as_ptr() as usize;
            (base, host_size(region.spec().size), region.spec().guest_addr)
        };
        let mut places: Box<[_]> = regions.iter().map(place).collect();
        places.sort_unstable();
        Ok(Self { log, places })
    }

    pub(crate) fn log(&self) -> &Arc<DirtyLog> {
        &self.log
    }

    fn pages_of(&self, slice: &GuestSlice<'_>) -> Option<DirtyPages> {
        let addr = slice.address();
        let at = self.places.partition_point(|(base, ..)| *base <= addr).checked_sub(1)?;
        let (base, size, guest_addr) = *self.places.get(at)?;
        let offset = addr - base;
        let is_inside = offset < size && size - offset >= slice.len();
        if !is_inside {
            return None;
        }
        DirtyPages::of(guest_addr + offset as u64, slice.len() as u64)
    }

    /// Appends the pages of the slices in the snapshot to `pages`. Adjacent pages are joined.
    pub(crate) fn pages(&self, slices: &[GuestSlice<'_>], pages: &mut Vec<DirtyPages>) {
        for more in slices.iter().filter_map(|slice| self.pages_of(slice)) {
            match pages.last_mut() {
                Some(last) if last.joined(more).is_some() => {
                    *last = last.joined(more).unwrap_or(more);
                }
                _ => pages.push(more),
            }
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host_size(size: u64) -> usize {
    size as usize
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::{GuestAddr, GuestMemory, LastHit, RegionSpec, install_sigbus_handler};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::pread;

    fn file(size: u64) -> rustix::fd::OwnedFd {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, size).unwrap();
        file
    }

    fn marked(file: impl AsFd, size: usize) -> Vec<u64> {
        let mut bytes = vec![0; size];
        pread(file, &mut bytes, 0).unwrap();
        let is_set = |n: &u64| bytes[usize::try_from(n / 8).unwrap()] >> (n % 8) & 1 == 1;
        (0..size as u64 * 8).filter(is_set).collect()
    }

    #[test]
    fn pages_of_any_bytes_are_marked_and_no_others() {
        let file = file(64);
        let log = DirtyLog::map(&file, 0, 16).unwrap();
        for (addr, len) in [(0, 1), (0x1fff, 2), (0x7000, 0x12_001), (0x7_ffff, 1), (0x5000, 0)] {
            DirtyPages::of(addr, len).into_iter().for_each(|pages| log.mark(pages));
        }
        let expected: Vec<u64> = [0, 1, 2].into_iter().chain(7..=0x19).chain([0x7f]).collect();
        assert_eq!(marked(&file, 64), expected);
        // Behind its end there is nothing to mark, whatever the file has there.
        log.mark(DirtyPages::of(0x7_f000, 0x2000).unwrap());
        log.mark(DirtyPages::of(u64::MAX - 4, 4).unwrap());
        assert_eq!(marked(&file, 64), expected);
    }

    #[test]
    fn a_log_that_is_too_large_empty_or_behind_its_file_is_refused() {
        let file = file(4096);
        for (offset, size) in [(0, 0), (0, (1 << 32) + 1), (0, u64::MAX), (1, 4096), (u64::MAX, 8)]
        {
            assert!(DirtyLog::map(&file, offset, size).is_err(), "{offset} {size}");
        }
        assert!(DirtyLog::map(std::fs::File::open("/dev/null").unwrap(), 0, 8).is_err());
        // An offset may be any: bits are set in bytes.
        DirtyLog::map(&file, 4095, 1).unwrap().mark(DirtyPages::of(0x3000, 1).unwrap());
        assert_eq!(marked(&file, 4096), [4095 * 8 + 3]);
    }

    #[test]
    fn a_snapshot_has_no_log_that_is_too_short_for_it() {
        let spec =
            |guest_addr| RegionSpec { guest_addr, size: 0x8000, user_addr: 0, mmap_offset: 0 };
        let mapping = || Arc::new(Mapping::anonymous(0x8000).unwrap());
        let log = Arc::new(DirtyLog::map(file(64), 0, 2).unwrap());
        let none = GuestMemory::default().with_log(Some(log)).unwrap();
        let low = none.with_mapping(spec(0x8000), mapping()).unwrap();
        assert!(low.log().is_some());
        let short = MemoryError::LogShort { size: 2, end: 0x1_8000 };
        assert_eq!(low.with_mapping(spec(0x1_0000), mapping()).unwrap_err(), short);
        let unlogged = low.with_log(None).unwrap();
        let high = unlogged.with_mapping(spec(0x1_0000), mapping()).unwrap();
        assert_eq!(high.with_log(low.log().cloned()).unwrap_err(), short);
        assert!(low.without_region(&spec(0x8000)).log().is_some());
    }

    #[test]
    fn the_pages_of_slices_are_those_of_their_regions() {
        let log = Arc::new(DirtyLog::map(file(4096), 0, 4096).unwrap());
        let mut memory = GuestMemory::default().with_log(Some(log)).unwrap();
        for guest_addr in [0x10_0000, 0x4000, 0x10_8000] {
            let spec = RegionSpec { guest_addr, size: 0x8000, user_addr: 0, mmap_offset: 0 };
            let mapping = Arc::new(Mapping::anonymous(0x8000).unwrap());
            memory = memory.with_mapping(spec, mapping).unwrap();
        }
        let (mut slices, mut pages) = (Vec::new(), Vec::new());
        for (addr, len) in [(0x4ff0, 0x20), (0x5010, 0xfff), (0x10_7fff, 2), (0xb000, 0x1000)] {
            let mut last = LastHit::default();
            memory.slices(GuestAddr(addr), len, &mut last, &mut slices).unwrap();
        }
        memory.dirty_pages(&slices, &mut pages);
        let expected = [(4, 6), (0x107, 0x108), (0xb, 0xb)];
        assert_eq!(pages, expected.map(|(first, last)| DirtyPages { first, last }));
    }

    #[test]
    fn a_log_that_is_cut_away_breaks_the_memory_that_has_it() {
        install_sigbus_handler();
        let file = file(8192);
        let log = Arc::new(DirtyLog::map(&file, 0, 8192).unwrap());
        let memory = GuestMemory::default().with_log(Some(log.clone())).unwrap();
        log.mark(DirtyPages::of(0, 1).unwrap());
        ftruncate(&file, 0).unwrap();
        assert!(!memory.is_broken());
        log.mark(DirtyPages::of(0, 1 << 28).unwrap());
        assert!(memory.is_broken() && log.is_broken());
    }
}
