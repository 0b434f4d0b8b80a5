//! The channels of a sender with the state that only the sender uses, and the cached destination of
//! the last frame.

use crate::net::switch::channel::{Channel, LentFrames};
use crate::net::switch::copy_queue::CopyInbox;
use crate::net::switch::vlan_rules::ETHERNET;
use crate::net::switch::{PortId, SwitchTime};
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HEADER_SIZE};
use std::collections::VecDeque;
use std::sync::Arc;

/// A channel, with the state that only its sender uses.
#[derive(Debug)]
pub(super) struct OwnChannel {
    pub(super) channel: Arc<Channel>,
    pub(super) inbox: Arc<CopyInbox>,
    pub(super) to: PortId,
    pub(super) pair: usize,
    /// The burst to which frames of the present call are added.
    pub(super) open: Option<Box<LentFrames>>,
    /// For each burst in the channel or with the receiver, the time at which it was put in.
    pub(super) handed: VecDeque<SwitchTime>,
    /// True if bursts were put in, and the receiver was not woken for them yet.
    pub(super) must_ring: bool,
    /// The number of a frame copy: the channel must not be used before the receiver has read that
    /// copy.
    pub(super) mailed: u64,
    /// The time until which the receiver gets only copies, because it has held frames for too long.
    pub(super) rests_until: SwitchTime,
}

impl OwnChannel {
    /// True if no burst of the sender is in the channel, with the receiver, or open.
    pub(super) fn is_empty(&self) -> bool {
        self.handed.is_empty() && self.open.is_none()
    }

    /// True if the channel can be used: its receiver is open, has read the earlier copies, and is
    /// not resting.
    #[inline]
    pub(super) fn is_served(&self, now: SwitchTime) -> bool {
        self.inbox.has_done(self.mailed) && !self.inbox.is_closed() && now.0 >= self.rests_until.0
    }
}

/// The destination of the last frame, cached for the next one.
#[derive(Clone, Copy, Debug)]
pub(super) struct CachedDestination {
    /// The destination and the source MAC address.
    pub(super) addresses: [u8; 12],
    pub(super) channel: usize,
    /// True if the receiver accepts every offload: partial checksums and large segments.
    pub(super) takes_all: bool,
}

impl CachedDestination {
    /// True if a frame that begins with `head` has this destination: it has the same addresses, and
    /// no VLAN tag.
    #[inline]
    pub(super) fn is_of(&self, head: &[u8; ETHERNET]) -> bool {
        head[..12] == self.addresses && head[12..] != [0x81, 0]
    }

    /// True if the receiver is known to accept a frame with this header unchanged.
    #[inline]
    pub(super) fn takes(&self, header: &[u8; HEADER_SIZE]) -> bool {
        self.takes_all || (header[0] & HDR_F_NEEDS_CSUM == 0 && header[1] == HDR_GSO_NONE)
    }
}

/// The channel for a frame, and the properties of its receiver that decide how to send it.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnWay {
    pub(super) channel: usize,
    /// True if the receiver accepts every offload.
    pub(super) takes_all: bool,
    /// True if the receiver uses several queues, so that each flow may have another channel.
    pub(super) is_steered: bool,
}
