//! Frames of a legacy driver: without mergeable buffers its header has 10 bytes.

use super::*;
use manyring_wire::net::{HASH_HEADER_SIZE, LEGACY_HEADER_SIZE};

fn guest(taken: Offloads) -> Guest {
    let mut guest = Guest::with([], taken);
    guest.tx.set_headers(LEGACY_HEADER_SIZE);
    guest
}

#[test]
fn a_legacy_drivers_frame_is_sent_whole_whatever_the_layout() {
    let header = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        hdr_len: 54.into(),
        gso_size: 10.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        num_buffers: 0.into(),
    };
    for header in [RawNetHeader::default(), header] {
        let short = &header.as_bytes()[..LEGACY_HEADER_SIZE];
        let whole = [header.as_bytes(), &tcp_frame(7, 60)].concat();
        for pieces in [
            &[70][..],
            &[10, 60],
            &[5, 65],
            &[5, 5, 60],
            &[11, 59],
            &[12, 58],
            &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 59, 1],
        ] {
            let mut guest = guest(ALL);
            guest.offer(&[short, &tcp_frame(7, 60)].concat(), pieces);
            guest.turn();
            assert_eq!(guest.port.passed(), std::slice::from_ref(&whole), "{pieces:?}");
            assert_eq!(guest.returned(), 1);
            assert_eq!(guest.ring.stats.bytes_passed.value(), 60);
        }
    }
}

#[test]
fn a_legacy_drivers_header_is_checked_by_what_was_negotiated() {
    let csum = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    let past = RawNetHeader { csum_start: 43.into(), ..csum };
    for (taken, header, passes) in
        [(ALL, csum, true), (Offloads::default(), csum, false), (ALL, past, false)]
    {
        let mut guest = guest(taken);
        let short = &header.as_bytes()[..LEGACY_HEADER_SIZE];
        guest.offer(&[short, &tcp_frame(1, 60)].concat(), &[10, 60]);
        guest.turn();
        assert_eq!(guest.port.passed().len(), usize::from(passes), "{header:?}");
        let bad = guest.ring.stats.dropped_bad_header.value();
        assert_eq!((guest.returned(), bad), (1, u64::from(!passes)));
    }
}

#[test]
fn a_legacy_drivers_chain_without_a_whole_frame_is_counted() {
    let long = vec![0; LEGACY_HEADER_SIZE + FRAME_SIZE_MAX + 1];
    let mut guest = guest(ALL);
    for len in [1, 9, 10, 23] {
        guest.offer(&[0; 64], &[len]);
    }
    guest.offer(&[0; 64], &[24]);
    guest.turn();
    assert_eq!((guest.returned(), guest.ring.stats.dropped_short.value()), (5, 4));
    assert_eq!(guest.port.passed().len(), 1, "14 bytes are an Ethernet header");
    guest.ring.write(DATA, &long);
    for len in [long.len() - 1, long.len()] {
        guest.ring.driver.add(&[(DATA, len32(len))], &[]).unwrap();
    }
    guest.ring.driver.publish();
    guest.turn();
    assert_eq!(guest.ring.stats.dropped_too_long.value(), 1);
    assert_eq!(guest.port.passed().len(), 2);
    let _ = guest.returned();
}

/// A driver that has hashes reported has longer headers both ways (§5.1.6).
#[test]
fn a_frame_behind_a_header_with_room_for_a_hash_is_sent_whole() {
    let long = [RawNetHeader::default().as_bytes(), &[0xee; 8], &frame(3, 60)].concat();
    for pieces in [&[80][..], &[20, 60], &[12, 8, 60], &[13, 67], &[70, 10]] {
        let mut guest = Guest::with([], ALL);
        guest.tx.set_headers(HASH_HEADER_SIZE);
        guest.offer(&long, pieces);
        guest.turn();
        assert_eq!(guest.port.sent(), [frame(3, 60)], "{pieces:?}");
        assert_eq!((guest.returned(), guest.ring.stats.bytes_passed.value()), (1, 60));
    }
    let mut guest = Guest::with([], ALL);
    guest.tx.set_headers(HASH_HEADER_SIZE);
    guest.offer(&long, &[33]);
    guest.turn();
    assert_eq!((guest.returned(), guest.ring.stats.dropped_short.value()), (1, 1));
}
