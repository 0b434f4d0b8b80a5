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
    /// The front-end (QEMU, Cloud Hypervisor): the device hears of queue pairs by
    /// `SET_VRING_ENABLE` and is offered no control queue.
    FrontEnd,
    /// The device (UML, crosvm): the control queue is one of its virtqueues.
    Device,
}

/// How a net driver drives.
#[derive(Clone, Debug)]
pub struct NetDriverOptions {
    /// Queue pairs to set up.
    pub queue_pairs: u16,
    /// Entries of each receiveq and transmitq.
    pub queue_size: u16,
    /// Virtio features to take if they are offered; those of the rings must be.
    pub features: u64,
    /// Vhost-user protocol features to take if they are offered.
    pub protocol_features: u64,
    /// Bytes of a receive buffer, header included, once `MRG_RXBUF` is negotiated.
    pub mergeable_size: u32,
    /// Bytes of a receive buffer, header included, without it.
    pub big_size: u32,
    /// Bytes of a transmit buffer, header included.
    pub transmit_size: u32,
    /// All transmitqs take their buffers from one place, as a guest's kernel does: the buffer that
    /// was free last is used next, by whichever queue. For pairs that are driven by one thread:
    /// others would wait for each other.
    pub shared_buffers: bool,
    /// Who reads the control queue.
    pub control: ControlOwner,
    /// A kick of a transmitq waits for this many packets or microseconds. 0 packets: it does not.
    pub kicks: Coalescing,
    /// Bytes of guest memory that no queue takes, for whatever a test adds.
    pub spare: u64,
    /// Longest time for the socket to appear.
    pub max_wait: Duration,
}

impl NetDriverOptions {
    /// Checksums and segments left to the other side, both ways.
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

    /// Of a legacy driver the device can see these alone: feature words had 32 bits.
    pub const LEGACY: u64 = u32::MAX as u64;

    /// The features to ask for: without a control queue if the device is to have none.
    pub(super) const fn wanted(&self) -> u64 {
        match self.control {
            // The front-end may leave the announcement to the guest: no control queue is needed.
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

/// The longest frame and its header.
#[allow(clippy::cast_possible_truncation, reason = "65,565 bytes")]
const LONGEST: u32 = (FRAME_SIZE_MAX + HEADER_SIZE) as u32;

/// Counters of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetCounters {
    /// Frames: of a transmitq those added, of a receiveq those taken.
    pub packets: u64,
    /// Their bytes, without headers.
    pub bytes: u64,
    /// Kicks sent.
    pub kicks: u64,
    /// Bursts made available that the device wanted no kick for.
    pub kicks_suppressed: u64,
    /// Bursts whose kick waited for more packets or time.
    pub kicks_delayed: u64,
    /// Calls seen.
    pub calls: u64,
}
