//! Virtio-net headers that lie in several pieces, are wrong, or change while they are read.

use super::*;

#[test]
fn a_header_in_pieces_is_read_whole_and_its_frame_follows() {
    let header = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    let bytes = [header.as_bytes(), &tcp_frame(7, 60)].concat();
    for pieces in [&[72][..], &[5, 67], &[5, 7, 60], &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 59, 1]] {
        let mut guest = Guest::new([]);
        guest.offer(&bytes, pieces);
        guest.turn();
        assert_eq!(guest.port.passed(), std::slice::from_ref(&bytes), "{pieces:?}");
    }
}

#[test]
fn a_header_that_lies_or_was_not_negotiated_is_counted() {
    let csum = RawNetHeader {
        flags: 1,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    let gso = RawNetHeader { gso_type: HDR_GSO_TCPV4, gso_size: 10.into(), ..csum };
    let lies = [
        RawNetHeader { csum_start: 60.into(), ..csum },
        RawNetHeader { csum_start: u16::MAX.into(), csum_offset: u16::MAX.into(), ..csum },
        RawNetHeader { gso_size: 0.into(), ..gso },
        RawNetHeader { gso_type: 77, ..gso },
        RawNetHeader { flags: 0, ..gso },
    ];
    let mut guest = Guest::new([]);
    for header in lies {
        guest.offer(&[header.as_bytes(), &tcp_frame(0, 60)].concat(), &[12, 60]);
    }
    guest.offer(&[gso.as_bytes(), &tcp_frame(1, 60)].concat(), &[12, 60]);
    guest.turn();
    assert_eq!(guest.returned(), lies.len() + 1);
    let stats = &guest.ring.stats;
    assert_eq!(stats.dropped_bad_header.value(), lies.len() as u64);
    assert_eq!((stats.packets.value(), stats.gso_packets.value()), (1, 1));
    let mut plain = Guest::with([], Offloads::default());
    plain.offer(&[csum.as_bytes(), &tcp_frame(0, 60)].concat(), &[12, 60]);
    plain.turn();
    assert_eq!((plain.returned(), plain.ring.stats.dropped_bad_header.value()), (1, 1));
}

#[test]
fn a_checksum_within_what_a_switch_or_host_judges_is_counted_and_its_frame_dropped() {
    let csum = |start: u16, offset: u16| RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: start.into(),
        csum_offset: offset.into(),
        ..RawNetHeader::default()
    };
    let tcp = tcp_frame(1, 80);
    let mut tagged = tcp.clone();
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    let mut arp = tcp.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    // The addresses, the tag, the addresses of IP, the ports; what is no IP has no place at all.
    let lies = [
        (&tcp, csum(0, 6)),
        (&tcp, csum(10, 2)),
        (&tagged, csum(14, 0)),
        (&tcp, csum(30, 4)),
        (&tcp, csum(34, 2)),
        (&tagged, csum(34, 16)),
        (&arp, csum(22, 0)),
        (&arp, csum(34, 16)),
    ];
    let rights = [(&tcp, csum(34, 16)), (&tagged, csum(38, 16))];
    let mut guest = Guest::new([]);
    for (frame, header) in lies.iter().chain(&rights) {
        let bytes = [header.as_bytes(), &frame[..]].concat();
        // The first bytes of the frame lie in several pieces.
        guest.offer(&bytes, &[12, 7, 6, 20, frame.len() - 33]);
    }
    // The same in one piece, and in a piece for the header and one for the frame.
    for (frame, header) in &lies {
        let bytes = [header.as_bytes(), &frame[..]].concat();
        guest.offer(&bytes, &[bytes.len()]);
        guest.offer(&bytes, &[12, frame.len()]);
        guest.offer(&bytes, &[1, bytes.len() - 1]);
    }
    guest.turn();
    assert_eq!(guest.returned(), lies.len() * 4 + rights.len());
    let stats = &guest.ring.stats;
    assert_eq!(stats.dropped_bad_header.value(), 4 * lies.len() as u64);
    assert_eq!(stats.packets.value(), rights.len() as u64);
    let mut sent = rights.map(|(frame, header)| [header.as_bytes(), &frame[..]].concat());
    // A port that is done late passes them in any order.
    let mut passed = guest.port.passed();
    passed.sort();
    sent.sort();
    assert_eq!(passed, sent);
}

#[test]
fn a_port_that_looks_at_the_place_of_checksums_decides_and_its_verdict_is_counted() {
    let header = |start: u16| RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: start.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    for (checks_place, packets, wrong) in [(false, 1, 1), (true, 2, 1)] {
        let mut guest = Guest::new([Next::Take, Next::Take, Next::Misplaced]);
        guest.port.script().checks_place = checks_place;
        for start in [34, 12].into_iter().chain(checks_place.then_some(14)) {
            guest.offer(&[header(start).as_bytes(), &tcp_frame(0, 60)].concat(), &[12, 60]);
        }
        guest.turn();
        let stats = &guest.ring.stats;
        assert_eq!((stats.packets.value(), stats.dropped_bad_header.value()), (packets, wrong));
        assert_eq!(guest.returned() as u64, packets + wrong);
    }
}

#[test]
fn a_header_longer_than_its_frame_is_cut_and_the_frame_is_sent() {
    let header = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        hdr_len: 61.into(),
        gso_size: 10.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    let mut guest = Guest::new([]);
    guest.offer(&[header.as_bytes(), &tcp_frame(0, 60)].concat(), &[12, 60]);
    guest.turn();
    let cut = RawNetHeader { hdr_len: 60.into(), ..header };
    assert_eq!(guest.port.passed()[0][..HEADER_SIZE], *cut.as_bytes());
    assert_eq!((guest.returned(), guest.ring.stats.packets.value()), (1, 1));
}

#[test]
fn a_header_that_changes_after_the_check_is_sent_as_it_was_checked() {
    let mut guest = Guest::new([Next::Block]);
    guest.offer_frame(3);
    guest.turn();
    guest.ring.write(DATA, &[0xff; HEADER_SIZE]);
    guest.tx.on_port();
    guest.turn();
    assert_eq!(guest.port.passed()[0][..HEADER_SIZE], [0; HEADER_SIZE]);
}
