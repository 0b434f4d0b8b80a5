//! The system calls that serve a task: `transfer` makes one call for a part of its bytes, and
//! `serve_to_the_end` makes all calls, on a thread that may wait for each.

use super::bounce::{Bounce, BounceBytes};
use super::quota::Retries;
use super::task::{Step, Task, head};
use super::{Image, Op};
use crate::sys::file as sys;
use manyring_memory::{GuestSlice, SliceList};
use rustix::fd::BorrowedFd;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::ops::Range;

/// Makes one call for at most `bytes` of a read or write, and records its progress in the task.
pub(super) fn transfer(
    task: &mut Task,
    file: BorrowedFd<'_>,
    bytes: u64,
    flags: i32,
) -> Result<(), Errno> {
    let mut first = SliceList::new();
    let slices = if bytes < task.len {
        head(&task.rest, bytes, &mut first);
        first.as_slices()
    } else {
        task.rest.as_slices()
    };
    let n = call(task.op, file, slices, task.offset, flags)?;
    went_on(task, n)
}

#[inline]
pub(super) fn call(
    op: Op,
    file: BorrowedFd<'_>,
    slices: &[GuestSlice<'_>],
    offset: u64,
    flags: i32,
) -> Result<usize, Errno> {
    match op {
        Op::Read => sys::read(file, slices, offset, flags),
        _ => sys::write(file, slices, offset, flags),
    }
}

/// Records that a call has moved `n` bytes of a task.
///
/// # Errors
/// `EIO`: no byte was moved, because the file is shorter than the disk.
pub(super) fn went_on(task: &mut Task, n: usize) -> Result<(), Errno> {
    // The file was truncated after it was measured: it is shorter than the disk.
    if n == 0 {
        return Err(Errno::IO);
    }
    task.went_on(n as u64);
    Ok(())
}

/// Returns the next step after an error: `EAGAIN` and `EINTR` are retried, and become `EIO` after
/// too many tries.
pub(super) fn went_wrong(task: &mut Task, errno: Errno) -> Step {
    match errno {
        Errno::AGAIN | Errno::INTR if task.retries.may_try_again() => Step::More,
        Errno::AGAIN | Errno::INTR => Step::Done(Err(Errno::IO)),
        errno => Step::Done(Err(errno)),
    }
}

/// Serves all of a task on a thread that may wait. `bounce` is the aligned memory for transfers
/// that `O_DIRECT` refuses.
pub(super) fn serve_to_the_end(
    task: &mut Task,
    image: &Image,
    bounce: &mut Bounce,
) -> Result<(), Errno> {
    let durable = match task.op {
        Op::Read => false,
        Op::Write { durable } => durable,
        Op::WriteZeroes { .. } | Op::Discard => {
            return serve_range(image, task.op, (task.offset, task.len), bounce);
        }
        op => return patiently(|| serve_without_data(image, op, task.offset, task.len)),
    };
    let syncs_itself = durable && image.syncs_by_write();
    let result = loop {
        let moved = if image.is_aligned(task.offset, task.rest.as_slices()) {
            let flags = if syncs_itself { sys::RWF_DSYNC } else { 0 };
            transfer(task, image.file(), task.len, flags)
        } else {
            let range = task.offset..task.offset + task.len;
            let moved = match task.op {
                Op::Read => bounce.read(image, range, &task.rest),
                _ => bounce.write(image, range, BounceBytes::Guest(&task.rest), durable),
            };
            moved.and_then(|n| went_on(task, n))
        };
        let step = match moved {
            Ok(()) => task.step(),
            Err(errno) => went_wrong(task, errno),
        };
        if let Step::Done(result) = step {
            break result;
        }
    };
    match result {
        Ok(()) if durable && !syncs_itself => {
            patiently(|| serve_without_data(image, Op::Flush, 0, 0))
        }
        result => result,
    }
}

/// Repeats a call while it fails with `EAGAIN` or `EINTR`, which become `EIO` after too many tries.
fn patiently(mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let mut retries = Retries::default();
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) if retries.may_try_again() => {}
            Err(Errno::AGAIN | Errno::INTR) => return Err(Errno::IO),
            result => return result,
        }
    }
}

/// Serves a discard or write-zeroes, and waits for it. If the range does not consist of whole
/// units, `fallocate` is called for the whole units only: a write-zeroes writes zeroes to the rest,
/// a discard leaves the rest as it is.
fn serve_range(
    image: &Image,
    op: Op,
    (offset, len): (u64, u64),
    bounce: &mut Bounce,
) -> Result<(), Errno> {
    let (units, end) = (image.whole_units(offset, len), offset + len);
    let middle = (units.start, units.end - units.start);
    match op {
        Op::WriteZeroes { unmap, durable } => {
            write_zeroes(image, offset..units.start, bounce)?;
            zero_units(image, middle, unmap, bounce)?;
            write_zeroes(image, units.end..end, bounce)?;
            if durable { patiently(|| image.sync()) } else { Ok(()) }
        }
        _ => patiently(|| discard(image, middle)),
    }
}

/// Serves a flush or secure erase, and waits for it.
pub(super) fn serve_without_data(
    image: &Image,
    op: Op,
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    match op {
        Op::Flush => image.sync(),
        Op::SecureErase => sys::secure_erase(image.holder(), offset, len),
        Op::Read | Op::Write { .. } | Op::Discard | Op::WriteZeroes { .. } => Err(Errno::INVAL),
    }
}

/// Number of tries to zero or discard a range of a block device that another process holds.
const BUSY_TRIES: usize = 4;

/// Zeroes or discards a range. A block device that another process holds refuses the call (`EBUSY`)
/// if the page cache has dirty pages in the range: so the image is synced, and the call repeated.
/// If the guest keeps writing to the range between the tries, every try may fail: then [`discard`]
/// does nothing, and [`zero_units`] writes zeroes.
fn change_range(
    image: &Image,
    mode: FallocateFlags,
    (offset, len): (u64, u64),
) -> Result<(), Errno> {
    for _ in 0..BUSY_TRIES {
        match rustix::fs::fallocate(image.holder(), mode, offset, len) {
            Err(Errno::BUSY) if image.is_block_device() && !image.holds_device() => image.sync()?,
            other => return other,
        }
    }
    Err(Errno::BUSY)
}

/// Punches a hole. If the file system cannot, does nothing, since a discard is a hint.
fn discard(image: &Image, (offset, len): (u64, u64)) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match change_range(image, mode, (offset, len)) {
        Err(Errno::OPNOTSUPP | Errno::BUSY) => Ok(()),
        other => other,
    }
}

/// Zeroes whole units by the cheapest call that is allowed and that the host supports. If there is
/// none, writes zeroes.
fn zero_units(
    image: &Image,
    (offset, len): (u64, u64),
    unmap: bool,
    bounce: &mut Bounce,
) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    for mode in if unmap { [punch, zero] } else { [zero, zero] } {
        match patiently(|| change_range(image, mode, (offset, len))) {
            Err(Errno::OPNOTSUPP | Errno::BUSY) => {}
            other => return other,
        }
    }
    write_zeroes(image, offset..offset + len, bounce)
}

/// Writes zeroes to the range, from aligned memory as `O_DIRECT` requires.
fn write_zeroes(image: &Image, range: Range<u64>, bounce: &mut Bounce) -> Result<(), Errno> {
    let mut at = range.start;
    while at < range.end {
        patiently(|| {
            at += bounce.write(image, at..range.end, BounceBytes::Zeroes, false)? as u64;
            Ok(())
        })?;
    }
    Ok(())
}
