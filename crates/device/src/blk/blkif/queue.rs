//! `BlkifQueue`: requests of a Xen ring, from the ring to the disk and back.
//!
//! ```text
//! plan:           pop a batch, parse each request; at a fault of the front-end the ring stops
//! read_segments:  map the pages that hold the segments of indirect requests, copy them out, unmap
//! map:            map the pages of all requests: one call
//! submit:         slices to the burst; the burst to the disk
//! complete:       for each completed request: release its pages, write its response; the engine
//!                 publishes the responses
//! ```
//! A request whose pages are all mapped already goes from `plan` directly to the burst, unless an
//! earlier request of the batch does not. Most often every request does.
//!
//! 1. The front-end can change requests and segments at any time. So each is copied once, and only
//!    the copy is used: requests when they are popped, segments of indirect requests out of their
//!    pages.
//! 2. Requests that do not fit into this turn are put back into the ring, the last one first: those
//!    beyond [`SEGMENTS_TURN`] segments, or beyond the pages that the queue has addresses for.
//! 3. Pages are released before the response is visible: once a front-end sees a response, it may
//!    end the grants of the request.

use super::plan::{
    InUse, IoKind, Planned, Reply, SHORT, access_of, answer_of, bytes_of, errno_of, is_ordered,
    segment_count,
};
use super::stages::{OrderedWrite, Stages, UNMAPPED};
use super::{LOT_PAGES, Shared};
use crate::blk::pending::{InFlight, Kind};
use crate::blk::requests::QueueRequests;
use manyring_backend::blk::{DiskQueue, Op};
use manyring_backend::sys::uring::Ring as DiskRing;
use manyring_memory::{
    GrantAsks, GrantCounters, GrantError, GrantPages, GrantRef, LastHit, PersistentGrants,
    SliceList,
};
use manyring_queue::blkif::{BackRing, Requests as Popped};
use manyring_queue::{Chain, QueueError, Ring};
use manyring_wire::xen::blkif::{
    Data, DataOp, Kind as Asked, Limits, PAGE_SIZE, Request, RequestError, SECTOR_SIZE, Segment,
};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most segments of one turn's requests together. A single request may have more.
const SEGMENTS_TURN: usize = 1024;
/// Delay before the next attempt to map a request's pages, if other queues use all mappings.
const RETRY_NS: u64 = 1_000_000;

/// A queue of a Xen block device, as its worker runs it.
#[derive(Debug)]
pub(super) struct BlkifQueue {
    pub(super) requests: QueueRequests<Reply>,
    pub(super) shared: Arc<Shared>,
    /// The present limit of the device; `None`: there is no limit.
    pub(super) gate: Option<Box<manyring_engine::Gate>>,
    pub(super) limits: Limits,
    /// True if every write must be durable when it is answered.
    write_through: bool,
    pub(super) grants: PersistentGrants,
    /// Keeps the pages of the ring mapped.
    _ring_pages: GrantPages,
    /// This turn's requests whose pages were not all mapped, and all after the first of them.
    pub(super) planned: Vec<Planned>,
    /// The segments of this turn's requests.
    pub(super) segments: Vec<Segment>,
    /// The data pages: page n of this list holds the data of segment n.
    pub(super) asks: GrantAsks,
    /// The pages with the segments of this turn's indirect requests.
    pub(super) lists: GrantAsks,
    /// The page of `lists` that is being read, and a copy of its bytes.
    pub(super) page: SliceList,
    pub(super) bytes: Box<[u8; PAGE_SIZE]>,
    pub(super) in_use: InUse,
    /// The region of mapped pages that was found last, where the next lookup begins.
    pub(super) last: LastHit,
    pub(super) stages: Stages,
    /// The most lots that the requests in flight can take together.
    pub(super) lots: u32,
    /// How many lots the queue has.
    lots_max: u32,
    /// True while requests were put back into the ring because they need pages or lots.
    is_held: bool,
    /// When to pop requests again that were put back for lack of mappings, even if no request of
    /// this queue has completed since. `None`: there are no such requests.
    retry_at_ns: Option<u64>,
    /// When the queue needs a turn to unmap unused grants; `None`: never, or `is_tended` is false.
    pub(super) purge_at_ns: Option<u64>,
    /// True if `purge_at_ns` was computed after the last turn with work.
    pub(super) is_tended: bool,
    /// The grants' counters that are already added to the queue's counters.
    pub(super) counted: GrantCounters,
}

/// The parts of which a new queue is made.
pub(super) struct QueueParts {
    pub(super) disk: Box<dyn DiskQueue>,
    pub(super) shared: Arc<Shared>,
    pub(super) limits: Limits,
    pub(super) write_through: bool,
    pub(super) grants: PersistentGrants,
    pub(super) ring_pages: GrantPages,
    pub(super) lots_max: u32,
    pub(super) ring_size: u16,
}

impl BlkifQueue {
    pub(super) fn new(parts: QueueParts) -> Self {
        let QueueParts { disk, shared, limits, write_through, grants, ring_pages, .. } = parts;
        let memory = grants.pages().memory().clone();
        Self {
            requests: QueueRequests::new(disk, memory, shared.host.clone()),
            shared,
            gate: None,
            limits,
            write_through,
            grants,
            _ring_pages: ring_pages,
            planned: Vec::new(),
            segments: Vec::new(),
            asks: GrantAsks::new(),
            lists: GrantAsks::new(),
            page: SliceList::new(),
            bytes: Box::new([0; PAGE_SIZE]),
            in_use: InUse::new(parts.ring_size),
            last: LastHit::default(),
            stages: Stages::default(),
            lots: 0,
            lots_max: parts.lots_max,
            is_held: false,
            retry_at_ns: None,
            purge_at_ns: None,
            is_tended: false,
            counted: GrantCounters::default(),
        }
    }

    /// True if the queue may pop no request before one in flight is done, or a retry is due.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_held || self.stages.is_gated()
    }

    /// Allows popping requests that were put back, since pages may be free now. True if any were.
    #[inline]
    pub(super) fn release_held(&mut self) -> bool {
        let was_held = self.is_held;
        if was_held {
            self.is_held = false;
            self.retry_at_ns = None;
        }
        was_held
    }

    /// Allows popping requests that were put back, if their retry is due. Returns true if it is.
    #[cold]
    fn retries(&mut self, now_ns: u64) -> bool {
        self.is_retry_due(now_ns) && self.release_held()
    }

    pub(super) fn is_retry_due(&self, now_ns: u64) -> bool {
        self.retry_at_ns.is_some_and(|at_ns| now_ns >= at_ns)
    }

    /// True if mapped memory of the guest was truncated.
    pub(super) fn is_broken(&self) -> bool {
        self.grants.pages().is_broken()
    }

    /// Returns when the queue needs a turn without an event; `None`: never.
    pub(super) fn due_ns(&self) -> Option<u64> {
        let limited_ns = self.limited_until_ns().filter(|_| !self.is_waiting());
        let space_ns = self.requests.waiters.due_ns();
        [self.retry_at_ns, self.purge_at_ns, space_ns, limited_ns].into_iter().flatten().min()
    }

    /// Discards the requests in flight when the queue ends. Their pages stay mapped for ever, since
    /// the disk may still use them.
    pub(super) fn discard_all(&mut self, ring: &mut BackRing) {
        if ring.in_flight() > 0 {
            self.grants.leak();
        }
        self.requests.drain().for_each(|request| ring.discard(request.chain));
    }

    /// Pops at most `limit` requests and starts them. Returns how many were popped and not put
    /// back. Leaves the batch empty.
    #[inline]
    pub(super) fn pop_and_submit(
        &mut self,
        (ring, batch): (&mut BackRing, &mut Popped),
        disk: Option<&mut DiskRing>,
        (now_ns, limit): (u64, usize),
    ) -> usize {
        let mut max = self.requests.burst_max().min(limit);
        if self.requests.waiters.is_due(now_ns) {
            // Retry also while a gate is closed: the gate waits for these requests.
            max = ring.recall(self.requests.waiters.begin_retry(now_ns).min(max));
            if max == 0 && ring.in_flight() == 0 {
                // No request waits for space any more: the last one got another error.
                self.requests.waiters.end(true);
            }
        } else if self.stages.is_gated() || (self.is_held && !self.retries(now_ns)) {
            return 0;
        }
        let popped = ring.pop_batch(batch, max);
        if popped == 0 {
            return 0;
        }
        let mut taken = self.plan((ring, batch), (popped, now_ns));
        if !self.planned.is_empty() {
            taken -= self.submit_planned(ring, now_ns);
        }
        self.requests.start(disk);
        taken
    }

    /// Maps the pages that planned requests need, and submits the requests to the disk. Returns how
    /// many requests were put back or discarded instead.
    fn submit_planned(&mut self, ring: &mut BackRing, now_ns: u64) -> usize {
        let planned = self.planned.len();
        self.read_segments(ring, now_ns);
        self.map(ring, now_ns);
        let gone = planned - self.planned.len();
        let mut planned = std::mem::take(&mut self.planned);
        planned.drain(..).for_each(|planned| self.submit(planned, now_ns));
        self.planned = planned;
        gone
    }

    /// Parses the requests of a batch. Requests whose pages are mapped go to the burst, others to
    /// `planned`; requests for a later turn are put back. Returns how many were not put back.
    fn plan(
        &mut self,
        (ring, batch): (&mut BackRing, &mut Popped),
        (popped, now_ns): (usize, u64),
    ) -> usize {
        self.limits.sectors = self.shared.capacity.load(Ordering::Relaxed) / SECTOR_SIZE;
        self.segments.clear();
        self.asks.clear();
        self.requests.burst().slices().restart(self.grants.pages().memory());
        let mut segments_left = SEGMENTS_TURN;
        let (mut index, mut taken) = (0, 0);
        while let Some((chain, raw)) = batch.take(index) {
            index += 1;
            // Parse in place: a request with its segments has over a hundred bytes to be copied.
            let (id, echo, kind) = match Request::parse(raw, &self.limits) {
                Ok(Request { id, echo, kind }) => (id, echo, Ok(kind)),
                Err(refusal) if refusal.error.is_fault() => {
                    ring.latch_fault(QueueError::Blkif(refusal.error));
                    ring.discard(chain);
                    each_left(batch, index..popped, |chain| ring.discard(chain));
                    break;
                }
                Err(refusal) => (refusal.id, refusal.echo, Err(refusal.error)),
            };
            let segments = segment_count(&kind);
            let lots = u32::try_from(segments.div_ceil(LOT_PAGES)).unwrap_or(u32::MAX);
            let has_lots = self.lots == 0
                || lots <= self.lots_max.saturating_sub(self.lots)
                    && !self.requests.are_many_bytes();
            if !has_lots || (segments > segments_left && taken > 0) {
                self.is_held = !has_lots;
                each_left(batch, index..popped, |chain| ring.unpop(chain));
                ring.unpop(chain);
                break;
            }
            segments_left = segments_left.saturating_sub(segments);
            self.lots += lots;
            taken += 1;
            let reply = Reply { id, echo, lots };
            let is_last = match kind {
                Ok(Asked::Data(data)) => self.plan_data((chain, reply), data, now_ns),
                kind => self.plan_other((chain, reply), kind, now_ns),
            };
            if is_last {
                each_left(batch, index..popped, |chain| ring.unpop(chain));
                break;
            }
        }
        taken
    }

    /// Plans a read or write that carries its segments itself. Returns true if it is a gate.
    #[inline]
    fn plan_data(&mut self, (chain, reply): (Chain, Reply), data: Data<'_>, now_ns: u64) -> bool {
        let Self { grants, asks, segments, .. } = self;
        let (op, sector, access) = (data.op, data.sector, access_of(data.op));
        let first = segments.len();
        for segment in data.segments() {
            grants.ask(asks, GrantRef(segment.gref()), access);
            segments.push(segment);
        }
        asks.end_request();
        let segments = first..segments.len();
        if self.asks.are_found() && self.planned.is_empty() {
            self.submit_data((chain, reply), (op, sector), segments, now_ns);
        } else {
            let what = IoKind::Data { op, sector, segments };
            self.planned.push(Planned { chain, reply, what });
        }
        is_ordered(op)
    }

    /// Plans any other request. Returns true if it is a gate.
    fn plan_other(
        &mut self,
        (chain, reply): (Chain, Reply),
        kind: Result<Asked<'_>, RequestError>,
        now_ns: u64,
    ) -> bool {
        let what = self.what(kind);
        let is_gate = what.is_gate();
        let waits = matches!(what, IoKind::Indirect(_));
        let planned = Planned { chain, reply, what };
        if waits || !self.planned.is_empty() {
            self.planned.push(planned);
        } else {
            self.submit(planned, now_ns);
        }
        is_gate
    }

    fn what(&self, kind: Result<Asked<'_>, RequestError>) -> IoKind {
        match kind {
            Err(error) => IoKind::Answer(answer_of(&error)),
            Ok(Asked::Flush) => IoKind::Flush,
            Ok(Asked::Barrier) => IoKind::Barrier,
            Ok(Asked::Discard { sector, count, secure }) => {
                let op = if secure { Op::SecureErase } else { Op::Discard };
                IoKind::Discard { op, offset: sector * SECTOR_SIZE, len: count * SECTOR_SIZE }
            }
            Ok(Asked::Indirect(indirect)) => IoKind::Indirect(indirect),
            Ok(Asked::Data(_)) => {
                debug_assert!(false, "it is planned by `plan_data`");
                IoKind::Answer(Errno::IO)
            }
        }
    }

    /// Removes the planned requests from `index` on, the last one first. Releases their pages, and
    /// calls `each` with each chain.
    pub(super) fn give_up(&mut self, index: usize, now_ns: u64, mut each: impl FnMut(Chain)) {
        for Planned { chain, reply, what } in self.planned.drain(index..).rev() {
            self.lots -= reply.lots;
            self.grants.give_up(&mut self.asks, what.numbers(), now_ns);
            each(chain);
        }
    }

    /// Maps the pages of all planned requests. If the process has no mappings left for a request,
    /// that request and all later ones are put back into the ring.
    fn map(&mut self, ring: &mut BackRing, now_ns: u64) {
        self.grants.acquire(&mut self.asks, now_ns);
        // After a fault the ring is stopped: put no request back.
        if ring.is_faulted() {
            return;
        }
        let asks = &self.asks;
        let has_no_room =
            |number: usize| asks.page(number).is_err_and(|error| errno_of(error) == SHORT);
        let is_short = |io: &IoKind| io.is_short() || io.numbers().into_iter().any(has_no_room);
        if let Some(index) = self.planned.iter().position(|planned| is_short(&planned.what)) {
            self.give_up(index, now_ns, |chain| ring.unpop(chain));
            self.is_held = true;
            self.retry_at_ns = Some(now_ns + RETRY_NS);
        }
    }

    /// Submits a request to the disk, or answers it.
    #[inline(never)]
    fn submit(&mut self, Planned { chain, reply, what }: Planned, now_ns: u64) {
        let slot = chain.slot();
        let offset = match what {
            IoKind::Discard { offset, .. } => offset,
            _ => 0,
        };
        let in_flight =
            |kind| InFlight { chain, reply, kind, len: 0, popped_at_ns: now_ns, offset };
        match what {
            IoKind::Data { op, sector, segments } => {
                let InFlight { chain, reply, .. } = in_flight(Kind::Other);
                self.submit_data((chain, reply), (op, sector), segments, now_ns);
            }
            IoKind::Answer(errno) => self.requests.answer(in_flight(Kind::Other), Err(errno)),
            IoKind::Flush => self.requests.submit(in_flight(Kind::Flush), (Op::Flush, 0, 0)),
            IoKind::Barrier => {
                let token = self.requests.hold(in_flight(Kind::Flush));
                self.stages.close_gate(OrderedWrite { token, durable: true, offset: 0, len: 0 });
            }
            IoKind::Discard { op, offset, len } => {
                let first = self.stages.cut_discard(slot.into(), op, offset, len);
                self.requests.submit(in_flight(Kind::Range), (op, offset, first));
            }
            IoKind::Indirect(_) => debug_assert!(false, "its segments were not read"),
        }
    }

    /// Submits a read or write to the disk, or answers it if one of its pages could not be mapped.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "one of two callers is on the way of every request")]
    fn submit_data(
        &mut self,
        (chain, reply): (Chain, Reply),
        (op, sector): (DataOp, u64),
        segments: Range<usize>,
        now_ns: u64,
    ) {
        let pushed = self.push_data(chain.slot(), op, segments.clone());
        let offset = sector * SECTOR_SIZE;
        let write = Op::Write { durable: self.write_through };
        let (kind, disk_op) = match op {
            DataOp::Read => (Kind::Read, Op::Read),
            _ => (Kind::Write, write),
        };
        match pushed {
            // Each arm makes its own `InFlight`: the compiler would build a shared one in memory.
            Ok(len) if !is_ordered(op) => {
                let popped_at_ns = now_ns;
                let request = InFlight { chain, reply, kind, len, popped_at_ns, offset };
                self.requests.submit(request, (disk_op, offset, len.into()));
            }
            Ok(len) => {
                let (kind, popped_at_ns) = (Kind::OrderedWrite, now_ns);
                let request = InFlight { chain, reply, kind, len, popped_at_ns, offset };
                self.hold_ordered(request, (op, sector), segments);
            }
            Err(_) => {
                let kind = Kind::Other;
                let popped_at_ns = now_ns;
                let request = InFlight { chain, reply, kind, len: 0, popped_at_ns, offset };
                self.requests.answer(request, Err(UNMAPPED));
            }
        }
    }

    /// Holds an ordered write. Its data is written when all requests before it are done.
    #[cold]
    fn hold_ordered(
        &mut self,
        request: InFlight<Reply>,
        (op, sector): (DataOp, u64),
        numbers: Range<usize>,
    ) {
        let len = request.len.into();
        let token = self.requests.hold(request);
        let durable = self.write_through || op == DataOp::WriteBarrier;
        let segments = self.segments[numbers.clone()].iter().map(bytes_of);
        let pages = numbers.filter_map(|number| self.asks.page(number).ok());
        self.stages.pieces.clear();
        self.stages.pieces.extend(pages.zip(segments));
        self.stages.close_gate(OrderedWrite { token, durable, offset: sector * SECTOR_SIZE, len });
    }

    /// Pushes a request's slices to the burst, and records its pages as in use. Returns its bytes.
    ///
    /// # Errors
    /// The error of the last page that is not mapped.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "one of two callers is on the way of every request")]
    fn push_data(
        &mut self,
        slot: u16,
        op: DataOp,
        numbers: Range<usize>,
    ) -> Result<u32, GrantError> {
        let access = access_of(op);
        let (mut len, mut refused) = (0, None);
        for number in numbers {
            // Continue after an error, to record the other pages: `complete` releases them.
            let page = match self.asks.page(number) {
                Ok(page) => page,
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            self.in_use.add(slot, page);
            let bytes = bytes_of(&self.segments[number]);
            let slices = self.requests.burst().slices();
            if let Err(error) = self.grants.resolve(page, bytes, access, &mut self.last, slices) {
                refused = Some(error);
            }
            len += bytes.1;
        }
        refused.map_or(Ok(len), Err)
    }
}

/// Takes the requests with these indexes out of a batch, the last one first, and calls `each` with
/// each chain.
#[cold]
fn each_left(batch: &mut Popped, indexes: Range<usize>, mut each: impl FnMut(Chain)) {
    for index in indexes.rev() {
        if let Some((chain, _)) = batch.take(index) {
            each(chain);
        }
    }
}
