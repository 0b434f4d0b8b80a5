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
/// Bytes of the header of a driver that has each frame's hash reported: the hash lies behind
/// `num_buffers` (§5.1.6).
pub const HASH_HEADER_SIZE: usize = 20;
/// Where `num_buffers` lies in the header.
pub const NUM_BUFFERS_OFFSET: usize = 10;
/// Longest frame: an IP packet of 65,535 bytes, an Ethernet header and a VLAN tag.
pub const FRAME_SIZE_MAX: usize = 65_535 + 14 + 4;
/// Smallest MTU that a device may tell (§5.1.4.2).
pub const MTU_MIN: u16 = 68;

/// The device takes packets with partial checksum.
pub const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
/// The driver takes packets with partial checksum.
pub const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
/// The driver may change its offloads while it runs.
pub const VIRTIO_NET_F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// `mtu` is valid.
pub const VIRTIO_NET_F_MTU: u64 = 1 << 3;
/// `mac` is valid.
pub const VIRTIO_NET_F_MAC: u64 = 1 << 5;
/// The driver takes TCP segments over IPv4 that are still to be cut.
pub const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
/// The driver takes TCP segments over IPv6 that are still to be cut.
pub const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
/// The driver takes uncut TCP segments with ECN.
pub const VIRTIO_NET_F_GUEST_ECN: u64 = 1 << 9;
/// The device takes uncut TCP segments over IPv4.
pub const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
/// The device takes uncut TCP segments over IPv6.
pub const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
/// The device takes uncut TCP segments with ECN.
pub const VIRTIO_NET_F_HOST_ECN: u64 = 1 << 13;
/// A packet may be spread over several receive buffers.
pub const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
/// `status` is valid.
pub const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
/// There is a control queue.
pub const VIRTIO_NET_F_CTRL_VQ: u64 = 1 << 17;
/// The control queue knows receive modes and the MAC table.
pub const VIRTIO_NET_F_CTRL_RX: u64 = 1 << 18;
/// The control queue filters VLANs.
pub const VIRTIO_NET_F_CTRL_VLAN: u64 = 1 << 19;
/// The control queue knows the further receive modes.
pub const VIRTIO_NET_F_CTRL_RX_EXTRA: u64 = 1 << 20;
/// The driver can announce itself.
pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// There are several queue pairs.
pub const VIRTIO_NET_F_MQ: u64 = 1 << 22;
/// The control queue sets the MAC address.
pub const VIRTIO_NET_F_CTRL_MAC_ADDR: u64 = 1 << 23;
/// The control queue coalesces notifications of one virtqueue.
pub const VIRTIO_NET_F_VQ_NOTF_COAL: u64 = 1 << 52;
/// The control queue coalesces notifications.
pub const VIRTIO_NET_F_NOTF_COAL: u64 = 1 << 53;
/// The driver takes UDP datagrams over IPv4 that are still to be cut.
pub const VIRTIO_NET_F_GUEST_USO4: u64 = 1 << 54;
/// The driver takes UDP datagrams over IPv6 that are still to be cut.
pub const VIRTIO_NET_F_GUEST_USO6: u64 = 1 << 55;
/// The device takes uncut UDP datagrams.
pub const VIRTIO_NET_F_HOST_USO: u64 = 1 << 56;
/// The device reports the hash of each frame.
pub const VIRTIO_NET_F_HASH_REPORT: u64 = 1 << 57;
/// The driver chooses the receiveq of each frame by its hash.
pub const VIRTIO_NET_F_RSS: u64 = 1 << 60;
/// `speed` and `duplex` are valid.
pub const VIRTIO_NET_F_SPEED_DUPLEX: u64 = 1 << 63;

/// `status`: the link is up (§5.1.4).
pub const VIRTIO_NET_S_LINK_UP: u16 = 1;
/// `status`: the driver shall announce itself (§5.1.4).
pub const VIRTIO_NET_S_ANNOUNCE: u16 = 2;
/// `speed`: not known.
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

/// Index of the control queue (§5.1.2): behind all pairs, or behind the first with neither `MQ` nor
/// `RSS`.
#[must_use]
pub const fn controlq(features: u64, queue_pairs_max: usize) -> usize {
    if features & (VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS) == 0 { 2 } else { queue_pairs_max * 2 }
}

/// `duplex` of the config space (§5.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Duplex {
    /// One direction at a time.
    Half = 0,
    /// Both directions.
    Full = 1,
    /// Not known.
    #[default]
    Unknown = 0xff,
}

/// The config space (§5.1.4), as far as the hash of receive-side scaling.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned,
)]
#[repr(C)]
pub struct NetConfig {
    /// MAC address.
    pub mac: [u8; 6],
    /// `VIRTIO_NET_S_*`.
    pub status: U16,
    /// Queue pairs at most.
    pub max_virtqueue_pairs: U16,
    /// Largest MTU the driver may use.
    pub mtu: U16,
    /// Mbit/s.
    pub speed: U32,
    /// [`Duplex`].
    pub duplex: u8,
    /// Bytes of the longest hash key.
    pub rss_max_key_size: u8,
    /// Entries of the longest indirection table.
    pub rss_max_indirection_table_length: U16,
    /// [`rss::hash_type`] bits.
    pub supported_hash_types: U32,
}

/// Unfinished packets that one side accepts: partial checksums, and segments that are still to be
/// cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offloads {
    /// Partial checksums; every other one needs it.
    pub csum: bool,
    /// Uncut TCP over IPv4.
    pub tso4: bool,
    /// Uncut TCP over IPv6.
    pub tso6: bool,
    /// Uncut TCP with ECN.
    pub ecn: bool,
    /// Uncut UDP over IPv4.
    pub uso4: bool,
    /// Uncut UDP over IPv6.
    pub uso6: bool,
}

impl Offloads {
    /// The unfinished packets that a driver accepts: by its `GUEST_*` features, or by the bits of
    /// `GUEST_OFFLOADS_SET`.
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

    /// The unfinished packets that a device accepts: the `HOST_*` features that were negotiated.
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

    /// True if frames may be longer than the MTU.
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
/// The control queue, and every feature whose commands [`Command`] knows, but those of several
/// queue pairs and of the hash.
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
/// Header flag: the checksum was found right.
pub const HDR_F_DATA_VALID: u8 = 2;
/// GSO type: whole frame.
pub const HDR_GSO_NONE: u8 = 0;
/// GSO type: TCP over IPv4.
pub const HDR_GSO_TCPV4: u8 = 1;
/// GSO type: TCP over IPv6.
pub const HDR_GSO_TCPV6: u8 = 4;
/// GSO type: UDP datagrams of equal size.
pub const HDR_GSO_UDP_L4: u8 = 5;
/// GSO flag: TCP with ECN.
pub const HDR_GSO_ECN: u8 = 0x80;

/// The bytes before a packet (§5.1.6).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned,
)]
#[repr(C)]
pub struct RawNetHeader {
    /// `HDR_F_*`.
    pub flags: u8,
    /// `HDR_GSO_*`.
    pub gso_type: u8,
    /// Bytes of all headers, a hint.
    pub hdr_len: U16,
    /// Bytes of payload of each piece.
    pub gso_size: U16,
    /// First byte of the checksum, from the start of the frame.
    pub csum_start: U16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: U16,
    /// Receive buffers the packet fills.
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

/// A header as two words, such as a processor loads and stores at once.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct HeaderWords {
    /// From `flags` to `csum_start`.
    first: U64,
    /// `csum_offset` and `num_buffers`.
    second: U32,
}

impl RawNetHeader {
    /// The bytes for a driver: with the number of buffers that the packet fills, and, for one that
    /// takes no checksums, without flags.
    ///
    /// The bytes are computed as whole words. If `num_buffers` were stored as a field of its own
    /// and the header copied in words after that, the CPU would have to wait until the store had
    /// reached the cache, behind all stores to the guest's buffers: that took two thirds of the
    /// time of a short packet.
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

    /// The header for a driver, as by [`Self::to_driver`], of a packet that fills one buffer and
    /// has neither a partial checksum nor segmentation; `None` if the header says that the packet
    /// has either. `bytes` are the header as the port gave it.
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

    /// Checks the header of a frame of `len` bytes against the negotiated features, and returns the
    /// header to hand on, of which every field can be relied on.
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
        // `hdr_len` is a hint that a device must not rely on (§5.1.6.2.2), so a wrong one is no
        // reason to drop the frame; but a tap refuses a header that is longer than the frame: cut
        // it.
        let frame = u16::try_from(len).unwrap_or(u16::MAX);
        clean.hdr_len = self.hdr_len.get().min(frame).into();
        Ok(clean)
    }
}

#[cfg(test)]
mod tests;
