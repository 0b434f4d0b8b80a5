//! Virtio-net headers that lie in several pieces, are wrong, or change while they are read.

use super::*;

#[test]
fn a_header_in_pieces_is_read_whole_and_its_frame_follows() {
    let header = RawHeader {
        flags: HDR_F_NEEDS_CSUM,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawHeader::default()
    };
    let bytes = [header.as_bytes(), &frame(7, 60)].concat();
    for pieces in [&[72][..], &[5, 67], &[5, 7, 60], &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 59, 1]] {
        let mut guest = Guest::new([]);
        guest.offer(&bytes, pieces);
        guest.turn();
        assert_eq!(guest.port.passed(), std::slice::from_ref(&bytes), "{pieces:?}");
    }
}

#[test]
fn a_header_that_lies_or_was_not_negotiated_is_counted() {
    let csum = RawHeader {
        flags: 1,
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawHeader::default()
    };
    let gso = RawHeader { gso_type: HDR_GSO_TCPV4, gso_size: 10.into(), ..csum };
    let lies = [
        RawHeader { csum_start: 60.into(), ..csum },
        RawHeader { csum_start: u16::MAX.into(), csum_offset: u16::MAX.into(), ..csum },
        RawHeader { gso_size: 0.into(), ..gso },
        RawHeader { gso_type: 77, ..gso },
        RawHeader { flags: 0, ..gso },
    ];
    let mut guest = Guest::new([]);
    for header in lies {
        guest.offer(&[header.as_bytes(), &frame(0, 60)].concat(), &[12, 60]);
    }
    guest.offer(&[gso.as_bytes(), &frame(1, 60)].concat(), &[12, 60]);
    guest.turn();
    assert_eq!(guest.returned(), lies.len() + 1);
    let stats = &guest.ring.stats;
    assert_eq!(stats.dropped_bad_header.value(), lies.len() as u64);
    assert_eq!((stats.packets.value(), stats.gso_packets.value()), (1, 1));
    let mut plain = Guest::with([], Offloads::default());
    plain.offer(&[csum.as_bytes(), &frame(0, 60)].concat(), &[12, 60]);
    plain.turn();
    assert_eq!((plain.returned(), plain.ring.stats.dropped_bad_header.value()), (1, 1));
}

#[test]
fn a_header_longer_than_its_frame_is_cut_and_the_frame_is_sent() {
    let header = RawHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        hdr_len: 61.into(),
        gso_size: 10.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawHeader::default()
    };
    let mut guest = Guest::new([]);
    guest.offer(&[header.as_bytes(), &frame(0, 60)].concat(), &[12, 60]);
    guest.turn();
    let cut = RawHeader { hdr_len: 60.into(), ..header };
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
