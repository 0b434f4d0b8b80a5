//! The hash is the one that Microsoft has published vectors for; what a driver sets is checked.

use super::*;
use crate::net::flow::FLOW_BYTES;
use proptest::prelude::*;
use std::net::{IpAddr, SocketAddr};

/// The key of the published vectors.
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// From "RSS Hash Verification" of the Windows driver documentation: target, source, the hash of
/// both addresses, the hash of addresses and TCP ports.
const VECTORS: [(&str, &str, u32, u32); 8] = [
    ("161.142.100.80:1766", "66.9.149.187:2794", 0x323e_8fc2, 0x51cc_c178),
    ("65.69.140.83:4739", "199.92.111.2:14230", 0xd718_262a, 0xc626_b0ea),
    ("12.22.207.184:38024", "24.19.198.95:12898", 0xd2d0_a5de, 0x5c2b_394a),
    ("209.142.163.6:2217", "38.27.205.30:48228", 0x8298_9176, 0xafc7_327f),
    ("202.188.127.2:1303", "153.39.163.191:44251", 0x5d18_09c5, 0x10e8_28a2),
    ("[3ffe:2501:200:3::1]:1766", "[3ffe:2501:200:1fff::7]:2794", 0x2cc1_8cd5, 0x4020_7d3d),
    ("[ff02::1]:4739", "[3ffe:501:8::260:97ff:fe40:efab]:14230", 0x0f0c_461c, 0xdde5_1bbf),
    (
        "[fe80::200:f8ff:fe21:67cf]:38024",
        "[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251",
        0x4b61_e985,
        0x02d1_feef,
    ),
];

/// Ethernet, VLAN tags, an IP header, ports and 16 bytes more.
fn frame(tags: usize, from: SocketAddr, to: SocketAddr, protocol: u8) -> Vec<u8> {
    let mut bytes = vec![2; 12];
    (0..tags).for_each(|_| bytes.extend([0x81, 0, 0, 7]));
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            bytes.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
            bytes.extend([from.octets(), to.octets()].concat());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol, 64]);
            bytes.extend([from.octets(), to.octets()].concat());
        }
        _ => panic!("two versions of IP"),
    }
    bytes.extend([from.port().to_be_bytes(), to.port().to_be_bytes()].concat());
    bytes.extend([0; 16]);
    bytes
}

fn ends(vector: &(&str, &str, u32, u32)) -> (SocketAddr, SocketAddr) {
    (vector.1.parse().unwrap(), vector.0.parse().unwrap())
}

fn hasher(types: u32) -> Hasher {
    Hasher::new(HashConfig { types, key: KEY.to_vec() })
}

#[test]
fn hashes_are_those_of_the_published_vectors() {
    for vector in &VECTORS {
        let (from, to) = ends(vector);
        let (addresses, tcp) = (vector.2, vector.3);
        let of = |types, protocol| {
            let frame = frame(0, from, to, protocol);
            let Hash { value, report } = hasher(types).hash_of(&frame);
            (report, value)
        };
        let reports = match from {
            SocketAddr::V4(_) => [HashReport::Ipv4, HashReport::Tcpv4, HashReport::Udpv4],
            SocketAddr::V6(_) => [HashReport::Ipv6, HashReport::Tcpv6, HashReport::Udpv6],
        };
        assert_eq!(of(hash_type::ALL, 6), (reports[1], tcp), "{vector:?}");
        // The published hash of a UDP datagram is that of a TCP segment with its ports.
        assert_eq!(of(hash_type::ALL, 17), (reports[2], tcp), "{vector:?}");
        assert_eq!(of(hash_type::ALL, 1), (reports[0], addresses), "{vector:?}");
        let only = hash_type::IPV4 | hash_type::IPV6;
        assert_eq!(of(only, 6), (reports[0], addresses), "{vector:?}");
        assert_eq!(of(0, 6), (HashReport::None, 0), "{vector:?}");
        let only = hash_type::TCPV4 | hash_type::TCPV6;
        assert_eq!(of(only, 17), (HashReport::None, 0), "{vector:?}");
    }
}

#[test]
fn extension_headers_of_ipv6_are_skipped_and_fragments_have_no_ports() {
    let (from, to) = ends(&VECTORS[5]);
    let (addresses, tcp) = (VECTORS[5].2, VECTORS[5].3);
    let hasher = hasher(hash_type::ALL);
    let of = |extension: &[u8], kind: u8| {
        let mut frame = frame(0, from, to, kind);
        frame.splice(54..54, extension.iter().copied());
        let Hash { value, report } = hasher.hash_of(&frame);
        (report, value)
    };
    let hop_by_hop = [6, 0, 1, 4, 0, 0, 0, 0];
    assert_eq!(of(&hop_by_hop, 0), (HashReport::Tcpv6, tcp));
    let routing_and_options = [&[60, 0, 4, 0, 0, 0, 0, 0][..], &hop_by_hop].concat();
    assert_eq!(of(&routing_and_options, 43), (HashReport::Tcpv6, tcp));
    let fragment = [6, 0, 0, 1, 0, 0, 0, 9];
    assert_eq!(of(&fragment, 44), (HashReport::Ipv6, addresses));
    let fragment_behind = [&[44, 0, 1, 4, 0, 0, 0, 0][..], &fragment].concat();
    assert_eq!(of(&fragment_behind, 0), (HashReport::Ipv6, addresses));
}

#[test]
fn fragments_go_by_their_addresses_and_tags_change_nothing() {
    let (from, to) = ends(&VECTORS[0]);
    let hasher = hasher(hash_type::ALL);
    let whole = frame(0, from, to, 6);
    for tags in [1, 2] {
        assert_eq!(hasher.hash_of(&frame(tags, from, to, 6)), hasher.hash_of(&whole));
    }
    assert_eq!(hasher.hash_of(&frame(3, from, to, 6)), Hash::default());
    let mut fragment = whole.clone();
    fragment[20..22].copy_from_slice(&0x2000u16.to_be_bytes());
    let addresses = Hash { value: VECTORS[0].2, report: HashReport::Ipv4 };
    assert_eq!(hasher.hash_of(&fragment), addresses);
    assert_eq!(hasher.hash_of(&whole[..36]), Hash::default());
    let mut options = whole;
    options[14] = 0x46;
    options.splice(34..34, [1; 4]);
    let tcp = Hash { value: VECTORS[0].3, report: HashReport::Tcpv4 };
    assert_eq!(hasher.hash_of(&options), tcp);
    options[14] = 0x4e;
    assert_eq!(
        hasher.hash_of(&options[..options.len() - 1]),
        addresses,
        "its ports lie past its end"
    );
}

fn config() -> RssConfig {
    RssConfig {
        hash: HashConfig { types: hash_type::ALL, key: KEY.to_vec() },
        unclassified: 3,
        table: vec![0, 1, 2, 1],
        transmitqs: 2,
    }
}

#[test]
fn a_frame_goes_where_the_table_says() {
    let rss = Rss::new(config());
    for vector in &VECTORS {
        let (from, to) = ends(vector);
        let expected = config().table[usize::try_from(vector.3 & 3).unwrap()];
        assert_eq!(rss.pair_of(&frame(0, from, to, 6)), usize::from(expected));
    }
    assert_eq!(rss.pair_of(&[0; 60]), 3, "no IP packet");
    assert_eq!(rss.pair_of(&[]), 3);
}

#[test]
fn a_configuration_is_read_as_it_was_written() {
    assert_eq!(RssConfig::parse(&config().emit()), Ok(config()));
    assert_eq!(config().pairs(), 4);
    let hash = HashConfig { types: hash_type::TCPV4, key: vec![7; 3] };
    assert_eq!(HashConfig::parse(&hash.emit()), Ok(hash.clone()));
    // As Linux writes it: types, table, transmitqs, key.
    let mut bytes = vec![0x3f, 0, 0, 0, 1, 0, 2, 0, 5, 0, 6, 0, 4, 0, 2, 0xaa, 0xbb];
    let read = RssConfig::parse(&bytes).unwrap();
    assert_eq!((read.table, read.unclassified, read.transmitqs), (vec![5, 6], 2, 4));
    assert_eq!(read.hash, HashConfig { types: 0x3f, key: vec![0xaa, 0xbb] });
    bytes.push(0);
    assert_eq!(RssConfig::parse(&bytes), Err(RssError::Size { size: 18 }));
}

#[test]
fn every_lie_of_a_configuration_is_named() {
    let good = config().emit();
    let with = |at: usize, bytes: &[u8]| {
        let mut lie = good.clone();
        lie[at..at + bytes.len()].copy_from_slice(bytes);
        RssConfig::parse(&lie)
    };
    assert_eq!(with(0, &[0x40]), Err(RssError::Types { types: 0x40 }));
    assert_eq!(with(3, &[0x80]), Err(RssError::Types { types: 0x8000_003f }));
    for mask in [2u16, 4, 6, 128, 255, 0x7fff, u16::MAX] {
        assert_eq!(with(4, &mask.to_le_bytes()), Err(RssError::Mask { mask }));
    }
    // A table that is longer than the command, or shorter.
    for mask in [127u16, 7, 1, 0] {
        assert!(with(4, &mask.to_le_bytes()).is_err(), "{mask}");
    }
    let key_at = 8 + 4 * 2 + 2;
    assert_eq!(with(key_at, &[41]), Err(RssError::Key { size: 41 }));
    assert_eq!(with(key_at, &[255]), Err(RssError::Key { size: 255 }));
    assert_eq!(with(key_at, &[39]), Err(RssError::Size { size: good.len() }));
    for len in 0..good.len() {
        assert!(RssConfig::parse(&good[..len]).is_err(), "{len}");
    }
    let hash = config().hash.emit();
    for len in 0..hash.len() {
        assert!(HashConfig::parse(&hash[..len]).is_err(), "{len}");
    }
}

/// The hash bit by bit, as it is defined.
fn plain(key: &[u8], input: &[u8]) -> u32 {
    let bit =
        |bytes: &[u8], at: usize| bytes.get(at / 8).is_some_and(|b| b >> (7 - at % 8) & 1 == 1);
    let window = |at: usize| (at..at + 32).fold(0, |w, at| w << 1 | u32::from(bit(key, at)));
    (0..input.len() * 8).filter(|at| bit(input, *at)).fold(0, |hash, at| hash ^ window(at))
}

/// Whether bytes are a `struct virtio_net_rss_config` (virtio 1.3 §5.1.6.5.7.1), by its offsets.
fn is_rss(bytes: &[u8]) -> bool {
    let word = |at: usize| usize::from(bytes[at]) | usize::from(bytes[at + 1]) << 8;
    if bytes.len() < 8 + 2 + 3 {
        return false;
    }
    let (types, table) = (word(0) | word(2) << 16, word(4) + 1);
    let key_at = 8 + 2 * table + 2;
    let is_known = types & !usize::try_from(hash_type::ALL).unwrap() == 0;
    let has_key = bytes.get(key_at).is_some_and(|size| {
        usize::from(*size) <= KEY_SIZE_MAX && bytes.len() == key_at + 1 + usize::from(*size)
    });
    is_known && table.is_power_of_two() && table <= TABLE_LEN_MAX && has_key
}

proptest! {
    #[test]
    fn the_table_comes_to_what_the_bits_do(
        key in prop::collection::vec(any::<u8>(), 0..=KEY_SIZE_MAX),
        input in prop::collection::vec(any::<u8>(), 0..=INPUT_SIZE_MAX),
    ) {
        prop_assert_eq!(Toeplitz::new(&key).hash(&input), plain(&key, &input));
    }

    /// A configuration with a few wrong bytes, cut off or longer: it is taken if it is one by its
    /// fields, and is then what was written.
    #[test]
    fn a_spoiled_configuration_is_taken_only_if_it_is_one(
        log_len in 0u32..10,
        key_size in 0usize..=KEY_SIZE_MAX,
        wrong in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in 0usize..2,
        more in prop::collection::vec(any::<u8>(), 0..2),
    ) {
        let mut bytes = RssConfig {
            hash: HashConfig { types: hash_type::ALL, key: KEY[..key_size].to_vec() },
            unclassified: 1,
            table: (0..1 << log_len).collect(),
            transmitqs: 3,
        }
        .emit();
        bytes.truncate(bytes.len() - cut);
        bytes.extend(more);
        for (at, byte) in wrong {
            // The first bytes and the key's size decide most.
            let places = [at.index(bytes.len()), at.index(8), 8 + (2 << log_len) + 2];
            let place = places[at.index(places.len())];
            if let Some(old) = bytes.get_mut(place) {
                *old = byte;
            }
        }
        let taken = RssConfig::parse(&bytes).map(|config| config.emit()).ok();
        prop_assert_eq!(taken, is_rss(&bytes).then_some(bytes));
    }

    /// A flow has one queue, whatever else its frames hold.
    #[test]
    fn frames_of_a_tcp_flow_have_one_queue(
        ports in any::<(u16, u16)>(),
        addresses in any::<(u32, u32)>(),
        table in prop::sample::select(vec![1usize, 2, 16, 128]),
        types in 0..=hash_type::ALL,
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 2..6),
        tags in prop::collection::vec(0usize..3, 6),
    ) {
        let pairs = (0..table).map(|at| u16::try_from(at * 7 % 256).unwrap());
        let rss = Rss::new(RssConfig {
            hash: HashConfig { types, key: KEY.to_vec() },
            unclassified: 0,
            table: pairs.collect(),
            transmitqs: 1,
        });
        let from = SocketAddr::new(IpAddr::V4(addresses.0.into()), ports.0);
        let to = SocketAddr::new(IpAddr::V4(addresses.1.into()), ports.1);
        let queues = payloads.iter().zip(tags).map(|(payload, tags)| {
            let mut frame = frame(tags, from, to, 6);
            frame.extend(payload);
            let whole = rss.pair_of(&frame);
            assert_eq!(rss.pair_of(&frame[..frame.len().min(FLOW_BYTES)]), whole);
            whole
        });
        let queues: Vec<_> = queues.collect();
        prop_assert!(queues.iter().all(|queue| *queue == queues[0]), "{:?}", queues);
    }
}

#[test]
fn a_hash_is_told_with_its_type_and_the_table_has_the_key_in_its_first_words() {
    let hash = Hash { value: 0x0403_0201, report: HashReport::Udpv6 };
    assert_eq!(hash.emit(), [1, 2, 3, 4, 6, 0, 0, 0]);
    let toeplitz = Toeplitz::new(&KEY);
    assert_eq!(toeplitz.words().len(), TOEPLITZ_WORDS);
    // Of the first half of a byte: no bit, the last of its bits, the first one.
    assert_eq!(toeplitz.words()[0], 0);
    assert_eq!(toeplitz.words()[1], (0x6d5a_56da << 3) | (0x25 >> 5));
    assert_eq!(toeplitz.words()[8], 0x6d5a_56da);
}

#[test]
fn a_configuration_needs_the_pairs_of_its_table_and_as_many_as_it_sends_on() {
    let table = RssConfig { table: vec![0, 6], ..config() };
    assert_eq!(table.pairs(), 7);
    assert_eq!(RssConfig { transmitqs: 9, ..table }.pairs(), 9);
}
