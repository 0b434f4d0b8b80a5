//! Frames with a partial checksum in every place: which of them a driver may send.

use super::super::{HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4};
use super::*;

const ICMPV6: u8 = 58;
const SCTP: u8 = 132;
const GRE: u8 = 47;
const ARP: u16 = 0x0806;

fn ethernet(tags: &[u16], kind: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    for tag in tags {
        frame.extend([&tag.to_be_bytes()[..], &[0, 5]].concat());
    }
    frame.extend(kind.to_be_bytes());
    frame.extend(packet);
    frame.resize(frame.len() + 60, 7);
    frame
}

fn ipv4(options: u8, protocol: u8) -> Vec<u8> {
    let mut ip = vec![0x45 + options, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0];
    ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    ip.resize(ip.len() + usize::from(options) * 4, 1);
    ip
}

/// IPv6 with these extension headers: the number of each, and all its bytes but the first.
fn ipv6(extensions: &[(u8, &[u8])], protocol: u8) -> Vec<u8> {
    let next = |n: usize| extensions.get(n).map_or(protocol, |extension| extension.0);
    let mut ip = vec![0x60, 0, 0, 0, 0, 0, next(0), 64];
    ip.extend([0xfd; 32]);
    for (n, (_, bytes)) in extensions.iter().enumerate() {
        ip.push(next(n + 1));
        ip.extend(*bytes);
    }
    ip
}

fn csum(start: usize, offset: u16) -> RawNetHeader {
    let csum_start = u16::try_from(start).unwrap().into();
    let flags = HDR_F_NEEDS_CSUM;
    RawNetHeader { flags, csum_start, csum_offset: offset.into(), ..RawNetHeader::default() }
}

/// The first place at which this frame may have a checksum whose offset is `offset`.
fn first(frame: &[u8], offset: u16) -> Option<usize> {
    let start = &frame[..frame.len().min(PLACE_BYTES)];
    (0..700).find(|at| csum(*at, offset).is_in_place(start))
}

#[test]
fn a_checksum_lies_behind_ethernet_all_tags_and_ip() {
    for tags in [&[][..], &[0x8100], &[0x88a8, 0x8100], &[0x9100], &[0x9200, 0x9300]] {
        let l3 = 14 + tags.len() * 4;
        for options in [0, 1, 10] {
            let frame = ethernet(tags, TYPE_IPV4, &ipv4(options, TCP));
            assert_eq!(first(&frame, 16), Some(l3 + 20 + usize::from(options) * 4), "{tags:?}");
        }
        let frame = ethernet(tags, TYPE_IPV6, &ipv6(&[], UDP));
        assert_eq!(first(&frame, 6), Some(l3 + 40), "{tags:?}");
    }
}

#[test]
fn what_is_no_ip_is_cut_short_or_is_a_fragment_has_no_place() {
    let (four, six) = (ipv4(0, TCP), ipv6(&[], TCP));
    for kind in [ARP, 0x8035, 0x88b5, 0x8847, 0x8864, 0x0040, 0x0026] {
        for packet in [&four, &six] {
            let frame = ethernet(&[], kind, packet);
            assert_eq!((first(&frame, 0), first(&frame, 16)), (None, None), "{kind:x}");
        }
    }
    for (kind, packet, len) in [(TYPE_IPV4, &four, 20), (TYPE_IPV6, &six, 40)] {
        let frame = ethernet(&[], kind, packet);
        for cut in 0..14 + len {
            assert_eq!(first(&frame[..cut], 16), None, "{kind:x} {cut}");
        }
        assert_eq!(first(&frame[..14 + len], 16), Some(14 + len));
        let other = ethernet(&[], TYPE_IPV4 ^ TYPE_IPV6 ^ kind, packet);
        assert_eq!(first(&other, 16), None, "a packet of the other version");
    }
    let mut short = four.clone();
    short[0] = 0x44;
    assert_eq!(first(&ethernet(&[], TYPE_IPV4, &short), 16), None, "no whole header");
    for bits in [1u16, 0x2000, 0x1fff] {
        let mut part = four.clone();
        part[6..8].copy_from_slice(&bits.to_be_bytes());
        assert_eq!(first(&ethernet(&[], TYPE_IPV4, &part), 16), None, "{bits:x}");
    }
    assert_eq!(first(&ethernet(&[0x8100; 40], TYPE_IPV4, &four), 16), None, "tags without an end");
}

#[test]
fn extension_headers_are_passed_by_and_begin_within_what_is_known() {
    let options = [0, 1, 4, 0, 0, 0, 0];
    let long = [&[1][..], &[0; 14]].concat();
    let whole = [0, 0, 0, 0, 0, 0, 9];
    for (extensions, size) in [
        (&[(0, &options[..])][..], 8),
        (&[(0, &options[..]), (43, &long), (60, &options)], 32),
        (&[(FRAGMENT, &whole)], 8),
        (&[(135, &options)], 8),
        (&[(139, &long)], 16),
        (&[(140, &options)], 8),
        // The length of an authentication header counts in words of four bytes, and two are free.
        (&[(51, &[&[4][..], &[0; 22]].concat())], 24),
    ] {
        let frame = ethernet(&[], TYPE_IPV6, &ipv6(extensions, TCP));
        assert_eq!(first(&frame, 16), Some(54 + size), "{extensions:?}");
    }
    for bits in [8u16, 1, 0xfff8] {
        let [high, low] = bits.to_be_bytes();
        let part = [(FRAGMENT, &[0, high, low, 0, 0, 0, 9][..])];
        assert_eq!(first(&ethernet(&[], TYPE_IPV6, &ipv6(&part, TCP)), 16), None, "{bits:x}");
    }
    // Only its length must be known of the last one, and not what follows it.
    let long = [&[30][..], &[0; 246]].concat();
    let far = [(60, &long[..]); 2];
    assert_eq!(first(&ethernet(&[], TYPE_IPV6, &ipv6(&far[..1], TCP)), 16), Some(54 + 248));
    assert_eq!(first(&ethernet(&[], TYPE_IPV6, &ipv6(&far, TCP)), 16), None);
}

#[test]
fn a_known_protocol_has_its_own_place_and_ports_and_types_stay() {
    for (protocol, offset) in [(TCP, 16), (UDP, 6), (1, 2), (2, 2), (33, 6), (SCTP, 8), (136, 6)] {
        let frame = ethernet(&[], TYPE_IPV4, &ipv4(0, protocol));
        for at in 0..40 {
            let is_in_place = csum(34, at).is_in_place(&frame);
            assert_eq!(is_in_place, at == offset, "{protocol}: {at}");
        }
    }
    let discovery = ethernet(&[], TYPE_IPV6, &ipv6(&[], ICMPV6));
    assert!(csum(54, 2).is_in_place(&discovery));
    assert!((0..100).all(|at| at == 2 || !csum(54, at).is_in_place(&discovery)), "its options");
    assert!((55..150).all(|at| !csum(at, 2).is_in_place(&discovery)), "its options");
}

#[test]
fn a_tunnels_checksum_lies_in_the_packet_that_it_carries() {
    // VXLAN: UDP, 8 bytes, Ethernet, IPv4, TCP.
    let vxlan = ethernet(&[], TYPE_IPV4, &ipv4(0, UDP));
    assert!(csum(34 + 8 + 8 + 14 + 20, 16).is_in_place(&vxlan));
    assert!(!csum(41, 16).is_in_place(&vxlan), "in the header of UDP");
    for (protocol, size) in [(GRE, 4), (4, 0), (41, 0), (115, 8)] {
        let frame = ethernet(&[], TYPE_IPV4, &ipv4(0, protocol));
        assert!(csum(34 + size + 20, 16).is_in_place(&frame), "{protocol}");
        assert!(!csum(33, 16).is_in_place(&frame), "{protocol}");
    }
    let over_sctp = ethernet(&[], TYPE_IPV6, &ipv6(&[], SCTP));
    assert!(csum(54 + 12, 0).is_in_place(&over_sctp) && !csum(54 + 11, 0).is_in_place(&over_sctp));
}

#[test]
fn segments_are_of_tcp_or_udp_as_their_type_says() {
    let frames = [
        (HDR_GSO_TCPV4, 34, 16, ethernet(&[], TYPE_IPV4, &ipv4(0, TCP))),
        (HDR_GSO_TCPV6, 54, 16, ethernet(&[], TYPE_IPV6, &ipv6(&[], TCP))),
        (HDR_GSO_UDP_L4, 34, 6, ethernet(&[], TYPE_IPV4, &ipv4(0, UDP))),
        (HDR_GSO_UDP_L4, 54, 6, ethernet(&[], TYPE_IPV6, &ipv6(&[], UDP))),
    ];
    for (right, start, offset, frame) in &frames {
        for gso_type in [HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4] {
            let header = RawNetHeader { gso_type, ..csum(*start, *offset) };
            assert_eq!(header.is_in_place(frame), gso_type == *right, "{gso_type} {right}");
        }
        let with_ecn = RawNetHeader { gso_type: right | HDR_GSO_ECN, ..csum(*start, *offset) };
        assert!(with_ecn.is_in_place(frame));
        let inner = RawNetHeader { gso_type: *right, ..csum(start + 30, *offset) };
        assert!(!inner.is_in_place(frame), "segments of a tunnel are not offered");
    }
}

#[test]
fn a_finished_frame_needs_no_place() {
    let header = RawNetHeader { flags: 2, csum_start: 3.into(), ..RawNetHeader::default() };
    assert!(header.is_in_place(&[]) && header.is_in_place(&ethernet(&[], ARP, &[])));
}

#[test]
fn a_usual_place_is_a_right_one_and_is_that_of_tcp_and_udp_behind_ethernet_and_ip() {
    let mut usual = Vec::new();
    for protocol in [TCP, UDP, 0, 1, FRAGMENT, GRE, ICMPV6, SCTP, 136] {
        let mut part = ipv4(0, protocol);
        part[6] = 0x20;
        let packets = [(TYPE_IPV4, ipv4(0, protocol)), (TYPE_IPV4, ipv4(1, protocol))];
        let others = [(TYPE_IPV4, part), (TYPE_IPV6, ipv6(&[], protocol)), (ARP, vec![0; 40])];
        for (kind, packet) in packets.into_iter().chain(others) {
            for tags in [&[][..], &[0x8100]] {
                let frame = ethernet(tags, kind, &packet);
                let start = frame.first_chunk().unwrap();
                for (at, offset) in (14..=60).flat_map(|at| (0..=20).map(move |n| (at, n))) {
                    for gso_type in [0, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4, 0x81, 0x84] {
                        let header = RawNetHeader { gso_type, ..csum(at, offset) };
                        if header.is_in_usual_place(start) {
                            assert!(header.is_in_place(&frame), "{header:?} {frame:?}");
                            usual.push((kind, protocol, at, offset, gso_type));
                        }
                    }
                }
            }
        }
    }
    let expected = [
        (TYPE_IPV4, TCP, 34, 16, 0),
        (TYPE_IPV4, TCP, 34, 16, HDR_GSO_TCPV4),
        (TYPE_IPV4, TCP, 34, 16, 0x81),
        (TYPE_IPV6, TCP, 54, 16, 0),
        (TYPE_IPV6, TCP, 54, 16, HDR_GSO_TCPV6),
        (TYPE_IPV6, TCP, 54, 16, 0x84),
        (TYPE_IPV4, UDP, 34, 6, 0),
        (TYPE_IPV6, UDP, 54, 6, 0),
    ];
    assert_eq!(usual, expected);
}
