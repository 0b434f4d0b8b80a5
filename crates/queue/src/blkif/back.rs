//! `BackRing`: the back half of a blkif ring.
//!
//! ```text
//! pop_batch:      prod = req_prod (acquire);  prod - rsp_prod <= size, else fault
//!                 for each new request: copy it out; give it a slot
//! push_response:  ring[rsp_prod] = response;  rsp_prod += 1;  the slot is free
//! publish:        shared rsp_prod = rsp_prod (release)
//! ```
//! What was done to it: (1) `req_prod` is read once per batch and kept; (2) of a request only as
//! many words are copied as its first one says that it has, each once; (3) responses are written at
//! once but published once per burst; (4) `req_event` is written only when it changes.
//!
//! **Slots.** The place of a request is not its slot. Requests are answered in any order, and the
//! place of an answered one may be taken by a new request while an older one, which had the same
//! place one round before, is still in flight: in a ring of four whose first four requests are
//! taken and all but the first answered, the fifth has the place of the first. So slots come from
//! a list.

use super::{RingConfig, entry_offset};
use crate::base::Base;
use crate::chain::{BATCH_CHAINS, Chain};
use crate::config::RingAddresses;
use crate::error::QueueError;
use crate::ring::Ring;
use manyring_memory::{GuestMemory, Words, fence_full};
use manyring_wire::xen::blkif::{
    Abi, ENTRY_WORDS, REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RawRequest, Response, need_event,
};
use std::sync::Arc;

/// Requests popped together. Reused: no allocation once it has grown.
#[derive(Debug, Default)]
pub struct Requests {
    entries: Vec<(Option<Chain>, RawRequest)>,
}

impl Requests {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes the request at `index`: its token, and the copy of it. `None` if it was taken before.
    #[inline]
    pub fn take(&mut self, index: usize) -> Option<(Chain, &RawRequest)> {
        let (chain, request) = self.entries.get_mut(index)?;
        Some((chain.take()?, request))
    }
}

/// The back half.
#[derive(Debug)]
pub struct BackRing {
    words: Words,
    memory: Arc<GuestMemory>,
    abi: Abi,
    size: u16,
    /// The next request to take.
    req_cons: u32,
    /// `req_prod` as last read.
    req_prod: u32,
    /// The next response to write.
    rsp_prod: u32,
    /// `rsp_prod` as last published.
    published: u32,
    /// `rsp_prod` when the front was last asked whether it wants a notification.
    signalled: u32,
    /// `req_event` as last written, at first by the front.
    event_written: u32,
    in_flight: u16,
    /// Slots that no request in flight has.
    free: Vec<u16>,
    fault: Option<QueueError>,
}

impl BackRing {
    /// Serves the ring of `config` in `memory` from the first request on that has no response.
    ///
    /// # Errors
    /// [`QueueError::PageOrder`], [`QueueError::Ring`].
    pub fn new(config: RingConfig, memory: Arc<GuestMemory>) -> Result<Self, QueueError> {
        let words = config.resolve(&memory)?;
        Self::with_words(config, words, memory)
    }

    /// As [`BackRing::new`], on words that are resolved (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::PageOrder`].
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
            size,
            req_cons: rsp_prod,
            req_prod: rsp_prod,
            rsp_prod,
            published: rsp_prod,
            signalled: rsp_prod,
            event_written,
            in_flight: 0,
            free: (0..size).rev().collect(),
            fault: None,
        })
    }

    /// Goes on where another back-end has stopped, which had taken the requests before `base` and
    /// published responses up to the ring's `rsp_prod`. Returns the tokens of those that have none:
    /// their places may hold responses by now, so what they asked for must be known from elsewhere.
    /// Nobody knows whether the front was told of the last responses: [`Ring::needs_notification`],
    /// called at once, says whether it waits for that.
    ///
    /// # Errors
    /// As [`BackRing::new`], and [`QueueError::Taken`] if there are more of them than a ring holds.
    pub fn resume(
        config: RingConfig,
        base: Base,
        memory: Arc<GuestMemory>,
    ) -> Result<(Self, Vec<Chain>), QueueError> {
        let mut ring = Self::new(config, memory)?;
        let taken = base.bits().wrapping_sub(ring.rsp_prod);
        if taken > u32::from(ring.size) {
            return Err(QueueError::Taken { taken, size: ring.size });
        }
        ring.req_cons = base.bits();
        ring.req_prod = base.bits();
        let chains = (0..taken).filter_map(|_| ring.chain()).collect();
        // As if the front had been told of none of the responses that are there.
        ring.signalled = ring.rsp_prod.wrapping_sub(u32::from(ring.size));
        Ok((ring, chains))
    }

    /// Pops up to `max` requests, and no more than [`BATCH_CHAINS`], into `requests`, which is
    /// emptied first. Returns how many. A fault of the front is latched: then no more come.
    #[inline]
    pub fn pop_batch(&mut self, requests: &mut Requests, max: usize) -> usize {
        debug_assert!(
            requests.entries.iter().all(|(chain, _)| chain.is_none()),
            "a request was not taken"
        );
        requests.entries.clear();
        if !self.has_available() {
            return 0;
        }
        let available = usize::from(self.available_count());
        for _ in 0..available.min(BATCH_CHAINS).min(max) {
            // There are as many slots as entries, and no more requests in flight than these.
            let Some(chain) = self.chain() else { break };
            let request = self.copy_out(self.req_cons);
            self.req_cons = self.req_cons.wrapping_add(1);
            requests.entries.push((Some(chain), request));
        }
        requests.entries.len()
    }

    /// Puts back the request that was popped last, untouched. It is copied out again later.
    pub fn unpop(&mut self, chain: Chain) {
        self.free_slot(chain);
        self.req_cons = self.req_cons.wrapping_sub(1);
    }

    /// Answers a request. Seen after [`Ring::publish`].
    #[inline]
    pub fn push_response(&mut self, chain: Chain, response: Response) {
        self.free_slot(chain);
        let offset = entry_offset(self.abi, self.size, self.rsp_prod);
        self.words.store_u32s(offset, &response.emit());
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Gives up a request of a ring that is broken or ends: the front never hears of it.
    pub fn discard(&mut self, chain: Chain) {
        self.free_slot(chain);
    }

    #[inline]
    fn chain(&mut self) -> Option<Chain> {
        let slot = self.free.pop()?;
        self.in_flight += 1;
        Some(Chain::new(slot))
    }

    #[inline]
    fn free_slot(&mut self, chain: Chain) {
        self.free.push(chain.finish());
        self.in_flight -= 1;
    }

    /// Copies the request of `count` out. Its first word says how long it is; that word is not
    /// read again, whatever the front makes of it meanwhile.
    #[inline]
    fn copy_out(&self, count: u32) -> RawRequest {
        let offset = entry_offset(self.abi, self.size, count);
        let mut words = [0; ENTRY_WORDS];
        words[0] = self.words.load_u32(offset);
        let size = self.abi.layout().request_size(words[0]);
        self.words.load_u32s(offset + 4, &mut words[1..size.div_ceil(4)]);
        RawRequest::new(self.abi, words)
    }

    fn write_event(&mut self, count: u32) {
        if self.event_written != count {
            self.words.store_u32(REQ_EVENT, count);
            self.event_written = count;
        }
    }
}

impl Ring for BackRing {
    #[inline]
    fn has_available(&mut self) -> bool {
        if self.fault.is_some() {
            return false;
        }
        if self.req_prod != self.req_cons {
            return true;
        }
        // Acquire: the requests behind the count are read after it.
        let (req_prod, req_cons) = (self.words.load_u32_acquire(REQ_PROD), self.req_cons);
        let (rsp_prod, size) = (self.rsp_prod, self.size);
        let unanswered = req_cons.wrapping_sub(rsp_prod);
        // A count that went back is one that is far ahead.
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
        self.req_prod.wrapping_sub(self.req_cons) as u16
    }

    fn in_flight(&self) -> u16 {
        self.in_flight
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
            // Release: the responses, and the data behind them, come first.
            self.words.store_u32_release(RSP_PROD, self.rsp_prod);
            self.published = self.rsp_prod;
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
        // Nobody sleeps before all requests are taken that were seen: no need to be told of more.
        if self.has_available() {
            return true;
        }
        self.write_event(self.req_cons.wrapping_add(1));
        // Full fence: the front publishes req_prod and then reads req_event; we have written
        // req_event and now read req_prod. One of us must see the other.
        fence_full();
        self.has_available()
    }

    /// An event that has passed asks for nothing. One that is still ahead is taken back.
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

    /// Never: a front-end that has other pages makes another ring.
    fn relocate(&mut self, _: RingAddresses, _: Arc<GuestMemory>) -> Result<(), QueueError> {
        Err(QueueError::Granted)
    }
}
