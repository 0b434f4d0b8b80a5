//! Headers and commands: what is right passes, everything else is named.

use super::*;

const ALL: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true };

fn gso(gso_type: u8) -> RawNetHeader {
    RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type,
        hdr_len: 54.into(),
        gso_size: 1448.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        num_buffers: 7.into(),
    }
}

#[test]
fn a_header_for_a_driver_is_the_same_but_for_flags_and_buffers() {
    for (flags, gso_type) in [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0x83), (0xfe, 0), (0xff, 0xff)] {
        let header = RawNetHeader { flags, ..gso(gso_type) };
        for takes_csum in [false, true] {
            let kept = if takes_csum { flags } else { 0 };
            let with = |count: u16| {
                let expected = RawNetHeader { flags: kept, num_buffers: count.into(), ..header };
                <[u8; HEADER_SIZE]>::try_from(expected.as_bytes()).unwrap()
            };
            for count in [0, 1, 0x1234, u16::MAX] {
                assert_eq!(header.to_driver(takes_csum, count), with(count));
            }
            let bytes: [u8; HEADER_SIZE] = header.as_bytes().try_into().unwrap();
            let is_plain = flags & HDR_F_NEEDS_CSUM == 0 && gso_type == HDR_GSO_NONE;
            assert_eq!(RawNetHeader::plain_to_driver(bytes, takes_csum), is_plain.then(|| with(1)));
        }
    }
}

#[test]
fn layouts_are_the_specifications() {
    assert_eq!((size_of::<RawNetHeader>(), size_of::<NetConfig>()), (HEADER_SIZE, 24));
    assert_eq!(std::mem::offset_of!(RawNetHeader, num_buffers), NUM_BUFFERS_OFFSET);
}

#[test]
fn a_plain_header_hands_nothing_on() {
    let header =
        RawNetHeader { flags: HDR_F_DATA_VALID, hdr_len: 9999.into(), ..RawNetHeader::default() };
    assert_eq!(header.checked(60, ALL), Ok(RawNetHeader::default()));
}

#[test]
fn every_lie_of_a_header_is_named() {
    let ok = gso(HDR_GSO_TCPV4);
    let clean = RawNetHeader { num_buffers: 0.into(), ..ok };
    assert_eq!(ok.checked(1514, ALL), Ok(clean));
    let cases = [
        (ok, 51, ALL, HeaderError::CsumRange),
        (ok, 1514, Offloads { tso4: false, ..ALL }, HeaderError::GsoType),
        (ok, 1514, Offloads::default(), HeaderError::Csum),
        (RawNetHeader { gso_size: 0.into(), ..ok }, 1514, ALL, HeaderError::GsoSize),
        (RawNetHeader { flags: 0, ..ok }, 1514, ALL, HeaderError::GsoCsum),
        (RawNetHeader { csum_start: 65535.into(), ..ok }, 1514, ALL, HeaderError::CsumRange),
        (gso(3), 1514, ALL, HeaderError::GsoType),
        (gso(HDR_GSO_ECN), 1514, ALL, HeaderError::GsoType),
        (gso(HDR_GSO_UDP_L4 | HDR_GSO_ECN), 1514, ALL, HeaderError::GsoType),
        (
            gso(HDR_GSO_TCPV6 | HDR_GSO_ECN),
            1514,
            Offloads { ecn: false, ..ALL },
            HeaderError::GsoType,
        ),
    ];
    for (header, len, taken, error) in cases {
        assert_eq!(header.checked(len, taken), Err(error), "{header:?}");
    }
}

#[test]
fn headers_said_to_be_longer_than_their_frame_are_cut_to_it() {
    let header = gso(HDR_GSO_TCPV4);
    for (said, len, handed_on) in [(54, 54, 54), (55, 54, 54), (u16::MAX, 1514, 1514), (0, 60, 0)] {
        let clean = RawNetHeader { hdr_len: said.into(), ..header }.checked(len, ALL).unwrap();
        assert_eq!(clean.hdr_len.get(), handed_on, "{said} of {len}");
    }
    // The length of the longest frame still fits into the field.
    let clean = RawNetHeader { hdr_len: u16::MAX.into(), ..header }.checked(65_549, ALL).unwrap();
    assert_eq!(clean.hdr_len.get(), u16::MAX);
}

#[test]
fn offloads_survive_the_way_through_the_features() {
    assert_eq!(Offloads::of_guest(ALL.guest_features()), ALL);
    assert_eq!(Offloads::of_host(ALL.host_features()), ALL);
    assert_eq!(Offloads::of_guest(VIRTIO_NET_F_GUEST_TSO4), Offloads::default(), "needs csum");
}

#[test]
fn commands_parse() {
    let parse = Command::parse;
    assert_eq!(parse(&[0, 0, 1]), Ok(Command::Rx(RxMode::Promisc, true)));
    assert_eq!(parse(&[1, 1, 2, 0, 0, 0, 0, 1]), Ok(Command::MacAddr([2, 0, 0, 0, 0, 1])));
    assert_eq!(parse(&[2, 0, 0xff, 0x0f]), Ok(Command::VlanAdd(4095)));
    assert_eq!(parse(&[3, 0]), Ok(Command::AnnounceAck));
    assert_eq!(parse(&[4, 0, 4, 0]), Ok(Command::QueuePairs(4)));
    assert_eq!(parse(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]), Ok(Command::GuestOffloads(2)));
    let coalescing = Coalescing { packets_max: 5, delay_us_max: 2000 };
    let data = [5, 0, 0, 0, 0xd0, 7, 0, 0];
    assert_eq!(parse(&[&[6, 0][..], &data].concat()), Ok(Command::CoalesceTx(coalescing)));
    let queue = QueueCoalescing { index: 3, coalescing };
    let data = [&[6, 2][..], &queue.emit()].concat();
    assert_eq!(parse(&data), Ok(Command::CoalesceQueue(queue)));
    assert_eq!(parse(&[6, 3, 3, 0]), Ok(Command::CoalesceQuery(3)));
    assert_eq!(parse(&[6, 3, 3, 0, 0, 0]), Ok(Command::CoalesceQuery(3)));
    assert_eq!(coalescing.emit(), [5, 0, 0, 0, 0xd0, 7, 0, 0], "what VQ_GET is answered with");
    let table = [&[1, 0, 1, 0, 0, 0][..], &[2, 0, 0, 0, 0, 9], &[0, 0, 0, 0]].concat();
    let filter = FilterTable { unicast: vec![[2, 0, 0, 0, 0, 9]], multicast: vec![] };
    assert_eq!(parse(&table), Ok(Command::MacTable(filter)));
}

#[test]
fn malformed_commands_are_named() {
    let cases: [&[u8]; 15] = [
        &[],
        &[0],
        &[0, 0],
        &[0, 6, 1],
        &[1, 0, 1, 0, 0, 0],
        &[1, 0, 255, 255, 255, 255, 0, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        &[1, 1, 1, 0, 0, 0, 0, 1],
        &[2, 0, 0, 0x10],
        &[3, 0, 0],
        &[4, 0, 1],
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0x80],
        &[6, 3],
        &[6, 3, 1],
        &[7, 0],
    ];
    for bytes in cases {
        assert!(Command::parse(bytes).is_err(), "{bytes:?}");
    }
}

#[test]
fn mac_addresses_are_read() {
    assert_eq!(parse_mac("52:54:00:12:34:fF"), Some([0x52, 0x54, 0, 0x12, 0x34, 0xff]));
    for text in [
        "",
        "52:54:00:12:34",
        "52:54:00:12:34:56:78",
        "01:00:00:00:00:01",
        "5:54:00:12:34:56",
        "00:00:00:00:00:00",
        "+2:54:00:12:34:56",
    ] {
        assert_eq!(parse_mac(text), None, "{text}");
    }
}

#[test]
fn headers_before_packets_have_the_length_that_was_negotiated() {
    let (merged, hash) = (VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_HASH_REPORT);
    let others = !(VIRTIO_F_VERSION_1 | merged | hash);
    for (features, size) in [
        (0, 10),
        (others, 10),
        (VIRTIO_F_VERSION_1, 12),
        (merged, 12),
        (VIRTIO_F_VERSION_1 | merged, 12),
        (VIRTIO_F_VERSION_1 | others, 12),
        (hash, 20),
        (VIRTIO_F_VERSION_1 | merged | hash, 20),
    ] {
        assert_eq!(header_size(features), size, "{features:#x}");
    }
}
