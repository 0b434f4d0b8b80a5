//! Bytes that a driver of a network device can send, at every limit: offloads, headers, commands.

use manyring_wire::net::rss::{HashConfig, RssConfig};
use manyring_wire::net::{
    Coalescing, Command, CommandError, FilterTable, HDR_F_DATA_VALID, HDR_F_NEEDS_CSUM,
    HDR_GSO_ECN, HDR_GSO_TCPV4, HDR_GSO_TCPV6, HDR_GSO_UDP_L4, HeaderError, Offloads,
    QueueCoalescing, RawNetHeader, RxMode, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MQ,
    VIRTIO_NET_F_RSS, controlq, is_mtu, parse_mac, receiveq, transmitq,
};

const NONE: Offloads =
    Offloads { csum: false, tso4: false, tso6: false, ecn: false, uso4: false, uso6: false };
const CSUM: Offloads = Offloads { csum: true, ..NONE };
const TSO4: Offloads = Offloads { tso4: true, ..CSUM };
const TSO6: Offloads = Offloads { tso6: true, ..CSUM };
const USO4: Offloads = Offloads { uso4: true, ..CSUM };
const USO6: Offloads = Offloads { uso6: true, ..CSUM };

/// A header with a partial checksum that ends at byte 52 of the frame, and headers of 54 bytes.
fn header(gso_type: u8) -> RawNetHeader {
    RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type,
        hdr_len: 54.into(),
        gso_size: 1448.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        num_buffers: 0.into(),
    }
}

#[test]
fn guest_offloads_need_what_the_specification_says_they_need() {
    let (csum, ecn) = (VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN);
    let (tso4, tso6) = (VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6);
    let (uso4, uso6) = (VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6);
    for (bits, offloads) in [
        (0, NONE),
        (csum, CSUM),
        (csum | tso4, TSO4),
        (csum | tso6, TSO6),
        (csum | uso4, USO4),
        (csum | uso6, USO6),
        (csum | ecn, CSUM),
        (csum | uso4 | uso6 | ecn, Offloads { uso6: true, ..USO4 }),
        (csum | tso4 | ecn, Offloads { ecn: true, ..TSO4 }),
        (csum | tso6 | ecn, Offloads { ecn: true, ..TSO6 }),
        (csum | tso4 | tso6 | ecn, Offloads { ecn: true, tso6: true, ..TSO4 }),
        (tso4 | tso6 | uso4 | uso6 | ecn, NONE),
    ] {
        assert_eq!(Offloads::of_guest(bits), offloads, "{bits:#x}");
    }
}

#[test]
fn host_offloads_need_what_the_specification_says_they_need() {
    let (csum, ecn, uso) = (VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_USO);
    let (tso4, tso6) = (VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6);
    for (bits, offloads) in [
        (0, NONE),
        (csum, CSUM),
        (csum | tso4, TSO4),
        (csum | tso6, TSO6),
        (csum | uso, Offloads { uso6: true, ..USO4 }),
        (csum | uso | ecn, Offloads { uso6: true, ..USO4 }),
        (csum | ecn, CSUM),
        (csum | tso4 | ecn, Offloads { ecn: true, ..TSO4 }),
        (csum | tso6 | ecn, Offloads { ecn: true, ..TSO6 }),
        (tso4 | tso6 | uso | ecn, NONE),
    ] {
        assert_eq!(Offloads::of_host(bits), offloads, "{bits:#x}");
    }
}

#[test]
fn each_offload_has_its_own_feature() {
    let ecn = Offloads { ecn: true, ..NONE };
    let only = |f: fn(&mut Offloads)| {
        let mut offloads = NONE;
        f(&mut offloads);
        offloads
    };
    for (offloads, guest, host) in [
        (NONE, 0, 0),
        (CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_CSUM),
        (only(|o| o.tso4 = true), VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_HOST_TSO4),
        (only(|o| o.tso6 = true), VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_TSO6),
        (ecn, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_HOST_ECN),
        // HOST_USO is for both versions of IP: one alone is no offer.
        (only(|o| o.uso4 = true), VIRTIO_NET_F_GUEST_USO4, 0),
        (only(|o| o.uso6 = true), VIRTIO_NET_F_GUEST_USO6, 0),
    ] {
        assert_eq!((offloads.guest_features(), offloads.host_features()), (guest, host));
    }
    let uso = Offloads { uso4: true, uso6: true, ..NONE };
    assert_eq!(uso.host_features(), VIRTIO_NET_F_HOST_USO);
}

#[test]
fn only_segmentation_makes_frames_longer_than_the_mtu() {
    assert!(!NONE.has_gso() && !CSUM.has_gso() && !Offloads { ecn: true, ..CSUM }.has_gso());
    assert!(TSO4.has_gso() && TSO6.has_gso() && USO4.has_gso() && USO6.has_gso());
}

#[test]
fn a_checksum_may_end_with_the_frame_and_headers_may_fill_it() {
    let whole = RawNetHeader { gso_type: 0, gso_size: 0.into(), hdr_len: 52.into(), ..header(0) };
    assert_eq!(whole.checked(52, CSUM), Ok(whole));
    assert_eq!(whole.checked(51, CSUM), Err(HeaderError::CsumRange));
    let longer = RawNetHeader { csum_offset: 17.into(), ..whole };
    assert_eq!(longer.checked(52, CSUM), Err(HeaderError::CsumRange));
    assert_eq!(longer.checked(53, CSUM), Ok(longer));
    let first = RawNetHeader { csum_start: 0.into(), csum_offset: 0.into(), ..whole };
    assert_eq!(first.checked(52, CSUM), Ok(first));
}

#[test]
fn each_segmentation_needs_its_own_offload() {
    let takes = |gso_type, taken| header(gso_type).checked(1514, taken).is_ok();
    assert!(takes(HDR_GSO_TCPV4, TSO4) && !takes(HDR_GSO_TCPV4, TSO6));
    assert!(takes(HDR_GSO_TCPV6, TSO6) && !takes(HDR_GSO_TCPV6, TSO4));
    assert!(takes(HDR_GSO_UDP_L4, USO4) && takes(HDR_GSO_UDP_L4, USO6));
    assert!(!takes(HDR_GSO_UDP_L4, Offloads { tso6: true, ..TSO4 }));
    let (ecn4, ecn6) = (HDR_GSO_TCPV4 | HDR_GSO_ECN, HDR_GSO_TCPV6 | HDR_GSO_ECN);
    assert!(!takes(ecn4, TSO4) && takes(ecn4, Offloads { ecn: true, ..TSO4 }));
    assert!(!takes(ecn6, TSO6) && takes(ecn6, Offloads { ecn: true, ..TSO6 }));
    assert!(!takes(HDR_GSO_UDP_L4 | HDR_GSO_ECN, Offloads { ecn: true, ..USO4 }));
}

#[test]
fn segmentation_without_a_checksum_or_a_size_is_refused() {
    let ok = header(HDR_GSO_TCPV4);
    let bare = RawNetHeader { flags: 0, csum_start: 60_000.into(), ..ok };
    assert_eq!(bare.checked(1514, TSO4), Err(HeaderError::GsoCsum));
    let valid = RawNetHeader { flags: HDR_F_DATA_VALID, ..ok };
    assert_eq!(valid.checked(1514, TSO4), Err(HeaderError::GsoCsum));
    let both = RawNetHeader { flags: HDR_F_NEEDS_CSUM | HDR_F_DATA_VALID, ..ok };
    assert_eq!(both.checked(1514, TSO4), Ok(ok), "only the flag that counts is handed on");
    let one = RawNetHeader { gso_size: 1.into(), ..ok };
    assert_eq!(one.checked(1514, TSO4), Ok(one));
}

#[test]
fn every_command_is_told_by_class_and_number() {
    let parse = Command::parse;
    for (number, mode) in [
        (0, RxMode::Promisc),
        (1, RxMode::AllMulti),
        (2, RxMode::AllUni),
        (3, RxMode::NoMulti),
        (4, RxMode::NoUni),
        (5, RxMode::NoBcast),
    ] {
        assert_eq!(parse(&[0, number, 1]), Ok(Command::Rx(mode, true)));
        assert_eq!(parse(&[0, number, 0]), Ok(Command::Rx(mode, false)));
        assert_eq!(parse(&[0, number, 0xff]), Ok(Command::Rx(mode, true)));
    }
    assert_eq!(parse(&[2, 0, 1, 0]), Ok(Command::VlanAdd(1)));
    assert_eq!(parse(&[2, 1, 1, 0]), Ok(Command::VlanDel(1)));
    assert_eq!(parse(&[2, 1, 0, 0x10]), Err(CommandError::Vlan { id: 4096 }));
    let coalescing = Coalescing { packets_max: 0x0102_0304, delay_us_max: 0x0506_0708 };
    let data = [4, 3, 2, 1, 8, 7, 6, 5];
    assert_eq!(parse(&[&[6, 0][..], &data].concat()), Ok(Command::CoalesceTx(coalescing)));
    assert_eq!(parse(&[&[6, 1][..], &data].concat()), Ok(Command::CoalesceRx(coalescing)));
    let queue = QueueCoalescing { index: 0x0201, coalescing };
    let data = [&[6, 2, 1, 2, 0, 0][..], &data].concat();
    assert_eq!(parse(&data), Ok(Command::CoalesceQueue(queue)));
}

#[test]
fn a_command_is_parsed_as_it_was_emitted() {
    let coalescing = Coalescing { packets_max: 0x0102_0304, delay_us_max: 0x0506_0708 };
    let (unicast, multicast) = (vec![[2, 0, 0, 0, 0, 1]], vec![[1, 0, 0x5e, 0, 0, 1]; 2]);
    let modes = RxMode::ALL.map(|mode| Command::Rx(mode, true));
    let hash = HashConfig { types: 0x3f, key: vec![9; 40] };
    let rss = RssConfig { hash: hash.clone(), unclassified: 1, table: vec![0, 2], transmitqs: 3 };
    let others = [
        Command::MacTable(FilterTable { unicast, multicast }),
        Command::MacAddr([2, 3, 4, 5, 6, 7]),
        Command::VlanAdd(4095),
        Command::VlanDel(0x102),
        Command::AnnounceAck,
        Command::QueuePairs(0x102),
        Command::GuestOffloads(VIRTIO_NET_F_GUEST_CSUM),
        Command::CoalesceTx(coalescing),
        Command::CoalesceRx(coalescing),
        Command::CoalesceQueue(QueueCoalescing { index: 0x0201, coalescing }),
        Command::CoalesceQuery(0x0201),
        Command::Rss(rss),
        Command::Hash(hash),
    ];
    for command in modes.into_iter().chain(others) {
        assert_eq!(Command::parse(&command.emit()), Ok(command));
    }
}

#[test]
fn a_query_of_coalescing_needs_at_least_the_queue() {
    let query = |data: &[u8]| Command::parse(&[&[6, 3][..], data].concat());
    assert_eq!(query(&[1, 2]), Ok(Command::CoalesceQuery(0x0201)));
    assert_eq!(query(&[1, 2, 0, 0]), Ok(Command::CoalesceQuery(0x0201)));
    assert_eq!(query(&[1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Ok(Command::CoalesceQuery(0x0201)));
    for len in [0, 1, 3, 11, 13] {
        let wrong = CommandError::Size { class: 6, command: 3, size: len };
        assert_eq!(query(&vec![0; len]), Err(wrong), "{len}");
    }
}

#[test]
fn a_command_of_a_wrong_size_is_refused_with_its_size() {
    for (class, command, sizes) in [
        (0, 0, &[0, 2][..]),
        (1, 1, &[5, 7]),
        (2, 0, &[0, 1, 3]),
        (2, 1, &[0, 1, 3]),
        (3, 0, &[1]),
        (4, 0, &[0, 1, 3]),
        (5, 0, &[0, 7, 9]),
        (6, 0, &[0, 7, 9]),
        (6, 1, &[0, 7, 9]),
        (6, 2, &[0, 11, 13]),
    ] {
        for &size in sizes {
            let bytes = [vec![class, command], vec![0; size]].concat();
            let wrong = CommandError::Size { class, command, size };
            assert_eq!(Command::parse(&bytes), Err(wrong), "{class} {command} {size}");
        }
    }
    assert_eq!(Command::parse(&[]), Err(CommandError::Short { size: 0 }));
    assert_eq!(Command::parse(&[3]), Err(CommandError::Short { size: 1 }));
    let unknown = CommandError::Unknown { class: 3, command: 1 };
    assert_eq!(Command::parse(&[3, 1]), Err(unknown));
}

#[test]
fn guest_offloads_are_the_bits_that_there_are_and_no_others() {
    let set = |bits: u64| Command::parse(&[&[5, 0][..], &bits.to_le_bytes()].concat());
    let known = VIRTIO_NET_F_GUEST_CSUM
        | VIRTIO_NET_F_GUEST_TSO4
        | VIRTIO_NET_F_GUEST_TSO6
        | VIRTIO_NET_F_GUEST_ECN
        | VIRTIO_NET_F_GUEST_USO4
        | VIRTIO_NET_F_GUEST_USO6;
    assert_eq!(set(known), Ok(Command::GuestOffloads(known)));
    assert_eq!(set(0), Ok(Command::GuestOffloads(0)));
    for bit in (0..64).map(|n| 1 << n).filter(|bit| known & bit == 0) {
        assert_eq!(set(bit), Err(CommandError::Offloads { bits: bit }));
        assert_eq!(set(known | bit), Err(CommandError::Offloads { bits: known | bit }));
    }
}

#[test]
fn both_mac_tables_are_read_to_their_counts() {
    let (a, b, c) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], [0x33, 0x33, 0, 0, 0, 3]);
    let data = [&[1, 0, 2, 0, 0, 0][..], &a, &b, &[1, 0, 0, 0], &c].concat();
    let filter = FilterTable { unicast: vec![a, b], multicast: vec![c] };
    assert_eq!(Command::parse(&data), Ok(Command::MacTable(filter)));
    let empty = FilterTable::default();
    assert_eq!(Command::parse(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Ok(Command::MacTable(empty)));
    // One byte less: the second table has no room for its entry.
    let short = CommandError::Table { count: 1, size: 9 };
    assert_eq!(Command::parse(&data[..data.len() - 1]), Err(short));
    // No second table at all, and none of both.
    let none = CommandError::Table { count: 0, size: 0 };
    assert_eq!(Command::parse(&data[..6 + 12]), Err(none));
    assert_eq!(Command::parse(&[1, 0]), Err(none));
    let more = CommandError::Size { class: 1, command: 0, size: data.len() - 1 };
    assert_eq!(Command::parse(&[&data[..], &[0]].concat()), Err(more));
}

#[test]
fn a_device_has_neither_a_groups_address_nor_none() {
    let set = |mac: [u8; 6]| Command::parse(&[&[1, 1][..], &mac].concat());
    for mac in [[2, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff]] {
        assert_eq!(set(mac), Ok(Command::MacAddr(mac)));
    }
    for mac in [[0; 6], [0xff; 6], [1, 0, 0, 0, 0, 1], [3, 0, 0, 0, 0, 0]] {
        assert_eq!(set(mac), Err(CommandError::Mac { mac }));
    }
    assert_eq!(parse_mac("02:00:00:00:00:01"), Some([2, 0, 0, 0, 0, 1]));
    assert_eq!(parse_mac("02:00:00:00:00:0g"), None);
    assert_eq!(parse_mac("02:00:00:00:00:001"), None);
}

#[test]
fn an_mtu_is_at_least_68() {
    assert!(is_mtu(68) && is_mtu(69) && is_mtu(u16::MAX));
    assert!(!is_mtu(67) && !is_mtu(0));
}

#[test]
fn queues_lie_where_the_specification_puts_them() {
    assert_eq!([0, 1, 5].map(receiveq), [0, 2, 10]);
    assert_eq!([0, 1, 5].map(transmitq), [1, 3, 11]);
    assert_eq!((controlq(0, 4), controlq(VIRTIO_NET_F_MQ, 4)), (2, 8));
    let neither = !(VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS);
    assert_eq!((controlq(neither, 4), controlq(u64::MAX, 1)), (2, 2));
    assert_eq!(controlq(VIRTIO_NET_F_RSS, 4), 8, "RSS has all pairs, too");
}
