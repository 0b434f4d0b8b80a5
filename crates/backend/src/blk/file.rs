//! `file`: serves an image by pread and pwrite. It is the plain version of `uring`, used if
//! io_uring is refused, and for files in tmpfs, for which io_uring has no advantage.
//!
//! ```text
//! read, write: a file in memory -> on the worker, in pieces: as much as the turn's quota allows
//!              a file on a disk -> on the worker, in pieces, if the page cache can serve the piece
//!              without waiting; the rest, and all of O_DIRECT, on the disk's thread (offload.rs);
//!              transfers that O_DIRECT refuses are copied there through aligned memory (bounce.rs)
//! all others:  on the disk's thread; but a flush of a file in memory, which does nothing, on the
//!              worker
//! ```
//! The worker's thread never waits for a disk, and copies no more than a quota, because its other
//! queues belong to other guests.

use super::calls::{call, serve_without_data, transfer, went_on, went_wrong};
use super::offload::{DiskThread, DiskThreadQueue};
use super::task::{Backlog, Step, Task};
use super::{Burst, Completion, Disk, DiskQueue, Geometry, Image, Op, Request};
use crate::blk::ImageError;
use crate::sys::file as sys;
use crate::sys::uring::Ring;
use manyring_memory::Pieces;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::sync::Arc;

/// A disk on an image that is read and written by system calls.
#[derive(Debug)]
pub struct FileDisk {
    image: Arc<Image>,
    offload: Arc<DiskThread>,
}

impl FileDisk {
    /// Serves `image`.
    #[must_use]
    pub fn new(image: Image) -> Self {
        let image = Arc::new(image);
        Self { offload: Arc::new(DiskThread::new(image.clone())), image }
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
    aside: DiskThreadQueue,
    /// False once the file system has refused a write with `RWF_NOWAIT` (`EOPNOTSUPP`).
    can_write_at_once: bool,
    /// Reused for each request that one call did not finish.
    task: Task,
}

impl FileQueue {
    pub(crate) fn new(image: Arc<Image>, offload: &Arc<DiskThread>) -> Result<Self, Errno> {
        Ok(Self {
            can_write_at_once: !image.is_direct(),
            image,
            backlog: Backlog::default(),
            aside: DiskThreadQueue::new(offload.clone())?,
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

    /// Serves a read or write on the worker, by one call. If bytes are left over, makes a task of
    /// them.
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
            // A short count: put the rest into the backlog, before all later requests.
            Step::More => self.backlog.push(self.task.take()),
            Step::Done(_) => {}
        }
        step
    }
}

/// The most requests that are popped in one turn.
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

/// Serves at most `bytes` of a read or write on the worker. Returns [`Step::Left`] if the call
/// would wait.
fn piece(task: &mut Task, image: &Image, bytes: u64, can_write: &mut bool) -> Step {
    let range = (task.offset, bytes.min(task.len));
    let Some(flags) = flags_here(task.op, range, image, *can_write) else { return Step::Left };
    let result = transfer(task, image.file(), bytes, flags);
    outcome(task, result, image, can_write)
}

/// Returns the flags for a read or write of this range (offset, length) on the worker. `None`: the
/// call could wait for the disk, so the worker must not make it.
#[inline]
fn flags_here(op: Op, range: (u64, u64), image: &Image, can_write: bool) -> Option<i32> {
    let in_memory = image.is_in_memory();
    match op {
        _ if image.is_direct() => None,
        Op::Write { durable: true } if in_memory => Some(sys::RWF_DSYNC),
        _ if in_memory => Some(0),
        Op::Write { durable: true } => None,
        Op::Write { .. } => can_write.then_some(sys::RWF_NOWAIT),
        // Check the page cache first: a read that misses it starts to read ahead, even with
        // `RWF_NOWAIT`, and then waits for a device whose queue is full.
        _ => (image.has_nowait() && is_cached(image, range)).then_some(sys::RWF_NOWAIT),
    }
}

/// Returns the next step of a task after the `result` of one call on the worker.
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

/// True if the page cache holds this range, or if the kernel cannot tell.
fn is_cached(image: &Image, (offset, len): (u64, u64)) -> bool {
    sys::is_cached(image.file(), offset, len).unwrap_or(true)
}
