//! virtio-net: feature bits, config space, packet header, offloads (virtio 1.3 §5.1).

mod control_queue;
pub mod flow;
pub mod head;
mod place;
pub mod rss;
pub mod segment;
pub mod sender;

pub use control_queue::{
    CTRL_HEADER_SIZE, Coalescing, Command, CommandError, CtrlStatus, FilterTable, MacAddress,
    QueueCoalescing, RxMode, VLAN_COUNT,
};
pub use control_queue::{class, is_mtu, parse_mac};
pub use place::{PLACE_BYTES, TYPES_TAG, USUAL_BYTES};

use crate::virtio::VIRTIO_F_VERSION_1;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned, transmute};

/// Bytes of the header before each packet (§5.1.6), with `num_buffers`.
pub const HEADER_SIZE: usize = 12;
/// Bytes of the header of a legacy driver without mergeable buffers: it ends before `num_buffers`
/// (§5.1.6.1).
pub const LEGACY_HEADER_SIZE: usize = 10;
/// Bytes of the header if `HASH_REPORT` is negotiated: the hash lies behind `num_buffers` (§5.1.6).
pub const HASH_HEADER_SIZE: usize = 20;
/// Offset of `num_buffers` in the header.
pub const NUM_BUFFERS_OFFSET: usize = 10;
/// Longest frame: an IP packet of 65,535 bytes, an Ethernet header and a VLAN tag.
pub const FRAME_SIZE_MAX: usize = 65_535 + 14 + 4;
/// Smallest MTU that a device may report (§5.1.4.2).
pub const MTU_MIN: u16 = 68;

/// The device takes packets with a partial checksum.
pub const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
/// The driver takes packets with a partial checksum.
pub const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
/// The driver may change its offloads while it runs.
pub const VIRTIO_NET_F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// `mtu` is valid.
pub const VIRTIO_NET_F_MTU: u64 = 1 << 3;
/// `mac` is valid.
pub const VIRTIO_NET_F_MAC: u64 = 1 << 5;
/// The driver takes TCP packets over IPv4 that are not yet cut into segments.
pub const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
/// The driver takes TCP packets over IPv6 that are not yet cut into segments.
pub const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
/// The driver takes uncut TCP packets with ECN.
pub const VIRTIO_NET_F_GUEST_ECN: u64 = 1 << 9;
/// The device takes uncut TCP packets over IPv4.
pub const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
/// The device takes uncut TCP packets over IPv6.
pub const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
/// The device takes uncut TCP packets with ECN.
pub const VIRTIO_NET_F_HOST_ECN: u64 = 1 << 13;
/// A packet may be spread over several receive buffers.
pub const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
/// `status` is valid.
pub const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
/// There is a control queue.
pub const VIRTIO_NET_F_CTRL_VQ: u64 = 1 << 17;
/// The control queue has commands for receive modes and for the MAC table.
pub const VIRTIO_NET_F_CTRL_RX: u64 = 1 << 18;
/// The control queue has commands for the VLAN filter.
pub const VIRTIO_NET_F_CTRL_VLAN: u64 = 1 << 19;
/// The control queue has commands for further receive modes.
pub const VIRTIO_NET_F_CTRL_RX_EXTRA: u64 = 1 << 20;
/// The driver can announce itself.
pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// There are several queue pairs.
pub const VIRTIO_NET_F_MQ: u64 = 1 << 22;
/// The control queue has a command that sets the MAC address.
pub const VIRTIO_NET_F_CTRL_MAC_ADDR: u64 = 1 << 23;
/// The control queue has commands that coalesce the notifications of one virtqueue.
pub const VIRTIO_NET_F_VQ_NOTF_COAL: u64 = 1 << 52;
/// The control queue has commands that coalesce the notifications of all queues.
pub const VIRTIO_NET_F_NOTF_COAL: u64 = 1 << 53;
/// The driver takes UDP packets over IPv4 that are not yet cut into datagrams.
pub const VIRTIO_NET_F_GUEST_USO4: u64 = 1 << 54;
/// The driver takes UDP packets over IPv6 that are not yet cut into datagrams.
pub const VIRTIO_NET_F_GUEST_USO6: u64 = 1 << 55;
/// The device takes uncut UDP packets.
pub const VIRTIO_NET_F_HOST_USO: u64 = 1 << 56;
/// The device reports the hash of each frame.
pub const VIRTIO_NET_F_HASH_REPORT: u64 = 1 << 57;
/// The driver chooses a receiveq for each hash value of frames.
pub const VIRTIO_NET_F_RSS: u64 = 1 << 60;
/// `speed` and `duplex` are valid.
pub const VIRTIO_NET_F_SPEED_DUPLEX: u64 = 1 << 63;

/// `status`: the link is up (§5.1.4).
pub const VIRTIO_NET_S_LINK_UP: u16 = 1;
/// `status`: the driver shall announce itself (§5.1.4).
pub const VIRTIO_NET_S_ANNOUNCE: u16 = 2;
/// `speed`: unknown.
pub const SPEED_UNKNOWN: u32 = u32::MAX;

/// Bytes of the header before each packet of a driver that has negotiated `features` (§5.1.6.1).
#[must_use]
pub const fn header_size(features: u64) -> usize {
    if features & VIRTIO_NET_F_HASH_REPORT != 0 {
        return HASH_HEADER_SIZE;
    }
    match features & (VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF) {
        0 => LEGACY_HEADER_SIZE,
        _ => HEADER_SIZE,
    }
}

/// Index of the receiveq of a queue pair (§5.1.2).
#[must_use]
pub const fn receiveq(pair: usize) -> usize {
    pair * 2
}

/// Index of the transmitq of a queue pair (§5.1.2).
#[must_use]
pub const fn transmitq(pair: usize) -> usize {
    pair * 2 + 1
}

/// Index of the control queue (§5.1.2): behind all queue pairs, or behind the first pair if neither
/// `MQ` nor `RSS` is negotiated.
#[must_use]
pub const fn controlq(features: u64, queue_pairs_max: usize) -> usize {
    if features & (VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS) == 0 { 2 } else { queue_pairs_max * 2 }
}

/// Values of `duplex` in the config space (§5.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Duplex {
    /// One direction at a time.
    Half = 0,
    /// Both directions.
    Full = 1,
    /// Unknown.
    #[default]
    Unknown = 0xff,
}

/// The config space (§5.1.4), up to the fields of receive-side scaling.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned,
)]
#[repr(C)]
pub struct NetConfig {
    /// MAC address.
    pub mac: [u8; 6],
    /// `VIRTIO_NET_S_*` bits.
    pub status: U16,
    /// Most queue pairs that the driver may use.
    pub max_virtqueue_pairs: U16,
    /// Largest MTU that the driver may use, in bytes.
    pub mtu: U16,
    /// Speed of the link in Mbit/s.
    pub speed: U32,
    /// A [`Duplex`].
    pub duplex: u8,
    /// Most bytes of a hash key.
    pub rss_max_key_size: u8,
    /// Most entries of an indirection table.
    pub rss_max_indirection_table_length: U16,
    /// [`rss::hash_type`] bits.
    pub supported_hash_types: U32,
}

/// The unfinished packets that one side takes: with a partial checksum, or not yet cut into
/// segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offloads {
    /// Packets with a partial checksum; all other fields require this one.
    pub csum: bool,
    /// TCP over IPv4, not yet cut.
    pub tso4: bool,
    /// TCP over IPv6, not yet cut.
    pub tso6: bool,
    /// TCP with ECN, not yet cut.
    pub ecn: bool,
    /// UDP over IPv4, not yet cut.
    pub uso4: bool,
    /// UDP over IPv6, not yet cut.
    pub uso6: bool,
}

impl Offloads {
    /// The unfinished packets that a driver takes, from its `GUEST_*` feature bits or from the bits
    /// of `GUEST_OFFLOADS_SET`.
    #[must_use]
    pub const fn of_guest(bits: u64) -> Self {
        let csum = bits & VIRTIO_NET_F_GUEST_CSUM != 0;
        let tso4 = csum && bits & VIRTIO_NET_F_GUEST_TSO4 != 0;
        let tso6 = csum && bits & VIRTIO_NET_F_GUEST_TSO6 != 0;
        Self {
            csum,
            tso4,
            tso6,
            ecn: (tso4 || tso6) && bits & VIRTIO_NET_F_GUEST_ECN != 0,
            uso4: csum && bits & VIRTIO_NET_F_GUEST_USO4 != 0,
            uso6: csum && bits & VIRTIO_NET_F_GUEST_USO6 != 0,
        }
    }

    /// The unfinished packets that a device takes, from the negotiated `HOST_*` feature bits.
    #[must_use]
    pub const fn of_host(features: u64) -> Self {
        let csum = features & VIRTIO_NET_F_CSUM != 0;
        let tso4 = csum && features & VIRTIO_NET_F_HOST_TSO4 != 0;
        let tso6 = csum && features & VIRTIO_NET_F_HOST_TSO6 != 0;
        let uso = csum && features & VIRTIO_NET_F_HOST_USO != 0;
        let ecn = (tso4 || tso6) && features & VIRTIO_NET_F_HOST_ECN != 0;
        Self { csum, tso4, tso6, ecn, uso4: uso, uso6: uso }
    }

    /// The `GUEST_*` features of this set.
    #[must_use]
    pub const fn guest_features(self) -> u64 {
        bit(self.csum, VIRTIO_NET_F_GUEST_CSUM)
            | bit(self.tso4, VIRTIO_NET_F_GUEST_TSO4)
            | bit(self.tso6, VIRTIO_NET_F_GUEST_TSO6)
            | bit(self.ecn, VIRTIO_NET_F_GUEST_ECN)
            | bit(self.uso4, VIRTIO_NET_F_GUEST_USO4)
            | bit(self.uso6, VIRTIO_NET_F_GUEST_USO6)
    }

    /// The `HOST_*` features of this set.
    #[must_use]
    pub const fn host_features(self) -> u64 {
        bit(self.csum, VIRTIO_NET_F_CSUM)
            | bit(self.tso4, VIRTIO_NET_F_HOST_TSO4)
            | bit(self.tso6, VIRTIO_NET_F_HOST_TSO6)
            | bit(self.ecn, VIRTIO_NET_F_HOST_ECN)
            | bit(self.uso4 && self.uso6, VIRTIO_NET_F_HOST_USO)
    }

    /// True if the set has any packets that are not yet cut: frames may then be longer than the
    /// MTU.
    #[must_use]
    pub const fn has_gso(self) -> bool {
        self.tso4 || self.tso6 || self.uso4 || self.uso6
    }
}

const fn bit(set: bool, feature: u64) -> u64 {
    if set { feature } else { 0 }
}

/// Every `GUEST_*` offload bit that `GUEST_OFFLOADS_SET` may carry.
pub const GUEST_OFFLOAD_BITS: u64 = VIRTIO_NET_F_GUEST_CSUM
    | VIRTIO_NET_F_GUEST_TSO4
    | VIRTIO_NET_F_GUEST_TSO6
    | VIRTIO_NET_F_GUEST_ECN
    | VIRTIO_NET_F_GUEST_USO4
    | VIRTIO_NET_F_GUEST_USO6;
/// The features of all commands that [`Command`] knows, except several queue pairs and the hash.
pub const CTRL_BITS: u64 = VIRTIO_NET_F_CTRL_VQ
    | VIRTIO_NET_F_CTRL_RX
    | VIRTIO_NET_F_CTRL_RX_EXTRA
    | VIRTIO_NET_F_CTRL_VLAN
    | VIRTIO_NET_F_CTRL_MAC_ADDR
    | VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
    | VIRTIO_NET_F_GUEST_ANNOUNCE
    | VIRTIO_NET_F_NOTF_COAL
    | VIRTIO_NET_F_VQ_NOTF_COAL;

/// Header flag: the checksum is partial (§5.1.6).
pub const HDR_F_NEEDS_CSUM: u8 = 1;
/// Header flag: the receiver need not check the checksum, which was found right.
pub const HDR_F_DATA_VALID: u8 = 2;
/// GSO type: a frame that is not to be cut.
pub const HDR_GSO_NONE: u8 = 0;
/// GSO type: TCP over IPv4.
pub const HDR_GSO_TCPV4: u8 = 1;
/// GSO type: TCP over IPv6.
pub const HDR_GSO_TCPV6: u8 = 4;
/// GSO type: UDP datagrams of equal size.
pub const HDR_GSO_UDP_L4: u8 = 5;
/// GSO flag: TCP with ECN.
pub const HDR_GSO_ECN: u8 = 0x80;

/// The header before each packet, without the hash (§5.1.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RawNetHeader {
    /// `HDR_F_*`.
    pub flags: u8,
    /// `HDR_GSO_*`.
    pub gso_type: u8,
    /// Bytes of all headers of the packet; only a hint.
    pub hdr_len: U16,
    /// Bytes of payload of each segment.
    pub gso_size: U16,
    /// Offset in the frame of the first byte that the checksum covers.
    pub csum_start: U16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: U16,
    /// Number of receive buffers that the packet fills.
    pub num_buffers: U16,
}

/// Why the header of a frame that a driver sent is refused; the frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each is")]
pub enum HeaderError {
    #[error("a partial checksum, which was not negotiated")]
    Csum,
    #[error("a checksum past the end of the frame")]
    CsumRange,
    #[error("an unknown segmentation type, or one that was not negotiated")]
    GsoType,
    #[error("segmentation into pieces of 0 bytes")]
    GsoSize,
    #[error("segmentation without a partial checksum")]
    GsoCsum,
}

/// A header as two words, which a processor loads and stores at once.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct HeaderWords {
    /// From `flags` to `csum_start`.
    first: U64,
    /// `csum_offset` and `num_buffers`.
    second: U32,
}

impl RawNetHeader {
    /// The header as bytes for a driver, with `num_buffers`: the number of buffers that the packet
    /// fills. For a driver that takes no partial checksums (`takes_csum`), the flags are 0.
    ///
    /// The bytes are computed as whole words. If `num_buffers` were stored alone and the header
    /// then copied in words, the CPU would wait until that store had reached the cache, behind all
    /// stores to the guest's buffers: this wait took two thirds of the time of a short packet.
    #[inline]
    #[must_use]
    pub fn to_driver(self, takes_csum: bool, num_buffers: u16) -> [u8; HEADER_SIZE] {
        let HeaderWords { first, second } = transmute!(self);
        let flags = if takes_csum { 0xff } else { 0 };
        let words = HeaderWords {
            first: (first.get() & (!0xff | flags)).into(),
            second: (second.get() & 0xffff | u32::from(num_buffers) << 16).into(),
        };
        transmute!(words)
    }

    /// The header as [`Self::to_driver`] gives it, for a packet in one buffer. `None` if the header
    /// says that the packet has a partial checksum or is to be cut. `bytes`: the header from the
    /// port.
    #[inline]
    #[must_use]
    pub fn plain_to_driver(
        bytes: [u8; HEADER_SIZE],
        takes_csum: bool,
    ) -> Option<[u8; HEADER_SIZE]> {
        const UNFINISHED: u64 = HDR_F_NEEDS_CSUM as u64 | 0xff << 8;
        let HeaderWords { first, second } = transmute!(bytes);
        if first.get() & UNFINISHED != 0 {
            return None;
        }
        let header: Self = transmute!(HeaderWords { first, second });
        Some(header.to_driver(takes_csum, 1))
    }

    /// Checks the header of a frame of `len` bytes against the negotiated offloads. Returns a
    /// header whose fields all hold for the frame.
    ///
    /// # Errors
    /// [`HeaderError`].
    #[inline]
    pub fn checked(self, len: usize, taken: Offloads) -> Result<Self, HeaderError> {
        if self.flags & HDR_F_NEEDS_CSUM == 0 && self.gso_type == HDR_GSO_NONE {
            return Ok(Self::default());
        }
        self.checked_offload(len, taken)
    }

    fn checked_offload(self, len: usize, taken: Offloads) -> Result<Self, HeaderError> {
        let mut clean = Self::default();
        if self.flags & HDR_F_NEEDS_CSUM != 0 {
            if !taken.csum {
                return Err(HeaderError::Csum);
            }
            let end = usize::from(self.csum_start.get()) + usize::from(self.csum_offset.get()) + 2;
            if end > len {
                return Err(HeaderError::CsumRange);
            }
            clean.flags = HDR_F_NEEDS_CSUM;
            clean.csum_start = self.csum_start;
            clean.csum_offset = self.csum_offset;
        }
        if self.gso_type != HDR_GSO_NONE {
            let is_taken = match self.gso_type & !HDR_GSO_ECN {
                HDR_GSO_TCPV4 => taken.tso4,
                HDR_GSO_TCPV6 => taken.tso6,
                HDR_GSO_UDP_L4 => (taken.uso4 || taken.uso6) && self.gso_type & HDR_GSO_ECN == 0,
                _ => false,
            };
            if !is_taken || (self.gso_type & HDR_GSO_ECN != 0 && !taken.ecn) {
                return Err(HeaderError::GsoType);
            }
            if self.gso_size.get() == 0 {
                return Err(HeaderError::GsoSize);
            }
            if clean.flags & HDR_F_NEEDS_CSUM == 0 {
                return Err(HeaderError::GsoCsum);
            }
            clean.gso_type = self.gso_type;
            clean.gso_size = self.gso_size;
        }
        // A driver's `hdr_len` is only a hint (§5.1.6.2.2), so a wrong one is no reason to drop the
        // frame. But a tap refuses a `hdr_len` longer than the frame: cut it.
        let frame = u16::try_from(len).unwrap_or(u16::MAX);
        clean.hdr_len = self.hdr_len.get().min(frame).into();
        Ok(clean)
    }
}

#[cfg(test)]
mod tests;
