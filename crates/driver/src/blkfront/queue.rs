//! `BlkfrontQueue`: a ring of a simulated Xen disk, from the guest's side.

use super::request::{BlkfrontOptions, XenDone, XenOp};
use crate::vring::now;
use crate::{DriverError, EventChannel, XEN_PAGE_SIZE, XenDomain};
use manyring_memory::{GrantAccess, GrantRef, GuestSlice, Words};
use manyring_queue::blkif::{FrontRing, RingConfig};
use manyring_wire::xen::blkif::{
    BlkifStatus, DISCARD_SECURE, INDIRECT_SEGMENTS_MAX, OP_DISCARD, OP_FLUSH_DISKCACHE, OP_READ,
    OP_WRITE, OP_WRITE_BARRIER, PAGE_SIZE, RawRequest, Response, SECTOR_SIZE, SECTORS_PER_PAGE,
    SEGMENT_SIZE, SEGMENTS_MAX, SEGMENTS_PER_PAGE, Segment, ring_bytes,
};
use manyring_wire::xen::device::Queue;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a sector, as a size in memory.
const SECTOR: usize = manyring_wire::host_size(SECTOR_SIZE);

/// The pages of one request: those of its data, and those of its segments if it is indirect.
#[derive(Debug)]
struct Slot {
    page: u32,
    segments_page: u32,
    /// The references under which both kinds of pages are granted now; permanent with persistent
    /// grants.
    grefs: Vec<GrantRef>,
    segment_grefs: Vec<GrantRef>,
    /// The id and the operation that the response must repeat.
    id: u64,
    operation: u8,
}

/// A queue of the disk. Owned by one thread.
#[derive(Debug)]
pub struct BlkfrontQueue {
    domain: Arc<XenDomain>,
    backend: u16,
    ring: FrontRing,
    ring_refs: Vec<GrantRef>,
    channel: EventChannel,
    options: BlkfrontOptions,
    slots: Vec<Slot>,
    free: Vec<u16>,
    requests: u64,
}

impl BlkfrontQueue {
    /// Number of the domain's pages that a queue takes.
    #[must_use]
    pub fn pages(options: &BlkfrontOptions) -> u32 {
        let slots = u32::from(options.abi.ring_size(options.ring_page_order));
        (1 << options.ring_page_order) + slots * (data_pages(options) + segment_pages(options))
    }

    /// Makes a queue in `domain` for a back-end in domain `backend`.
    ///
    /// # Errors
    /// [`DriverError::ArenaFull`] without pages for it, [`DriverError::RingFull`] without grant
    /// references for it, [`DriverError::Queue`] for a ring of such a size.
    pub fn new(
        domain: &Arc<XenDomain>,
        backend: u16,
        options: &BlkfrontOptions,
    ) -> Result<Self, DriverError> {
        let order = options.ring_page_order;
        let first = domain.alloc_pages(1 << order)?;
        let at = first as usize * XEN_PAGE_SIZE;
        let words = Words::new(domain.memory().clone(), at, ring_bytes(order), PAGE_SIZE as u64);
        let config = RingConfig { abi: options.abi, order, addr: 0 };
        let ring = FrontRing::with_words(config, 0.into(), words.ok_or(Errno::INVAL)?)?;
        let pages = first..first + (1 << order);
        let ring_refs = pages.map(|page| domain.grant(backend, page, GrantAccess::Write));
        let ring_refs = ring_refs.collect::<Result<_, _>>()?;
        let mut queue = Self {
            channel: domain.event_channel(backend)?,
            domain: domain.clone(),
            backend,
            free: (0..ring.size()).rev().collect(),
            ring,
            ring_refs,
            options: *options,
            slots: Vec::new(),
            requests: 0,
        };
        for _ in 0..queue.ring.size() {
            let slot = queue.slot()?;
            queue.slots.push(slot);
        }
        Ok(queue)
    }

    fn slot(&self) -> Result<Slot, DriverError> {
        let (data, segments) = (data_pages(&self.options), segment_pages(&self.options));
        let (page, segments_page) =
            (self.domain.alloc_pages(data)?, self.domain.alloc_pages(segments)?);
        let is_kept = self.options.persistent;
        let granted = |first: u32, count: u32| {
            let pages = first..first + if is_kept { count } else { 0 };
            let grant = |page| self.domain.grant(self.backend, page, GrantAccess::Write);
            pages.map(grant).collect::<Result<Vec<_>, _>>()
        };
        let (grefs, segment_grefs) = (granted(page, data)?, granted(segments_page, segments)?);
        Ok(Slot { page, segments_page, grefs, segment_grefs, id: 0, operation: 0 })
    }

    /// The grant references and the event channel of this queue, as the back-end must know them.
    #[must_use]
    pub fn nodes(&self) -> Queue {
        Queue {
            ring_refs: self.ring_refs.iter().map(|gref| gref.0).collect(),
            event_channel: self.channel.port(),
        }
    }

    /// The options of the front-end.
    #[must_use]
    pub fn options(&self) -> &BlkfrontOptions {
        &self.options
    }

    /// The ring of this queue, for tests that spoil it.
    #[must_use]
    pub fn ring(&mut self) -> &mut FrontRing {
        &mut self.ring
    }

    /// The event channel of this queue.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// How many requests were submitted and not taken.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request. Returns its tag, or `None` if the ring is full. The back-end sees it after
    /// [`Self::publish`].
    ///
    /// # Errors
    /// [`DriverError::TooLong`]; [`DriverError::RingFull`] without a free grant reference.
    pub fn submit(&mut self, op: XenOp<'_>) -> Result<Option<u16>, DriverError> {
        let Some(&tag) = self.free.last() else { return Ok(None) };
        self.requests += 1;
        let (abi, id) = (self.options.abi, self.requests << 16 | u64::from(tag));
        let (request, operation) = match op {
            XenOp::Read { sector, len } => self.data(tag, OP_READ, (id, sector), len)?,
            XenOp::WriteAny { sector, len } => self.data(tag, OP_WRITE, (id, sector), len)?,
            XenOp::Write { sector, data } => self.write_data(tag, OP_WRITE, (id, sector), data)?,
            XenOp::Barrier { sector, data } => {
                self.write_data(tag, OP_WRITE_BARRIER, (id, sector), data)?
            }
            XenOp::FlushWrite { sector, data } => {
                self.write_data(tag, OP_FLUSH_DISKCACHE, (id, sector), data)?
            }
            XenOp::Flush => {
                (RawRequest::data(abi, OP_FLUSH_DISKCACHE, id, 0, &[]), OP_FLUSH_DISKCACHE)
            }
            XenOp::Discard { sector, count, secure } => {
                let flag = if secure { DISCARD_SECURE } else { 0 };
                (RawRequest::discard(abi, flag, id, sector, count), OP_DISCARD)
            }
        };
        Ok(self.add(tag, &request, operation))
    }

    /// Adds a request that may be malformed. Only its id and its grant references are replaced, by
    /// those of a free slot. Returns its tag.
    ///
    /// # Errors
    /// [`DriverError::RingFull`].
    pub fn submit_raw(
        &mut self,
        operation: u8,
        make: impl FnOnce(u64, &[GrantRef], &[GrantRef]) -> RawRequest,
    ) -> Result<u16, DriverError> {
        let tag = *self.free.last().ok_or(DriverError::RingFull)?;
        self.requests += 1;
        let id = self.requests << 16 | u64::from(tag);
        self.grant_slot(tag, data_pages(&self.options), segment_pages(&self.options), true)?;
        let slot = &self.slots[usize::from(tag)];
        let request = make(id, &slot.grefs, &slot.segment_grefs);
        self.add(tag, &request, operation).ok_or(DriverError::RingFull)
    }

    fn add(&mut self, tag: u16, request: &RawRequest, operation: u8) -> Option<u16> {
        if !self.ring.add(request) {
            return None;
        }
        self.free.pop();
        let slot = &mut self.slots[usize::from(tag)];
        (slot.id, slot.operation) = (request.id(), operation);
        Some(tag)
    }

    fn write_data(
        &mut self,
        tag: u16,
        operation: u8,
        place: (u64, u64),
        bytes: &[u8],
    ) -> Result<(RawRequest, u8), DriverError> {
        self.check(bytes.len())?;
        self.data_slice(tag, bytes.len()).ok_or(Errno::INVAL)?.write_from(bytes);
        self.data(tag, operation, place, bytes.len())
    }

    /// A request whose data is the first `len` bytes of the buffer.
    fn data(
        &mut self,
        tag: u16,
        operation: u8,
        (id, sector): (u64, u64),
        len: usize,
    ) -> Result<(RawRequest, u8), DriverError> {
        let abi = self.options.abi;
        let pages = self.check(len)?;
        let is_indirect = pages as usize > SEGMENTS_MAX;
        let lists = if is_indirect { segment_pages(&self.options) } else { 0 };
        self.grant_slot(tag, pages, lists, operation == OP_READ)?;
        let slot = &self.slots[usize::from(tag)];
        let segments = segments_of(&slot.grefs, len)?;
        if !is_indirect {
            return Ok((RawRequest::data(abi, operation, id, sector, &segments), operation));
        }
        let bytes: Vec<u8> = segments.iter().flat_map(|segment| segment.emit_bytes()).collect();
        let at = slot.segments_page as usize * XEN_PAGE_SIZE;
        let list = self.domain.memory().slice(at, bytes.len()).ok_or(Errno::INVAL)?;
        list.write_from(&bytes);
        let grefs: Vec<u32> = slot.segment_grefs.iter().map(|gref| gref.0).collect();
        let count = u16::try_from(segments.len()).map_err(|_| Errno::INVAL)?;
        let grefs = &grefs[..usize::from(count).div_ceil(SEGMENTS_PER_PAGE)];
        Ok((RawRequest::indirect(abi, operation, id, sector, (count, grefs)), operation))
    }

    /// Grants the pages of a slot, unless they are granted permanently. The back-end may write only
    /// to the data pages of a read.
    fn grant_slot(
        &mut self,
        tag: u16,
        pages: u32,
        lists: u32,
        is_read: bool,
    ) -> Result<(), DriverError> {
        if self.options.persistent {
            return Ok(());
        }
        let (domain, backend) = (&self.domain, self.backend);
        let slot = &mut self.slots[usize::from(tag)];
        let access = if is_read { GrantAccess::Write } else { GrantAccess::Read };
        for page in slot.page..slot.page + pages {
            slot.grefs.push(domain.grant(backend, page, access)?);
        }
        for page in slot.segments_page..slot.segments_page + lists {
            slot.segment_grefs.push(domain.grant(backend, page, GrantAccess::Read)?);
        }
        Ok(())
    }

    /// Number of pages of a request of `len` bytes.
    fn check(&self, len: usize) -> Result<u32, DriverError> {
        let segments = usize::from(self.options.indirect_segments.min(INDIRECT_SEGMENTS_MAX));
        let max = (self.options.buffer_size as usize).min(segments.max(SEGMENTS_MAX) * PAGE_SIZE);
        let pages = u32::try_from(len.div_ceil(PAGE_SIZE)).ok();
        pages.filter(|_| len <= max).ok_or(DriverError::TooLong { len, max })
    }

    /// Publishes the requests that were submitted, and notifies the back-end if it wants that.
    /// Returns true if it has notified.
    pub fn publish(&mut self) -> bool {
        let wants = self.ring.publish();
        if wants {
            self.channel.notify();
        }
        wants
    }

    /// Takes a completed request, if there is one. Does not wait.
    ///
    /// # Errors
    /// [`DriverError::Response`] for a response to no request in flight, or with another operation;
    /// [`DriverError::StillMapped`] if the back-end has answered, but still has a page mapped that
    /// is not granted permanently.
    pub fn take(&mut self) -> Result<Option<XenDone>, DriverError> {
        let Some(response) = self.ring.take_response() else { return Ok(None) };
        let Response { id, operation, status } = response;
        let wrong = DriverError::Response { id, operation };
        let [low, high, ..] = id.to_le_bytes();
        let tag = u16::from_le_bytes([low, high]);
        let slot = self.slots.get_mut(usize::from(tag));
        let Some(slot) = slot.filter(|slot| (slot.id, slot.operation) == (id, operation)) else {
            return Err(wrong);
        };
        slot.id = 0;
        if !self.options.persistent {
            for gref in slot.grefs.drain(..).chain(slot.segment_grefs.drain(..)) {
                if !self.domain.end_access(gref) {
                    return Err(DriverError::StillMapped { gref: gref.0 });
                }
            }
        }
        self.free.push(tag);
        Ok(Some(XenDone { tag, status }))
    }

    /// Takes a completed request; sleeps on the event channel if there is none.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], and those of [`Self::take`].
    pub fn wait(&mut self, timeout: Duration) -> Result<XenDone, DriverError> {
        let deadline = now() + timeout;
        loop {
            if let Some(done) = self.take()? {
                return Ok(done);
            }
            if !self.ring.enable_notifications() {
                self.channel.wait(deadline.saturating_duration_since(now()))?;
            }
        }
    }

    /// Takes a completed request; polls the ring until there is one.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], and those of [`Self::take`].
    pub fn poll(&mut self, timeout: Duration) -> Result<XenDone, DriverError> {
        let deadline = now() + timeout;
        loop {
            for _ in 0..1000 {
                if let Some(done) = self.take()? {
                    return Ok(done);
                }
                std::hint::spin_loop();
            }
            if now() >= deadline {
                return Err(DriverError::Timeout);
            }
        }
    }

    /// The first `len` bytes of a request's buffer.
    #[must_use]
    pub fn data_slice(&self, tag: u16, len: usize) -> Option<GuestSlice<'_>> {
        let page = self.slots.get(usize::from(tag))?.page;
        self.domain.memory().slice(page as usize * XEN_PAGE_SIZE, len)
    }

    /// Copies the data that a request has read.
    ///
    /// # Errors
    /// [`DriverError::TooLong`].
    pub fn read_data(&self, tag: u16, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.check(bytes.len())?;
        self.data_slice(tag, bytes.len()).ok_or(Errno::INVAL)?.read_into(bytes);
        Ok(())
    }

    /// Runs one request to its end. No other request may be in flight. Returns its tag and its
    /// status.
    ///
    /// # Errors
    /// [`DriverError::Timeout`] after `max_wait` of the options.
    pub fn run(&mut self, op: XenOp<'_>) -> Result<XenDone, DriverError> {
        self.submit(op)?.ok_or(DriverError::RingFull)?;
        self.publish();
        self.wait(self.options.max_wait)
    }

    fn run_well(&mut self, op: XenOp<'_>) -> Result<u16, DriverError> {
        match self.run(op)? {
            XenDone { tag, status: BlkifStatus::Okay } => Ok(tag),
            XenDone { status, .. } => Err(DriverError::XenStatus(status)),
        }
    }

    /// Reads from `sector` on.
    ///
    /// # Errors
    /// [`DriverError::XenStatus`], and those of [`Self::run`].
    pub fn read(&mut self, sector: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        let tag = self.run_well(XenOp::Read { sector, len: bytes.len() })?;
        self.read_data(tag, bytes)
    }

    /// Writes from `sector` on.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn write(&mut self, sector: u64, data: &[u8]) -> Result<(), DriverError> {
        self.run_well(XenOp::Write { sector, data }).map(drop)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn flush(&mut self) -> Result<(), DriverError> {
        self.run_well(XenOp::Flush).map(drop)
    }

    /// Discards sectors.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn discard(&mut self, sector: u64, count: u64) -> Result<(), DriverError> {
        self.run_well(XenOp::Discard { sector, count, secure: false }).map(drop)
    }

    /// Ends the grants of the ring and of all buffers. Returns how many of their pages are still
    /// mapped: none, if the back-end has disconnected from the queue.
    #[must_use]
    pub fn end_grants(&mut self) -> usize {
        let slots = self.slots.iter_mut();
        let of_slots =
            slots.flat_map(|slot| slot.grefs.drain(..).chain(slot.segment_grefs.drain(..)));
        let all: Vec<_> = self.ring_refs.drain(..).chain(of_slots).collect();
        all.into_iter().filter(|gref| !self.domain.end_access(*gref)).count()
    }
}

/// Bytes of a page, in the type of buffer sizes.
const PAGE_BYTES: u32 = 4096;
const _: () = assert!(PAGE_BYTES as usize == PAGE_SIZE);

/// Number of pages of a slot's buffer.
fn data_pages(options: &BlkfrontOptions) -> u32 {
    options.buffer_size.div_ceil(PAGE_BYTES)
}

/// Number of pages for the segments of a slot's largest request.
fn segment_pages(options: &BlkfrontOptions) -> u32 {
    let has_any = options.indirect_segments > 0 && data_pages(options) as usize > SEGMENTS_MAX;
    let bytes = data_pages(options) as usize * SEGMENT_SIZE;
    if has_any { u32::try_from(bytes.div_ceil(PAGE_SIZE)).unwrap_or(0) } else { 0 }
}

/// The segments for `len` bytes in the pages of `grefs`, from the start of the first page on.
fn segments_of(grefs: &[GrantRef], len: usize) -> Result<Vec<Segment>, DriverError> {
    let sectors = len / SECTOR;
    let last = sectors.div_ceil(usize::from(SECTORS_PER_PAGE)).saturating_sub(1);
    let segment = |(index, gref): (usize, &GrantRef)| {
        let before = index * usize::from(SECTORS_PER_PAGE);
        let here = (sectors - before).min(usize::from(SECTORS_PER_PAGE));
        let here = u8::try_from(here).unwrap_or(SECTORS_PER_PAGE);
        Segment::new(gref.0, 0, here - 1).map_err(|_| Errno::INVAL.into())
    };
    let whole = len.is_multiple_of(SECTOR) && len > 0;
    let used = grefs.get(..=last).filter(|_| whole).ok_or(Errno::INVAL)?;
    used.iter().enumerate().map(segment).collect()
}
