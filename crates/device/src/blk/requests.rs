//! `QueueRequests`: a queue's requests, from parsing to the disk and back, for both ring formats.
//!
//! ```text
//! parse (virtio.rs, blkif/):    push slices; submit(request, op, offset, len), or
//!                               answer(request, result) without the disk
//! start:                        the burst goes to the disk's queue
//! reap, finish:                 completed requests are counted, and passed to the code of the
//!                               ring's format, which answers them
//! ```
//! `R` has the fields of a request that the answer in its ring's format needs. The rest is common
//! to both formats: the disk's queue, the burst, the table of requests in flight, and the counters.

use super::host::{FailedRequest, HostErrors};
use super::pending::{InFlight, Kind, PendingRequests};
use super::waiting_for_space::SpaceWaiters;
use manyring_backend::blk::{Burst, Completion, DiskQueue, Op};
use manyring_backend::sys::uring::Ring;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Fence, QueueIo};
use manyring_memory::{GuestMemory, GuestSlice, fault_count};
use manyring_wire::blk::SECTOR_SIZE;
use rustix::io::Errno;
use std::sync::Arc;

/// The most requests that one turn pops: each may have a thousand descriptors, and queues of other
/// guests wait while a worker walks these.
const BURST_MAX: usize = 128;

/// A queue pops nothing while its requests in flight have this many bytes together, because
/// stopping the queue waits for all of them. A single request may have more bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The most requests that one turn puts back, since queues of other guests wait meanwhile.
const RECALLS_MAX: usize = 64;

/// The requests of a queue.
#[derive(Debug)]
pub(super) struct QueueRequests<R> {
    disk: Box<dyn DiskQueue>,
    burst_max: usize,
    pending: PendingRequests<R>,
    burst: Burst,
    /// Completions that [`Self::finish`] has not handled yet: those of the disk, and those of
    /// requests that were answered without it.
    done: Vec<Completion>,
    /// Requests that wait for space on the host.
    pub(super) waiters: SpaceWaiters,
    /// The value of [`fault_count`] up to which guest memory has been checked.
    faults: u64,
    /// While the queue stops: tokens of the requests to put back, the last one first.
    recalls: Vec<u32>,
    /// True if the disk cannot give back the last request of `recalls`: its completion is awaited.
    is_awaited: bool,
}

impl<R> QueueRequests<R> {
    pub(super) fn new(
        disk: Box<dyn DiskQueue>,
        memory: Arc<GuestMemory>,
        host: Arc<HostErrors>,
    ) -> Self {
        Self {
            burst_max: disk.burst_max().min(BURST_MAX),
            disk,
            pending: PendingRequests::new(memory),
            burst: Burst::default(),
            done: Vec::new(),
            waiters: SpaceWaiters::new(host),
            faults: fault_count(),
            recalls: Vec::new(),
            is_awaited: false,
        }
    }

    /// Returns the most requests to pop in one turn.
    #[inline]
    pub(super) fn burst_max(&self) -> usize {
        self.burst_max
    }

    /// True if the requests in flight have [`BYTES_MAX`] bytes or more together.
    #[inline]
    pub(super) fn are_many_bytes(&self) -> bool {
        self.pending.bytes() >= BYTES_MAX
    }

    /// Returns the last `count` requests that were added.
    pub(super) fn last_requests(&self, count: usize) -> impl Iterator<Item = &InFlight<R>> {
        self.pending.newest(count)
    }

    /// Returns the snapshot in which the slices of new requests lie.
    pub(super) fn memory(&self) -> &GuestMemory {
        self.pending.memory()
    }

    /// Attaches the disk's queue to a worker.
    pub(super) fn attach(&mut self, io: &mut QueueIo<'_>) {
        let tag = io.disk_tag();
        self.disk.attach(io.ring(), tag);
    }

    /// Detaches the disk's queue from its worker, when nothing is in flight.
    pub(super) fn detach(&mut self, io: &mut QueueIo<'_>) {
        self.disk.detach(io.ring());
        if let Some(fd) = self.disk.readiness() {
            io.unwatch_offload(fd);
        }
    }

    /// Watches the eventfd by which a thread of the disk reports completions.
    pub(super) fn watch(&mut self, io: &mut QueueIo<'_>) {
        if let Some(fd) = self.disk.readiness() {
            io.watch_offload(fd);
        }
    }

    /// Handles the completion of an io_uring entry that belongs to the request of `token`.
    pub(super) fn on_event(&mut self, token: u32, result: i32, io: &mut QueueIo<'_>) {
        self.disk.on_event(token, result, io.ring(), &mut self.done);
    }

    /// Serves requests in `memory` from now on; `reply` is sent when no request uses older memory.
    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, reply: Fence) {
        self.burst.release();
        self.disk.release_memory();
        self.pending.retire(memory, reply);
    }

    /// Sends `reply` when every request that was popped before this call is done.
    pub(super) fn barrier(&mut self, reply: Fence) {
        self.pending.barrier(reply);
    }

    /// Answers the fences that waited for requests whose responses are published now.
    #[inline]
    pub(super) fn acknowledge(&mut self) {
        self.pending.acknowledge();
    }

    /// Removes all requests when the queue ends.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = InFlight<R>> {
        self.pending.drain()
    }

    /// Returns the burst, to which the caller pushes a request's slices before [`Self::submit`].
    #[inline]
    pub(super) fn burst(&mut self) -> &mut Burst {
        &mut self.burst
    }

    /// Returns the slices that were pushed for the next request.
    #[inline]
    pub(super) fn new_slices(&self) -> &[GuestSlice<'_>] {
        self.burst.new_slices()
    }

    /// Adds a request to the burst, with the slices that were pushed since the last one.
    #[inline]
    pub(super) fn submit(&mut self, request: InFlight<R>, (op, offset, len): (Op, u64, u64)) {
        let token = self.pending.add(request);
        self.burst.push(token, op, offset, len);
    }

    /// Adds a request that is neither answered nor submitted yet; returns its token. Drops the
    /// slices that were pushed for it.
    pub(super) fn hold(&mut self, request: InFlight<R>) -> u32 {
        self.burst.forget_slices();
        self.pending.add(request)
    }

    /// Submits a further step of a request, with the slices that were pushed for this step.
    pub(super) fn resubmit(&mut self, token: u32, (op, offset, len): (Op, u64, u64)) {
        self.burst.push(token, op, offset, len);
    }

    /// Answers a request without the disk. Drops the slices that were pushed for it.
    #[inline]
    pub(super) fn answer(&mut self, request: InFlight<R>, result: Result<(), Errno>) {
        self.burst.forget_slices();
        let token = self.pending.add(request);
        self.done.push(Completion { token, result });
    }

    /// Submits the burst to the disk. If there was one, returns true: the caller must then reap.
    #[inline]
    pub(super) fn start(&mut self, ring: Option<&mut Ring>) -> bool {
        let has_any = !self.burst.is_empty();
        if has_any {
            if fault_count() == self.faults || self.are_sound() {
                self.disk.submit(&self.burst, ring, &mut self.done);
            }
            self.burst.clear();
        }
        has_any
    }

    /// Checks whether this guest's memory was truncated, after some guest's was. Truncated memory
    /// reads as zeroes, so a request may be one that the driver never made: then fails the requests
    /// of the burst, and returns false.
    #[cold]
    fn are_sound(&mut self) -> bool {
        let faults = fault_count();
        if !self.pending.memory().is_broken() {
            self.faults = faults;
            return true;
        }
        let failed = |token| Completion { token, result: Err(Errno::FAULT) };
        self.done.extend(self.burst.iter().map(|(request, _)| failed(request.token)));
        false
    }

    /// Ends a turn of the disk. Returns true if the disk has more work on this thread next turn.
    #[inline]
    pub(super) fn reap(&mut self) -> bool {
        self.disk.reap(&mut self.done)
    }

    /// Completions that [`Self::finish`] has not handled yet.
    #[inline]
    pub(super) fn done(&mut self) -> &mut Vec<Completion> {
        &mut self.done
    }

    /// Begins to put requests back into the ring, because the queue stops. The caller must then
    /// call [`Self::recall`] in each turn.
    pub(super) fn begin_recall(&mut self) {
        (self.recalls, self.is_awaited) = (self.pending.last_added(), false);
    }

    /// Marks all requests until now as impossible to put back: some of them were set aside before,
    /// so they are not the last ones that were popped.
    pub(super) fn bar_recall(&mut self) {
        self.pending.end_run();
    }

    /// True if requests are still to be put back.
    #[inline]
    pub(super) fn are_recalled(&self) -> bool {
        !self.recalls.is_empty()
    }

    /// Takes the last popped requests back from the disk, and calls `put_back` for each, until one
    /// of them is found that the disk has completed. A transfer under way ends after its present
    /// piece, and is waited for. Returns true if more requests are left for the next turn.
    ///
    /// Only the last requests can be put back: the position of a ring is one index, so a request
    /// before one that was answered would be lost.
    #[cold]
    pub(super) fn recall(
        &mut self,
        mut ring: Option<&mut Ring>,
        mut put_back: impl FnMut(InFlight<R>),
    ) -> bool {
        for _ in 0..RECALLS_MAX {
            let Some(&token) = self.recalls.last() else { return false };
            // The disk may have completed the request already. `ECANCELED` means that a recalled
            // transfer has ended after one of its pieces: the request can still be put back.
            if let Some(at) = self.done.iter().position(|done| done.token == token) {
                if self.done[at].result != Err(Errno::CANCELED) {
                    self.recalls.clear();
                    return false;
                }
                self.done.swap_remove(at);
            } else if self.is_awaited {
                return false;
            } else if !self.disk.recall(token, ring.as_deref_mut()) {
                self.is_awaited = true;
                return false;
            }
            self.is_awaited = false;
            self.recalls.pop();
            self.pending.take_last(token).into_iter().for_each(&mut put_back);
        }
        true
    }

    /// Counts and logs requests that failed on the host. If the host has no space for a request,
    /// and the ring can set requests aside (`can_wait`), removes the request instead of answering
    /// it, and passes it to `set_aside`. Returns how many were set aside.
    #[cold]
    pub(super) fn heed_host(
        &mut self,
        (stats, can_wait): (&QueueStats, bool),
        now_ns: u64,
        mut set_aside: impl FnMut(InFlight<R>),
    ) -> usize {
        let Self { done, pending, waiters, .. } = self;
        let mut count = 0;
        done.retain(|&Completion { token, result }| {
            let Some(request) = pending.get(token) else { return true };
            let Err(errno) = result else {
                waiters.had_space(request.popped_at_ns, request.kind);
                return true;
            };
            if !is_of_host(request.kind, errno) {
                return true;
            }
            let (kind, sector) = (request.kind, request.offset / SECTOR_SIZE);
            let end = request.offset + u64::from(request.len);
            let device_size = waiters.host().device_size(errno, kind, end);
            let waits = can_wait && device_size.is_none() && waiters.host().may_wait(kind, errno);
            let failed = FailedRequest { kind, sector, errno, device_size, waits, now_ns };
            waiters.host().failed(failed, stats);
            if waits && let Some((request, _)) = pending.finish(token) {
                waiters.waits(now_ns);
                set_aside(request);
                count += 1;
            }
            !waits
        });
        count
    }

    /// Counts the completed requests and passes each to `answer`, with its result, the number of
    /// bytes written to the guest, and the memory snapshot in which its slices lie.
    ///
    /// Unless `is_heeded`, stops before the first failed request, and does nothing while requests
    /// wait for space. The caller must then call [`Self::heed_host`], and this function again.
    #[inline]
    pub(super) fn finish(
        &mut self,
        stats: &QueueStats,
        (clock, is_heeded): (impl Fn() -> u64, bool),
        mut answer: impl FnMut(InFlight<R>, Result<(), Errno>, u32, &GuestMemory),
    ) -> Finished {
        let needs_heed = self.waiters.is_waiting() && !is_heeded;
        if self.done.is_empty() || needs_heed {
            return Finished { count: 0, lost: false, needs_heed };
        }
        let now_ns = clock();
        let (mut lost, mut count) = (false, self.done.len());
        let mut tally = RequestTally::default();
        let Self { done, pending, .. } = self;
        for (at, &Completion { token, result }) in done.iter().enumerate() {
            if let Err(errno) = result {
                if !is_heeded {
                    count = at;
                    break;
                }
                lost |= is_lost(errno);
            }
            if let Some((request, memory)) = pending.finish(token) {
                let given = tally.count(&request, result.is_ok(), now_ns, stats);
                answer(request, result, given, memory);
            }
        }
        tally.store(now_ns, stats);
        let needs_heed = count < done.len();
        if needs_heed {
            done.drain(..count);
        } else {
            done.clear();
        }
        Finished { count, lost, needs_heed }
    }
}

/// True if the host caused the error. A request of kind `Other` did not reach the disk, and the
/// guest causes `EFAULT` and `EOPNOTSUPP`.
fn is_of_host(kind: Kind, errno: Errno) -> bool {
    kind != Kind::Other && !matches!(errno, Errno::FAULT | Errno::OPNOTSUPP)
}

/// True if a disk returns this error because guest memory was truncated.
#[cold]
#[inline(never)]
fn is_lost(errno: Errno) -> bool {
    errno == Errno::FAULT
}

/// The result of [`QueueRequests::finish`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    /// Number of requests that were answered.
    pub(super) count: usize,
    /// True if guest memory was truncated.
    pub(super) lost: bool,
    /// True if the caller must call [`QueueRequests::heed_host`], and then
    /// [`QueueRequests::finish`] again.
    pub(super) needs_heed: bool,
}

/// The result of the end of a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    /// Number of requests that were returned to the driver.
    pub(crate) count: usize,
    /// Number of requests that have left the queue: those returned, and those set aside.
    pub(crate) freed: usize,
    /// True if guest memory was truncated.
    pub(crate) lost: bool,
    /// True if the disk has more work on this thread in the next turn.
    pub(crate) has_more: bool,
}

/// Counters of a burst, which are added to the queue's counters at its end.
#[derive(Default)]
struct RequestTally {
    requests: u64,
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    /// When the requests of the present run were popped. A run has requests of the same kind and
    /// time of popping; if they end in one turn, they took equally long and are recorded together.
    popped_at_ns: u64,
    kind: Kind,
    serve_count: u64,
}

impl RequestTally {
    /// Counts a request. Returns how many bytes were written to the guest. A failed request counts
    /// as no bytes, since it is unknown how many it moved.
    #[inline]
    fn count<R>(
        &mut self,
        request: &InFlight<R>,
        is_ok: bool,
        now_ns: u64,
        stats: &QueueStats,
    ) -> u32 {
        let len = if is_ok { request.len } else { count_error(stats) };
        let given = match request.kind {
            Kind::Read => {
                self.reads += 1;
                self.bytes_read += u64::from(len);
                len
            }
            Kind::Write => {
                self.writes += 1;
                self.bytes_written += u64::from(len);
                0
            }
            other => count_rare(other, len, stats),
        };
        if request.popped_at_ns != self.popped_at_ns || request.kind != self.kind {
            if self.serve_count > 0 {
                self.store_serve(now_ns, stats);
            }
            (self.popped_at_ns, self.kind) = (request.popped_at_ns, request.kind);
        }
        self.serve_count += 1;
        given
    }

    /// Records the present run of requests. Not inlined: most bursts call it once, at their end.
    #[inline(never)]
    fn store_serve(&mut self, now_ns: u64, stats: &QueueStats) {
        let took_ns = now_ns.saturating_sub(self.popped_at_ns);
        stats.serve_ns.record(self.kind.served(), took_ns, self.serve_count);
        self.requests += self.serve_count;
        self.serve_count = 0;
    }

    /// Adds the sums of a burst to the counters. Most bursts are all reads or all writes, so sums
    /// that are zero are skipped.
    #[inline]
    fn store(&mut self, now_ns: u64, stats: &QueueStats) {
        if self.serve_count > 0 {
            self.store_serve(now_ns, stats);
        }
        stats.requests.add(self.requests);
        if self.reads > 0 {
            stats.reads.add(self.reads);
            stats.bytes_read.add(self.bytes_read);
        }
        if self.writes > 0 {
            stats.writes.add(self.writes);
            stats.bytes_written.add(self.bytes_written);
        }
    }
}

/// Counts a request that is neither a read nor a write. Returns how many bytes were written to the
/// guest.
#[cold]
#[inline(never)]
fn count_rare(kind: Kind, len: u32, stats: &QueueStats) -> u32 {
    match kind {
        Kind::Read | Kind::Write => debug_assert!(false, "a tally counts it"),
        Kind::Flush => stats.flushes.add(1),
        Kind::Range => stats.discards.add(1),
        Kind::OrderedWrite => {
            stats.writes.add(1);
            stats.bytes_written.add(len.into());
        }
        Kind::Other => return len,
    }
    0
}

/// Counts a failed request. Returns 0, the bytes for which it counts.
#[cold]
#[inline(never)]
fn count_error(stats: &QueueStats) -> u32 {
    stats.errors.add(1);
    0
}
