//! The place of a partial checksum: behind all headers that a switch or a host has judged.
//!
//! ```text
//! Ethernet   tags, then IPv4 or IPv6: a frame of another type has no place for a checksum
//! IP         its options and extension headers; a part of a fragmented packet has no place
//! transport  one of `PROTOCOLS`: the checksum field of its own header; or, of UDP, UDP-Lite and
//!            SCTP, anywhere behind that header, since they may carry a packet.
//!            Another protocol (GRE, IP in IP): anywhere behind the IP headers
//! segments   TCP or UDP, as the type says
//! ```
//! A checksum is written late: by a switch for a receiver that takes no partial checksums, by the
//! host when the frame leaves it, or by a guest that forwards the frame. By then somebody has
//! decided about the frame by its VLAN, addresses and ports. So the checksum, and the fields that
//! number segments, must not lie in bytes that were decided on.
//!
//! For a tunnel of the guest (VXLAN, GRE, IP in IP) the checksum lies in the packet that it
//! carries.

use super::flow::{ETHERNET, IPV6, VLAN_TAG};
use super::{
    HDR_F_NEEDS_CSUM, HDR_GSO_ECN, HDR_GSO_NONE, HDR_GSO_TCPV4, HDR_GSO_TCPV6, RawNetHeader,
};

/// Most bytes of a frame that are examined. If a tag or the IP header does not lie in them, or an
/// extension header does not begin in them, the frame has no place for a checksum. The header with
/// the checksum may lie behind them.
pub const PLACE_BYTES: usize = 116;
/// EtherTypes of tags: of a customer, of a provider, and three older ones of providers.
pub const TYPES_TAG: [u16; 5] = [0x8100, 0x88a8, 0x9100, 0x9200, 0x9300];
const TYPE_IPV4: u16 = 0x0800;
const TYPE_IPV6: u16 = 0x86dd;
const IPV4: usize = 20;
/// Mask of an IPv4 header's flag "more fragments" and fragment offset. In IPv6 these are in header
/// 44.
const FRAGMENT_IPV4: u16 = 0x3fff;
const FRAGMENT_IPV6: u16 = 0xfff9;

const FRAGMENT: u8 = 44;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// For each protocol: its number, the offset of the checksum in its header, and the length of that
/// header. Length 0: the protocol carries no packet that could have the partial checksum.
const PROTOCOLS: [(u8, usize, usize); 8] = [
    (TCP, 16, 0),
    (UDP, 6, 8),
    // ICMP, IGMP, DCCP, ICMPv6, SCTP, UDP-Lite.
    (1, 2, 0),
    (2, 2, 0),
    (33, 6, 0),
    (58, 2, 0),
    (132, 8, 12),
    (136, 6, 8),
];

/// Bytes of a frame that [`RawNetHeader::is_in_usual_place`] examines.
pub const USUAL_BYTES: usize = 24;
/// Offset of TCP or UDP behind an Ethernet header and a plain IP header.
const BEHIND_IPV4: usize = ETHERNET + IPV4;
const BEHIND_IPV6: usize = ETHERNET + IPV6;

impl RawNetHeader {
    /// True if the partial checksum is that of TCP or UDP directly behind Ethernet and IP, as in
    /// nearly all frames. Then [`Self::is_in_place`] is true as well. If this is false, ask that.
    /// `start` are the first bytes of the frame.
    #[must_use]
    #[inline]
    pub fn is_in_usual_place(&self, start: &[u8; USUAL_BYTES]) -> bool {
        let kind = u16::from_be_bytes([start[ETHERNET - 2], start[ETHERNET - 1]]);
        let fragment = u16::from_be_bytes([start[ETHERNET + 6], start[ETHERNET + 7]]);
        let (transport, protocol, segments) = match (kind, start[ETHERNET]) {
            (TYPE_IPV4, 0x45) if fragment & FRAGMENT_IPV4 == 0 => {
                (BEHIND_IPV4, start[ETHERNET + 9], HDR_GSO_TCPV4)
            }
            (TYPE_IPV6, 0x60..=0x6f) => (BEHIND_IPV6, start[ETHERNET + 6], HDR_GSO_TCPV6),
            _ => return false,
        };
        let gso_type = self.gso_type & !HDR_GSO_ECN;
        let (offset, is_right) = match protocol {
            TCP => (16, gso_type == HDR_GSO_NONE || gso_type == segments),
            UDP => (6, gso_type == HDR_GSO_NONE),
            _ => return false,
        };
        let place = (usize::from(self.csum_start.get()), self.csum_offset.get());
        is_right && place == (transport, offset)
    }

    /// False if the frame has a partial checksum whose place may be examined by somebody before the
    /// checksum is written. `start` are the first bytes of the frame; [`PLACE_BYTES`] are enough.
    #[must_use]
    #[inline]
    pub fn is_in_place(&self, start: &[u8]) -> bool {
        self.flags & HDR_F_NEEDS_CSUM == 0 || self.has_place(start).is_some()
    }

    fn has_place(&self, start: &[u8]) -> Option<()> {
        let (network, kind) = behind_tags(start)?;
        let is_ipv4 = kind == TYPE_IPV4;
        let (transport, protocol) = match kind {
            TYPE_IPV4 => behind_ipv4(start, network)?,
            TYPE_IPV6 => behind_ipv6(start, network)?,
            _ => return None,
        };
        let first = usize::from(self.csum_start.get()).checked_sub(transport)?;
        let offset = usize::from(self.csum_offset.get());
        let known = PROTOCOLS.iter().find(|known| known.0 == protocol);
        let is_own = known.is_some_and(|(_, at, _)| (first, offset) == (0, *at));
        let is_right = match self.gso_type & !HDR_GSO_ECN {
            HDR_GSO_NONE => is_own || known.is_none_or(|(_, _, size)| *size != 0 && first >= *size),
            HDR_GSO_TCPV4 => is_own && protocol == TCP && is_ipv4,
            HDR_GSO_TCPV6 => is_own && protocol == TCP && !is_ipv4,
            _ => is_own && protocol == UDP,
        };
        is_right.then_some(())
    }
}

/// The offset of the packet behind all tags of a frame, and the packet's EtherType.
#[inline]
fn behind_tags(start: &[u8]) -> Option<(usize, u16)> {
    let mut at = ETHERNET;
    loop {
        let kind = word(start, at - 2)?;
        if !TYPES_TAG.contains(&kind) {
            return Some((at, kind));
        }
        at += VLAN_TAG;
    }
}

/// The offset of the data of an IPv4 packet, and its protocol. `None`: the packet is a fragment or
/// cut off.
#[inline]
fn behind_ipv4(start: &[u8], at: usize) -> Option<(usize, u8)> {
    let ip: &[u8; IPV4] = start.get(at..)?.first_chunk()?;
    let size = usize::from(ip[0] & 15) * 4;
    let is_whole = u16::from_be_bytes([ip[6], ip[7]]) & FRAGMENT_IPV4 == 0;
    (ip[0] >> 4 == 4 && size >= IPV4 && is_whole).then_some((at + size, ip[9]))
}

/// The offset of the data of an IPv6 packet behind its extension headers, and its protocol. `None`:
/// the packet is a fragment, or its headers do not end in `start`.
#[inline]
fn behind_ipv6(start: &[u8], at: usize) -> Option<(usize, u8)> {
    let ip: &[u8; IPV6] = start.get(at..)?.first_chunk()?;
    if ip[0] >> 4 != 6 {
        return None;
    }
    let (mut next, mut at) = (ip[6], at + IPV6);
    loop {
        let size = match (start.get(at..), next) {
            (Some([_, _, high, low, ..]), FRAGMENT) => {
                (u16::from_be_bytes([*high, *low]) & FRAGMENT_IPV6 == 0).then_some(8)?
            }
            (_, FRAGMENT) => return None,
            (rest, _) => match extension_size(next, rest.and_then(|rest| rest.get(1)).copied()) {
                Some(size) => size?,
                None => return Some((at, next)),
            },
        };
        next = *start.get(at)?;
        at += size;
    }
}

/// Bytes of the IPv6 extension header `kind`, whose second byte is `units`. `None`: `kind` is no
/// extension header. `Some(None)`: the length is unknown, because `units` is `None`.
///
/// All receivers read the header that follows hop-by-hop and destination options, routing and
/// authentication headers. Only some receivers read what follows mobility, host identity and shim6
/// headers: these count as extension headers too.
#[inline]
pub(super) fn extension_size(kind: u8, units: Option<u8>) -> Option<Option<usize>> {
    let units = units.map(usize::from);
    match kind {
        // Hop-by-hop options, routing, destination options, mobility, host identity, shim6.
        0 | 43 | 60 | 135 | 139 | 140 => Some(units.map(|units| (units + 1) * 8)),
        // Authentication.
        51 => Some(units.map(|units| (units + 2) * 4)),
        _ => None,
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> Option<u16> {
    let [high, low, ..] = bytes.get(at..)? else { return None };
    Some(u16::from_be_bytes([*high, *low]))
}

#[cfg(test)]
mod tests;
