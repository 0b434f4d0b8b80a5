//! `BlkifQueue`: requests of a Xen ring, from the ring to the disk and back.
//!
//! ```text
//! plan:           pop a batch, parse each request; a fault of the front-end stops the ring there
//! read_segments:  map the pages that hold the segments of indirect requests, copy them out, unmap
//! map:            map the pages of all requests: one call
//! submit:         slices to the burst; the burst to the disk
//! complete:       what is done: let go of its pages, write its response; the engine publishes it
//! ```
//! A request all of whose pages are mapped already goes from `plan` to the burst, as long as none
//! before it has to wait for the steps between: most often that is every request.
//! 1. What the front-end can change while it is looked at is copied once: requests when they are
//!    popped, segments out of their pages.
//! 2. What does not fit into this turn goes back to the ring, from the last request on: more than
//!    [`SEGMENTS_TURN`] segments, or more pages than the queue has addresses for.
//! 3. Pages are let go of before the response is visible, so that the front-end may end their
//!    grants when it sees it.

use super::plan::{
    InUse, Planned, Reply, SHORT, What, access_of, bytes_of, errno_of, is_ordered, segment_count,
};
use super::stages::{Gate, Stages, UNMAPPED};
use super::{LOT_PAGES, Shared};
use crate::blk::pending::{InFlight, Kind};
use crate::blk::requests::Requests;
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
    Status,
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
    pub(super) limits: Limits,
    /// Every write is durable when it is answered.
    write_through: bool,
    pub(super) grants: PersistentGrants,
    /// The pages in which the ring lies.
    _ring_pages: GrantPages,
    /// Requests of this turn that wait for pages, and all behind the first of them.
    pub(super) planned: Vec<Planned>,
    /// Segments of this turn's requests, and the pages that were asked for under their numbers.
    pub(super) segments: Vec<Segment>,
    pub(super) asks: GrantAsks,
    /// The pages of segments of indirect requests, one of them, and its copy.
    pub(super) lists: GrantAsks,
    pub(super) page: SliceList,
    pub(super) bytes: Box<[u8; PAGE_SIZE]>,
    pub(super) in_use: InUse,
    /// Where the window's region lies.
    pub(super) last: LastHit,
    pub(super) stages: Stages,
    /// Lots that requests in flight can take, and how many there are.
    pub(super) lots: u32,
    lots_max: u32,
    /// Requests were put back, because pages of others must be let go of first.
    is_held: bool,
    /// They find no room although nothing of ours is in flight: it is tried again then. `None` if
    /// nothing was put back.
    retry_at_ns: Option<u64>,
    /// When grants are to be looked after. Known since the last turn without work, if `is_tended`;
    /// else `None`.
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
    pub(super) ring_size: u16,
}

impl BlkifQueue {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { disk, shared, limits, write_through, grants, ring_pages, .. } = parts;
        Self {
            requests: Requests::new(disk, grants.pages().memory().clone()),
            shared,
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

    /// True if nothing is popped before a request in flight is done.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_held || self.stages.is_gated()
    }

    /// What was put back may find room now. True if something was.
    #[inline]
    pub(super) fn release_held(&mut self) -> bool {
        let was_held = self.is_held;
        if was_held {
            self.is_held = false;
            self.retry_at_ns = None;
        }
        was_held
    }

    /// What was put back is tried again, if it is time to.
    #[cold]
    fn retries(&mut self, now_ns: u64) -> bool {
        self.retry_at_ns.is_some_and(|at_ns| now_ns >= at_ns) && self.release_held()
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

    /// Pops a batch and starts its requests. Returns how many. The batch is empty then.
    #[inline]
    pub(super) fn pop_and_submit(
        &mut self,
        (ring, batch): (&mut BackRing, &mut Popped),
        disk: Option<&mut DiskRing>,
        now_ns: u64,
    ) -> usize {
        if self.stages.is_gated() || (self.is_held && !self.retries(now_ns)) {
            return 0;
        }
        let popped = ring.pop_batch(batch, self.requests.burst_max());
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

    /// Maps what the planned requests wait for, and gives them to the disk. Returns how many of
    /// them went back, or were given up.
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

    /// Parses the requests of a batch, and gives those to the burst that wait for nothing. Those
    /// that are not for this turn go back. Returns how many are.
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
            // Looked at where it lies: with its segments a request has more than a hundred bytes.
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
            let has_lots = self.lots == 0 || lots <= self.lots_max.saturating_sub(self.lots);
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

    /// A request that carries its segments. True if it is a gate.
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
            self.planned.push(Planned { chain, reply, what: What::Data { op, sector, segments } });
        }
        is_ordered(op)
    }

    /// Any other request. True if it is a gate.
    fn plan_other(
        &mut self,
        (chain, reply): (Chain, Reply),
        kind: Result<Asked<'_>, RequestError>,
        now_ns: u64,
    ) -> bool {
        let what = self.what(kind);
        let is_gate = what.is_gate();
        let waits = matches!(what, What::Indirect(_));
        let planned = Planned { chain, reply, what };
        if waits || !self.planned.is_empty() {
            self.planned.push(planned);
        } else {
            self.submit(planned, now_ns);
        }
        is_gate
    }

    fn what(&self, kind: Result<Asked<'_>, RequestError>) -> What {
        match kind {
            Err(error) if error.status() == Status::Unsupported => What::Answer(Errno::OPNOTSUPP),
            Err(_) => What::Answer(Errno::IO),
            Ok(Asked::Flush) => What::Flush,
            Ok(Asked::Barrier) => What::Barrier,
            Ok(Asked::Discard { sector, count, secure }) => {
                let op = if secure { Op::SecureErase } else { Op::Discard };
                What::Discard { op, offset: sector * SECTOR_SIZE, len: count * SECTOR_SIZE }
            }
            Ok(Asked::Indirect(indirect)) => What::Indirect(indirect),
            Ok(Asked::Data(_)) => {
                debug_assert!(false, "it is planned by `plan_data`");
                What::Answer(Errno::IO)
            }
        }
    }

    /// Takes the requests from `index` on out of those that are planned, the last one first, and
    /// lets go of the pages that were found for them.
    pub(super) fn give_up(&mut self, index: usize, now_ns: u64, mut each: impl FnMut(Chain)) {
        for Planned { chain, reply, what } in self.planned.drain(index..).rev() {
            self.lots -= reply.lots;
            self.grants.give_up(&mut self.asks, what.numbers(), now_ns);
            each(chain);
        }
    }

    /// Maps the pages of all requests. From the first one on for whose pages there is no room,
    /// they go back.
    fn map(&mut self, ring: &mut BackRing, now_ns: u64) {
        self.grants.acquire(&mut self.asks, now_ns);
        // A ring that has stopped gets nothing back.
        if ring.is_faulted() {
            return;
        }
        let asks = &self.asks;
        let has_no_room =
            |number: usize| asks.page(number).is_err_and(|error| errno_of(error) == SHORT);
        let is_short = |what: &What| what.is_short() || what.numbers().into_iter().any(has_no_room);
        if let Some(index) = self.planned.iter().position(|planned| is_short(&planned.what)) {
            self.give_up(index, now_ns, |chain| ring.unpop(chain));
            self.is_held = true;
            self.retry_at_ns = Some(now_ns + RETRY_NS);
        }
    }

    /// Gives a request to the disk, or answers it.
    #[inline(never)]
    fn submit(&mut self, Planned { chain, reply, what }: Planned, now_ns: u64) {
        let slot = chain.slot();
        let in_flight = |kind| InFlight { chain, reply, kind, len: 0, popped_at_ns: now_ns };
        match what {
            What::Data { op, sector, segments } => {
                let InFlight { chain, reply, .. } = in_flight(Kind::Other);
                self.submit_data((chain, reply), (op, sector), segments, now_ns);
            }
            What::Answer(errno) => self.requests.answer(in_flight(Kind::Other), Err(errno)),
            What::Flush => self.requests.submit(in_flight(Kind::Flush), (Op::Flush, 0, 0)),
            What::Barrier => {
                let token = self.requests.hold(in_flight(Kind::Flush));
                self.stages.close_gate(Gate { token, durable: true, offset: 0, len: 0 });
            }
            What::Discard { op, offset, len } => {
                let first = self.stages.cut_discard(slot.into(), op, offset, len);
                self.requests.submit(in_flight(Kind::Range), (op, offset, first));
            }
            What::Indirect(_) => debug_assert!(false, "its segments were not read"),
        }
    }

    /// Gives a read or write to the disk, or answers it if a page of it could not be mapped.
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
        let write = Op::Write { durable: self.write_through };
        let (kind, disk_op) = match op {
            DataOp::Read => (Kind::Read, Op::Read),
            _ => (Kind::Write, write),
        };
        match pushed {
            // A request of its own: one that others take the address of is put together in memory
            // and copied from there.
            Ok(len) if !is_ordered(op) => {
                let request = InFlight { chain, reply, kind, len, popped_at_ns: now_ns };
                self.requests.submit(request, (disk_op, sector * SECTOR_SIZE, len.into()));
            }
            Ok(len) => {
                let request = InFlight { chain, reply, kind, len, popped_at_ns: now_ns };
                self.hold_ordered(request, (op, sector), segments);
            }
            Err(_) => {
                let kind = Kind::Other;
                let request = InFlight { chain, reply, kind, len: 0, popped_at_ns: now_ns };
                self.requests.answer(request, Err(UNMAPPED));
            }
        }
    }

    /// An ordered write, whose pages are written when all requests before it are done.
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
        self.stages.close_gate(Gate { token, durable, offset: sector * SECTOR_SIZE, len });
    }

    /// Pushes the slices of a request to the burst, and keeps its pages for as long as it is in
    /// flight. Returns its bytes.
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
            // Those are kept that are mapped, though others of the request are not.
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

/// Takes the requests with these indexes out of a batch, the last one first.
#[cold]
fn each_left(batch: &mut Popped, indexes: Range<usize>, mut each: impl FnMut(Chain)) {
    for index in indexes.rev() {
        if let Some((chain, _)) = batch.take(index) {
            each(chain);
        }
    }
}
