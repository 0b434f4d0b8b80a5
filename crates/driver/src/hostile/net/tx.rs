//! How a frame that a driver sends can be wrong: headers that lie, chains that are no frame.

use super::FRAME_SIZE;
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_TCPV4, HDR_GSO_UDP_L4, RawNetHeader};

/// One way for a frame that a driver sends to be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TxSpoil {
    /// Headers longer than the frame.
    HdrLenPastEnd,
    /// Segments of 0 bytes.
    GsoSizeZero,
    /// A segmentation type that there is not.
    GsoUnknown,
    /// Segmentation without a partial checksum.
    GsoWithoutCsum,
    /// ECN said of UDP.
    GsoUdpEcn,
    /// A checksum that begins past the end.
    CsumStartPastEnd,
    /// A checksum that goes past the end.
    CsumOffsetPastEnd,
    /// A checksum whose place is more than 16 bits away.
    CsumWraps,
    /// A checksum in the Ethernet header.
    CsumInEthernet,
    /// A checksum in the IP header.
    CsumInNetwork,
    /// A checksum in the ports of TCP.
    CsumInPorts,
    /// A chain of one descriptor of 11 bytes.
    ShortHeader,
    /// A chain of one descriptor: a header and no frame.
    HeaderAlone,
    /// A header and a descriptor of no bytes.
    EmptyFrame,
    /// A frame of one byte.
    OneByte,
    /// A header in pieces of one byte.
    HeaderInPieces,
    /// A chain of one descriptor of no bytes.
    ZeroLength,
    /// A chain with nothing the device may read.
    OnlyWritable,
    /// A frame, and something the device may write.
    WritableToo,
    /// A frame of 70 KiB in one descriptor.
    TooLong,
    /// A frame of 70 KiB in four.
    TooLongInPieces,
}

impl TxSpoil {
    /// Every way.
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

    /// True if the chain is in order and the header before the frame lies.
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

    /// The header: of a frame of [`FRAME_SIZE`] bytes, and right unless it is to lie.
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
