//! `BlkifQueue`: requests of a Xen ring, from the ring to the disk and back.
//!
//! ```text
//! plan:           pop a batch, parse each request; a fault of the front-end stops the ring there
//! read_segments:  map the pages that hold the segments of indirect requests, copy them out, unmap
//! map:            map the pages of all requests: one call
//! submit:         slices to the burst; the burst to the disk
//! complete:       what is done: let go of its pages, write its response; the engine publishes it
//! ```
//! 1. What the front-end can change while it is looked at is copied once: requests when they are
//!    popped, segments out of their pages.
//! 2. What does not fit into this turn goes back to the ring, from the last request on: more than
//!    [`SEGMENTS_TURN`] segments, or more pages than the queue has addresses for.
//! 3. Pages are let go of before the response is visible, so that the front-end may end their
//!    grants when it sees it.

use super::plan::{
    Planned, Reply, SHORT, What, access_of, bytes_of, errno_of, is_ordered, segment_count,
};
use super::stages::{Gate, Stages, UNMAPPED};
use super::{LOT_PAGES, Shared};
use crate::blk::pending::{InFlight, Kind};
use crate::blk::requests::Requests;
use manyring_backend::blk::{DiskQueue, Op};
use manyring_backend::sys::uring::Ring as DiskRing;
use manyring_memory::{
    GrantAccess, GrantAsks, GrantCounters, GrantError, GrantPage, GrantPages, GrantRef, LastHit,
    PersistentGrants, SliceList, copy_from_slices,
};
use manyring_queue::blkif::{BackRing, Requests as Popped};
use manyring_queue::{QueueError, Ring};
use manyring_wire::xen::blkif::{
    DataOp, Indirect, Kind as Asked, Limits, PAGE_SIZE, Request, RequestError, SECTOR_SIZE,
    Segment, Status,
};
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Segments of the requests of one turn; a single request may have more.
const SEGMENTS_TURN: usize = 1024;
/// How long a request waits whose pages find no room, because other queues of the process have it.
const RETRY_NS: u64 = 1_000_000;

/// A queue of a Xen block device, as its worker runs it.
#[derive(Debug)]
pub(super) struct BlkifQueue {
    pub(super) requests: Requests<Reply>,
    shared: Arc<Shared>,
    limits: Limits,
    /// Every write is durable when it is answered.
    write_through: bool,
    pub(super) grants: PersistentGrants,
    /// The pages in which the ring lies.
    _ring_pages: GrantPages,
    popped: Popped,
    planned: Vec<Planned>,
    segments: Vec<Segment>,
    asks: GrantAsks,
    /// A page of segments, and its copy.
    page: SliceList,
    bytes: Box<[u8; PAGE_SIZE]>,
    /// By slot: pages of a request in flight.
    pub(super) in_use: Vec<Vec<GrantPage>>,
    pub(super) released: Vec<GrantPage>,
    pub(super) stages: Stages,
    /// Lots that requests in flight can take, and how many there are.
    pub(super) lots: u32,
    lots_max: u32,
    /// Requests were put back, because pages of others must be let go of first.
    is_held: bool,
    /// They find no room although nothing of ours is in flight: it is tried again then.
    retry_at_ns: Option<u64>,
    /// When grants are to be looked after. Known since the last turn without work, if `is_tended`.
    pub(super) purge_at_ns: Option<u64>,
    pub(super) is_tended: bool,
    /// What was added to the queue's counters before.
    pub(super) counted: GrantCounters,
}

/// What a queue begins with.
pub(super) struct Parts {
    pub(super) disk: Box<dyn DiskQueue>,
    pub(super) shared: Arc<Shared>,
    pub(super) limits: Limits,
    pub(super) write_through: bool,
    pub(super) grants: PersistentGrants,
    pub(super) ring_pages: GrantPages,
    pub(super) lots_max: u32,
}

impl BlkifQueue {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { disk, shared, limits, write_through, grants, ring_pages, lots_max } = parts;
        Self {
            requests: Requests::new(disk, grants.pages().memory().clone()),
            shared,
            limits,
            write_through,
            grants,
            _ring_pages: ring_pages,
            popped: Popped::new(),
            planned: Vec::new(),
            segments: Vec::new(),
            asks: GrantAsks::new(),
            page: SliceList::new(),
            bytes: Box::new([0; PAGE_SIZE]),
            in_use: Vec::new(),
            released: Vec::new(),
            stages: Stages::default(),
            lots: 0,
            lots_max,
            is_held: false,
            retry_at_ns: None,
            purge_at_ns: None,
            is_tended: false,
            counted: GrantCounters::default(),
        }
    }

    /// True if nothing is popped before a request in flight is done.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_held || self.stages.is_gated()
    }

    /// What was put back may find room now.
    pub(super) fn release_held(&mut self) {
        self.is_held = false;
        self.retry_at_ns = None;
    }

    /// True if a page of a request was cut away.
    pub(super) fn is_broken(&self) -> bool {
        self.grants.pages().is_broken()
    }

    /// When a turn is due that nobody asks for.
    pub(super) fn due_ns(&self) -> Option<u64> {
        [self.retry_at_ns, self.purge_at_ns].into_iter().flatten().min()
    }

    /// Gives up what is in flight, when the queue ends. A disk may still use its pages, which stay
    /// mapped then.
    pub(super) fn discard_all(&mut self, ring: &mut BackRing) {
        if ring.in_flight() > 0 {
            self.grants.leak();
        }
        self.requests.drain().for_each(|request| ring.discard(request.chain));
    }

    /// Pops a batch and starts its requests. Returns how many.
    #[inline]
    pub(super) fn pop_and_submit(
        &mut self,
        ring: &mut BackRing,
        disk: Option<&mut DiskRing>,
        now_ns: u64,
    ) -> usize {
        let retries = self.retry_at_ns.is_some_and(|at_ns| now_ns >= at_ns);
        if self.stages.is_gated() || (self.is_held && !retries) {
            return 0;
        }
        self.release_held();
        let popped = ring.pop_batch(&mut self.popped, self.requests.burst_max());
        if popped == 0 {
            return 0;
        }
        self.plan(ring, popped);
        self.read_segments(ring, now_ns);
        self.map(ring, now_ns);
        let taken = self.planned.len();
        self.submit(now_ns);
        self.requests.start(disk);
        taken
    }

    /// Parses the requests of a batch. Those that are not for this turn go back.
    fn plan(&mut self, ring: &mut BackRing, popped: usize) {
        self.limits.sectors = self.shared.capacity.load(Ordering::Relaxed) / SECTOR_SIZE;
        self.segments.clear();
        let mut segments_left = SEGMENTS_TURN;
        for index in 0..popped {
            let Some((chain, raw)) = self.popped.take(index) else { continue };
            // Looked at where it lies: with its segments a request has more than a hundred bytes.
            let parsed = Request::parse(raw, &self.limits);
            let (id, echo, kind) = match &parsed {
                Ok(Request { id, echo, kind }) => (*id, *echo, Ok(kind)),
                Err(refusal) if refusal.error.is_fault() => {
                    ring.latch_fault(QueueError::Blkif(refusal.error));
                    ring.discard(chain);
                    for rest in index + 1..popped {
                        if let Some((chain, _)) = self.popped.take(rest) {
                            ring.discard(chain);
                        }
                    }
                    return;
                }
                Err(refusal) => (refusal.id, refusal.echo, Err(refusal.error)),
            };
            let segments = segment_count(kind);
            let lots = u32::try_from(segments.div_ceil(LOT_PAGES)).unwrap_or(u32::MAX);
            let has_lots = self.lots == 0 || lots <= self.lots_max.saturating_sub(self.lots);
            if !has_lots || (segments > segments_left && !self.planned.is_empty()) {
                self.is_held = !has_lots;
                self.unpop(ring, index + 1..popped);
                ring.unpop(chain);
                return;
            }
            segments_left = segments_left.saturating_sub(segments);
            self.lots += lots;
            let what = self.what(kind);
            let is_last = what.is_gate();
            self.planned.push(Planned { chain, reply: Reply { id, echo, lots }, what });
            if is_last {
                self.unpop(ring, index + 1..popped);
                return;
            }
        }
    }

    /// Puts requests of the batch back, the last one first.
    fn unpop(&mut self, ring: &mut BackRing, indexes: Range<usize>) {
        for index in indexes.rev() {
            if let Some((chain, _)) = self.popped.take(index) {
                ring.unpop(chain);
            }
        }
    }

    fn what(&mut self, kind: Result<&Asked, RequestError>) -> What {
        match kind {
            Err(error) if error.status() == Status::Unsupported => What::Answer(Errno::OPNOTSUPP),
            Err(_) => What::Answer(Errno::IO),
            Ok(Asked::Flush) => What::Flush,
            Ok(Asked::Barrier) => What::Barrier,
            Ok(Asked::Discard { sector, count, secure }) => {
                let op = if *secure { Op::SecureErase } else { Op::Discard };
                What::Discard { op, offset: sector * SECTOR_SIZE, len: count * SECTOR_SIZE }
            }
            Ok(Asked::Data(data)) => {
                let first = self.segments.len();
                self.segments.extend_from_slice(data.segments());
                let segments = first..self.segments.len();
                What::Data { op: data.op, sector: data.sector, segments }
            }
            Ok(Asked::Indirect(indirect)) => What::Indirect(*indirect),
        }
    }

    /// Copies the segments of indirect requests out of their pages.
    fn read_segments(&mut self, ring: &mut BackRing, now_ns: u64) {
        self.asks.clear();
        for planned in &self.planned {
            if let What::Indirect(indirect) = &planned.what {
                for gref in indirect.grefs() {
                    self.asks.push(GrantRef(*gref), GrantAccess::Read);
                }
                self.asks.end_request();
            }
        }
        if self.asks.is_empty() {
            return;
        }
        self.grants.acquire(&mut self.asks, now_ns);
        self.page.restart(self.grants.pages().memory());
        let (mut number, mut fault) = (0, None);
        for index in 0..self.planned.len() {
            let What::Indirect(indirect) = self.planned[index].what else { continue };
            let numbers = number..number + indirect.grefs().len();
            number = numbers.end;
            match self.segments_of(&indirect, numbers) {
                Ok(what) => self.planned[index].what = what,
                Err(error) => {
                    fault = Some((index, error));
                    break;
                }
            }
        }
        self.page.clear();
        let pages = self.asks.acquired(0..self.asks.len());
        self.grants.release(pages, now_ns);
        if let Some((index, error)) = fault {
            ring.latch_fault(QueueError::Blkif(error));
            for planned in self.planned.drain(index..) {
                self.lots -= planned.reply.lots;
                ring.discard(planned.chain);
            }
        }
    }

    /// The segments of one indirect request, whose pages have these numbers.
    ///
    /// # Errors
    /// The front-end's fault.
    fn segments_of(
        &mut self,
        indirect: &Indirect,
        numbers: Range<usize>,
    ) -> Result<What, RequestError> {
        let first = self.segments.len();
        for (index, number) in numbers.enumerate() {
            let len = indirect.page_bytes(index);
            let bytes = &mut self.bytes[..len];
            let list = &mut self.page;
            list.clear();
            let range = (0, u32::try_from(len).unwrap_or(0));
            let last = &mut LastHit::default();
            let found = self
                .asks
                .page(number)
                .and_then(|page| self.grants.resolve(page, range, GrantAccess::Read, last, list));
            if let Err(error) = found {
                return Ok(What::Answer(errno_of(error)));
            }
            copy_from_slices(list.as_slices(), bytes);
            for segment in Segment::parse_page(bytes) {
                self.segments.push(segment?);
            }
        }
        let segments = first..self.segments.len();
        match indirect.check(&self.segments[segments.clone()], &self.limits) {
            Ok(_) => Ok(What::Data { op: indirect.op, sector: indirect.sector, segments }),
            Err(error) if error.is_fault() => Err(error),
            Err(_) => Ok(What::Answer(Errno::IO)),
        }
    }

    /// Maps the pages of all requests. From the first one on for whose pages there is no room,
    /// they go back.
    fn map(&mut self, ring: &mut BackRing, now_ns: u64) {
        self.asks.clear();
        for planned in &self.planned {
            if let What::Data { op, segments, .. } = &planned.what {
                let access = access_of(*op);
                for segment in &self.segments[segments.clone()] {
                    self.asks.push(GrantRef(segment.gref()), access);
                }
                self.asks.end_request();
            }
        }
        if !self.asks.is_empty() {
            self.grants.acquire(&mut self.asks, now_ns);
        }
        let mut number = 0;
        for index in 0..self.planned.len() {
            let numbers = number..number + self.planned[index].what.pages();
            let has_no_room =
                |number: usize| self.asks.page(number).is_err_and(|error| errno_of(error) == SHORT);
            let is_short = self.planned[index].what.is_short();
            // A ring that has stopped gets nothing back.
            if !ring.is_faulted() && (is_short || numbers.clone().any(has_no_room)) {
                let pages = self.asks.acquired(number..self.asks.len());
                self.grants.release(pages, now_ns);
                for planned in self.planned.drain(index..).rev() {
                    self.lots -= planned.reply.lots;
                    ring.unpop(planned.chain);
                }
                self.is_held = true;
                self.retry_at_ns = Some(now_ns + RETRY_NS);
                return;
            }
            number = numbers.end;
        }
    }

    /// Gives the planned requests to the disk, or answers them.
    fn submit(&mut self, now_ns: u64) {
        self.requests.burst().slices().restart(self.grants.pages().memory());
        let mut planned = std::mem::take(&mut self.planned);
        // All pages lie in one region, which is looked up once for the burst.
        let (mut number, mut last) = (0, LastHit::default());
        for Planned { chain, reply, what } in planned.drain(..) {
            let slot = chain.slot();
            let in_flight = |kind, len: u64| {
                let len = u32::try_from(len).unwrap_or(u32::MAX);
                InFlight { chain, reply, kind, len, popped_at_ns: now_ns }
            };
            match what {
                What::Answer(errno) => {
                    self.requests.answer(in_flight(Kind::Other, 0), Err(errno));
                }
                What::Flush => {
                    self.requests.submit(in_flight(Kind::Flush, 0), (Op::Flush, 0, 0));
                }
                What::Barrier => {
                    let token = self.requests.hold(in_flight(Kind::Flush, 0));
                    self.stages.close_gate(Gate { token, durable: true, offset: 0, len: 0 });
                }
                What::Discard { op, offset, len } => {
                    let first = self.stages.cut_discard(slot.into(), op, offset, len);
                    let request = in_flight(Kind::Range, 0);
                    self.requests.submit(request, (op, offset, first));
                }
                What::Data { op, sector, segments } => {
                    let numbers = number..number + segments.len();
                    number = numbers.end;
                    let kind = if op == DataOp::Read { Kind::Read } else { Kind::Write };
                    match self.push_data(slot, op, numbers, segments, &mut last) {
                        Ok(len) if is_ordered(op) => {
                            let token = self.requests.hold(in_flight(kind, len));
                            let durable = self.write_through || op == DataOp::WriteBarrier;
                            let offset = sector * SECTOR_SIZE;
                            self.stages.close_gate(Gate { token, durable, offset, len });
                        }
                        Ok(len) => {
                            let disk_op = match op {
                                DataOp::Read => Op::Read,
                                _ => Op::Write { durable: self.write_through },
                            };
                            let what = (disk_op, sector * SECTOR_SIZE, len);
                            self.requests.submit(in_flight(kind, len), what);
                        }
                        Err(_) => {
                            let request = in_flight(Kind::Other, 0);
                            self.requests.answer(request, Err(UNMAPPED));
                        }
                    }
                }
                What::Indirect(_) => debug_assert!(false, "its segments were not read"),
            }
        }
        self.planned = planned;
    }

    /// Pushes the slices of a request to the burst, and keeps its pages for as long as it is in
    /// flight. Returns its bytes.
    fn push_data(
        &mut self,
        slot: u16,
        op: DataOp,
        numbers: Range<usize>,
        segments: Range<usize>,
        last: &mut LastHit,
    ) -> Result<u64, GrantError> {
        if self.in_use.len() <= slot.into() {
            self.in_use.resize_with(usize::from(slot) + 1, Vec::new);
        }
        // Those that are mapped, though others of the request are not.
        self.in_use[usize::from(slot)].extend(self.asks.acquired(numbers.clone()));
        let mut len = 0;
        let segments = &self.segments[segments];
        for (number, segment) in numbers.clone().zip(segments) {
            let (page, bytes) = (self.asks.page(number)?, bytes_of(segment));
            let slices = self.requests.burst().slices();
            self.grants.resolve(page, bytes, access_of(op), last, slices)?;
            len += u64::from(bytes.1);
        }
        if is_ordered(op) {
            let pages = numbers.filter_map(|number| self.asks.page(number).ok());
            self.stages.pieces.clear();
            self.stages.pieces.extend(pages.zip(segments.iter().map(bytes_of)));
        }
        Ok(len)
    }
}
