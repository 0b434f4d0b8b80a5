//! A numbered frame: UDP over IPv4 over Ethernet, whose payload says whose it is and is whole.

use crate::soak::random::{mix, stamp};
use std::net::Ipv4Addr;

/// The far end's port, and the guest's.
pub(super) const PORT: u16 = 7007;
/// Bytes of a payload: a multiple of 8, and no frame is longer than an MTU of 1500.
pub(super) const PAYLOAD_MIN: usize = 48;
pub(super) const PAYLOAD_MAX: usize = 1464;

/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
const MAGIC: u64 = 0x6d61_6e79_736f_616b;

/// The far end's address on the network of a guest; the guest's has 2 at its end.
pub(in crate::soak) fn far_address(guest: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, guest, 1)
}

/// A guest's address.
pub(in crate::soak) fn address(guest: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, guest, 2)
}

/// A guest's MAC address.
pub(in crate::soak) fn mac(guest: u8) -> [u8; 6] {
    [2, 0, 0, 0x77, 0, guest]
}

/// The MAC address of the far end of a guest's cable.
pub(in crate::soak) fn far_mac(guest: u8) -> [u8; 6] {
    [2, 0, 0, 0x77, 1, guest]
}

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the guest to the far end.
    Out,
    /// Back.
    Back,
}

/// The fields of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Note {
    pub(super) guest: u8,
    pub(super) way: Way,
    pub(super) number: u64,
}

impl Note {
    /// A payload of `len` bytes, cut to what a payload may have.
    pub(super) fn payload(self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.clamp(PAYLOAD_MIN, PAYLOAD_MAX) / 8 * 8];
        stamp(&mut bytes, self.owner(), self.number, 0);
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.owner().to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        let len = bytes.len();
        bytes[24..32].copy_from_slice(&(len as u64).to_le_bytes());
        let end = len - 8;
        let sum = checksum(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a payload back. None: a byte of it is wrong, or it is nobody's.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let owner = word(8)?;
        let way = if owner & 1 == 0 { Way::Out } else { Way::Back };
        let note = Self { guest: u8::try_from(owner >> 1).ok()?, way, number: word(16)? };
        (bytes == note.payload(bytes.len())).then_some(note)
    }

    fn owner(self) -> u64 {
        u64::from(self.guest) << 1 | u64::from(self.way == Way::Back)
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(MAGIC, |sum, word| mix(sum ^ u64::from_le_bytes(*word)))
}

/// A frame of the guest to its far end. The UDP checksum is left out: a wrong byte must arrive, so
/// that it is seen.
pub(super) fn frame(guest: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADERS + payload.len());
    bytes.extend(far_mac(guest));
    bytes.extend(mac(guest));
    bytes.extend([8, 0]);
    let udp_len = length(8 + payload.len());
    let mut ip = [0; 20];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&length(28 + payload.len()).to_be_bytes());
    ip[6] = 0x40;
    ip[8] = 64;
    ip[9] = 17;
    ip[12..16].copy_from_slice(&address(guest).octets());
    ip[16..20].copy_from_slice(&far_address(guest).octets());
    let sum = header_checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes.extend(ip);
    bytes.extend(PORT.to_be_bytes());
    bytes.extend(PORT.to_be_bytes());
    bytes.extend(udp_len.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}

/// The kind of a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received<'a> {
    /// UDP from the far end to this guest.
    Payload(&'a [u8]),
    /// To everybody, or another protocol of the host's.
    Other,
    /// A frame for another guest.
    Foreign,
}

/// Looks at the headers of a frame that the guest received.
pub(super) fn received(guest: u8, frame: &[u8]) -> Received<'_> {
    let (Some(to), Some(kind)) = (frame.get(..6), frame.get(12..14)) else {
        return Received::Foreign;
    };
    if to != mac(guest) {
        return if to[0] & 1 == 1 { Received::Other } else { Received::Foreign };
    }
    if kind != [8, 0] || frame.get(23) != Some(&17) {
        return Received::Other;
    }
    let is_ours = frame.get(26..30) == Some(&far_address(guest).octets())
        && frame.get(30..34) == Some(&address(guest).octets());
    match frame.get(HEADERS..) {
        Some(payload) if is_ours => Received::Payload(payload),
        _ => Received::Foreign,
    }
}

fn length(len: usize) -> u16 {
    u16::try_from(len).unwrap_or(u16::MAX)
}

/// The checksum of an IPv4 header whose own field is 0.
fn header_checksum(header: &[u8; 20]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTE: Note = Note { guest: 3, way: Way::Back, number: 77 };

    #[test]
    fn a_payload_with_any_wrong_byte_is_nobodys() {
        let mut payload = NOTE.payload(100);
        assert_eq!(payload.len(), 96);
        assert_eq!(Note::parse(&payload), Some(NOTE));
        for at in 0..payload.len() {
            payload[at] ^= 1;
            assert_ne!(Note::parse(&payload), Some(NOTE), "byte {at}");
            payload[at] ^= 1;
        }
        assert_eq!(Note::parse(&payload[..88]), None);
        assert_eq!(Note::parse(&[]), None);
    }

    #[test]
    fn a_frame_is_told_from_those_of_others_by_its_addresses() {
        let payload = NOTE.payload(64);
        let mut frame = frame(3, &payload);
        assert_eq!(received(3, &frame), Received::Foreign, "it is for the far end");
        frame[..6].copy_from_slice(&mac(3));
        assert_eq!(received(3, &frame), Received::Foreign, "its addresses are the wrong way round");
        frame[26..30].copy_from_slice(&far_address(3).octets());
        frame[30..34].copy_from_slice(&address(3).octets());
        assert_eq!(received(3, &frame), Received::Payload(&payload));
        assert_eq!(received(4, &frame), Received::Foreign);
        frame[..6].copy_from_slice(&[255; 6]);
        assert_eq!(received(3, &frame), Received::Other);
    }

    #[test]
    fn the_checksum_of_a_header_is_the_one_of_rfc_1071() {
        let header = [
            0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0,
            0xc7,
        ];
        assert_eq!(header_checksum(&header), 0xb861);
    }
}
