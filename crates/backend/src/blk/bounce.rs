//! `Bounce`: transfers that `O_DIRECT` refuses, through aligned memory of the daemon.
//!
//! `O_DIRECT` refuses memory, offsets and lengths that are not aligned. Such a transfer must not go
//! through the page cache instead: the page cache holds whole pages, and writes a page back over
//! sectors that other requests wrote directly at the same time. The disk's own thread makes the
//! transfer, in pieces:
//! ```text
//! read:   read the units that hold the piece; copy the piece to the guest
//! write:  whole units:       copy the piece from the guest, once; write
//!         a part of a unit:  keep other writes out of its units (`guard.rs`); read the first and
//!                            the last unit; copy the piece over that; write
//! ```
//! A piece ends where the daemon's memory does. The copies cost no worker time. Truncated guest
//! memory reads as zeroes: a copy out of it is not written, and the request fails as if the kernel
//! had made the transfer.

use super::Image;
use crate::sys::file as sys;
use manyring_memory::{Mapping, SliceList, copy_between};
use rustix::io::Errno;
use std::ops::Range;

/// Bytes of one piece, and of the aligned memory.
const BOUNCE_BYTES: u64 = 1 << 20;

/// The source of a write's bytes, or the target of a read's.
#[derive(Clone, Copy, Debug)]
pub(super) enum BounceBytes<'a> {
    /// Guest memory.
    Guest(&'a SliceList),
    /// Zeroes, for a write-zeroes request.
    Zeroes,
}

/// Memory of [`BOUNCE_BYTES`] with the alignment of a page, mapped when a transfer first needs it.
#[derive(Debug)]
pub(super) struct Bounce {
    memory: Option<Mapping>,
    may_wait: bool,
}

impl Bounce {
    /// Makes the buffer of the disk's own thread, which may wait for other writes of the disk.
    pub(super) fn of_thread() -> Self {
        Self { memory: None, may_wait: true }
    }

    /// Makes the buffer of a worker that serves a task itself because the host could not start the
    /// disk's thread. A worker must not wait for other writes: it learns of their ends only by its
    /// own io_uring.
    pub(super) fn of_worker() -> Self {
        Self { memory: None, may_wait: false }
    }

    fn memory(&mut self) -> Result<&Mapping, Errno> {
        if self.memory.is_none() {
            let memory = Mapping::anonymous(BOUNCE_BYTES);
            self.memory = Some(memory.map_err(|_| Errno::NOMEM)?);
        }
        self.memory.as_ref().ok_or(Errno::NOMEM)
    }

    /// Reads the first piece of `range` of the disk. Returns its length in bytes.
    ///
    /// # Errors
    /// `ENOMEM`: no memory for the piece. `EFAULT`: guest memory was truncated. Any other: the
    /// read's.
    pub(super) fn read(
        &mut self,
        image: &Image,
        range: Range<u64>,
        list: &SliceList,
    ) -> Result<usize, Errno> {
        let units = first_units(&range, image.unit());
        let memory = self.memory()?;
        let found = fill(image, memory, &units, units.clone())?;
        let skip = range.start - units.start;
        let len = found.saturating_sub(skip).min(range.end - range.start);
        let piece = memory.slice(host(skip), host(len)).ok_or(Errno::INVAL)?;
        let copied = copy_between(list.as_slices().iter(), 0, &[piece]);
        if list.is_broken() { Err(Errno::FAULT) } else { Ok(copied) }
    }

    /// Writes the first piece of `range` of the disk, durably if `durable`. Returns its length in
    /// bytes.
    ///
    /// # Errors
    /// As [`Self::read`]; `EAGAIN`: another write is under way in these units, and a worker may not
    /// wait for its end.
    pub(super) fn write(
        &mut self,
        image: &Image,
        range: Range<u64>,
        bytes: BounceBytes<'_>,
        durable: bool,
    ) -> Result<usize, Errno> {
        let (unit, may_wait) = (image.unit(), self.may_wait);
        let units = first_units(&range, unit);
        let end = range.end.min(units.end);
        let memory = self.memory()?;
        let is_partial = range.start > units.start || end < units.end;
        let changing = if is_partial {
            let changing = image.guard().change(units.clone(), may_wait)?;
            let first = units.start..units.start + unit;
            let last = units.end - unit..units.end;
            if range.start > units.start {
                fill(image, memory, &units, first.clone())?;
            }
            if end < units.end && (first != last || range.start == units.start) {
                fill(image, memory, &units, last)?;
            }
            Some(changing)
        } else {
            None
        };
        let (skip, len) = (host(range.start - units.start), host(end - range.start));
        let piece = memory.slice(skip, len).ok_or(Errno::INVAL)?;
        match bytes {
            BounceBytes::Guest(list) => {
                let copied = copy_between([piece].iter(), 0, list.as_slices());
                if copied < len || list.is_broken() {
                    return Err(Errno::FAULT);
                }
            }
            BounceBytes::Zeroes => piece.fill_zero(),
        }
        let written = image.within_size(is_partial.then_some(units.end), || {
            let flags = if durable { sys::RWF_DSYNC } else { 0 };
            put(image, memory, &units, flags)
        });
        drop(changing);
        let written = host(written?.saturating_sub(range.start - units.start));
        if written == 0 { Err(Errno::IO) } else { Ok(written.min(len)) }
    }
}

/// Returns the first units of `range`: [`BOUNCE_BYTES`] at most, one unit at least.
fn first_units(range: &Range<u64>, unit: u64) -> Range<u64> {
    let start = range.start / unit * unit;
    start..range.end.next_multiple_of(unit).min(start + (BOUNCE_BYTES / unit).max(1) * unit)
}

/// Reads `part` of `units` into memory, whose first byte belongs to the first unit. Zeroes the
/// bytes of the part that lie behind the end of the image. Returns how many bytes of the part the
/// image has.
fn fill(
    image: &Image,
    memory: &Mapping,
    units: &Range<u64>,
    part: Range<u64>,
) -> Result<u64, Errno> {
    let unit = image.unit();
    let mut at = part.start;
    while at < part.end {
        let rest = memory.slice(host(at - units.start), host(part.end - at)).ok_or(Errno::INVAL)?;
        let n = again(|| sys::read(image.file(), &[rest], at, 0))? as u64;
        at += n;
        if !at.is_multiple_of(unit) || n == 0 {
            break;
        }
    }
    let rest = memory.slice(host(at - units.start), host(part.end.saturating_sub(at)));
    rest.ok_or(Errno::INVAL)?.fill_zero();
    Ok(at - part.start)
}

/// Writes `units` from memory, whose first byte belongs to the first unit. Returns how many bytes
/// of whole units were written: all, unless a call after the first one failed.
fn put(image: &Image, memory: &Mapping, units: &Range<u64>, flags: i32) -> Result<u64, Errno> {
    let mut at = units.start;
    while at < units.end {
        let rest = memory.slice(host(at - units.start), host(units.end - at));
        let rest = rest.ok_or(Errno::INVAL)?;
        match again(|| sys::write(image.file(), &[rest], at, flags)) {
            Ok(n) if n as u64 / image.unit() > 0 => at += n as u64 / image.unit() * image.unit(),
            Ok(_) => return if at > units.start { Ok(at - units.start) } else { Err(Errno::IO) },
            Err(_) if at > units.start => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(at - units.start)
}

fn again(call: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    rustix::io::retry_on_intr(call)
}

#[allow(clippy::cast_possible_truncation, reason = "64-bit hosts only, see manyring-wire")]
const fn host(bytes: u64) -> usize {
    bytes as usize
}
