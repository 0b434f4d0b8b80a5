//! `BackRing`: the back half of a blkif ring.
//!
//! ```text
//! pop_batch:      prod = req_prod (acquire);  prod - rsp_prod <= size, else fault
//!                 for each new request: copy it out; give it a slot
//! push_response:  ring[rsp_prod] = response;  rsp_prod += 1;  the slot is free
//! publish:        shared rsp_prod = rsp_prod (release)
//! ```
//! Differences to the plain version, and why they are right:
//! 1. `req_prod` is read once per batch, and kept.
//! 2. The first word of a request says how many words the request has. Only these are copied, each
//!    once, over the copy of an earlier request, which is neither cleared before nor moved after.
//! 3. Responses are written at once, but published once per burst.
//! 4. `req_event` is written only when it changes. So in a turn the cache line of the counts is
//!    fetched once to be read, and once to publish; `rsp_event` is read while we have the line.
//!
//! **Slots.** The place of a request in the ring is not its slot. Requests are answered in any
//! order, so a new request may have the same place as an older one that is still in flight. In a
//! ring of four entries whose first four requests are taken, and all but the first answered, the
//! fifth request has the place of the first. So slots come from a list (`slots.rs`). A slot is free
//! again when the front can see the response: until then the journal of the ring keeps the request
//! under its slot.

use super::requests::Requests;
use super::slots::Slots;
use super::{RingConfig, entry_offset};
use crate::aside::Aside;
use crate::base::Base;
use crate::chain::{BATCH_CHAINS, Chain};
use crate::config::RingAddresses;
use crate::error::QueueError;
use crate::record::journal::{self, Journal, JournalError, Owed, Shape};
use crate::ring::Ring;
use manyring_memory::{GuestMemory, Part, Words, fence_compiler, fence_full};
use manyring_wire::xen::blkif::{
    Abi, ENTRY_WORDS, Layout, REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RawRequest, Response,
    need_event,
};
use std::sync::Arc;

/// The back half.
#[derive(Debug)]
pub struct BackRing {
    words: Words,
    memory: Arc<GuestMemory>,
    abi: Abi,
    entry_size: usize,
    size: u16,
    /// Count of the next request to take.
    req_cons: u32,
    /// `req_prod` as last read.
    req_prod: u32,
    /// Count of the next response to write.
    rsp_prod: u32,
    /// `rsp_prod` as last published.
    published: u32,
    /// `rsp_prod` at the last [`Ring::needs_notification`].
    signalled: u32,
    /// `req_event` as last written by us; before that, as the front has initialised it.
    event_written: u32,
    in_flight: u16,
    slots: Slots,
    /// Records which requests are taken and not answered.
    journal: Option<Journal>,
    /// Slots of the owed requests, the oldest last: a former back-end has taken them, not answered
    /// them.
    owed: Owed,
    /// How many requests at the start of the last batch were owed.
    owed_in_batch: usize,
    /// The slots of requests that are set aside; the journal keeps the requests.
    aside: Aside,
    fault: Option<QueueError>,
}

impl BackRing {
    /// Serves the ring of `config` in `memory` from the first request on that has no response.
    ///
    /// # Errors
    /// [`QueueError::PageOrder`]: the ring has too many pages. [`QueueError::Ring`]: it does not
    /// lie in `memory`.
    pub fn new(config: RingConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        let words = config.resolve(&memory)?;
        Self::with_words(config, words, memory)
    }

    /// As [`BackRing::new`], on words that are resolved (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::PageOrder`]: the ring has too many pages.
    pub fn with_words(
        config: RingConfig,
        words: Words,
        memory: Arc<GuestMemory>,
    ) -> Result<Self, QueueError> {
        config.check()?;
        let size = config.abi.ring_size(config.order);
        let rsp_prod = words.load_u32(RSP_PROD);
        let event_written = words.load_u32(REQ_EVENT);
        Ok(Self {
            words,
            memory,
            abi: config.abi,
            entry_size: config.abi.layout().entry_size,
            size,
            req_cons: rsp_prod,
            req_prod: rsp_prod,
            rsp_prod,
            published: rsp_prod,
            signalled: rsp_prod,
            event_written,
            in_flight: 0,
            slots: Slots::new(size),
            journal: None,
            owed: Owed::new(),
            owed_in_batch: 0,
            aside: Aside::default(),
            fault: None,
        })
    }

    /// Serves a ring that its front has just made. Taken requests are recorded in `journal`, of
    /// [`journal_size`](super::journal_size) bytes, for [`BackRing::take_over`].
    ///
    /// # Errors
    /// As [`BackRing::new`], and [`QueueError::Journal`]: the journal is too short.
    pub fn begin(
        config: RingConfig,
        memory: Arc<GuestMemory>,
        journal: Option<Words>,
    ) -> Result<Self, QueueError> {
        Self::new(config, memory)?.journaled(journal)
    }

    /// Goes on with the ring of a former back-end, which may have been killed: pops the requests
    /// that it had taken and not answered, as its journal says, and then those in the ring. The
    /// caller must notify the front: the former back-end may have published responses without.
    ///
    /// A ring that nobody has served, or in which no request is left to answer, needs no usable
    /// journal: it is served like a new one.
    ///
    /// # Errors
    /// As [`BackRing::new`], and [`QueueError::Journal`]: the journal does not say which requests
    /// must be answered. The front has to make another ring.
    pub fn take_over(
        config: RingConfig,
        memory: Arc<GuestMemory>,
        journal: Option<Words>,
    ) -> Result<Self, QueueError> {
        let mut ring = Self::new(config, memory)?;
        if journal::is_unserved(&ring.words) {
            return ring.journaled(journal);
        }
        let shape = Shape { abi: ring.abi, size: ring.size };
        let found = match journal.clone() {
            Some(words) => Journal::resume(words, shape, &ring.words, ring.rsp_prod),
            None => Err(JournalError::Missing),
        };
        match found {
            Ok((journal, owed)) => ring.resume(journal, owed),
            Err(_) if ring.words.load_u32_acquire(REQ_PROD) == ring.rsp_prod => {
                return ring.journaled(journal);
            }
            Err(error) => return Err(QueueError::Journal(error)),
        }
        Ok(ring)
    }

    /// Begins the journal, or marks the ring as served without one. Called before anything is
    /// taken.
    fn journaled(mut self, journal: Option<Words>) -> Result<Self, QueueError> {
        match journal {
            Some(words) => {
                let shape = Shape { abi: self.abi, size: self.size };
                let begun = Journal::begin(words, shape, &self.words, self.rsp_prod);
                self.journal = Some(begun.map_err(QueueError::Journal)?);
            }
            None => journal::mark_unwritten(&self.words),
        }
        Ok(self)
    }

    fn resume(&mut self, journal: Journal, owed: Owed) {
        // At most the ring's size, which 16 bits can hold.
        let taken = u32::try_from(owed.len()).unwrap_or(u32::MAX);
        self.req_cons = self.rsp_prod.wrapping_add(taken);
        self.req_prod = self.req_cons;
        self.slots.take_away(&owed);
        self.owed = owed;
        self.owed.reverse();
        self.journal = Some(journal);
    }

    /// How many owed requests were not popped again yet.
    #[must_use]
    pub fn owed_count(&self) -> usize {
        self.owed.len()
    }

    /// Pops up to `max` requests, and no more than [`BATCH_CHAINS`], into `requests`, which is
    /// emptied first. Returns how many. After a fault of the front, which is latched, it pops none.
    #[inline]
    pub fn pop_batch(&mut self, requests: &mut Requests, max: usize) -> usize {
        self.owed_in_batch = 0;
        if !self.has_available() {
            requests.restart(0, self.abi);
            return 0;
        }
        if !self.owed.is_empty() {
            return self.pop_owed(requests, max);
        }
        // The slots are as many as the ring's entries. Only a front that reuses the entries of
        // responses that are not published yet could run out of them.
        let available = usize::from(self.available_count()).min(self.slots.free_count());
        let count = available.min(BATCH_CHAINS).min(max);
        let entries = requests.restart(count, self.abi);
        // One match for the batch: in each arm the layout is a constant.
        match self.abi {
            Abi::X86_32 => self.copy_batch::<ENTRY_32>(Abi::X86_32.layout(), entries),
            Abi::Native | Abi::X86_64 => {
                self.copy_batch::<ENTRY_64>(Abi::X86_64.layout(), entries);
            }
        }
        if let Some(journal) = &mut self.journal {
            journal.end_batch();
        }
        count
    }

    /// Takes one request for each of `entries`; the requests lie in the ring as `layout` says.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "each caller has a layout of constants")]
    fn copy_batch<const ENTRY: usize>(
        &mut self,
        layout: &Layout,
        entries: &mut [(Option<Chain>, RawRequest)],
    ) {
        let (taken, mut count) = (entries.len(), self.req_cons);
        let Self { words, slots, journal, .. } = self;
        for ((chain, request), slot) in entries.iter_mut().zip(slots.next(taken)) {
            let entry = words.part::<ENTRY>(entry_offset(ENTRY, self.size, count));
            let copied = copy_out(entry, layout, request.words_mut());
            if let Some(journal) = journal {
                let (head, rest) = copied.split_at(layout.segments / 4);
                journal.take(*slot, head, rest);
            }
            *chain = Some(Chain::new(*slot));
            count = count.wrapping_add(1);
        }
        slots.take(taken);
        self.in_flight += batch_count(taken);
        self.req_cons = count;
    }

    /// Pops the requests that a former back-end has taken and not answered, the oldest first.
    #[cold]
    fn pop_owed(&mut self, requests: &mut Requests, max: usize) -> usize {
        let count = self.owed.len().min(BATCH_CHAINS).min(max);
        let oldest = self.owed.len() - count;
        let entries = requests.restart(count, self.abi);
        for ((chain, request), slot) in entries.iter_mut().zip(self.owed.drain(oldest..).rev()) {
            // A ring with owed requests has a journal.
            if let Some(journal) = &self.journal {
                journal.copy_to(slot, request);
            }
            *chain = Some(Chain::new(slot));
        }
        self.in_flight += batch_count(count);
        self.owed_in_batch = count;
        count
    }

    /// True if requests can be set aside. That needs a journal, which keeps copies of them: the
    /// front may overwrite the requests in the ring.
    #[must_use]
    pub fn can_set_aside(&self) -> bool {
        self.journal.is_some()
    }

    /// Sets a request aside, to be popped again after [`BackRing::recall`]. A back-end that takes
    /// the ring over before that finds the request among those that are owed.
    ///
    /// # Panics
    /// If [`BackRing::can_set_aside`] is false: nobody would have the request any more.
    pub fn set_aside(&mut self, chain: Chain) {
        assert!(self.journal.is_some(), "no copy of the request is kept");
        let slot = self.end(chain);
        self.aside.push(slot);
    }

    /// Lets the next batch pop up to `max` requests that were set aside, before all others. Returns
    /// how many.
    pub fn recall(&mut self, max: usize) -> usize {
        let slots: Vec<_> = (0..max).map_while(|_| self.aside.take_first()).collect();
        self.owed.extend(slots.iter().rev());
        slots.len()
    }

    /// Puts back, untouched, the request that was popped last. A later batch copies it out again.
    pub fn unpop(&mut self, chain: Chain) {
        let slot = self.end(chain);
        if self.owed_in_batch > 0 {
            self.owed_in_batch -= 1;
            self.owed.push(slot);
            return;
        }
        self.req_cons = self.req_cons.wrapping_sub(1);
        self.slots.put_back(slot);
        if let Some(journal) = &mut self.journal {
            journal.put_back(slot);
        }
    }

    /// Answers a request. The front sees the response after [`Ring::publish`].
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a rare caller must not make it a call for the others")]
    pub fn push_response(&mut self, chain: Chain, response: Response) {
        let slot = self.end(chain);
        self.slots.answer(slot);
        if let Some(journal) = &mut self.journal {
            journal.answer(slot);
        }
        let offset = entry_offset(self.entry_size, self.size, self.rsp_prod);
        self.words.store_few_u32s(offset, response.emit());
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Gives up a request of a ring that is broken or ends: the front gets no response, unless
    /// another back-end takes the ring over. The slot is not used again.
    pub fn discard(&mut self, chain: Chain) {
        self.end(chain);
    }

    #[inline]
    fn end(&mut self, chain: Chain) -> u16 {
        self.in_flight -= 1;
        chain.finish()
    }

    fn write_event(&mut self, count: u32) {
        if self.event_written != count {
            self.words.store_u32(REQ_EVENT, count);
            self.event_written = count;
        }
    }
}

/// Bytes of a ring entry for each layout.
const ENTRY_32: usize = Abi::X86_32.layout().entry_size;
const ENTRY_64: usize = Abi::X86_64.layout().entry_size;

/// Copies the request of an entry out, and returns its words. The first word says how long the
/// request is. It is read once, so the front cannot change the length while the rest is copied.
#[inline(always)]
#[allow(clippy::inline_always, reason = "the layout is one of constants")]
fn copy_out<'a, const ENTRY: usize>(
    entry: Part<'_, ENTRY>,
    layout: &Layout,
    words: &'a mut [u32; ENTRY_WORDS],
) -> &'a [u32] {
    // Every request has the words that lie before the segments of a read or write.
    let (head, rest) = words.split_at_mut(layout.segments / 4);
    entry.load_u32s(0, head);
    let size = layout.request_size(head[0]);
    entry.load_u32s(layout.segments, &mut rest[..(size - layout.segments) / 4]);
    &words[..size / 4]
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "at most BATCH_CHAINS")]
const fn batch_count(count: usize) -> u16 {
    count as u16
}

impl Ring for BackRing {
    #[inline]
    fn has_available(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.req_prod != self.req_cons || !self.owed.is_empty() {
            return true;
        }
        // Acquire: the requests that the count covers are read after the count.
        let (req_prod, req_cons) = (self.words.load_u32_acquire(REQ_PROD), self.req_cons);
        let (rsp_prod, size) = (self.rsp_prod, self.size);
        let unanswered = req_cons.wrapping_sub(rsp_prod);
        // The difference wraps, so a `req_prod` that went back counts as one that is far ahead.
        if req_prod.wrapping_sub(req_cons) > u32::from(size) - unanswered {
            self.latch_fault(QueueError::ReqProd { req_prod, req_cons, rsp_prod, size });
            return false;
        }
        self.req_prod = req_prod;
        req_prod != req_cons
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    fn available_count(&self) -> u16 {
        self.req_prod.wrapping_sub(self.req_cons) as u16 + self.owed.len() as u16
    }

    fn in_flight(&self) -> u16 {
        self.in_flight
    }

    #[inline]
    fn aside(&self) -> u16 {
        self.aside.count()
    }

    fn size(&self) -> u16 {
        self.size
    }

    /// The count of the next request to take.
    fn base(&self) -> Base {
        Base::from_bits(self.req_cons)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    fn publish(&mut self) -> u16 {
        let count = self.rsp_prod.wrapping_sub(self.published);
        if count != 0 {
            if let Some(journal) = &mut self.journal {
                journal.publish();
            }
            // Release: the front sees the responses, and the data of reads, before the count.
            self.words.store_u32_release(RSP_PROD, self.rsp_prod);
            self.published = self.rsp_prod;
            // The journal records of these slots may be overwritten only after that store.
            fence_compiler();
            self.slots.publish();
        }
        count as u16
    }

    #[inline]
    fn needs_notification(&mut self) -> bool {
        let (new, old) = (self.published, self.signalled);
        if new == old {
            return false;
        }
        // Full fence: the front writes rsp_event and then reads rsp_prod; we have written rsp_prod
        // and now read rsp_event. One of us must see the other.
        fence_full();
        self.signalled = new;
        need_event(self.words.load_u32(RSP_EVENT), new, old)
    }

    fn enable_notifications(&mut self) -> bool {
        // While requests that were seen are not taken, the queue does not sleep: it needs no event.
        if self.has_available() {
            return true;
        }
        self.write_event(self.req_cons.wrapping_add(1));
        // Full fence: the front publishes req_prod and then reads req_event; we have written
        // req_event and now read req_prod. One of us must see the other.
        fence_full();
        self.has_available()
    }

    /// A `req_event` that the front's count has passed asks for no event. So an event that is still
    /// ahead is set back to such a count.
    fn disable_notifications(&mut self) {
        if self.event_written == self.req_cons.wrapping_add(1) {
            self.write_event(self.req_cons);
        }
    }

    fn fault(&self) -> Option<QueueError> {
        self.fault
    }

    fn latch_fault(&mut self, fault: QueueError) {
        self.fault.get_or_insert(fault);
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Always refused: the pages of a blkif ring cannot move. The front-end makes another ring
    /// instead.
    fn relocate(&mut self, _: RingAddresses, _: Arc<GuestMemory>) -> Result<(), QueueError> {
        Err(QueueError::Granted)
    }
}
