//! Bytes that a driver of a disk can send, at every limit: requests, segments, descriptors.

use manyring_wire::blk::{
    RawBlkHeader, RawSegment, RequestKind, SECTOR_SIZE, Segment, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_OUT,
};
use manyring_wire::virtqueue::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor, avail_entry, need_event, used_entry,
};

fn kind(kind: u32, sector: u64) -> RequestKind {
    let header = RawBlkHeader { kind: kind.into(), reserved: 0.into(), sector: sector.into() };
    RequestKind::parse(&header)
}

fn segment(sector: u64, num_sectors: u32, flags: u32) -> Option<Segment> {
    Segment::parse(&RawSegment {
        sector: sector.into(),
        num_sectors: num_sectors.into(),
        flags: flags.into(),
    })
}

#[test]
fn every_type_of_request_is_told_by_its_number() {
    for (number, expected) in [
        (0, RequestKind::In { offset: 3 * SECTOR_SIZE }),
        (1, RequestKind::Out { offset: 3 * SECTOR_SIZE }),
        (2, RequestKind::Unknown(2)),
        (3, RequestKind::Unknown(3)),
        (4, RequestKind::Flush),
        (8, RequestKind::GetId),
        (11, RequestKind::Discard),
        (13, RequestKind::WriteZeroes),
        (14, RequestKind::SecureErase),
        (15, RequestKind::Unknown(15)),
    ] {
        assert_eq!(kind(number, 3), expected);
    }
}

#[test]
fn the_sector_counts_for_reads_and_writes_only_and_must_fit_64_bits_in_bytes() {
    let last = u64::MAX / SECTOR_SIZE;
    let offset = last * SECTOR_SIZE;
    assert_eq!(kind(VIRTIO_BLK_T_OUT, last), RequestKind::Out { offset });
    assert_eq!(kind(VIRTIO_BLK_T_OUT, last + 1), RequestKind::OutOfRange);
    assert_eq!(kind(VIRTIO_BLK_T_FLUSH, u64::MAX), RequestKind::Flush);
}

#[test]
fn a_segment_may_end_where_64_bits_end_and_not_past_it() {
    let last = u64::MAX / SECTOR_SIZE;
    let ok = Segment { offset: last * SECTOR_SIZE, len: 0, unmap: false };
    assert_eq!(segment(last, 0, 0), Some(ok));
    assert_eq!(segment(last, 1, 0), None, "the sum has 65 bits");
    assert_eq!(segment(last + 1, 0, 0), None, "the offset has 65 bits");
    let long = u64::from(u32::MAX) * SECTOR_SIZE;
    assert_eq!(segment(0, u32::MAX, 0), Some(Segment { offset: 0, len: long, unmap: false }));
}

#[test]
fn only_the_unmap_flag_of_a_segment_is_known() {
    assert_eq!(segment(1, 1, 0), Some(Segment { offset: 512, len: 512, unmap: false }));
    assert_eq!(segment(1, 1, 1), Some(Segment { offset: 512, len: 512, unmap: true }));
    for bit in 1..32 {
        assert_eq!(segment(1, 1, 1 << bit), None);
        assert_eq!(segment(1, 1, 1 << bit | 1), None);
    }
}

#[test]
fn descriptors_have_their_fields_where_the_specification_puts_them() {
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    let desc =
        Descriptor { addr: 0x0807_0605_0403_0201, len: 0x0c0b_0a09, flags: 0x0e0d, next: 0x100f };
    assert_eq!(Descriptor::parse_bytes(&bytes), desc);
    let (low, high) = desc.emit();
    assert_eq!([low.to_ne_bytes(), high.to_ne_bytes()].concat(), bytes);
    assert_eq!(Descriptor::parse(low, high), desc);
}

#[test]
fn descriptors_of_a_packed_ring_have_their_id_before_their_flags() {
    // addr, len, id, flags (virtio 1.3 §2.8.13).
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0x90];
    let desc = Descriptor { addr: 0x0807_0605_0403_0201, len: 0x0c0b_0a09, flags: 0x900f, next: 0 };
    let (low, high) = desc.emit_packed(0x0e0d);
    assert_eq!([low.to_ne_bytes(), high.to_ne_bytes()].concat(), bytes);
    assert_eq!(Descriptor::parse_packed(low, high), (desc, 0x0e0d));
}

#[test]
fn each_flag_of_a_descriptor_says_one_thing() {
    for flags in 0..8u16 {
        let desc = Descriptor { addr: 0, len: 0, flags, next: 0 };
        let told = (desc.has_next(), desc.is_writable(), desc.is_indirect());
        let is = |flag: u16| flags & flag == flag;
        assert_eq!(told, (is(DESC_F_NEXT), is(DESC_F_WRITE), is(DESC_F_INDIRECT)));
    }
}

#[test]
fn entries_of_the_rings_follow_each_other() {
    assert_eq!([0, 1, 255].map(avail_entry), [4, 6, 514]);
    assert_eq!([0, 1, 255].map(used_entry), [4, 12, 2044]);
}

#[test]
fn an_event_is_passed_by_the_move_that_leaves_it_behind() {
    // The plain version: one of the indexes that the move leaves is the event.
    for old in [0u16, 1, 0x7fff, 0x8000, 0xfffd, 0xffff] {
        for step in 0..6u16 {
            for event in (0..10).map(|n: u16| old.wrapping_sub(2).wrapping_add(n)) {
                let passed = (0..step).any(|n| old.wrapping_add(n) == event);
                let new = old.wrapping_add(step);
                assert_eq!(need_event(event, new, old), passed, "{event} {new} {old}");
            }
        }
    }
}
