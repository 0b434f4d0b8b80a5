//! Options of a net driver: queue pairs, buffers, features, who owns the control queue.

use manyring_wire::net::{
    CTRL_BITS, Coalescing, FRAME_SIZE_MAX, GUEST_OFFLOAD_BITS, HEADER_SIZE, VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_SPEED_DUPLEX, VIRTIO_NET_F_STATUS,
};
use manyring_wire::vhost_user::{
    PROTOCOL_F_CONFIG, PROTOCOL_F_MQ, PROTOCOL_F_MTU, PROTOCOL_F_RARP, PROTOCOL_F_REPLY_ACK,
};
use manyring_wire::virtio::{VIRTIO_F_EVENT_IDX, VIRTIO_F_IN_ORDER, VIRTIO_F_VERSION_1};
use std::time::Duration;

/// Who reads the driver's control queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlOwner {
    /// The front-end (QEMU, Cloud Hypervisor). It tells the device of queue pairs by
    /// `SET_VRING_ENABLE`, and gives the device no control queue.
    FrontEnd,
    /// The device (UML, crosvm): the control queue is one of its virtqueues.
    Device,
}

/// Options of a net driver.
#[derive(Clone, Debug)]
pub struct NetDriverOptions {
    /// Queue pairs to set up.
    pub queue_pairs: u16,
    /// Number of entries of each receiveq and transmitq.
    pub queue_size: u16,
    /// Virtio features to negotiate if they are offered. Starting fails if a ring feature is not.
    pub features: u64,
    /// Vhost-user protocol features to negotiate if they are offered.
    pub protocol_features: u64,
    /// Bytes of a receive buffer, including the header, if `MRG_RXBUF` is negotiated.
    pub mergeable_size: u32,
    /// Bytes of a receive buffer, including the header, if `MRG_RXBUF` is not negotiated.
    pub big_size: u32,
    /// Bytes of a transmit buffer, including the header.
    pub transmit_size: u32,
    /// All transmitqs take their buffers from one pool, as those of a guest's kernel do: the buffer
    /// that was freed last is used next, by any queue. For pairs that one thread drives: several
    /// threads would wait for each other at the pool.
    pub shared_buffers: bool,
    /// Who reads the control queue.
    pub control: ControlOwner,
    /// How many packets or microseconds a kick of a transmitq may wait for. 0 packets: kicks are
    /// sent at once.
    pub kicks: Coalescing,
    /// Bytes of guest memory to leave free, for whatever a test adds.
    pub spare: u64,
    /// Longest wait for the socket to appear.
    pub max_wait: Duration,
}

impl NetDriverOptions {
    /// Partial checksums and uncut segments, in both directions.
    pub const OFFLOADS: u64 = VIRTIO_NET_F_CSUM
        | VIRTIO_NET_F_HOST_TSO4
        | VIRTIO_NET_F_HOST_TSO6
        | VIRTIO_NET_F_HOST_ECN
        | VIRTIO_NET_F_HOST_USO
        | GUEST_OFFLOAD_BITS;
    /// The control queue and the features that need it.
    pub const CONTROL: u64 = CTRL_BITS;
    /// The features of a driver without offloads.
    pub const PLAIN: u64 = VIRTIO_F_EVENT_IDX
        | VIRTIO_F_IN_ORDER
        | VIRTIO_F_VERSION_1
        | VIRTIO_NET_F_MRG_RXBUF
        | VIRTIO_NET_F_MAC
        | VIRTIO_NET_F_STATUS
        | VIRTIO_NET_F_MTU
        | VIRTIO_NET_F_SPEED_DUPLEX
        | VIRTIO_NET_F_MQ;

    /// The feature bits that a legacy driver can negotiate: its feature words have 32 bits.
    pub const LEGACY: u64 = u32::MAX as u64;

    /// The features to ask for: none of the control queue, if the front-end owns it.
    pub(super) const fn wanted(&self) -> u64 {
        match self.control {
            // The guest can announce itself without a control queue if the front-end asks it to.
            ControlOwner::FrontEnd => {
                self.features & !(Self::CONTROL & !VIRTIO_NET_F_GUEST_ANNOUNCE)
            }
            ControlOwner::Device => self.features,
        }
    }
}

impl Default for NetDriverOptions {
    /// One pair of 256, `EVENT_IDX`, mergeable buffers of 1536 bytes, every offload, the control
    /// queue read by the front-end, kicks at once.
    fn default() -> Self {
        Self {
            queue_pairs: 1,
            queue_size: 256,
            features: Self::PLAIN | Self::OFFLOADS | Self::CONTROL,
            protocol_features: PROTOCOL_F_MQ
                | PROTOCOL_F_CONFIG
                | PROTOCOL_F_REPLY_ACK
                | PROTOCOL_F_RARP
                | PROTOCOL_F_MTU,
            mergeable_size: 1536,
            big_size: LONGEST,
            transmit_size: LONGEST,
            shared_buffers: false,
            control: ControlOwner::FrontEnd,
            kicks: Coalescing::default(),
            spare: 256 << 10,
            max_wait: Duration::from_secs(30),
        }
    }
}

/// Bytes of the longest frame with its header.
#[allow(clippy::cast_possible_truncation, reason = "65,565 bytes")]
const LONGEST: u32 = (FRAME_SIZE_MAX + HEADER_SIZE) as u32;

/// Counters of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetCounters {
    /// Number of frames: added to a transmitq, or taken from a receiveq.
    pub packets: u64,
    /// Bytes of these frames, without headers.
    pub bytes: u64,
    /// Kicks sent.
    pub kicks: u64,
    /// Bursts that were published without a kick, because the device wanted none.
    pub kicks_suppressed: u64,
    /// Bursts whose kick waited for more packets or for time to pass.
    pub kicks_delayed: u64,
    /// Calls that the device has sent and this driver has seen.
    pub calls: u64,
}
