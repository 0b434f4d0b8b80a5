//! `file`: pread and pwrite. This is the plain twin of `uring`, used if io_uring is refused, and
//! for files in memory (tmpfs), for which io_uring has no advantage.
//!
//! ```text
//! read, write: a file in memory -> on the worker, in pieces: as much as the turn's quota allows
//!              a file on a disk -> on the worker, in pieces, what the page cache has or takes
//!              without waiting; the rest, and all of O_DIRECT, on the disk's thread (offload.rs)
//! what O_DIRECT refuses is copied there through aligned memory (bounce.rs)
//! all others:  on the disk's thread; but a flush of a file in memory, which does nothing, on the
//!              worker
//! ```
//! The worker's thread never waits for a disk, and copies no more than a quota, because its other
//! queues belong to other guests.

use super::bounce::{Bounce, Bytes};
use super::offload::{Aside, Offload};
use super::quota::Patience;
use super::task::{Backlog, Step, Task, head};
use super::{Burst, Completion, Disk, DiskQueue, Geometry, Image, Op, Request};
use crate::blk::ImageError;
use crate::sys::file as sys;
use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, Pieces, SliceList};
use rustix::fd::BorrowedFd;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;

/// How often zeroing or discarding a range of a block device that another process holds is tried.
const BUSY_TRIES: usize = 4;

/// A disk on an image that is read and written by system calls.
#[derive(Debug)]
pub struct FileDisk {
    image: Arc<Image>,
    offload: Arc<Offload>,
}

impl FileDisk {
    /// Serves `image`.
    #[must_use]
    pub fn new(image: Image) -> Self {
        let image = Arc::new(image);
        Self { offload: Arc::new(Offload::new(image.clone())), image }
    }
}

impl Disk for FileDisk {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn open_queue(&self, _has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        Ok(Box::new(FileQueue::new(self.image.clone(), &self.offload)?))
    }

    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno> {
        self.image.resize(size)
    }

    fn acquire(&self) -> Result<(), ImageError> {
        self.image.acquire()
    }

    fn release(&self) {
        self.image.release();
    }

    fn kind(&self) -> &'static str {
        "file"
    }

    fn image(&self) -> Option<&Image> {
        Some(&self.image)
    }
}

/// A queue that serves its requests one after another.
#[derive(Debug)]
pub(crate) struct FileQueue {
    image: Arc<Image>,
    backlog: Backlog,
    aside: Aside,
    /// False once the file system has refused a write with `RWF_NOWAIT` (`EOPNOTSUPP`).
    can_write_at_once: bool,
    /// Reused for requests that one call did not finish.
    task: Task,
}

impl FileQueue {
    pub(crate) fn new(image: Arc<Image>, offload: &Arc<Offload>) -> Result<Self, Errno> {
        Ok(Self {
            can_write_at_once: !image.is_direct(),
            image,
            backlog: Backlog::default(),
            aside: Aside::new(offload.clone())?,
            task: Task::default(),
        })
    }

    /// Serves a request on the worker, puts it into the backlog, or sends it to the disk's thread.
    fn start(&mut self, request: &Request, pieces: Pieces<'_>) -> Step {
        match request.op {
            Op::Read | Op::Write { .. } if self.backlog.takes_at_once(request.len) => {
                self.serve(request, pieces)
            }
            Op::Read | Op::Write { .. } => {
                self.backlog.push(Task::new(request, pieces));
                Step::More
            }
            Op::Flush if self.image.is_in_memory() => {
                Step::Done(serve_without_data(&self.image, Op::Flush, 0, 0))
            }
            _ => {
                self.aside.send(Task::new(request, pieces));
                Step::Left
            }
        }
    }

    /// Serves a read or write on the worker, by one call. The bytes left over become a task.
    fn serve(&mut self, request: &Request, pieces: Pieces<'_>) -> Step {
        let (op, range) = (request.op, (request.offset, request.len));
        let Some(flags) = flags_here(op, range, &self.image, self.can_write_at_once) else {
            self.aside.send(Task::new(request, pieces));
            return Step::Left;
        };
        let result = call(op, self.image.file(), pieces.as_slices(), request.offset, flags);
        if result.is_ok_and(|n| n as u64 == request.len) {
            return Step::Done(Ok(()));
        }
        self.task.begin(request, pieces);
        let result = result.and_then(|n| went_on(&mut self.task, n));
        let step = outcome(&mut self.task, result, &self.image, &mut self.can_write_at_once);
        match step {
            Step::Left => self.aside.send(self.task.take()),
            // A short count: the rest keeps its place before all later requests.
            Step::More => self.backlog.push(self.task.take()),
            Step::Done(_) => {}
        }
        step
    }
}

/// At most how many requests are popped in one turn.
pub(crate) const INLINE_BURST: usize = 8;

impl DiskQueue for FileQueue {
    fn burst_max(&self) -> usize {
        INLINE_BURST
    }

    fn submit(&mut self, burst: &Burst, _ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        for (request, pieces) in burst.iter() {
            if let Step::Done(result) = self.start(request, pieces) {
                done.push(Completion { token: request.token, result });
            }
        }
    }

    fn recall(&mut self, token: u32, _ring: Option<&mut Ring>) -> bool {
        self.backlog.recall(token) || self.aside.recall(token)
    }

    fn release_memory(&mut self) {
        self.task.rest.release();
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        Some(self.aside.readiness())
    }

    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        self.aside.reap(done);
        let Self { image, backlog, aside, can_write_at_once, .. } = self;
        backlog.run(done, |task, bytes| match piece(task, image, bytes, can_write_at_once) {
            Step::Left => {
                aside.send(task.take());
                Step::Left
            }
            step => step,
        })
    }
}

/// Serves at most `bytes` of a read or write on the worker. [`Step::Left`]: the call would wait.
fn piece(task: &mut Task, image: &Image, bytes: u64, can_write: &mut bool) -> Step {
    let range = (task.offset, bytes.min(task.len));
    let Some(flags) = flags_here(task.op, range, image, *can_write) else { return Step::Left };
    let result = transfer(task, image.file(), bytes, flags);
    outcome(task, result, image, can_write)
}

/// The flags for a read or write of this range (offset, length) on the worker. `None`: the call
/// could wait for the disk, so the worker must not make it.
#[inline]
fn flags_here(op: Op, range: (u64, u64), image: &Image, can_write: bool) -> Option<i32> {
    let in_memory = image.is_in_memory();
    match op {
        _ if image.is_direct() => None,
        Op::Write { durable: true } if in_memory => Some(sys::RWF_DSYNC),
        _ if in_memory => Some(0),
        Op::Write { durable: true } => None,
        Op::Write { .. } => can_write.then_some(sys::RWF_NOWAIT),
        // A read that misses the page cache starts to read ahead even with `RWF_NOWAIT`, and then
        // waits for a device that is full.
        _ => (image.has_nowait() && is_cached(image, range)).then_some(sys::RWF_NOWAIT),
    }
}

/// The next step of a task after the `result` of one call on the worker.
fn outcome(
    task: &mut Task,
    result: Result<(), Errno>,
    image: &Image,
    can_write: &mut bool,
) -> Step {
    let in_memory = image.is_in_memory();
    match result {
        Err(Errno::AGAIN) if !in_memory => Step::Left,
        Err(Errno::OPNOTSUPP) if !in_memory => {
            *can_write &= task.op == Op::Read;
            Step::Left
        }
        Err(errno) => went_wrong(task, errno),
        Ok(()) => task.step(),
    }
}

/// True if the page cache holds this range, or if the system cannot tell.
fn is_cached(image: &Image, (offset, len): (u64, u64)) -> bool {
    sys::is_cached(image.file(), offset, len).unwrap_or(true)
}

/// Makes one call for at most `bytes` of a read or write.
fn transfer(task: &mut Task, file: BorrowedFd<'_>, bytes: u64, flags: i32) -> Result<(), Errno> {
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
fn call(
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

/// Notes that a call has moved `n` bytes of a task.
///
/// # Errors
/// `EIO`: no byte was moved, because the file ends before the disk does.
fn went_on(task: &mut Task, n: usize) -> Result<(), Errno> {
    // The file is shorter than the disk: it was truncated after it was measured.
    if n == 0 {
        return Err(Errno::IO);
    }
    task.went_on(n as u64);
    Ok(())
}

/// The next step after an error: `EAGAIN` and `EINTR` are tried again, and at last count as `EIO`.
fn went_wrong(task: &mut Task, errno: Errno) -> Step {
    match errno {
        Errno::AGAIN | Errno::INTR if task.patience.may_try_again() => Step::More,
        Errno::AGAIN | Errno::INTR => Step::Done(Err(Errno::IO)),
        errno => Step::Done(Err(errno)),
    }
}

/// Serves all of a task, waiting for each of its calls: for a thread that may wait. `bounce` is the
/// aligned memory for transfers that `O_DIRECT` refuses.
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
                _ => bounce.write(image, range, Bytes::Guest(&task.rest), durable),
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

/// Repeats a call while it fails with `EAGAIN` or `EINTR`, which at last count as `EIO`.
fn patiently(mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let mut patience = Patience::default();
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) if patience.may_try_again() => {}
            Err(Errno::AGAIN | Errno::INTR) => return Err(Errno::IO),
            result => return result,
        }
    }
}

/// Serves a discard or write-zeroes, and waits for it. Of a range that does not consist of whole
/// units, `fallocate` gets the whole units; zeroes are written to the ends, which a discard leaves
/// as they are.
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
pub(crate) fn serve_without_data(
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

/// Zeroes or discards a range. A block device that another process holds refuses a range of which
/// the page cache has bytes that are not written yet (`EBUSY`), so the image is synced and the
/// range tried again. If the guest keeps writing to the range between the tries, every try may
/// fail: the request then fails with `EBUSY`, and the data on the disk stay as they are.
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

/// Punches a hole. A discard is a hint: if the file system cannot punch holes, it does nothing.
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

/// Zeroes whole units by the cheapest way that is allowed and that the host supports. If the host
/// supports no other way, zeroes are written.
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

/// Writes zeroes to the range, from aligned memory, as `O_DIRECT` asks for it.
fn write_zeroes(image: &Image, range: Range<u64>, bounce: &mut Bounce) -> Result<(), Errno> {
    let mut at = range.start;
    while at < range.end {
        patiently(|| {
            at += bounce.write(image, at..range.end, Bytes::Zeroes, false)? as u64;
            Ok(())
        })?;
    }
    Ok(())
}
