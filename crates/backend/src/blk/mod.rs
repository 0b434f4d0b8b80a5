//! `Disk` (per device) and `DiskQueue` (per queue, owned by one worker).
//!
//! The lifecycle of a disk queue:
//! 1. [`Disk::open_queue`] makes it, on the control thread.
//! 2. [`DiskQueue::attach`] on the worker: registers files with the worker's ring, if there is one.
//! 3. [`DiskQueue::submit`] takes a burst of requests. What is done at once is in `done` already.
//! 4. [`DiskQueue::on_event`] for each completion of the ring that carries this queue's tag.
//! 5. [`DiskQueue::reap`] at the end of every turn: what is done without the ring, and a piece of
//!    what takes long. It is called again at once while it says that there is more, and when
//!    [`DiskQueue::readiness`] is written.
//! 6. [`DiskQueue::detach`] when nothing is in flight: before a move, and before the drop.
//!
//! The worker's thread is shared with the queues of other guests: `submit` and `reap` together
//! copy a bounded number of bytes there (`quota.rs`), and do not wait for the host.
//!
//! Every token that was submitted comes back in exactly one [`Completion`]. The device has checked
//! that a request lies inside the disk. A disk that does not finish a request before `submit`
//! returns keeps its slices in a list of its own ([`SliceList`]), and with them their memory.

mod container;
pub mod fault;
pub mod file;
mod flushes;
mod holder;
mod image;
pub mod memory;
pub mod null;
mod offload;
mod quota;
mod spares;
mod task;
pub mod uring;

pub use image::{Image, ImageError, ImageOptions};

use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, Pieces, SliceList};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::ops::Range;

/// What a disk is, as a device must know it. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size, a multiple of 512.
    pub size: u64,
    /// Smallest unit that is read or written without extra work.
    pub block_size: u32,
    /// Unit of the medium.
    pub physical_block_size: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// Largest discard, 0 = cannot.
    pub discard_max: u64,
    /// Largest write-zeroes, 0 = cannot.
    pub write_zeroes_max: u64,
    /// Largest secure erase, 0 = cannot.
    pub secure_erase_max: u64,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Disk to memory.
    Read,
    /// Memory to disk.
    Write {
        /// Durable at completion (write-through).
        durable: bool,
    },
    /// Completed writes become durable.
    Flush,
    /// The range's content is not needed any more.
    Discard,
    /// The range reads as zeroes.
    WriteZeroes {
        /// The range may be deallocated.
        unmap: bool,
        /// Durable at completion (write-through).
        durable: bool,
    },
    /// The range cannot be recovered.
    SecureErase,
}

/// One request. Offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub struct Request {
    /// Comes back in the completion: a number below the ring's size that no other request in
    /// flight has.
    pub token: u32,
    /// What to do.
    pub op: Op,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes; for reads and writes the sum of the slices.
    pub len: u64,
    slices: Range<usize>,
}

/// A burst of requests with their slices in one list. Reused.
#[derive(Debug, Default)]
pub struct Burst {
    requests: Vec<Request>,
    slices: SliceList,
}

impl Burst {
    /// Adds a request whose slices are those pushed since the last one.
    #[inline]
    pub fn push(&mut self, token: u32, op: Op, offset: u64, len: u64) {
        let first = self.requests.last().map_or(0, |r| r.slices.end);
        let slices = first..self.slices.len();
        self.requests.push(Request { token, op, offset, len, slices });
    }

    /// The list to push a request's slices to, before [`Self::push`].
    pub fn slices(&mut self) -> &mut SliceList {
        &mut self.slices
    }

    /// The slices pushed since the last request.
    #[must_use]
    pub fn new_slices(&self) -> &[GuestSlice<'_>] {
        &self.slices.as_slices()[self.requests.last().map_or(0, |r| r.slices.end)..]
    }

    /// Drops slices that were pushed for a request that will not be.
    pub fn forget_slices(&mut self) {
        let end = self.requests.last().map_or(0, |r| r.slices.end);
        self.slices.truncate(end);
    }

    /// The requests with their slices.
    pub fn iter(&self) -> impl Iterator<Item = (&Request, Pieces<'_>)> {
        self.requests.iter().map(|r| (r, self.slices.pieces(r.slices.clone())))
    }

    /// True if there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Empties the burst, and lets go of the snapshot that its slices came from.
    pub fn release(&mut self) {
        self.requests.clear();
        self.slices.release();
    }

    /// Empties the burst, keeps its memory.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.slices.clear();
    }
}

/// A request that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's.
    pub token: u32,
    /// Success, or why the host refused.
    pub result: Result<(), Errno>,
}

/// A disk, shared by its queues. Its methods may block (a network disk that hangs): they are for
/// a thread that may wait.
pub trait Disk: Send + Sync + std::fmt::Debug {
    /// What the disk is now.
    fn geometry(&self) -> Geometry;

    /// Makes a queue. `has_ring`: the worker will lend an io_uring.
    ///
    /// # Errors
    /// The system's.
    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno>;

    /// Takes the size of the host anew, after changing it to `size` if one is given.
    ///
    /// # Errors
    /// The system's; `EOPNOTSUPP` if the disk cannot change its size.
    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno>;

    /// A short name for logs and counters: `file`, `uring`, `null`, ..
    fn kind(&self) -> &'static str;
}

/// One queue of a disk.
pub trait DiskQueue: Send + std::fmt::Debug {
    /// Gets ready on the worker that will submit; events of the ring will carry `tag | token`.
    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        let _ = (ring, tag);
    }

    /// Lets go of the worker's ring. Nothing is in flight.
    fn detach(&mut self, ring: Option<&mut Ring>) {
        let _ = ring;
    }

    /// How many requests a burst should have at most. A disk that serves a burst inline before it
    /// returns wants few, so that the first is not answered as late as the last.
    fn burst_max(&self) -> usize {
        usize::MAX
    }

    /// Starts every request of the burst; pushes to `done` what is finished at once.
    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>);

    /// Guest memory is about to change: lets go of what no request uses any more, and of the rest
    /// as soon as its request is done.
    fn release_memory(&mut self) {}

    /// An event of the ring for `token`.
    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        let _ = (token, result, ring, done);
    }

    /// Becomes readable, by a further write to an eventfd, when [`Self::reap`] has something that
    /// came from outside of the worker's thread. Watched while the queue is attached.
    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Ends the turn: pushes what is finished without the ring, and does a piece of what takes
    /// long. True if there is more to do here in the next turn.
    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let _ = done;
        false
    }
}
