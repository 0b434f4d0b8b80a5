//! `Disk` (per device) and `DiskQueue` (per queue, owned by one worker).
//!
//! The lifecycle of a disk queue:
//! 1. [`Disk::open_queue`] makes it, on the control thread.
//! 2. [`DiskQueue::attach`] registers the queue's files with the worker's io_uring, if the worker
//!    has one.
//! 3. [`DiskQueue::submit`] starts a burst of requests. Requests that are done at once are in
//!    `done` when it returns.
//! 4. [`DiskQueue::on_event`] is called for each completion of the io_uring with the queue's tag.
//! 5. [`DiskQueue::reap`] is called at the end of every turn. It returns the requests that are done
//!    outside the io_uring, and serves a piece of a long one. The queue takes another turn while
//!    `reap` returns true, and whenever [`DiskQueue::readiness`] is written.
//! 6. [`DiskQueue::detach`] is called when nothing is in flight: before a move to another worker,
//!    and before the drop.
//!
//! The worker's thread also serves queues of other guests. Therefore `submit` and `reap` together
//! copy a bounded number of bytes (`quota.rs`), and do not wait for the host.
//!
//! Every submitted token comes back in exactly one [`Completion`]. The device has checked that each
//! request lies inside the disk. A disk that does not finish a request before `submit` returns
//! keeps the request's slices in a list of its own ([`SliceList`]), so that their memory stays
//! mapped.

mod bounce;
mod calls;
mod container;
pub mod fault;
pub mod file;
mod flushes;
mod guard;
mod holder;
mod image;
pub mod memory;
pub mod null;
mod offload;
mod quota;
mod spares;
mod task;
pub mod uring;

pub use image::{Ending, Image, ImageDescriptors, ImageError, ImageOptions, Marks};

use crate::sys::uring::Ring;
use manyring_memory::{GuestSlice, Pieces, SliceList};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::ops::Range;

/// The size and the limits of a disk, from which a device makes its configuration. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size of the disk, a multiple of 512.
    pub size: u64,
    /// The logical block size (`blk_size`, virtio 1.3 §5.2.4): 4096 if the host's block device has
    /// no smaller blocks, else 512. A [`Disk`] serves whole sectors of 512 bytes in either case.
    pub block_size: u32,
    /// The physical block size, a power of two: writing a part of such a block costs extra work.
    pub physical_block_size: u32,
    /// The smallest write that the host suggests, a multiple of `physical_block_size`.
    pub min_io_size: u32,
    /// The largest request that the host suggests, a multiple of `physical_block_size`; 0: the host
    /// suggests none.
    pub opt_io_size: u32,
    /// True if the disk may not be written.
    pub read_only: bool,
    /// Bytes of the longest discard; 0: not supported.
    pub discard_max: u64,
    /// Bytes of the longest write-zeroes; 0: not supported.
    pub write_zeroes_max: u64,
    /// Bytes of the longest secure erase; 0: not supported.
    pub secure_erase_max: u64,
}

/// The operation of a request (virtio 1.3 §5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Copies from the disk to guest memory.
    Read,
    /// Copies from guest memory to the disk.
    Write {
        /// True if the write must be durable at completion (write-through).
        durable: bool,
    },
    /// Makes all completed writes durable.
    Flush,
    /// Says that the content of the range is not needed any more.
    Discard,
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// True if the range may be deallocated.
        unmap: bool,
        /// True if the zeroes must be durable at completion (write-through).
        durable: bool,
    },
    /// Makes the content of the range unrecoverable.
    SecureErase,
}

/// One request. Offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub struct Request {
    /// Identifies the request in its completion: a number below the ring's size that no other
    /// request in flight has.
    pub token: u32,
    /// The operation.
    pub op: Op,
    /// The offset on the disk of the request's first byte.
    pub offset: u64,
    /// The length in bytes; for reads and writes this is the sum of the slices.
    pub len: u64,
    slices: Range<usize>,
}

/// A burst of requests, with all their slices in one list. It is reused, to allocate nothing.
#[derive(Debug, Default)]
pub struct Burst {
    requests: Vec<Request>,
    slices: SliceList,
}

impl Burst {
    /// Adds a request. Its slices are those pushed since the last request.
    #[inline]
    pub fn push(&mut self, token: u32, op: Op, offset: u64, len: u64) {
        let first = self.requests.last().map_or(0, |r| r.slices.end);
        let slices = first..self.slices.len();
        self.requests.push(Request { token, op, offset, len, slices });
    }

    /// Returns the list to which the caller pushes a request's slices, before [`Self::push`].
    pub fn slices(&mut self) -> &mut SliceList {
        &mut self.slices
    }

    /// Returns the slices pushed since the last request, for the request to be added next.
    #[must_use]
    pub fn new_slices(&self) -> &[GuestSlice<'_>] {
        &self.slices.as_slices()[self.requests.last().map_or(0, |r| r.slices.end)..]
    }

    /// Drops the slices pushed since the last request: the request is not added after all.
    pub fn forget_slices(&mut self) {
        let end = self.requests.last().map_or(0, |r| r.slices.end);
        self.slices.truncate(end);
    }

    /// Returns the requests with their slices.
    pub fn iter(&self) -> impl Iterator<Item = (&Request, Pieces<'_>)> {
        self.requests.iter().map(|r| (r, self.slices.pieces(r.slices.clone())))
    }

    /// True if there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Empties the burst, and drops the reference to the memory snapshot of its slices.
    pub fn release(&mut self) {
        self.requests.clear();
        self.slices.release();
    }

    /// Empties the burst, but keeps its allocation.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.slices.clear();
    }
}

/// A request that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the request.
    pub token: u32,
    /// `Ok`, or the host's error, which the device converts to a status (virtio 1.3 §5.2.6).
    pub result: Result<(), Errno>,
}

/// A connection between a queue and the server of its disk, with its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// True if the connection is established.
    pub is_up: bool,
    /// True if several queues share the connection, because the server accepts no more connections.
    pub is_shared: bool,
    /// Number of times that the connection was lost.
    pub losses: u64,
    /// Number of requests that were sent and are not answered.
    pub in_flight: u64,
    /// Bytes sent to the server so far.
    pub bytes_sent: u64,
    /// Bytes received from the server so far.
    pub bytes_received: u64,
}

/// A disk, shared by its queues. Its methods may block (a network disk may hang), so only threads
/// that may wait call them.
pub trait Disk: Send + Sync + std::fmt::Debug {
    /// Returns the present geometry: only its size can change, by [`Self::resize`].
    fn geometry(&self) -> Geometry;

    /// Makes a queue. `has_ring`: its worker will have an io_uring.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no descriptor or memory for the queue.
    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno>;

    /// Returns the most queues that the disk can have.
    fn queues_max(&self) -> usize {
        usize::MAX
    }

    /// Returns the connections of the disk's queues to its server; empty for a disk without a
    /// server.
    fn connections(&self) -> Vec<Connection> {
        Vec::new()
    }

    /// Changes the size of the disk to `size`, if given; then measures the disk again.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: the disk cannot change its size. `EROFS`: it is read-only. `EINVAL`: the size
    /// is zero, or not whole sectors. Any other: the host cannot change or measure it.
    fn resize(&self, size: Option<u64>) -> Result<Geometry, Errno>;

    /// Returns the size that the host has for the disk now; changes nothing.
    ///
    /// # Errors
    /// The host cannot measure it.
    fn measure(&self) -> Result<u64, Errno> {
        self.image().map_or_else(|| Ok(self.geometry().size), Image::measure)
    }

    /// Returns the file of a disk in memory, for the process that serves the disk from now on.
    /// `None`: the disk is not in memory.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no descriptor or memory for the file.
    fn hand_memory(&self) -> Result<Option<OwnedFd>, Errno> {
        Ok(None)
    }

    /// Locks the image for rings ([`ImageOptions::lock_with_rings`]), if the disk has that setting:
    /// called when a ring starts and no other one runs. May block.
    ///
    /// # Errors
    /// `InUse`: another process has locked the image. `Lock`: the file system cannot lock it.
    fn acquire(&self) -> Result<(), ImageError> {
        Ok(())
    }

    /// Unlocks the image after [`Self::acquire`], when the last ring has stopped. May block.
    fn release(&self) {}

    /// Returns a short name for logs and counters: `file`, `uring`, `null`, ..
    fn kind(&self) -> &'static str;

    /// Returns the image behind the disk, if there is one.
    fn image(&self) -> Option<&Image> {
        None
    }
}

/// One queue of a disk.
pub trait DiskQueue: Send + std::fmt::Debug {
    /// Prepares the queue on the worker that will submit its requests. The entries that the queue
    /// puts into the io_uring must carry `tag | token` as their `user_data`.
    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        let _ = (ring, tag);
    }

    /// Removes the queue from its worker's io_uring, when nothing is in flight.
    fn detach(&mut self, ring: Option<&mut Ring>) {
        let _ = ring;
    }

    /// Returns the most requests that a burst should have. A disk that serves a burst before
    /// `submit` returns wants short bursts: the first request is answered no earlier than the last
    /// one.
    fn burst_max(&self) -> usize {
        usize::MAX
    }

    /// Starts every request of the burst; adds completions of those that are done at once to
    /// `done`.
    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>);

    /// Called when guest memory is about to change: releases slices that are kept for reuse now,
    /// and those of each request in flight when it is done.
    fn release_memory(&mut self) {}

    /// Handles the completion of an io_uring entry of request `token`; `result` is the kernel's.
    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        let _ = (token, result, ring, done);
    }

    /// Called when the queue stops: takes a request back, if nobody has begun it, or if its
    /// finished part can be repeated. Returns true if the request is as if it had never been
    /// submitted, and gets no completion. False: its completion comes, with `ECANCELED` if a long
    /// transfer has ended after a piece.
    fn recall(&mut self, token: u32, ring: Option<&mut Ring>) -> bool {
        let _ = (token, ring);
        false
    }

    /// Returns an eventfd that another thread writes when [`Self::reap`] has a completion of it.
    /// The worker watches it edge-triggered while the queue is attached, and never reads it.
    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Ends the turn: adds completions of requests that are done outside the io_uring to `done`,
    /// and serves a piece of a long request. Returns true if the next turn has more to do.
    fn reap(&mut self, done: &mut Vec<Completion>) -> bool {
        let _ = done;
        false
    }
}
