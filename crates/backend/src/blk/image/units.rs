//! The units of an image: which transfers can use direct I/O, and which parts of a range are whole
//! units.

use super::{Image, size_of_file};
use crate::blk::guard::Guard;
use std::ops::Range;
use std::sync::PoisonError;

impl Image {
    /// Returns the number of bytes of the unit that the host writes: the alignment of offsets with
    /// `O_DIRECT`, else 1.
    pub(in crate::blk) fn unit(&self) -> u64 {
        self.offset_align
    }

    /// Returns the part of the range that consists of whole units of `fallocate`. It is empty if
    /// the range contains no whole unit; its bounds lie inside the range even then.
    pub(in crate::blk) fn whole_units(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset + len;
        let start = offset.next_multiple_of(self.range_unit).min(end);
        start..(end / self.range_unit * self.range_unit).max(start)
    }

    /// Returns the guard that keeps other writes out of a unit while a part of the unit is written.
    pub(in crate::blk) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Calls `write`, which writes up to `end`; `None`: the write ends inside the file. If the file
    /// ends inside the last unit, the write extends it, and it is truncated to its former size.
    pub(in crate::blk) fn within_size<T>(&self, end: Option<u64>, write: impl FnOnce() -> T) -> T {
        let Some(end) = end.filter(|_| !self.block_device) else { return write() };
        let _sizing = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = size_of_file(&self.file).unwrap_or(u64::MAX);
        let written = write();
        // A file that is now longer than `end` was extended by the operator during the write: the
        // disk must not cut it.
        if size_of_file(&self.file).is_ok_and(|now| now > size && now <= end) {
            // If this fails, the file stays longer by some zeroes; the disk has its size anyway.
            let _ = rustix::fs::ftruncate(&self.file, size);
            // Truncating has zeroed the rest of the last page in the page cache. Flush and drop the
            // page; its bytes are on the disk already, so nothing is lost if this fails.
            let _ = rustix::fs::fdatasync(&self.file);
            let page = size - size % rustix::param::page_size() as u64;
            let _ = rustix::fs::fadvise(&self.file, page, None, rustix::fs::Advice::DontNeed);
        }
        written
    }

    /// True if a transfer can use [`Self::file`]: with `O_DIRECT` its offset and all its slices
    /// must be aligned. A transfer that is not aligned is copied (`bounce.rs`).
    #[must_use]
    pub fn is_aligned(&self, offset: u64, slices: &[manyring_memory::GuestSlice]) -> bool {
        let align = usize::try_from(self.offset_align).unwrap_or(usize::MAX);
        self.offset_align == 1
            || (offset.is_multiple_of(self.offset_align)
                && slices.iter().all(|s| {
                    s.len().is_multiple_of(align) && s.address().is_multiple_of(self.memory_align)
                }))
    }
}
