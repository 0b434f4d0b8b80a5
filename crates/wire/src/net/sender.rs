//! `is_own`: whether a frame names its port's own address as its only sender.

use super::flow::{ETHERNET, IPV6, VLAN_TAG};
use super::place::extension_size;
use super::{PLACE_BYTES, TYPES_TAG};

/// Bytes of an Ethernet header with a VLAN tag.
const TAGGED: usize = ETHERNET + VLAN_TAG;
const TYPE_VLAN: u16 = 0x8100;
const TYPE_ARP: u16 = 0x0806;
const TYPE_RARP: u16 = 0x8035;
const TYPE_IPV6: u16 = 0x86dd;
/// An EtherType is at least this. A smaller number is the length of an IEEE 802.3 frame, which
/// begins with two service access points (802.2).
const TYPE_MIN: u16 = 0x600;
/// Service access points of frames that may be ARP: SNAP, behind which an EtherType follows (RFC
/// 1042), and ARP's own. The lowest bit is not part of the number: it marks groups and responses.
const ACCESS_POINTS_OF_ARP: [u8; 2] = [0xaa, 0x98];
/// Offset of the sender's address in an ARP packet.
const ARP_SENDER: usize = 8;
const ICMPV6: u8 = 58;
const FRAGMENT: u8 = 44;
/// Types of neighbour discovery messages (RFC 4861): the first and the last. `OPTIONS_AT`: the
/// offset of the options in each.
const ROUTER_SOLICITATION: u8 = 133;
const REDIRECT: u8 = 137;
const OPTIONS_AT: [usize; 5] = [8, 16, 24, 24, 40];
/// Options with the link-layer address of the sender, and of the target.
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Most bytes of a frame that [`is_own`] examines.
pub const LOOK_MAX: usize = PLACE_BYTES;

/// True if the packet behind the Ethernet header may name a sender too, so that [`is_own`] must
/// look.
#[must_use]
pub fn needs_look(head: &[u8]) -> bool {
    let at = if is_tagged(head) { TAGGED } else { ETHERNET };
    match kind(head, at - 2) {
        Some(TYPE_ARP | TYPE_RARP | TYPE_IPV6) | None => true,
        Some(kind) => kind < TYPE_MIN || TYPES_TAG.contains(&kind),
    }
}

/// True if a frame names no other sender than `mac`: in its Ethernet header, in ARP and RARP, and
/// in the options of neighbour discovery. `head` has the first [`LOOK_MAX`] bytes of the frame.
/// False also for a message of neighbour discovery whose options do not all lie in `head`.
#[must_use]
pub fn is_own(head: &[u8], mac: [u8; 6]) -> bool {
    if head.get(6..12) != Some(&mac) {
        return false;
    }
    let at = if is_tagged(head) { TAGGED } else { ETHERNET };
    let packet = head.get(at..).unwrap_or(&[]);
    match kind(head, at - 2) {
        Some(TYPE_ARP | TYPE_RARP) => packet.get(ARP_SENDER..ARP_SENDER + 6) == Some(&mac),
        Some(TYPE_IPV6) => discovers_as(packet, mac),
        // A second tag, or one of another kind, would hide the packet behind it from this check.
        // Linux strips a service tag without a VLAN as it strips a priority tag.
        Some(kind) if TYPES_TAG.contains(&kind) => false,
        // A frame of IEEE 802.3 could hide ARP as well.
        Some(kind) => kind >= TYPE_MIN || !may_be_arp(packet),
        None => false,
    }
}

/// True if the payload of an IEEE 802.3 frame may be ARP, or is too short to tell.
fn may_be_arp(payload: &[u8]) -> bool {
    let Some(points) = payload.first_chunk::<2>() else { return true };
    points.iter().any(|point| ACCESS_POINTS_OF_ARP.contains(&(point & 0xfe)))
}

/// True if an IPv6 packet is no message of neighbour discovery, or names only `mac` as an address.
///
/// Neighbour discovery has no extension headers that a sender would need, and no fragments (RFC
/// 6980). Receivers take it behind extension headers all the same, so such a message is refused,
/// and so is a packet whose extension headers go beyond `packet`, or beyond its own length: what
/// follows that length in a frame is padding, which the receivers drop.
fn discovers_as(packet: &[u8], mac: [u8; 6]) -> bool {
    let Some(ip) = packet.first_chunk::<IPV6>() else { return false };
    let len = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
    let packet = packet.get(..IPV6 + len).unwrap_or(packet);
    let (mut next, mut at) = (ip[6], IPV6);
    loop {
        let following;
        match next {
            ICMPV6 => break,
            FRAGMENT => {
                let Some(offset) = kind(packet, at + 2) else { return false };
                if offset & !7 != 0 {
                    return true;
                }
                following = at + 8;
            }
            // An encrypted payload (50) concerns only its two ends.
            kind => match extension_size(kind, packet.get(at + 1).copied()) {
                Some(Some(size)) => following = at + size,
                Some(None) => return false,
                None => return true,
            },
        }
        let Some(kind) = packet.get(at) else { return false };
        (next, at) = (*kind, following);
    }
    let Some(message) = packet.get(at..) else { return false };
    let Some(kind) = message.first().copied() else { return false };
    if !(ROUTER_SOLICITATION..=REDIRECT).contains(&kind) {
        return true;
    }
    if at != IPV6 {
        return false;
    }
    let options_at = OPTIONS_AT[usize::from(kind - ROUTER_SOLICITATION)];
    let Some(mut options) = message.get(options_at..len) else { return false };
    while let [option, units, rest @ ..] = options {
        let size = usize::from(*units) * 8;
        if size == 0 || size > options.len() {
            return false;
        }
        let names_sender =
            *option == SOURCE_LINK || (*option == TARGET_LINK && kind == NEIGHBOUR_ADVERTISEMENT);
        if names_sender && rest.get(..6) != Some(&mac) {
            return false;
        }
        options = &options[size..];
    }
    options.is_empty()
}

/// True if the frame that begins with `head` has a VLAN tag and all of the tag lies in `head`.
fn is_tagged(head: &[u8]) -> bool {
    kind(head, ETHERNET - 2) == Some(TYPE_VLAN) && head.len() >= ETHERNET + 2
}

/// The big-endian number in the two bytes at offset `at`.
fn kind(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?.try_into().ok()?;
    Some(u16::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn ethernet(from: [u8; 6], kind: u16) -> Vec<u8> {
        [&[0xff; 6][..], &from, &kind.to_be_bytes()].concat()
    }

    fn arp(sender: [u8; 6]) -> Vec<u8> {
        let mut frame = ethernet(OWN, TYPE_ARP);
        frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(sender);
        frame.extend([0; 14]);
        frame
    }

    fn discovery(kind: u8, option: &[u8]) -> Vec<u8> {
        let mut frame = ethernet(OWN, TYPE_IPV6);
        let size = 24 + option.len();
        frame.extend([0x60, 0, 0, 0, 0, u8::try_from(size).unwrap(), ICMPV6, 255]);
        frame.extend([0xfe; 32]);
        frame.push(kind);
        frame.extend([0; 23]);
        frame.extend(option);
        frame
    }

    #[test]
    fn padding_behind_a_packet_is_not_read_as_its_headers() {
        // The first fragment ends within a header of 16 bytes with options: what follows that
        // header comes in the second fragment, whatever lies in the padding of the first.
        let mut first = ethernet(OWN, TYPE_IPV6);
        first.extend([0x60, 0, 0, 0, 0, 16, FRAGMENT, 255]);
        first.extend([0xfe; 32]);
        first.extend([60, 0, 0, 1, 0, 0, 0, 7]);
        first.extend([ICMPV6, 1, 1, 12, 0, 0, 0, 0]);
        assert!(!is_own(&first, OWN));
        first.extend([0; 8]);
        first.extend([128, 0, 0, 0, 0, 0, 0, 0]);
        assert!(!is_own(&first, OWN), "a fragment with padding");
        first[19] = 32;
        assert!(is_own(&first, OWN), "all of these bytes are the fragment's");
        // A message without a byte of its own, and one in a packet of no bytes.
        let mut none = discovery(128, &[]);
        none[19] = 0;
        assert!(!is_own(&none, OWN));
        none[20] = 0;
        assert!(!is_own(&none, OWN));
        // Other protocols pass, also without a byte behind the header of IPv6.
        for protocol in [6, 17, 50, 59] {
            none[20] = protocol;
            assert!(is_own(&none, OWN) && is_own(&none[..ETHERNET + IPV6], OWN), "{protocol}");
            assert!(!is_own(&none[..ETHERNET + 6], OWN), "no whole header");
        }
    }

    #[test]
    fn who_says_that_it_is_somebody_else_is_found_in_every_place() {
        assert!(is_own(&ethernet(OWN, 0x0800), OWN) && !is_own(&ethernet(OTHER, 0x0800), OWN));
        assert!(is_own(&arp(OWN), OWN) && !is_own(&arp(OTHER), OWN));
        assert!(!is_own(&arp(OWN)[..20], OWN), "an ARP packet that is cut short");
        let option = |kind: u8, mac: [u8; 6]| [&[kind, 1][..], &mac].concat();
        for (message, link, from, is_right) in [
            (135, SOURCE_LINK, OWN, true),
            (135, SOURCE_LINK, OTHER, false),
            (136, TARGET_LINK, OWN, true),
            (136, TARGET_LINK, OTHER, false),
            (129, TARGET_LINK, OTHER, true),
        ] {
            let frame = discovery(message, &option(link, from));
            assert_eq!(is_own(&frame, OWN), is_right, "{message} {link}");
        }
        let mut endless = discovery(135, &option(14, OWN));
        let at = endless.len() - 7;
        endless[at] = 0;
        assert!(!is_own(&endless, OWN), "an option of no bytes");
        for (extension, bytes) in [
            (0, [0, 1, 4, 0, 0, 0, 0]),
            (43, [0; 7]),
            (60, [0, 1, 4, 0, 0, 0, 0]),
            (135, [0; 7]),
            (139, [0; 7]),
            (140, [0; 7]),
            // An authentication header of eight bytes: two words are not counted.
            (51, [0; 7]),
            (FRAGMENT, [0, 0, 0, 0, 0, 0, 1]),
        ] {
            let mut behind = discovery(135, &option(SOURCE_LINK, OWN));
            behind[20] = extension;
            behind.splice(54..54, [&[ICMPV6][..], &bytes].concat());
            assert!(!is_own(&behind, OWN), "behind extension header {extension}");
            // Other messages pass behind it, and what follows a chain that does not end does not.
            behind[62] = 128;
            assert!(is_own(&behind, OWN), "an echo behind {extension}");
            if ![51, FRAGMENT].contains(&extension) {
                behind[55] = 31;
                assert!(!is_own(&behind[..behind.len().min(LOOK_MAX)], OWN), "{extension}");
            }
        }
        let double = [&ethernet(OWN, TYPE_VLAN)[..], &[0, 5, 0x81, 0, 0, 6, 8, 6]].concat();
        assert!(needs_look(&double[..14]) && !is_own(&double, OWN), "a second tag");
        for tag in [0x88a8, 0x9100, 0x9200, 0x9300] {
            let service = [&ethernet(OWN, tag)[..], &[0, 0], &arp(OTHER)[12..]].concat();
            assert!(needs_look(&service[..14]) && !is_own(&service, OWN), "{tag:x}");
            let inner = [&ethernet(OWN, TYPE_VLAN)[..], &[0, 5], &service[12..]].concat();
            assert!(needs_look(&inner[..14]) && !is_own(&inner, OWN), "{tag:x} behind another");
        }
        let length = u16::try_from(arp(OTHER).len() - 6).unwrap();
        for points in [[0xaa, 0xaa], [0xaa, 0xab], [0xab, 0xaa], [0xaa, 0], [0, 0xab], [0x98, 0x98]]
        {
            let start = [&ethernet(OWN, length)[..], &points].concat();
            let snap = [&start[..], &[3, 0, 0, 0], &arp(OTHER)[12..]].concat();
            assert!(needs_look(&snap[..14]) && !is_own(&snap, OWN), "ARP behind {points:x?}");
        }
        assert!(!is_own(&ethernet(OWN, 1), OWN), "IEEE 802.3 without a whole 802.2 header");
        // Frames of the spanning tree protocol have a length in the place of a type as well.
        let tree = [&ethernet(OWN, 38)[..], &[0x42, 0x42, 3], &[0; 35]].concat();
        assert!(needs_look(&tree[..14]) && is_own(&tree, OWN), "IEEE 802.2 without SNAP");
    }
}
