//! `BlkQueue`: parses chains of virtio-blk into requests, and answers them (virtio 1.3 §5.2.6).

use super::config::{RANGE_BYTES_MAX, RANGES_MAX, SIZE_MAX};
use super::pending::{InFlight, Kind};
use super::requests::{Completed, Finished, QueueRequests};
use super::{IN_FLIGHT_MAX, Shared};
use manyring_backend::blk::{Burst, DiskQueue, Op};
use manyring_backend::sys::uring::Ring;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Fence, Gate};
use manyring_memory::{
    GuestMemory, GuestSlice, KeptByte, Pieces, SliceList, copy_from_slices, copy_to_slices,
    total_len,
};
use manyring_queue::{Batch, Chains, QueueError};
use manyring_wire::blk::{
    HEADER_SIZE, ID_SIZE, RawBlkHeader, RawSegment, RequestKind, SECTOR_SIZE, SEGMENT_SIZE,
    Segment, Status, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use manyring_wire::host_size;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::FromBytes;

/// The most requests of a turn, if the disk completes them at once, so that they are answered
/// together. The driver handles these answers while the device serves the next group in the next
/// turn; if one turn served a full ring, driver and device would alternate, each waiting for the
/// other. The limit does not hold while the driver waits for a notification: it would wake for the
/// first group, and again later.
const GROUP: u16 = 16;

/// A queue of a virtio block device, as its worker runs it.
#[derive(Debug)]
pub(crate) struct BlkQueue {
    /// The requests, each with the location of its status byte.
    pub(super) requests: QueueRequests<KeptByte>,
    pub(super) shared: Arc<Shared>,
    /// Most bytes of a data descriptor: SIZE_MAX, if the driver negotiated it.
    slice_max: usize,
    pub(super) batch: Batch,
    /// The present limit of the device; `None`: there is no limit.
    pub(super) gate: Option<Box<Gate>>,
}

/// The result of parsing a request.
enum Parsed {
    /// The disk must serve the request. Its slices are in the burst; `bytes` is their length.
    Submit { op: Op, offset: u64, len: u64, kind: Kind, bytes: u32 },
    /// Answer the request without the disk.
    Answer { status: Status, kind: Kind, len: u32 },
}

impl Parsed {
    const fn refuse(status: Status) -> Self {
        Self::Answer { status, kind: Kind::Other, len: 0 }
    }
}

impl BlkQueue {
    pub(super) fn new(
        disk: Box<dyn DiskQueue>,
        shared: Arc<Shared>,
        memory: Arc<GuestMemory>,
    ) -> Self {
        Self {
            requests: QueueRequests::new(disk, memory, shared.host.clone()),
            slice_max: usize::MAX,
            shared,
            batch: Batch::new(),
            gate: None,
        }
    }

    /// Sets the limits that the driver's features imply.
    pub(super) fn with_features(mut self, features: u64) -> Self {
        if features & VIRTIO_BLK_F_SIZE_MAX != 0 {
            self.slice_max = SIZE_MAX as usize;
        }
        self
    }

    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, reply: Fence) {
        self.batch.release();
        self.requests.retire(memory, reply);
    }

    /// True if no request may be popped before one in flight is done: [`IN_FLIGHT_MAX`] are in
    /// flight, or they have too many bytes.
    pub(crate) fn is_full(&self, queue: &impl Chains) -> bool {
        queue.in_flight() >= IN_FLIGHT_MAX || self.requests.are_many_bytes()
    }

    /// Discards the requests in flight, when the queue ends.
    pub(crate) fn discard_all(&mut self, queue: &mut impl Chains) {
        self.requests.drain().for_each(|request| queue.discard(request.chain));
    }

    /// Pops at most `limit` requests and starts them. Returns how many.
    #[inline]
    pub(crate) fn pop_and_submit(
        &mut self,
        queue: &mut impl Chains,
        ring: Option<&mut Ring>,
        (now_ns, limit): (u64, usize),
    ) -> usize {
        if self.is_full(queue) {
            return 0;
        }
        let room = usize::from(IN_FLIGHT_MAX.saturating_sub(queue.in_flight()));
        let max = self.requests.burst_max().min(room).min(limit);
        let is_retry = self.requests.waiters.is_due(now_ns);
        let mut popped = if is_retry {
            self.pop_waiting(queue, (max, now_ns))
        } else {
            let is_whole = max <= GROUP.into() || queue.wants_call_within(GROUP);
            let group = if is_whole { max } else { GROUP.into() };
            queue.pop_batch(&mut self.batch, group)
        };
        if popped == 0 {
            return 0;
        }
        for index in 0..popped {
            self.take_request(queue, index, now_ns);
            if self.requests.are_many_bytes() {
                popped = self.put_back(queue, index + 1..popped, is_retry);
                break;
            }
        }
        // These requests were popped long ago, so they are not the last ones of the ring.
        if is_retry {
            self.requests.bar_recall();
        }
        self.requests.start(ring);
        popped
    }

    /// Pops up to `max` of the requests that wait for space, to retry them. Returns how many.
    #[cold]
    fn pop_waiting(&mut self, queue: &mut impl Chains, (max, now_ns): (usize, u64)) -> usize {
        let tried = self.requests.waiters.begin_retry(now_ns);
        let popped = queue.pop_aside(&mut self.batch, max.min(tried));
        if popped == 0 && queue.in_flight() == 0 {
            // No request waits any more: the last one was answered with another error.
            self.requests.waiters.end(true);
        }
        popped
    }

    /// Ends the waiting of requests for space, because the driver must get its memory back. If they
    /// were popped last, they are put back into the ring; else a batch of them fails. Returns how
    /// many failed, and true if some are left for another call.
    pub(super) fn give_up_aside(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
    ) -> (usize, bool) {
        let mut failed = 0;
        let mut has_more = false;
        if !queue.unpop_aside() {
            let popped = queue.pop_aside(&mut self.batch, usize::MAX);
            for index in 0..popped {
                let Some((chain, _, writable)) = self.batch.take(index) else { continue };
                match writable.last_byte() {
                    Some(status) => {
                        status.write(self.requests.memory(), Status::IoErr as u8);
                        queue.push_used(chain, 1);
                        failed += 1;
                    }
                    None => queue.discard(chain),
                }
            }
            has_more = popped > 0 && queue.aside() > 0;
        }
        stats.requests.add(failed as u64);
        stats.errors.add(failed as u64);
        if has_more {
            stats.waiting_for_space.set(queue.aside().into());
        } else {
            stats.waiting_for_space.set(0);
            self.requests.waiters.end(false);
        }
        (failed, has_more)
    }

    /// Puts the chains of these indexes back unchanged: into the ring, or, if `is_retry`, to those
    /// that are set aside. Returns how many chains of the batch are left.
    #[cold]
    fn put_back(
        &mut self,
        queue: &mut impl Chains,
        indexes: Range<usize>,
        is_retry: bool,
    ) -> usize {
        let left = indexes.start;
        for index in indexes.rev() {
            match self.batch.take(index) {
                Some((chain, ..)) if is_retry => queue.set_aside(chain),
                Some((chain, ..)) => queue.unpop(chain),
                None => {}
            }
        }
        left
    }

    /// Parses one chain and adds its request to the burst. A chain that has no space for header or
    /// status stops the queue.
    #[inline]
    fn take_request(&mut self, queue: &mut impl Chains, index: usize, now_ns: u64) {
        let Some((chain, readable, writable)) = self.batch.take(index) else { return };
        // An earlier chain of this batch was malformed and has stopped the queue: discard this one.
        if queue.fault().is_some_and(|fault| matches!(fault, QueueError::Request(_))) {
            queue.discard(chain);
            return;
        }
        let (header, status) = match (read_header(&readable), writable.last_byte()) {
            (Some(header), Some(status)) => (header, status),
            (header, _) => {
                queue.latch_fault(QueueError::Request(if header.is_none() {
                    "shorter than its header of 16 bytes"
                } else {
                    "without a status byte"
                }));
                queue.discard(chain);
                return;
            }
        };
        debug_assert!(status.is_in(self.requests.memory()), "of another snapshot");
        let burst = self.requests.burst();
        let mut parsed = parse(&self.shared, header, readable, writable, burst);
        let slice_max = self.slice_max;
        let is_bounded = slice_max != usize::MAX;
        if is_bounded && self.requests.new_slices().iter().any(|slice| slice.len() > slice_max) {
            parsed = Parsed::refuse(Status::IoErr);
        }
        let reply = status;
        let in_flight =
            |kind, len, offset| InFlight { chain, reply, kind, len, popped_at_ns: now_ns, offset };
        match parsed {
            Parsed::Submit { op, offset, len, kind, bytes } => {
                self.requests.submit(in_flight(kind, bytes, offset), (op, offset, len));
            }
            Parsed::Answer { status: answer, kind, len } => {
                self.requests.answer(in_flight(kind, len, 0), result_of(answer));
            }
        }
    }

    /// Ends a turn of the disk: returns completed requests to the driver.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        clock: impl Fn() -> u64,
    ) -> Completed {
        let has_more = self.requests.reap();
        self.answer(queue, stats, clock, has_more)
    }

    /// Ends a turn of a queue that stops: puts requests that the disk has not done back into the
    /// ring. Returns true if the next turn has more to do. The caller must call [`Self::answer`]
    /// next.
    #[cold]
    pub(crate) fn recall(&mut self, queue: &mut impl Chains, ring: Option<&mut Ring>) -> bool {
        let has_more = self.requests.reap();
        self.requests.recall(ring, |request| queue.unpop(request.chain)) || has_more
    }

    /// Returns completed requests to the driver.
    #[inline]
    pub(crate) fn answer(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        clock: impl Fn() -> u64,
        has_more: bool,
    ) -> Completed {
        let finished = self.requests.finish(stats, (&clock, false), |request, result, given, m| {
            push_answer(queue, request, (result, given), m);
        });
        if finished.needs_heed {
            return self.answer_failed(queue, stats, clock, (finished.count, has_more));
        }
        let Finished { count, lost, .. } = finished;
        Completed { count, freed: count, lost, has_more }
    }

    /// Continues [`Self::answer`] when a request failed on the host, or when some wait for space.
    #[cold]
    #[inline(never)]
    fn answer_failed(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        clock: impl Fn() -> u64,
        (answered, has_more): (usize, bool),
    ) -> Completed {
        let set_aside = |request: InFlight<_>| queue.set_aside(request.chain);
        let aside = self.requests.heed_host((stats, true), clock(), set_aside);
        let has_more = self.requests.waiters.note(queue.aside(), stats) || has_more;
        let finished = self.requests.finish(stats, (clock, true), |request, result, given, m| {
            push_answer(queue, request, (result, given), m);
        });
        let count = answered + finished.count;
        Completed { count, freed: count + aside, lost: finished.lost, has_more }
    }
}

/// Writes the status of a request, and pushes its chain.
#[inline(always)]
#[allow(clippy::inline_always, reason = "the rare caller must not make it a call for the other")]
fn push_answer(
    queue: &mut impl Chains,
    request: InFlight<KeptByte>,
    (result, given): (Result<(), Errno>, u32),
    memory: &GuestMemory,
) {
    // Set the status also of a failed request: then the driver may rely on this byte only
    // (§2.7.8.2).
    let status = match result {
        Ok(()) => Status::Ok,
        Err(Errno::OPNOTSUPP) => Status::Unsupp,
        Err(_) => Status::IoErr,
    };
    request.reply.write(memory, status as u8);
    queue.push_used(request.chain, 1 + given);
}

/// Converts the status of a request that never reached the disk to a disk's result.
const fn result_of(status: Status) -> Result<(), Errno> {
    match status {
        Status::Ok => Ok(()),
        Status::IoErr => Err(Errno::IO),
        Status::Unsupp => Err(Errno::OPNOTSUPP),
    }
}

/// Copies the header out of guest memory, once.
#[inline]
fn read_header(readable: &[GuestSlice]) -> Option<RawBlkHeader> {
    let bytes = readable.first()?.read_array::<HEADER_SIZE>().or_else(|| {
        let mut bytes = [0; HEADER_SIZE];
        (copy_from_slices(readable, &mut bytes) == HEADER_SIZE).then_some(bytes)
    })?;
    RawBlkHeader::read_from_bytes(&bytes).ok()
}

/// Adds the data of a write to `out`: all readable bytes after the header.
#[inline]
fn push_readable(readable: Pieces<'_>, out: &mut SliceList) {
    out.extend_part(readable, HEADER_SIZE, usize::MAX);
}

/// Adds the buffers for the data of a read to `out`: the first `len` writable bytes.
#[inline]
fn push_writable(writable: Pieces<'_>, len: u64, out: &mut SliceList) {
    out.extend_part(writable, 0, host_size(len));
}

/// Parses a request. For a read or write, pushes its slices to the burst.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "two formats of a ring call it; in each it is the loop's body"
)]
#[allow(clippy::cast_possible_truncation, reason = "at most the 20 bytes of an id")]
fn parse(
    shared: &Shared,
    header: RawBlkHeader,
    readable: Pieces<'_>,
    writable: Pieces<'_>,
    burst: &mut Burst,
) -> Parsed {
    let kind = RequestKind::parse(&header);
    match kind {
        RequestKind::In { offset } => {
            let len = total_len(&writable) - 1;
            push_writable(writable, len, burst.slices());
            transfer(shared, Op::Read, Kind::Read, offset, len)
        }
        RequestKind::Out { .. } if shared.read_only => Parsed::refuse(Status::IoErr),
        RequestKind::Out { offset } => {
            push_readable(readable, burst.slices());
            let len = total_len(&readable) - HEADER_SIZE as u64;
            let durable = shared.write_through.load(Ordering::Relaxed);
            transfer(shared, Op::Write { durable }, Kind::Write, offset, len)
        }
        RequestKind::Flush => {
            Parsed::Submit { op: Op::Flush, offset: 0, len: 0, kind: Kind::Flush, bytes: 0 }
        }
        RequestKind::GetId => {
            let mut data = SliceList::new();
            push_writable(writable, total_len(&writable) - 1, &mut data);
            let len = copy_to_slices(data.as_slices(), &shared.serial);
            debug_assert!(len <= ID_SIZE);
            Parsed::Answer { status: Status::Ok, kind: Kind::Other, len: len as u32 }
        }
        RequestKind::Discard | RequestKind::WriteZeroes | RequestKind::SecureErase => {
            range(shared, kind, &readable)
        }
        RequestKind::Unknown(_) => Parsed::refuse(Status::Unsupp),
        RequestKind::OutOfRange => Parsed::refuse(Status::IoErr),
    }
}

/// True if this range of bytes lies inside the device.
fn is_inside(shared: &Shared, offset: u64, len: u64) -> bool {
    let capacity = shared.capacity.load(Ordering::Relaxed);
    offset <= capacity && capacity - offset >= len
}

#[inline]
fn transfer(shared: &Shared, op: Op, kind: Kind, offset: u64, len: u64) -> Parsed {
    if !len.is_multiple_of(SECTOR_SIZE) || !is_inside(shared, offset, len) {
        return Parsed::refuse(Status::IoErr);
    }
    if len == 0 {
        return Parsed::Answer { status: Status::Ok, kind, len: 0 };
    }
    let bytes = u32::try_from(len).unwrap_or(u32::MAX);
    Parsed::Submit { op, offset, len, kind, bytes }
}

/// Parses a discard, write-zeroes or secure erase, whose segment follows the header. If the device
/// does not offer the feature (a read-only device never does), the request is unsupported, whatever
/// its segment contains.
fn range(shared: &Shared, kind: RequestKind, readable: &[GuestSlice]) -> Parsed {
    let feature = match kind {
        RequestKind::Discard => VIRTIO_BLK_F_DISCARD,
        RequestKind::WriteZeroes => VIRTIO_BLK_F_WRITE_ZEROES,
        _ => VIRTIO_BLK_F_SECURE_ERASE,
    };
    if shared.offered & feature == 0 {
        return Parsed::refuse(Status::Unsupp);
    }
    let mut bytes = [0; HEADER_SIZE + SEGMENT_SIZE];
    let len = total_len(readable);
    let ranges = u64::from(RANGES_MAX);
    if len != (HEADER_SIZE as u64) + ranges * (SEGMENT_SIZE as u64) {
        return Parsed::refuse(Status::IoErr);
    }
    copy_from_slices(readable, &mut bytes);
    let Ok(raw) = RawSegment::read_from_bytes(&bytes[HEADER_SIZE..]) else {
        return Parsed::refuse(Status::IoErr);
    };
    let Some(segment) = Segment::parse(&raw) else { return Parsed::refuse(Status::Unsupp) };
    if segment.unmap && kind != RequestKind::WriteZeroes {
        return Parsed::refuse(Status::Unsupp);
    }
    let (offset, len) = (segment.offset, segment.len);
    if len > RANGE_BYTES_MAX || !is_inside(shared, offset, len) {
        return Parsed::refuse(Status::IoErr);
    }
    let durable = shared.write_through.load(Ordering::Relaxed);
    let op = match kind {
        RequestKind::Discard => Op::Discard,
        RequestKind::WriteZeroes => Op::WriteZeroes { unmap: segment.unmap, durable },
        _ => Op::SecureErase,
    };
    if len == 0 {
        return Parsed::Answer { status: Status::Ok, kind: Kind::Range, len: 0 };
    }
    Parsed::Submit { op, offset, len, kind: Kind::Range, bytes: 0 }
}
