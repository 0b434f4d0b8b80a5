//! The faults that a transmitted frame can have: false header fields, and chains that are no frame.

use super::FRAME_SIZE;
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_TCPV4, HDR_GSO_UDP_L4, RawNetHeader};

/// One fault of a transmitted frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TxSpoil {
    /// `hdr_len` longer than the frame.
    HdrLenPastEnd,
    /// Segments of 0 bytes (`gso_size`).
    GsoSizeZero,
    /// An unknown segmentation type.
    GsoUnknown,
    /// Segmentation without a partial checksum.
    GsoWithoutCsum,
    /// The ECN flag with UDP segmentation.
    GsoUdpEcn,
    /// A checksum area that begins behind the end of the frame.
    CsumStartPastEnd,
    /// A checksum field behind the end of the frame.
    CsumOffsetPastEnd,
    /// A checksum field whose offset does not fit 16 bits.
    CsumWraps,
    /// A checksum field in the Ethernet header.
    CsumInEthernet,
    /// A checksum field in the IP header.
    CsumInNetwork,
    /// A checksum field in the ports of TCP.
    CsumInPorts,
    /// A chain of one descriptor of 11 bytes, too short for a header.
    ShortHeader,
    /// A chain of one descriptor: a header and no frame.
    HeaderAlone,
    /// A header and a descriptor of no bytes.
    EmptyFrame,
    /// A frame of one byte.
    OneByte,
    /// A header in descriptors of one byte each.
    HeaderInPieces,
    /// A chain of one descriptor of no bytes.
    ZeroLength,
    /// A chain without a device-readable byte.
    OnlyWritable,
    /// A frame, and a device-writable descriptor behind it.
    WritableToo,
    /// A frame of 70 KiB in one descriptor.
    TooLong,
    /// A frame of 70 KiB in four descriptors.
    TooLongInPieces,
}

impl TxSpoil {
    /// Every fault.
    pub const ALL: [Self; 21] = [
        Self::HdrLenPastEnd,
        Self::GsoSizeZero,
        Self::GsoUnknown,
        Self::GsoWithoutCsum,
        Self::GsoUdpEcn,
        Self::CsumStartPastEnd,
        Self::CsumOffsetPastEnd,
        Self::CsumWraps,
        Self::CsumInEthernet,
        Self::CsumInNetwork,
        Self::CsumInPorts,
        Self::ShortHeader,
        Self::HeaderAlone,
        Self::EmptyFrame,
        Self::OneByte,
        Self::HeaderInPieces,
        Self::ZeroLength,
        Self::OnlyWritable,
        Self::WritableToo,
        Self::TooLong,
        Self::TooLongInPieces,
    ];

    /// True if the chain itself is valid and the fault is in the header before the frame.
    #[must_use]
    pub fn is_header_lie(self) -> bool {
        matches!(
            self,
            Self::GsoSizeZero
                | Self::GsoUnknown
                | Self::GsoWithoutCsum
                | Self::GsoUdpEcn
                | Self::CsumStartPastEnd
                | Self::CsumOffsetPastEnd
                | Self::CsumWraps
                | Self::CsumInEthernet
                | Self::CsumInNetwork
                | Self::CsumInPorts
        )
    }

    /// The header for a frame of [`FRAME_SIZE`] bytes: correct, unless the fault is in it.
    pub(super) fn header(self) -> RawNetHeader {
        let csum = RawNetHeader {
            flags: HDR_F_NEEDS_CSUM,
            hdr_len: 54.into(),
            csum_start: 34.into(),
            csum_offset: 16.into(),
            ..RawNetHeader::default()
        };
        let gso = RawNetHeader { gso_type: HDR_GSO_TCPV4, gso_size: 10.into(), ..csum };
        let end = u16::try_from(FRAME_SIZE).unwrap_or(0);
        match self {
            Self::HdrLenPastEnd => RawNetHeader { hdr_len: (end + 1).into(), ..gso },
            Self::GsoSizeZero => RawNetHeader { gso_size: 0.into(), ..gso },
            Self::GsoUnknown => RawNetHeader { gso_type: 0x7f, ..gso },
            Self::GsoWithoutCsum => RawNetHeader { flags: 0, ..gso },
            Self::GsoUdpEcn => RawNetHeader { gso_type: HDR_GSO_UDP_L4 | 0x80, ..gso },
            Self::CsumStartPastEnd => RawNetHeader { csum_start: end.into(), ..csum },
            Self::CsumOffsetPastEnd => RawNetHeader { csum_offset: (end - 34 - 1).into(), ..csum },
            Self::CsumWraps => {
                RawNetHeader { csum_start: u16::MAX.into(), csum_offset: u16::MAX.into(), ..csum }
            }
            Self::CsumInEthernet => RawNetHeader { csum_start: 10.into(), ..csum },
            Self::CsumInNetwork => RawNetHeader { csum_start: 16.into(), ..csum },
            Self::CsumInPorts => RawNetHeader { csum_offset: 2.into(), ..csum },
            _ => RawNetHeader::default(),
        }
    }
}
