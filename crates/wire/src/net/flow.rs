//! `flow`: one number for all frames of a flow, in both directions.
//!
//! A flow is what two ends (address and port) send to each other. A BPF program in the host's
//! kernel also looks up flows (`manyring-backend`, `net/tap/program.rs`). It must compute the same
//! number, step by step:
//! ```text
//! kind     the first 38 bytes: Ethernet, then IPv4 or IPv6; up to two times it is looked at again
//!          behind a VLAN tag (4 bytes) or a PPPoE session's headers (8 bytes)
//! ends     the two addresses, and the ports of TCP, UDP and SCTP, also behind up to two extension
//!          headers of IPv6 of at most 24 bytes each; a fragment has no ports; a frame without IP
//!          has its two Ethernet addresses
//! number   (mixed(end ^ key) + mixed(other end ^ key)) * MIX[0]: a sum is the same both ways
//! ```
//! The key is the tap's own, so that nobody can aim flows at one queue. The frame is not checked:
//! malformed frames get some number too, since the number only selects a queue.

/// Most bytes of a frame that are read: two PPPoE headers, IPv6 with two extension headers (an IPv4
/// header with all its options is shorter), and ports.
pub const FLOW_BYTES: usize =
    ETHERNET + LOOKS_BEHIND * PPPOE + IPV6 + EXTENSIONS_MAX * EXTENSION_SIZE_MAX + 4;
/// Bytes of the shortest frame that has a flow: up to the ports behind an IPv4 header.
pub const FLOW_BYTES_MIN: usize = 38;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Bytes of an IPv6 header.
pub const IPV6: usize = 40;
/// Bytes of a VLAN tag.
pub const VLAN_TAG: usize = 4;
/// Bytes between an Ethernet header and the packet of a PPPoE session (RFC 2516).
pub const PPPOE: usize = 8;
/// How many VLAN tags and PPPoE headers are skipped at most.
pub const LOOKS_BEHIND: usize = 2;
/// The protocol numbers of IPv4 in an Ethernet header and in a PPP header.
pub const TYPES_IPV4: [u16; 2] = [0x0800, 0x0021];
/// The protocol numbers of IPv6 in an Ethernet header and in a PPP header.
pub const TYPES_IPV6: [u16; 2] = [0x86dd, 0x0057];
/// The EtherTypes of a customer's and of a provider's VLAN tag.
pub const TYPES_VLAN: [u16; 2] = [0x8100, 0x88a8];
/// The EtherType of a PPPoE session.
pub const TYPE_PPPOE: u16 = 0x8864;
/// Protocol numbers of the IPv6 extension headers that are skipped: hop-by-hop options, routing
/// header, destination options (RFC 8200 section 4). Their second byte is their length in units of
/// 8 bytes, without the first 8. Fragment headers (44) are not skipped: all fragments of a packet
/// get the same flow only if the ports count for none of them.
pub const EXTENSIONS: [u8; 3] = [0, 43, 60];
/// How many extension headers are skipped at most.
pub const EXTENSIONS_MAX: usize = 2;
/// Largest length field of an extension header that is skipped.
pub const EXTENSION_UNITS_MAX: u8 = 2;
/// Bytes of an extension header with the largest length field.
const EXTENSION_SIZE_MAX: usize = (EXTENSION_UNITS_MAX as usize + 1) * 8;
/// Protocol numbers of TCP, UDP and SCTP, whose ports lie in the same place.
pub const PROTOCOLS_WITH_PORTS: [u8; 3] = [6, 17, 132];
/// Mask of an IPv4 header's "more fragments" flag and fragment offset: 0 if the packet is whole.
pub const FRAGMENT: u16 = 0x3fff;
/// Odd numbers whose products spread over all bits.
pub const MIX: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd6e8_feb8_6659_fd93];

/// The flow of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The number of the flow.
    pub number: u64,
    /// True if the number belongs to one connection. False for fragments, tunnels, echoes and
    /// frames without IP: several connections may share their number. The number may still select a
    /// queue, but the queue on which the guest sends such frames does not tell where answers
    /// belong.
    pub is_connection: bool,
}

/// The flow of the frame that begins with `start`; [`FLOW_BYTES`] bytes are enough. `None`: the
/// frame is too short.
#[must_use]
#[inline]
pub fn flow_of(start: &[u8], key: u64) -> Option<Flow> {
    let (window, at) = packet_of(start)?;
    let kind = word(window, ETHERNET - 2);
    let (ends, is_connection) = if TYPES_IPV4.contains(&kind) {
        let ends = [half(window, ETHERNET + 12), half(window, ETHERNET + 16)].map(u64::from);
        let is_whole = word(window, ETHERNET + 6) & FRAGMENT == 0;
        let header = usize::from(window[ETHERNET] & 0xf) * 4;
        let protocol = is_whole.then_some(window[ETHERNET + 9]);
        with_ports(start, ends, protocol, at + ETHERNET + header)
    } else if TYPES_IPV6.contains(&kind) {
        let ip = start.get(at + ETHERNET..at + ETHERNET + IPV6)?;
        let end = |at: usize| long(ip, at).wrapping_mul(MIX[1]) ^ long(ip, at + 8);
        let (protocol, at) = behind_extensions(start, ip[6], at + ETHERNET + IPV6);
        with_ports(start, [end(8), end(24)], protocol, at)
    } else {
        ([0, 6].map(|at| station(start, at)), false)
    };
    let [a, b] = ends.map(|end| mixed(end ^ key));
    Some(Flow { number: a.wrapping_add(b).wrapping_mul(MIX[0]), is_connection })
}

/// Skips VLAN tags and PPPoE headers. Returns [`FLOW_BYTES_MIN`] bytes, of which the first
/// [`ETHERNET`] end with the EtherType of the packet, and their offset in the frame. `None`: the
/// frame is shorter.
#[inline(always)]
#[allow(clippy::inline_always, reason = "a part of `flow_of`, which each frame passes")]
pub(super) fn packet_of(start: &[u8]) -> Option<(&[u8], usize)> {
    let mut window = start.get(..FLOW_BYTES_MIN)?;
    let mut at = 0;
    for _ in 0..LOOKS_BEHIND {
        let kind = word(window, ETHERNET - 2);
        if TYPES_VLAN.contains(&kind) {
            at += VLAN_TAG;
        } else if kind == TYPE_PPPOE {
            at += PPPOE;
        } else {
            break;
        }
        window = start.get(at..at + FLOW_BYTES_MIN)?;
    }
    Some((window, at))
}

/// Skips IPv6 extension headers. `protocol` is the protocol of the header at `at`. Returns the
/// protocol and the offset of the header behind them. The protocol is `None` if an extension header
/// is cut off or longer than [`EXTENSION_UNITS_MAX`] permits.
#[inline]
pub(super) fn behind_extensions(start: &[u8], protocol: u8, at: usize) -> (Option<u8>, usize) {
    let (mut protocol, mut at) = (protocol, at);
    for _ in 0..EXTENSIONS_MAX {
        if !EXTENSIONS.contains(&protocol) {
            break;
        }
        match start.get(at..at + 2) {
            Some(&[next, units]) if units <= EXTENSION_UNITS_MAX => {
                protocol = next;
                at += (usize::from(units) + 1) * 8;
            }
            _ => return (None, at),
        }
    }
    (Some(protocol), at)
}

/// Adds the ports at offset `at` to both ends, if the protocol has ports.
#[inline]
fn with_ports(start: &[u8], ends: [u64; 2], protocol: Option<u8>, at: usize) -> ([u64; 2], bool) {
    let has_ports = protocol.is_some_and(|protocol| PROTOCOLS_WITH_PORTS.contains(&protocol));
    let ports = start.get(at..at + 4).filter(|_| has_ports);
    let Some(&[a, b, c, d]) = ports else { return (ends, false) };
    let above = |port: [u8; 2]| u64::from(u16::from_ne_bytes(port)) << 48;
    ([ends[0] ^ above([a, b]), ends[1] ^ above([c, d])], true)
}

/// The Ethernet address at offset `at`, combined from three words as the BPF program does it.
#[inline]
fn station(frame: &[u8], at: usize) -> u64 {
    let part = |at: usize| u64::from(u16::from_ne_bytes([frame[at], frame[at + 1]]));
    part(at) | part(at + 2) << 16 | part(at + 4) << 32
}

#[inline]
const fn mixed(end: u64) -> u64 {
    let end = end.wrapping_mul(MIX[0]);
    let end = (end ^ (end >> 32)).wrapping_mul(MIX[1]);
    end ^ (end >> 29)
}

/// The two bytes at offset `at`, in network order.
#[inline]
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Four bytes of an address, in the byte order of this host, as the BPF program loads them.
#[inline]
fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
fn long(bytes: &[u8], at: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(eight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ethernet, tags, and an IP header without options.
    fn frame(tags: usize, is_v6: bool, ends: [(u64, u16); 2], protocol: u8) -> Vec<u8> {
        let mut bytes = vec![0; 12];
        (0..tags).for_each(|tag| bytes.extend([0x81, 0, 0, 7 + u8::try_from(tag).unwrap()]));
        let address = |bytes: &mut Vec<u8>, n: u64| {
            if is_v6 {
                bytes.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0]);
                bytes.extend(n.to_be_bytes());
            } else {
                bytes.extend(&n.to_be_bytes()[4..]);
            }
        };
        if is_v6 {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol, 64]);
        } else {
            bytes.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
        }
        ends.iter().for_each(|end| address(&mut bytes, end.0));
        ends.iter().for_each(|end| bytes.extend(end.1.to_be_bytes()));
        bytes.extend([0; 16]);
        bytes
    }

    const KEY: u64 = 0x0123_4567_89ab_cdef;

    fn number(frame: &[u8]) -> u64 {
        flow_of(frame, KEY).unwrap().number
    }

    const ENDS: [(u64, u16); 2] = [(0x0a00_0001, 40_000), (0x0a00_0002, 5201)];

    #[test]
    fn both_ways_of_a_flow_have_one_number_and_other_flows_have_others() {
        for (tags, is_v6, protocol) in
            [(0, false, 6), (1, false, 17), (0, true, 6), (1, true, 132), (0, false, 1)]
        {
            let there = number(&frame(tags, is_v6, ENDS, protocol));
            let back = number(&frame(tags, is_v6, [ENDS[1], ENDS[0]], protocol));
            assert_eq!(there, back, "{tags} {is_v6} {protocol}");
            let has_ports = protocol != 1;
            let mut moved = ENDS;
            // Two ends whose ports move together are told apart too.
            (moved[0].1, moved[1].1) = (moved[0].1 + 2, moved[1].1 + 2);
            let other = number(&frame(tags, is_v6, moved, protocol));
            assert_eq!(there != other, has_ports, "{tags} {is_v6} {protocol}");
            // A switch that adds a tag, or takes it away, does not change the flow.
            assert_eq!(number(&frame(1 - tags, is_v6, ENDS, protocol)), there);
        }
    }

    #[test]
    fn fragments_go_with_their_addresses_and_options_move_the_ports() {
        let mut whole = frame(0, false, ENDS, 17);
        let of_whole = flow_of(&whole, KEY).unwrap();
        assert!(of_whole.is_connection);
        let fragments = [1u16, 0x2000, 0x2005].map(|bits| {
            let mut fragment = whole.clone();
            fragment[20..22].copy_from_slice(&bits.to_be_bytes());
            flow_of(&fragment, KEY).unwrap()
        });
        assert!(fragments.iter().all(|one| !one.is_connection && *one == fragments[0]));
        assert_ne!(fragments[0].number, of_whole.number);
        whole[14] = 0x47;
        whole.splice(34..34, [1; 8]);
        assert_eq!(flow_of(&whole, KEY), Some(of_whole));
    }

    #[test]
    fn a_flow_is_found_behind_tags_and_sessions_and_no_further() {
        for is_v6 in [false, true] {
            let plain = frame(0, is_v6, ENDS, 6);
            let packet = &plain[14..];
            let ppp: [u8; 2] = if is_v6 { [0, 0x57] } else { [0, 0x21] };
            let session = [&[0x88, 0x64, 0x11, 0, 0, 9, 0, 60][..], &ppp].concat();
            let behind = |layers: &[u8]| number(&[&[0; 12][..], layers, packet].concat());
            let tagged = [&[0x81, 0, 0, 5][..], &session].concat();
            for layers in [&session[..], &tagged] {
                assert_eq!(behind(layers), number(&plain), "{layers:?}");
            }
            assert_eq!(number(&frame(2, is_v6, ENDS, 6)), number(&plain));
            let third = flow_of(&frame(3, is_v6, ENDS, 6), KEY).unwrap();
            assert!(!third.is_connection && third.number != number(&plain));
        }
    }

    #[test]
    fn ports_are_found_behind_two_short_extension_headers_and_no_further() {
        let plain = frame(0, true, ENDS, 6);
        let by_addresses = flow_of(&frame(0, true, ENDS, 58), KEY).unwrap();
        // Each row: the protocols of the extension headers, and the length field of each.
        let behind = |headers: &[(u8, u8)]| {
            let mut frame = plain.clone();
            let next = headers.iter().skip(1).map(|(protocol, _)| *protocol).chain([6]);
            let mut extensions = Vec::new();
            for ((_, units), next) in headers.iter().zip(next) {
                extensions.extend([next, *units]);
                extensions.extend(vec![1; 6 + usize::from(*units) * 8]);
            }
            frame[20] = headers[0].0;
            frame.splice(54..54, extensions);
            flow_of(&frame, KEY).unwrap()
        };
        for headers in [&[(0, 0)][..], &[(60, 2)], &[(43, 2), (60, 2)], &[(0, 0), (43, 1)]] {
            assert_eq!(Some(behind(headers)), flow_of(&plain, KEY), "{headers:?}");
        }
        for headers in [&[(44, 0)][..], &[(0, 3)], &[(0, 0), (44, 0)], &[(51, 1)], &[(0, 0); 3]] {
            assert_eq!(behind(headers), by_addresses, "{headers:?}");
        }
    }

    #[test]
    fn what_is_no_connection_goes_by_its_addresses() {
        let whole = frame(0, false, ENDS, 6);
        assert_eq!(flow_of(&whole[..FLOW_BYTES_MIN - 1], KEY), None);
        assert!(flow_of(&whole[..FLOW_BYTES_MIN], KEY).is_some());
        assert_eq!(flow_of(&frame(1, false, ENDS, 6)[..41], KEY), None);
        let six = frame(0, true, ENDS, 6);
        assert_eq!(flow_of(&six[..53], KEY), None);
        assert!(!flow_of(&six[..57], KEY).unwrap().is_connection, "its ports are missing");
        // A tunnel, an echo, and what is no IP.
        for protocol in [47, 4, 1] {
            let flow = flow_of(&frame(0, false, ENDS, protocol), KEY).unwrap();
            assert!(!flow.is_connection);
            assert_eq!(flow.number, number(&frame(0, false, ENDS, 1)));
        }
        let mut other = whole;
        other[12..14].copy_from_slice(&[0x88, 0x47]);
        let from = |station: u8| {
            let mut frame = other.clone();
            frame[11] = station;
            flow_of(&frame, KEY).unwrap()
        };
        assert!(!from(1).is_connection);
        assert_ne!(from(1).number, from(2).number);
    }

    #[test]
    fn each_tap_has_numbers_of_its_own() {
        let of = |key: u64| flow_of(&frame(0, false, ENDS, 6), key).unwrap().number;
        assert_ne!(of(1) >> 48, of(2) >> 48);
    }

    /// Numbers that lie together in one of this many slots: none has many more than its share.
    #[test]
    fn near_flows_spread() {
        const SLOTS: usize = 256;
        let mut slots = vec![0; SLOTS];
        for n in 0..16_384u64 {
            let step = u16::try_from(n % 4096).unwrap();
            let ends = [(0x0a00_0001, 32_768 + step), (0x0a00_0002 + n / 4096, 5201 + step % 2)];
            let place = number(&frame(0, false, ends, 6)) >> 56;
            slots[usize::try_from(place).unwrap()] += 1;
        }
        let (most, least) = (slots.iter().max().unwrap(), slots.iter().min().unwrap());
        assert!(*most <= 110 && *least >= 25, "{least} to {most} of 64 each");
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_flow_or_none(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let enough = bytes.len().min(FLOW_BYTES);
            prop_assert_eq!(flow_of(&bytes, KEY), flow_of(&bytes[..enough], KEY));
        }
    }

    /// The host's program must come to these numbers too.
    #[test]
    fn numbers_of_flows_are_those_of_the_steps_above() {
        let mixed = |end: u64| {
            let end = u128::from(end) * u128::from(MIX[0]) % (1 << 64);
            let end = (end ^ (end / (1 << 32))) * u128::from(MIX[1]) % (1 << 64);
            end ^ (end / (1 << 29))
        };
        let of = |ends: [u64; 2]| {
            let sum = ends.map(|end| mixed(end ^ KEY)).iter().sum::<u128>() % (1 << 64);
            u64::try_from(sum * u128::from(MIX[0]) % (1 << 64)).unwrap()
        };
        let four = |bytes: [u8; 4], port: [u8; 2]| {
            u64::from(u32::from_ne_bytes(bytes)) ^ u64::from(u16::from_ne_bytes(port)) << 48
        };
        let whole = frame(0, false, ENDS, 6);
        let ends = [four([10, 0, 0, 1], [0x9c, 0x40]), four([10, 0, 0, 2], [0x14, 0x51])];
        assert_eq!(number(&whole), of(ends));
        let station = |bytes: [u8; 6]| {
            let part = |at: usize| u64::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
            part(0) + part(2) * (1 << 16) + part(4) * (1 << 32)
        };
        let (to, from) = ([1, 2, 3, 4, 5, 6], [0xff, 8, 9, 10, 11, 0xfe]);
        let other = [&to[..], &from, &[0x88, 0x47], &[0; 40]].concat();
        assert_eq!(number(&other), of([station(to), station(from)]));
        let six = |low: u8, port: [u8; 2]| {
            let high = u64::from_ne_bytes([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0]);
            let low = u64::from_ne_bytes([0, 0, 0, 0, 10, 0, 0, low]);
            let address = high.wrapping_mul(MIX[1]) ^ low;
            address ^ u64::from(u16::from_ne_bytes(port)) << 48
        };
        let whole = frame(0, true, ENDS, 17);
        assert_eq!(number(&whole), of([six(1, [0x9c, 0x40]), six(2, [0x14, 0x51])]));
    }
}
