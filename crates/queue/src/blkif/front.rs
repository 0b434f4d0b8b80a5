//! `FrontRing`: the front half of a blkif ring.

use super::{RingConfig, entry_offset};
use crate::base::Base;
use crate::error::QueueError;
use manyring_memory::{GuestMemory, Words, fence_full};
use manyring_wire::xen::blkif::{
    Abi, REQ_EVENT, REQ_PROD, RESPONSE_WORDS, RSP_EVENT, RSP_PROD, RawRequest, Response, need_event,
};

/// The front half.
#[derive(Debug)]
pub struct FrontRing {
    words: Words,
    abi: Abi,
    size: u16,
    /// Count of the next request to write.
    req_prod: u32,
    /// `req_prod` as last published.
    published: u32,
    /// Count of the next response to take.
    rsp_cons: u32,
    /// `rsp_prod` as last read.
    rsp_prod: u32,
}

impl FrontRing {
    /// Makes an empty ring of `config` in `memory` whose counts begin at `base` (tests use other
    /// bases than 0).
    ///
    /// # Errors
    /// [`QueueError::PageOrder`]: the ring has too many pages. [`QueueError::Ring`]: it does not
    /// lie in `memory`.
    pub fn new(config: RingConfig, base: Base, memory: &GuestMemory) -> Result<Self, QueueError> {
        Self::with_words(config, base, config.resolve(memory)?)
    }

    /// As [`FrontRing::new`], on words that are resolved (tests, loom).
    ///
    /// # Errors
    /// [`QueueError::PageOrder`]: the ring has too many pages.
    pub fn with_words(config: RingConfig, base: Base, words: Words) -> Result<Self, QueueError> {
        config.check()?;
        let base = base.bits();
        words.store_u32s(RSP_EVENT + 4, &[0; 12]);
        for count in [REQ_PROD, RSP_PROD] {
            words.store_u32(count, base);
        }
        for event in [REQ_EVENT, RSP_EVENT] {
            words.store_u32(event, base.wrapping_add(1));
        }
        Ok(Self {
            words,
            abi: config.abi,
            size: config.abi.ring_size(config.order),
            req_prod: base,
            published: base,
            rsp_cons: base,
            rsp_prod: base,
        })
    }

    /// Adds a request, which the back sees after [`Self::publish`]. False: the ring is full.
    #[must_use]
    pub fn add(&mut self, request: &RawRequest) -> bool {
        if self.free_count() == 0 {
            return false;
        }
        let offset = entry_offset(self.abi.layout().entry_size, self.size, self.req_prod);
        self.words.store_u32s(offset, request.words());
        self.req_prod = self.req_prod.wrapping_add(1);
        true
    }

    /// Makes all added requests available. Returns true if the back wants a notification.
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.req_prod, self.published);
        if new == old {
            return false;
        }
        // Release: the back sees the requests before the count that covers them.
        self.words.store_u32_release(REQ_PROD, new);
        self.published = new;
        // Full fence: mirrors the one in the back half's `enable_notifications`.
        fence_full();
        need_event(self.words.load_u32(REQ_EVENT), new, old)
    }

    /// Takes a response. Reads `rsp_prod` only when all responses that it covered are taken.
    ///
    /// # Panics
    /// If the back has more responses than there were requests, or an unknown status.
    pub fn take_response(&mut self) -> Option<Response> {
        if self.rsp_prod == self.rsp_cons {
            self.look();
            if self.rsp_prod == self.rsp_cons {
                return None;
            }
        }
        let mut words = [0; RESPONSE_WORDS];
        self.words.load_u32s(
            entry_offset(self.abi.layout().entry_size, self.size, self.rsp_cons),
            &mut words,
        );
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        let response = Response::parse(words);
        assert!(response.is_some(), "the back answered with the words {words:x?}");
        response
    }

    fn look(&mut self) {
        // Acquire: the responses are read after the count that covers them.
        let rsp_prod = self.words.load_u32_acquire(RSP_PROD);
        let (count, asked) =
            (rsp_prod.wrapping_sub(self.rsp_cons), self.published.wrapping_sub(self.rsp_cons));
        assert!(count <= asked, "the back answered {count} of {asked} requests");
        self.rsp_prod = rsp_prod;
    }

    /// Asks for a notification of the next response, then reads `rsp_prod` again. True: a response
    /// is there already; do not sleep.
    pub fn enable_notifications(&mut self) -> bool {
        self.words.store_u32(RSP_EVENT, self.rsp_cons.wrapping_add(1));
        // Full fence: mirrors the one in the back half's `needs_notification`.
        fence_full();
        self.look();
        self.rsp_prod != self.rsp_cons
    }

    /// Asks for no notifications: sets `rsp_event` to a count that has passed.
    pub fn disable_notifications(&mut self) {
        self.words.store_u32(RSP_EVENT, self.rsp_cons);
    }

    /// How many requests can be added.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    pub fn free_count(&self) -> u16 {
        self.size - self.req_prod.wrapping_sub(self.rsp_cons) as u16
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }
}
