//! The lanes of a sender as it has them, and the way to one.

use crate::net::switch::guard::ETHERNET;
use crate::net::switch::lane::{Burst, Lane};
use crate::net::switch::mail::Inbox;
use crate::net::switch::{Moment, PortId};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HEADER_SIZE};
use std::collections::VecDeque;
use std::sync::Arc;

/// A lane, as its sender has it.
#[derive(Debug)]
pub(super) struct OwnLane {
    pub(super) lane: Arc<Lane>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) to: PortId,
    pub(super) pair: usize,
    /// The burst that the present call adds to.
    pub(super) open: Option<Box<Burst>>,
    /// When each burst was handed over that is not back.
    pub(super) handed: VecDeque<Moment>,
    /// The receiver has not been told of what was handed over.
    pub(super) must_ring: bool,
    /// A letter of the inbox: nothing goes by the lane before the receiver is done with it.
    pub(super) mailed: u64,
    /// Its receiver has let frames lie, and gets only copies until then.
    pub(super) rests_until: Moment,
}

impl OwnLane {
    /// True if nothing of the sender is in the lane, and nothing is about to be.
    pub(super) fn is_empty(&self) -> bool {
        self.handed.is_empty() && self.open.is_none()
    }

    /// True if its receiver is there, has done with the mail that goes before, and does not rest.
    #[inline]
    pub(super) fn is_served(&self, now: Moment) -> bool {
        self.inbox.has_done(self.mailed) && !self.inbox.is_closed() && now.0 >= self.rests_until.0
    }
}

/// The way of the last frame, for the next one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// Both addresses.
    pub(super) addresses: [u8; 12],
    pub(super) lane: usize,
    /// The receiver takes whatever a guest leaves unfinished.
    pub(super) takes_all: bool,
}

impl Way {
    /// True if a frame that begins with `head` goes this way: it has the same addresses, and no
    /// tag.
    #[inline]
    pub(super) fn is_of(&self, head: &[u8; ETHERNET]) -> bool {
        head[..12] == self.addresses && head[12..] != [0x81, 0]
    }

    /// True if the receiver takes a frame with this header as it is, by what is known here.
    #[inline]
    pub(super) fn takes(&self, header: &[u8; HEADER_SIZE]) -> bool {
        self.takes_all || (header[0] & HDR_F_NEEDS_CSUM == 0 && header[1] == HDR_GSO_NONE)
    }
}

/// The lane of a frame, and what is known of its receiver.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnWay {
    pub(super) lane: usize,
    /// It takes whatever a guest leaves unfinished.
    pub(super) takes_all: bool,
    /// It uses several queues, so that each flow has a way of its own.
    pub(super) is_steered: bool,
}
