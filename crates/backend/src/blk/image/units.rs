//! The units of an image: which transfers may go past the page cache, and which ranges are whole.

use super::{Image, size_of_file};
use crate::blk::guard::Guard;
use std::ops::Range;
use std::sync::PoisonError;

impl Image {
    /// Bytes of a unit that the host writes: the alignment for offsets with `O_DIRECT`, else 1.
    pub(in crate::blk) fn unit(&self) -> u64 {
        self.offset_align
    }

    /// The units that `fallocate` can serve and that lie in the range as a whole. The result is
    /// empty if the range holds no whole unit; its bounds lie inside the range even then.
    pub(in crate::blk) fn whole_units(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset + len;
        let start = offset.next_multiple_of(self.range_unit).min(end);
        start..(end / self.range_unit * self.range_unit).max(start)
    }

    /// The guard that keeps other writes out of a unit while a part of it is written.
    pub(in crate::blk) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Makes `write`, which ends at `end`. If the file ends inside the last unit, the write makes
    /// it longer, and it is cut back to its former size. `None`: the write ends inside the file.
    pub(in crate::blk) fn within_size<T>(&self, end: Option<u64>, write: impl FnOnce() -> T) -> T {
        let Some(end) = end.filter(|_| !self.block_device) else { return write() };
        let _sizing = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = size_of_file(&self.file).unwrap_or(u64::MAX);
        let written = write();
        // A file that ends behind `end` was not made longer by this write, but by its operator.
        if size_of_file(&self.file).is_ok_and(|now| now > size && now <= end) {
            // If this fails the file has some zeroes more, and the disk has its size.
            let _ = rustix::fs::ftruncate(&self.file, size);
            // The host zeroes the rest of the last page in its page cache. The page holds what is
            // on the disk already: nothing is lost if this fails.
            let _ = rustix::fs::fdatasync(&self.file);
            let page = size - size % rustix::param::page_size() as u64;
            let _ = rustix::fs::fadvise(&self.file, page, None, rustix::fs::Advice::DontNeed);
        }
        written
    }

    /// True if a transfer can go to [`Self::file`]: with `O_DIRECT` its offset and all its slices
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
