//! The channels of a sender as the sender sees them, and the cached way of the last frame.

use crate::net::switch::channel::{Channel, LentFrames};
use crate::net::switch::copy_queue::CopyInbox;
use crate::net::switch::vlan_rules::ETHERNET;
use crate::net::switch::{PortId, SwitchTime};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HEADER_SIZE};
use std::collections::VecDeque;
use std::sync::Arc;

/// A channel, with the state that only its sender has.
#[derive(Debug)]
pub(super) struct OwnChannel {
    pub(super) channel: Arc<Channel>,
    pub(super) inbox: Arc<CopyInbox>,
    pub(super) to: PortId,
    pub(super) pair: usize,
    /// The burst that frames of the present call are added to.
    pub(super) open: Option<Box<LentFrames>>,
    /// The time at which each burst that is out was handed over.
    pub(super) handed: VecDeque<SwitchTime>,
    /// Bursts were handed over, and the receiver was not woken for them yet.
    pub(super) must_ring: bool,
    /// The number of a frame copy: the channel is not used before the receiver has read that one.
    pub(super) mailed: u64,
    /// The receiver has held frames for too long, and gets only copies until this time.
    pub(super) rests_until: SwitchTime,
}

impl OwnChannel {
    /// True if no burst of the sender is in the channel or open.
    pub(super) fn is_empty(&self) -> bool {
        self.handed.is_empty() && self.open.is_none()
    }

    /// True if its receiver exists, has read the earlier copies, and is not resting.
    #[inline]
    pub(super) fn is_served(&self, now: SwitchTime) -> bool {
        self.inbox.has_done(self.mailed) && !self.inbox.is_closed() && now.0 >= self.rests_until.0
    }
}

/// The destination of the last frame, cached for the next one.
#[derive(Clone, Copy, Debug)]
pub(super) struct CachedDestination {
    /// The Ethernet addresses, destination first.
    pub(super) addresses: [u8; 12],
    pub(super) channel: usize,
    /// The receiver accepts every offload: partial checksums and large segments.
    pub(super) takes_all: bool,
}

impl CachedDestination {
    /// True if a frame that begins with `head` goes this way: it has the same addresses, and no
    /// tag.
    #[inline]
    pub(super) fn is_of(&self, head: &[u8; ETHERNET]) -> bool {
        head[..12] == self.addresses && head[12..] != [0x81, 0]
    }

    /// True if the receiver is known to accept a frame with this header as it is.
    #[inline]
    pub(super) fn takes(&self, header: &[u8; HEADER_SIZE]) -> bool {
        self.takes_all || (header[0] & HDR_F_NEEDS_CSUM == 0 && header[1] == HDR_GSO_NONE)
    }
}

/// The channel of a frame, and the properties of its receiver that decide how it is sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnWay {
    pub(super) channel: usize,
    /// The receiver accepts every offload.
    pub(super) takes_all: bool,
    /// The receiver uses several queues, so that each flow has its own way.
    pub(super) is_steered: bool,
}
