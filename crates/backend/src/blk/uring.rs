//! `uring`: serves an image through the io_uring of the worker.
//!
//! ```text
//! submit: short read through the page cache -> try preadv2(RWF_NOWAIT): a hit saves a round trip
//!         a write through the page cache of a file -> an entry that is refused if it would wait;
//!         an entry that was refused or is too long for a turn -> own thread (`offload.rs`)
//!         discard, write-zeroes of a file; secure erase -> the disk's own thread
//!         a transfer that O_DIRECT refuses, or a write to a unit that the thread is changing
//!                                       -> the disk's own thread (`bounce.rs`, `guard.rs`)
//!         else -> an entry of the ring, submitted once per burst; a long one is forced to a kernel
//!                 thread (IOSQE_ASYNC), and has no more than PIECE_BYTES at a time
//! event:  all bytes -> done;  a part -> the rest again;  EAGAIN, EINTR -> again, for a while
//!         ECANCELED -> the kernel has no thread at all: served here, waiting for the disk
//! ```
//! Measured: a read from the page cache, served on the worker, is as cheap as an entry of a batch,
//! and has no latency. A file in memory (tmpfs) does not support `RWF_NOWAIT`, so the kernel gives
//! every entry to a thread, at 2 to 3 times the cost: such a file is served as by `file`.
//!
//! The kernel copies a transfer through the page cache while the worker submits it, if it can do so
//! without waiting. Therefore the bytes that are submitted without `IOSQE_ASYNC` count against the
//! turn of the queue and of the worker, as bytes do that the worker copies itself. Long transfers,
//! and those beyond the turn's quota, are copied by a kernel thread. The kernel always gives
//! `fdatasync` to such a thread. They serve few entries of a disk at once (`sys/uring/slots.rs`).
//!
//! Kernel threads make one write to a file at a time, and there the writes of one guest's image
//! could wait for those of another's (`offload.rs` says why). So the disk's own thread makes each
//! write to a file that the worker cannot make without waiting. The results of that thread come
//! through the inbox of the worker's ring, as events like all others.
//!
//! The kernel is told not to wait while the worker submits, but two kinds of requests wait all the
//! same when the queue of the host's device is full: direct I/O of a file, and a read that misses
//! the page cache and so starts to read ahead. A worker with a single guest submits such requests
//! itself, since only that guest waits. A worker with several guests leaves them to the kernel's
//! threads. This was measured to cost 5 to 15 % more CPU for each request at full depth, with the
//! same number of requests a second, and ten microseconds more if one request is in flight. Before
//! Linux 6.5 no call tells whether the page cache holds a range. So while a device has recently
//! made the worker wait, its requests are left to the kernel's threads (`sys/uring/fast.rs`).

#![allow(unsafe_code, reason = "allow-listed: answers for memory that the kernel has")]

mod guarded_writes;
mod in_flight;
mod recall;
mod submitter;
mod zeroes;

use super::bounce::Bounce;
use super::calls::serve_to_the_end;
use super::file::{FileQueue, INLINE_BURST};
use super::flushes::Flushes;
use super::guard::QUESTION;
use super::offload::{DiskThread, warn_of_waiting};
use super::quota::{BURST, Quota};
use super::task::{Task, head};
use super::{Burst, Completion, Disk, DiskQueue, Geometry, Image, ImageError, Op, Request};
use crate::sys::file as sys;
use crate::sys::uring::{FileOp, Ring, RingDisk, RingFile, Submitter, Width};
use in_flight::{IoInFlight, Stage, Step};
use manyring_memory::{Mapping, MemoryError, Pieces, SliceList};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zeroes::{shared_zeroes, zeroes};

/// `FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`
const PUNCH_HOLE: i32 = 1 | 2;
/// `FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE`
const ZERO_RANGE: i32 = 1 | 16;
/// The most direct I/O requests that are submitted at once. The kernel starts none of a submission
/// before it has prepared all of it, so the disk idles during a long one. Measured at a depth of
/// 32: bursts of 4 reach 0.94 of the rate of fio without a guest, unbounded ones 0.82.
const DIRECT_BURST: usize = 4;
/// A transfer that costs more than to copy this many bytes is made by a thread of the kernel.
const INLINE_BYTES: u64 = 128 << 10;
/// Most bytes of one entry, so that the kernel's few threads take turns among requests.
const PIECE_BYTES: u64 = 4 << 20;
/// The capacity, in slices, that the list of a finished request keeps. Lists of tokens from
/// `TOKENS_KEPT` on, which only large rings have, keep little.
const SLICES_KEPT: usize = 256;
const TOKENS_KEPT: usize = 1024;
const SLICES_KEPT_BEYOND: usize = 4;

/// A disk on an image that is served through io_uring.
#[derive(Debug)]
pub struct UringDisk {
    image: Arc<Image>,
    /// Distinguishes the disk from other disks of the same worker.
    number: u64,
    offload: Arc<DiskThread>,
    zeroes: &'static Mapping,
}

impl UringDisk {
    /// Makes a disk that serves `image`.
    ///
    /// # Errors
    /// [`MemoryError::Map`]: the process has no address space left for the zeroes.
    pub fn new(image: Image) -> Result<Self, MemoryError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (image, zeroes) = (Arc::new(image), shared_zeroes()?);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { offload: Arc::new(DiskThread::new(image.clone())), number, image, zeroes })
    }

    fn queue(&self) -> Result<UringQueue, Errno> {
        Ok(UringQueue {
            image: self.image.clone(),
            number: self.number,
            name: self.image.guard().name_queue(),
            flushes: Flushes::new(self.image.clone())?,
            ended: Vec::new(),
            disk: None,
            offload: self.offload.clone(),
            can_write_at_once: true,
            quota: Quota::new(BURST),
            piece: SliceList::new(),
            tag: 0,
            file: RingFile::Plain(-1),
            holder: RingFile::Plain(-1),
            synced: RingFile::Plain(-1),
            zeroes: self.zeroes,
            in_flight: Vec::new(),
            holders: Vec::new(),
        })
    }
}

impl Disk for UringDisk {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn open_queue(&self, has_ring: bool) -> Result<Box<dyn DiskQueue>, Errno> {
        let copies = self.image.is_in_memory() && !self.image.is_direct();
        if !has_ring || copies {
            return Ok(Box::new(FileQueue::new(self.image.clone(), &self.offload)?));
        }
        Ok(Box::new(self.queue()?))
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
        "uring"
    }

    fn image(&self) -> Option<&Image> {
        Some(&self.image)
    }
}

#[derive(Debug)]
struct UringQueue {
    image: Arc<Image>,
    number: u64,
    /// The disk and its device, as registered with the worker's io_uring.
    disk: Option<RingDisk>,
    tag: u64,
    file: RingFile,
    /// The file description for `fallocate`.
    holder: RingFile,
    /// The number by which the guard of the image knows the queue.
    name: u64,
    /// The file description on which this queue calls `fdatasync`.
    synced: RingFile,
    flushes: Flushes,
    /// Reused for flushes that end together.
    ended: Vec<u32>,
    zeroes: &'static Mapping,
    /// The disk's own thread.
    offload: Arc<DiskThread>,
    /// False once the file system has refused to write into the page cache without waiting.
    can_write_at_once: bool,
    quota: Quota,
    /// Reused for the slices of an entry that is only a piece of its request.
    piece: SliceList,
    /// The requests, indexed by token. A finished request keeps its list of slices for reuse.
    in_flight: Vec<IoInFlight>,
    /// Tokens that had requests since the last change of guest memory, each once: their lists may
    /// refer to the present memory.
    holders: Vec<u32>,
}

impl UringQueue {
    /// Stores a request under its token.
    fn remember(&mut self, request: &Request, pieces: Pieces<'_>) {
        let at = request.token as usize;
        self.in_flight.resize_with(self.in_flight.len().max(at + 1), IoInFlight::default);
        let is_whole = self.is_whole(request);
        let entry = &mut self.in_flight[at];
        assert!(!entry.is_open, "a token came twice");
        if !std::mem::replace(&mut entry.is_holder, true) {
            self.holders.push(request.token);
        }
        entry.op = request.op;
        entry.offset = request.offset;
        entry.len = request.len;
        entry.stage = match request.op {
            Op::Read | Op::Write { .. } => Stage::Transfer,
            Op::Flush => Stage::Flush,
            Op::SecureErase => Stage::Aside,
            Op::Discard | Op::WriteZeroes { .. } if !is_whole => Stage::Aside,
            Op::Discard | Op::WriteZeroes { .. } if !self.image.holds_device() => Stage::Aside,
            Op::WriteZeroes { unmap: false, .. } => Stage::Fallocate(ZERO_RANGE),
            _ => Stage::Fallocate(PUNCH_HOLE),
        };
        entry.aligned = self.image.is_aligned(request.offset, &pieces);
        if entry.stage == Stage::Transfer && !entry.aligned {
            entry.stage = Stage::Aside;
        }
        entry.retries.renew();
        entry.rest.clear();
        entry.rest.shrink_to(SLICES_KEPT.max(pieces.len()));
        entry.rest.extend(pieces);
    }

    /// Frees the token of a request that is done.
    fn close(&mut self, token: u32) {
        self.left(token);
        let entry = &mut self.in_flight[token as usize];
        if entry.close() {
            // Also release `piece`, which may still list slices of the same memory snapshot.
            self.piece.release();
        }
        if token as usize >= TOKENS_KEPT {
            entry.rest.clear();
            entry.rest.shrink_to(SLICES_KEPT_BEYOND);
        }
    }

    /// Passes the rest of a request to the disk's own thread.
    fn start_aside(&mut self, token: u32, disk: RingDisk, ring: &mut Ring) {
        // First take the request off the guard's list: else it and the thread wait for each other.
        self.left(token);
        let task = self.task(token);
        let user_data = self.tag | u64::from(token);
        if !matches!(task.op, Op::Read | Op::Write { .. }) {
            ring.owes(disk, user_data);
        }
        let entry = &mut self.in_flight[token as usize];
        (entry.stage, entry.is_open) = (Stage::Aside, true);
        self.offload.send(task, ring.inbox(), user_data);
    }

    /// Makes a task of a request's rest, for the disk's thread, or the worker when it must wait.
    fn task(&mut self, token: u32) -> Task {
        let entry = &mut self.in_flight[token as usize];
        Task {
            token,
            op: if entry.stage == Stage::Flush { Op::Flush } else { entry.op },
            offset: entry.offset,
            len: entry.len,
            rest: std::mem::take(&mut entry.rest),
            ..Task::default()
        }
    }

    /// Puts an entry for the next piece of a request into the io_uring.
    fn start(&mut self, token: u32, ring: &mut Ring) {
        let disk =
            *self.disk.get_or_insert_with(|| ring.open_disk(self.number, self.image.device()));
        let submitter = match self.in_flight[token as usize].stage {
            Stage::Transfer => self.submitter(token, disk, ring),
            Stage::Aside => None,
            _ => Some(Submitter::Kernel(Width::Narrow)),
        };
        let Some(submitter) = submitter else { return self.start_aside(token, disk, ring) };
        let entry = &mut self.in_flight[token as usize];
        entry.is_open = true;
        let user_data = self.tag | u64::from(token);
        match (entry.stage, entry.op) {
            (Stage::Transfer, op) => {
                let op = match op {
                    Op::Write { .. } => FileOp::Write { dsync: entry.syncs_itself(&self.image) },
                    _ => FileOp::Read,
                };
                let file = self.file;
                let slices = if entry.len > PIECE_BYTES {
                    head(&entry.rest, PIECE_BYTES, &mut self.piece);
                    self.piece.as_slices()
                } else {
                    entry.rest.as_slices()
                };
                // SAFETY: these bytes are listed in `entry.rest`. While `is_open`, the list neither
                // changes nor drops its memory snapshot: until the event of this token, or for ever
                // if this queue is dropped before.
                unsafe {
                    ring.transfer(op, (disk, file), slices, entry.offset, submitter, user_data);
                }
            }
            (Stage::Fallocate(mode), _) => {
                let file = (disk, self.holder);
                ring.fallocate(file, mode, (entry.offset, entry.len), user_data);
            }
            (Stage::Zeroes, _) => {
                let zeroes = zeroes(self.zeroes, entry.len);
                let op = FileOp::Write { dsync: false };
                // SAFETY: the zeroes of this process are mapped for ever.
                unsafe {
                    let file = (disk, self.file);
                    ring.transfer(op, file, &zeroes, entry.offset, submitter, user_data);
                }
            }
            (Stage::Aside, _) => {}
            (Stage::Flush, _) => {
                if self.flushes.begin(token) {
                    ring.flush(disk, self.synced, user_data);
                }
            }
        }
    }

    /// Ends all flushes that one `fdatasync` has served, and starts those that waited for it.
    #[cold]
    fn end_flushes(&mut self, result: Done, ring: &mut Ring, done: &mut Vec<Completion>) {
        let mut ended = std::mem::take(&mut self.ended);
        self.flushes.end(&mut ended);
        for token in ended.drain(..) {
            self.close(token);
            done.push(Completion { token, result });
        }
        self.ended = ended;
        if let Some(next) = self.flushes.next() {
            self.start(next, ring);
        }
    }

    /// Tries to read from the page cache on the worker, by one call. `None`: the read would wait,
    /// was interrupted by a signal, or was short; then the io_uring must serve it.
    fn read_cached(&self, request: &Request, pieces: Pieces<'_>) -> Option<Result<(), Errno>> {
        let file = self.image.file();
        match sys::read(file, pieces.as_slices(), request.offset, sys::RWF_NOWAIT) {
            Ok(0) => Some(Err(Errno::IO)),
            Ok(n) => (n as u64 == request.len).then_some(Ok(())),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(errno) => Some(Err(errno)),
        }
    }

    /// Serves the rest of a request on the worker's thread, which waits for the disk.
    #[cold]
    fn end_here(&mut self, token: u32) -> Result<(), Errno> {
        warn_of_waiting(&self.image);
        let mut task = self.task(token);
        serve_to_the_end(&mut task, &self.image, &mut Bounce::of_worker())
    }

    /// Serves a request on the worker, or passes it to the io_uring or the disk's thread. Returns
    /// the result if the request is done.
    fn begin(&mut self, request: &Request, pieces: Pieces<'_>, ring: &mut Ring) -> Option<Done> {
        if request.op == Op::Read && self.reads_here(request.offset, request.len, ring) {
            self.disk.iter().for_each(|disk| ring.calls(*disk));
            let result = self.read_cached(request, pieces);
            if result.is_some() {
                return result;
            }
        }
        self.remember(request, pieces);
        self.keep_apart(request.token);
        self.start(request.token, ring);
        None
    }
}

impl DiskQueue for UringQueue {
    fn burst_max(&self) -> usize {
        if self.image.is_direct() { DIRECT_BURST } else { INLINE_BURST }
    }

    fn attach(&mut self, ring: Option<&mut Ring>, tag: u64) {
        self.tag = tag;
        if let Some(ring) = ring {
            self.sit_down(ring, tag);
            self.disk = Some(ring.open_disk(self.number, self.image.device()));
            self.file = ring.register_file(self.image.file());
            self.synced = ring.register_file(self.flushes.file());
            self.holder = if self.image.is_direct() {
                ring.register_file(self.image.holder())
            } else {
                self.file
            };
        }
    }

    fn detach(&mut self, ring: Option<&mut Ring>) {
        self.stand_up();
        let disk = self.disk.take();
        if let Some(ring) = ring {
            disk.into_iter().for_each(|disk| ring.close_disk(disk));
            ring.unregister_file(self.file);
            ring.unregister_file(self.synced);
            if self.image.is_direct() {
                ring.unregister_file(self.holder);
            }
        }
    }

    fn submit(&mut self, burst: &Burst, ring: Option<&mut Ring>, done: &mut Vec<Completion>) {
        let Some(ring) = ring else {
            let refused = Err(Errno::NODEV);
            done.extend(burst.iter().map(|(r, _)| Completion { token: r.token, result: refused }));
            return;
        };
        let began = ring.begin();
        for (request, pieces) in burst.iter() {
            if let Some(result) = self.begin(request, pieces, ring) {
                done.push(Completion { token: request.token, result });
            }
        }
        ring.took(began);
    }

    fn reap(&mut self, _done: &mut Vec<Completion>) -> bool {
        self.quota.renew();
        false
    }

    fn on_event(
        &mut self,
        token: u32,
        result: i32,
        ring: Option<&mut Ring>,
        done: &mut Vec<Completion>,
    ) {
        if token == QUESTION {
            return self.answer();
        }
        let (Some(entry), Some(ring)) = (self.in_flight.get_mut(token as usize), ring) else {
            return;
        };
        let is_flush = entry.stage == Stage::Flush;
        let step = match usize::try_from(result) {
            Ok(n) => entry.went_on(n, &self.image),
            Err(_) => {
                let errno = Errno::from_raw_os_error(-result);
                let is_write = matches!(entry.op, Op::Write { .. });
                if errno == Errno::OPNOTSUPP && is_write && entry.stage == Stage::Transfer {
                    self.can_write_at_once = false;
                }
                entry.failed(errno)
            }
        };
        let result = match step {
            Step::Again if self.in_flight[token as usize].ends_now() => Err(Errno::CANCELED),
            Step::Again => return self.start(token, ring),
            // `end_here` has already passed the result of a flush to `Image::synced`.
            Step::Here => self.end_here(token),
            Step::Done if is_flush => self.image.synced(Ok(())),
            Step::Failed(errno) if is_flush => self.image.synced(Err(errno)),
            Step::Done => Ok(()),
            Step::Failed(errno) => Err(errno),
        };
        // Convert `EAGAIN` to `EIO` only now: `Image::synced` would take `EIO` for a loss of bytes.
        let result = result.map_err(|errno| match errno {
            Errno::AGAIN | Errno::INTR => Errno::IO,
            errno => errno,
        });
        if is_flush {
            return self.end_flushes(result, ring, done);
        }
        self.close(token);
        done.push(Completion { token, result });
    }

    fn recall(&mut self, token: u32, ring: Option<&mut Ring>) -> bool {
        ring.is_some_and(|ring| self.take_back(token, ring))
    }

    fn release_memory(&mut self) {
        self.piece.release();
        for token in self.holders.drain(..) {
            self.in_flight[token as usize].retire();
        }
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        self.stand_up();
        // The kernel may still use the memory of requests in flight: leave it mapped for ever.
        for entry in self.in_flight.drain(..).filter(|entry| entry.is_open) {
            std::mem::forget(entry.rest);
        }
    }
}

type Done = Result<(), Errno>;

#[cfg(test)]
mod tests;
