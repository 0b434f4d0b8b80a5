//! Reads received bytes as a receiver does: their VLAN, their senders, and a finished checksum.

use crate::sent::TAGS;
use manyring_backend::net::switch::{PortOptions, Vlans};
use manyring_wire::net::RawNetHeader;

pub(crate) fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The VLAN of a frame on a port; `None`: it does not belong there.
pub(crate) fn vlan(options: &PortOptions, bytes: &[u8]) -> Option<u16> {
    let tag = (word(bytes, 12) == Some(0x8100)).then(|| word(bytes, 14)).flatten();
    let named = tag.map_or(0, |tci| tci & 0xfff);
    match &options.vlans {
        Vlans::All => Some(named),
        Vlans::Access(own) => Some(*own),
        Vlans::Trunk(vlans) => vlans.contains(&named).then_some(named),
    }
}

/// Every link-layer address that some receiver takes for the sender's.
pub(crate) fn senders(bytes: &[u8]) -> Vec<[u8; 6]> {
    let address = |bytes: &[u8], at: usize| Some(*bytes.get(at..)?.first_chunk::<6>()?);
    let mut all = vec![address(bytes, 6).unwrap()];
    let mut at = 12;
    while word(bytes, at).is_some_and(|kind| TAGS.contains(&kind)) {
        at += 4;
    }
    let (Some(kind), Some(packet)) = (word(bytes, at), bytes.get(at + 2..)) else { return all };
    match kind {
        0x0806 | 0x8035 => all.extend(address(packet, 8)),
        0..0x600 if packet.len() > 3 && packet[..2].iter().any(|point| point & 0xfe == 0xaa) => {
            if matches!(word(packet, 6), Some(0x0806 | 0x8035)) {
                all.extend(address(packet, 16));
            }
        }
        0..0x600 if packet.len() > 3 && packet[..2].iter().any(|point| point & 0xfe == 0x98) => {
            all.extend(address(packet, 11));
        }
        0x86dd => all.extend(neighbours(packet)),
        _ => {}
    }
    all
}

/// The link-layer addresses of a message of neighbour discovery, behind any extension headers.
pub(crate) fn neighbours(packet: &[u8]) -> Vec<[u8; 6]> {
    let (Some(len), Some(mut next)) = (word(packet, 4), packet.get(6).copied()) else {
        return Vec::new();
    };
    let is_jumbo = len == 0 && next == 0;
    let end = if is_jumbo { packet.len() } else { packet.len().min(40 + usize::from(len)) };
    let (packet, mut at) = (&packet[..end], 40);
    while next != 58 {
        let [following, units, ..] = packet.get(at..).unwrap_or_default() else {
            return Vec::new();
        };
        at += match next {
            0 | 43 | 60 | 135 | 139 | 140 => (usize::from(*units) + 1) * 8,
            51 => (usize::from(*units) + 2) * 4,
            44 if word(packet, at + 2).is_some_and(|offset| offset & !7 == 0) => 8,
            _ => return Vec::new(),
        };
        next = *following;
    }
    let message = packet.get(at..).unwrap_or_default();
    let Some(kind @ 133..=137) = message.first().copied() else { return Vec::new() };
    let mut options =
        message.get([8, 16, 24, 24, 40][usize::from(kind) - 133]..).unwrap_or_default();
    let mut all = Vec::new();
    while let [option, units, a, b, c, d, e, f, ..] = *options {
        if option == 1 || (option == 2 && kind == 136) {
            all.push([a, b, c, d, e, f]);
        }
        let size = usize::from(units) * 8;
        if size == 0 || size > options.len() {
            break;
        }
        options = &options[size..];
    }
    all
}

/// The frame as a receiver finishes it that takes open checksums.
pub(crate) fn finished(header: &RawNetHeader, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let start = usize::from(header.csum_start.get());
    let at = start + usize::from(header.csum_offset.get());
    if header.flags & 1 == 0 || at + 2 > bytes.len() {
        return bytes;
    }
    let pair = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = bytes[start..].chunks(2).map(pair).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    bytes[at..at + 2].copy_from_slice(&(!u16::try_from(sum).unwrap()).to_be_bytes());
    bytes
}
