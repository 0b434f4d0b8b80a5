//! blkif requests and responses against hand-made bytes, against their borders, and against noise.

use super::*;
use proptest::prelude::*;

const DISK: u64 = 2048;

fn limits() -> Limits {
    Limits {
        sectors: DISK,
        block_shift: 0,
        writable: true,
        barrier: true,
        flush: true,
        discard: true,
        discard_secure: true,
        indirect_segments_max: 256,
    }
}

/// A request out of bytes at offsets, as a compiler of `abi` would have laid it out.
fn by_hand(abi: Abi, fields: &[(usize, &[u8])]) -> RawRequest {
    let mut bytes = [0; 4 * ENTRY_WORDS];
    for (offset, field) in fields {
        bytes[*offset..*offset + field.len()].copy_from_slice(field);
    }
    let word = |n: usize| bytes[4 * n..4 * n + 4].try_into().unwrap();
    RawRequest::new(abi, std::array::from_fn(|n| u32::from_le_bytes(word(n))))
}

fn refused(raw: &RawRequest, limits: &Limits) -> RequestError {
    Request::parse(raw, limits).unwrap_err().error
}

fn data(op: u8, sector: u64, segments: &[Segment]) -> RawRequest {
    RawRequest::data(Abi::X86_64, op, 1, sector, segments)
}

#[test]
fn write_of_either_abi_is_parsed_at_its_offsets() {
    for (abi, [id, sector, segments]) in
        [(Abi::Native, [8, 16, 24]), (Abi::X86_64, [8, 16, 24]), (Abi::X86_32, [4, 12, 20])]
    {
        let raw = by_hand(
            abi,
            &[
                (0, &[OP_WRITE, 2, 0, 0xca]),
                (id, &0x0102_0304_0506_0708_u64.to_le_bytes()),
                (sector, &100_u64.to_le_bytes()),
                (segments, &[9, 0, 0, 0, 1, 7, 0xee, 0xee]),
                (segments + 8, &[0xff, 1, 0, 0, 0, 0]),
            ],
        );
        let request = Request::parse(&raw, &limits()).unwrap();
        assert_eq!((request.id, request.echo), (0x0102_0304_0506_0708, OP_WRITE), "{abi:?}");
        let Kind::Data(data) = request.kind else { panic!("{request:?}") };
        assert_eq!((data.op, data.sector), (DataOp::Write, 100));
        let expected = [Segment::new(9, 1, 7).unwrap(), Segment::new(0x1ff, 0, 0).unwrap()];
        assert_eq!(data.segments().collect::<Vec<_>>(), expected);
        assert_eq!((expected[0].offset(), expected[0].len()), (512, 3584));
    }
}

#[test]
fn discard_of_either_abi_is_parsed_at_its_offsets() {
    for (abi, [id, sector, count]) in [(Abi::X86_64, [8, 16, 24]), (Abi::X86_32, [4, 12, 20])] {
        let raw = by_hand(
            abi,
            &[
                (0, &[OP_DISCARD, DISCARD_SECURE, 0, 0]),
                (id, &5_u64.to_le_bytes()),
                (sector, &8_u64.to_le_bytes()),
                (count, &16_u64.to_le_bytes()),
            ],
        );
        let kind = |secure| Kind::Discard { sector: 8, count: 16, secure };
        let request = Request::parse(&raw, &limits()).unwrap();
        assert_eq!(request, Request { id: 5, echo: OP_DISCARD, kind: kind(true) }, "{abi:?}");
        let not_offered = Limits { discard_secure: false, ..limits() };
        assert_eq!(Request::parse(&raw, &not_offered).unwrap().kind, kind(false));
    }
}

#[test]
fn indirect_request_of_either_abi_is_parsed_at_its_offsets_and_echoes_its_inner_operation() {
    for (abi, [id, sector, grefs]) in [(Abi::X86_64, [8, 16, 28]), (Abi::X86_32, [4, 12, 24])] {
        let raw = by_hand(
            abi,
            &[
                (0, &[OP_INDIRECT, OP_WRITE, 1, 2]),
                (id, &6_u64.to_le_bytes()),
                (sector, &3_u64.to_le_bytes()),
                (grefs, &[70, 0, 0, 0, 71, 0, 0, 0]),
            ],
        );
        let wide = Limits { indirect_segments_max: 1024, ..limits() };
        let request = Request::parse(&raw, &wide).unwrap();
        assert_eq!((request.id, request.echo), (6, OP_WRITE), "{abi:?}");
        let Kind::Indirect(indirect) = request.kind else { panic!("{request:?}") };
        assert_eq!((indirect.op, indirect.sector), (DataOp::Write, 3));
        assert_eq!((indirect.segment_count(), indirect.grefs()), (513, &[70, 71][..]));
        let bytes = [indirect.page_bytes(0), indirect.page_bytes(1), indirect.page_bytes(2)];
        assert_eq!(bytes, [4096, 8, 0]);
    }
}

#[test]
fn response_has_12_bytes_that_are_the_same_in_every_abi() {
    let response = Response { id: 0x0102_0304_0506_0708, operation: 6, status: BlkifStatus::Error };
    assert_eq!(response.emit(), [0x0506_0708, 0x0102_0304, 0xffff_0006]);
    for status in [BlkifStatus::Okay, BlkifStatus::Error, BlkifStatus::Unsupported] {
        let response = Response { status, ..response };
        assert_eq!(Response::parse(response.emit()), Some(response));
    }
    assert_eq!(Response::parse([0, 0, 0x0001_0000]), None);
    assert_eq!(Response::parse([0, 0, 0xfffd_0000]), None);
}

#[test]
fn ring_has_32_entries_a_page_in_every_abi() {
    for abi in Abi::ALL {
        let sizes: Vec<u16> = (0..=RING_PAGE_ORDER_MAX).map(|order| abi.ring_size(order)).collect();
        assert_eq!(sizes, [32, 64, 128, 256, 512], "{abi:?}");
        let end = RING_ENTRIES + 512 * abi.layout().entry_size;
        assert!(end <= ring_bytes(RING_PAGE_ORDER_MAX));
    }
}

#[test]
fn protocol_names_an_abi_and_an_unknown_one_is_none() {
    assert_eq!(Abi::parse(b"x86_32-abi"), Some(Abi::X86_32));
    assert_eq!(Abi::parse(b"x86_64-abi"), Some(Abi::X86_64));
    assert_eq!((Abi::parse(b"x86_64"), Abi::parse(b"")), (None, None));
    for abi in Abi::ALL {
        assert!(abi.name().is_none_or(|name| Abi::parse(name.as_bytes()) == Some(abi)));
    }
}

#[test]
fn segment_that_ends_before_it_begins_or_behind_its_page_is_a_fault() {
    for (first, last) in [(1, 0), (0, 8), (8, 8), (255, 255), (7, 255)] {
        let raw = by_hand(Abi::X86_64, &[(0, &[OP_READ, 1]), (24, &[1, 0, 0, 0, first, last])]);
        let error = refused(&raw, &limits());
        assert_eq!(error, RequestError::Segment(BlkifSegmentError { first, last }));
        assert!(error.is_fault() && error.status() == BlkifStatus::Error);
    }
    assert_eq!(Segment::new(3, 0, 7), Ok(Segment::page(3)));
}

#[test]
fn request_of_more_than_eleven_segments_is_a_fault_and_of_none_is_answered() {
    let segments = [Segment::page(1); 12];
    assert!(Request::parse(&data(OP_READ, 0, &segments[..11]), &limits()).is_ok());
    let error = refused(&data(OP_READ, 0, &segments), &limits());
    assert_eq!(error, RequestError::Segments { count: 12, max: 11 });
    assert!(error.is_fault());
    let error = refused(&data(OP_WRITE, 0, &[]), &limits());
    assert_eq!(error, RequestError::Empty { operation: OP_WRITE });
    assert!(!error.is_fault());
}

#[test]
fn sectors_past_the_end_are_out_of_range_even_where_the_sum_wraps() {
    let page = [Segment::page(1)];
    assert!(Request::parse(&data(OP_READ, DISK - 8, &page), &limits()).is_ok());
    for sector in [DISK - 7, DISK, u64::MAX - 7, u64::MAX] {
        let error = refused(&data(OP_READ, sector, &page), &limits());
        assert_eq!(error, RequestError::Range { sector, count: 8, sectors: DISK });
        assert!(!error.is_fault() && error.status() == BlkifStatus::Error);
    }
    let discard = |sector, count| RawRequest::discard(Abi::X86_32, 0, 1, sector, count);
    assert!(Request::parse(&discard(0, DISK), &limits()).is_ok());
    for (sector, count) in [(0, DISK + 1), (DISK, 1), (8, u64::MAX), (u64::MAX, u64::MAX)] {
        let error = refused(&discard(sector, count), &limits());
        assert_eq!(error, RequestError::Range { sector, count, sectors: DISK });
    }
    let empty = RequestError::Empty { operation: OP_DISCARD };
    assert_eq!(refused(&discard(0, 0), &limits()), empty);
}

#[test]
fn sectors_of_a_disk_of_4096_bytes_a_block_are_whole_blocks() {
    let blocks = Limits { block_shift: 3, ..limits() };
    let half = |first, last| Segment::new(1, first, last).unwrap();
    assert!(Request::parse(&data(OP_READ, 8, &[Segment::page(1)]), &blocks).is_ok());
    let error = refused(&data(OP_READ, 4, &[Segment::page(1)]), &blocks);
    assert_eq!(error, RequestError::Alignment { sector: 4, count: 8, block: 8 });
    assert!(matches!(
        refused(&data(OP_READ, 8, &[half(0, 3)]), &blocks),
        RequestError::Alignment { .. }
    ));
    // The sum is a whole block, but no segment is.
    let error = refused(&data(OP_READ, 8, &[half(0, 3), half(4, 7)]), &blocks);
    assert!(matches!(error, RequestError::Alignment { .. }) && !error.is_fault());
}

#[test]
fn what_was_not_offered_is_answered_as_unsupported() {
    let nothing = Limits {
        barrier: false,
        flush: false,
        discard: false,
        indirect_segments_max: 0,
        ..limits()
    };
    let requests = [
        (OP_WRITE_BARRIER, data(OP_WRITE_BARRIER, 0, &[Segment::page(1)])),
        (OP_FLUSH_DISKCACHE, data(OP_FLUSH_DISKCACHE, 0, &[])),
        (OP_DISCARD, RawRequest::discard(Abi::X86_64, 0, 1, 0, 8)),
        (OP_INDIRECT, RawRequest::indirect(Abi::X86_64, OP_READ, 1, 0, (1, &[1]))),
        (4, data(4, 0, &[])),
        (7, data(7, 0, &[])),
        (255, data(255, 0, &[])),
    ];
    for (operation, raw) in requests {
        let error = refused(&raw, &nothing);
        assert_eq!(error, RequestError::NotOffered { operation });
        assert!(!error.is_fault() && error.status() == BlkifStatus::Unsupported);
    }
}

#[test]
fn barrier_and_flush_move_data_if_they_have_segments() {
    let (barrier, flush) =
        (data(OP_WRITE_BARRIER, 9, &[]), data(OP_FLUSH_DISKCACHE, u64::MAX, &[]));
    assert_eq!(Request::parse(&barrier, &limits()).unwrap().kind, Kind::Barrier);
    // A flush without data carries no sector: whatever stands there is not looked at.
    assert_eq!(Request::parse(&flush, &limits()).unwrap().kind, Kind::Flush);
    let op = |operation| {
        let raw = data(operation, 0, &[Segment::page(1)]);
        match Request::parse(&raw, &limits()).unwrap().kind {
            Kind::Data(data) => data.op,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(op(OP_WRITE_BARRIER), DataOp::WriteBarrier);
    assert_eq!(op(OP_FLUSH_DISKCACHE), DataOp::FlushWrite);
}

#[test]
fn writes_to_a_disk_that_is_read_only_are_refused_and_reads_are_not() {
    let limits = Limits { writable: false, ..limits() };
    let page = [Segment::page(1)];
    for raw in [
        data(OP_WRITE, 0, &page),
        data(OP_WRITE_BARRIER, 0, &page),
        data(OP_FLUSH_DISKCACHE, 0, &page),
        RawRequest::discard(Abi::X86_64, 0, 1, 0, 8),
        RawRequest::indirect(Abi::X86_64, OP_WRITE, 1, 0, (1, &[1])),
    ] {
        assert_eq!(refused(&raw, &limits), RequestError::ReadOnly);
    }
    assert!(Request::parse(&data(OP_READ, 0, &page), &limits).is_ok());
    assert!(Request::parse(&data(OP_FLUSH_DISKCACHE, 0, &[]), &limits).is_ok());
}

#[test]
fn indirect_request_with_a_count_or_an_inner_operation_that_lies_is_refused() {
    let raw = |inner, count| {
        RawRequest::indirect(Abi::X86_64, inner, 1, 0, (count, &[1, 2, 3, 4, 5, 6, 7, 8]))
    };
    for inner in [OP_WRITE_BARRIER, OP_FLUSH_DISKCACHE, OP_DISCARD, OP_INDIRECT, 200] {
        let error = refused(&raw(inner, 1), &limits());
        assert_eq!(error, RequestError::IndirectOperation { operation: inner });
        assert!(error.is_fault());
    }
    let error = refused(&raw(OP_READ, 257), &limits());
    assert_eq!(error, RequestError::Segments { count: 257, max: 256 });
    // Whatever is offered, eight pages hold no more than 4096.
    let greedy = Limits { indirect_segments_max: u16::MAX, sectors: u64::MAX, ..limits() };
    assert!(Request::parse(&raw(OP_READ, 4096), &greedy).is_ok());
    let error = refused(&raw(OP_READ, 4097), &greedy);
    assert_eq!(error, RequestError::Segments { count: 4097, max: 4096 });
    let error = refused(&raw(OP_READ, 0), &limits());
    assert_eq!(error, RequestError::Empty { operation: OP_INDIRECT });
}

#[test]
fn segments_of_indirect_pages_are_checked_as_those_of_a_request() {
    let raw = RawRequest::indirect(Abi::X86_64, OP_READ, 1, DISK - 16, (2, &[1]));
    let Kind::Indirect(indirect) = Request::parse(&raw, &limits()).unwrap().kind else { panic!() };
    let page = [Segment::page(5), Segment::new(6, 2, 3).unwrap()];
    let bytes: Vec<u8> = page.iter().flat_map(|segment| segment.emit_bytes()).collect();
    let parsed: Result<Vec<_>, _> = Segment::parse_page(&bytes).collect();
    assert_eq!(parsed, Ok(page.to_vec()));
    assert_eq!(indirect.check(&page, &limits()), Ok(10));
    let (count, expected) = (1, 2);
    let error = RequestError::IndirectCount { count, expected };
    assert_eq!(indirect.check(&page[..1], &limits()), Err(error));
    let small = Limits { sectors: DISK - 7, ..limits() };
    let range = RequestError::Range { sector: DISK - 16, count: 10, sectors: DISK - 7 };
    assert_eq!(indirect.check(&page, &small), Err(range));
    let spoiled = [&bytes[..12], &[9, 1, 0, 0]].concat();
    let parsed: Result<Vec<_>, _> = Segment::parse_page(&spoiled).collect();
    assert_eq!(parsed, Err(BlkifSegmentError { first: 9, last: 1 }));
}

#[test]
fn refusal_says_how_it_is_to_be_answered() {
    let raw = RawRequest::indirect(Abi::X86_32, OP_WRITE, 77, DISK, (1, &[1]));
    let refusal = Request::parse(&raw, &limits()).unwrap_err();
    assert_eq!((refusal.id, refusal.echo), (77, OP_WRITE));
    let text = "request: 1 sectors at sector 2048 of a disk of 2048";
    assert_eq!(refusal.to_string(), text);
}

proptest! {
    /// The bytes that a request says it has are all that its parsing looks at: a ring may leave
    /// the others out.
    #[test]
    fn words_behind_the_size_of_a_request_change_nothing(
        words in prop::array::uniform28(any::<u32>()), head in any::<[u8; 4]>(), abi in 0..3_usize
    ) {
        let abi = Abi::ALL[abi];
        let mut words = words;
        words[0] = u32::from_le_bytes([head[0] % 8, head[1] % 14, head[2], head[3] % 2]);
        let limits = Limits { sectors: u64::MAX, ..limits() };
        let whole = RawRequest::new(abi, words);
        let mut cut = [0; ENTRY_WORDS];
        cut[..whole.words().len()].copy_from_slice(whole.words());
        let cut = RawRequest::new(abi, cut);
        prop_assert_eq!(Request::parse(&whole, &limits), Request::parse(&cut, &limits));
        prop_assert_eq!(whole, cut, "and they are the same request");
    }

    #[test]
    fn data_request_emitted_parses_back(
        id in any::<u64>(), sector in 0..DISK - 88, op in 0..4_u8, abi in 0..3_usize,
        segments in prop::collection::vec((any::<u32>(), 0..8_u8, 0..8_u8), 1..12),
    ) {
        let segment = |&(gref, a, b): &(u32, u8, u8)| {
            Segment::new(gref, a.min(b), a.max(b)).unwrap()
        };
        let segments: Vec<Segment> = segments.iter().map(segment).collect();
        let raw = RawRequest::data(Abi::ALL[abi], op, id, sector, &segments);
        let request = Request::parse(&raw, &limits()).unwrap();
        prop_assert_eq!((request.id, request.echo), (id, op));
        let Kind::Data(data) = request.kind else { panic!("{request:?}") };
        prop_assert_eq!(data.sector, sector);
        prop_assert_eq!(data.segment_count(), segments.len());
        prop_assert_eq!(data.segments().collect::<Vec<_>>(), segments);
    }

    /// Whatever lies in the ring, a request that is parsed stays on the disk and in its pages.
    #[test]
    fn noise_is_refused_or_stays_inside_the_limits(
        words in prop::array::uniform28(any::<u32>()), head in any::<[u8; 4]>(),
        sector in 0..3000_u64, abi in 0..3_usize
    ) {
        let abi = Abi::ALL[abi];
        let mut words = words;
        words[0] = u32::from_le_bytes([head[0] % 8, head[1] % 14, head[2], head[3] % 4]);
        words[abi.layout().sector / 4] = u32::try_from(sector).unwrap();
        words[abi.layout().sector / 4 + 1] = 0;
        match Request::parse(&RawRequest::new(abi, words), &limits()).map(|request| request.kind) {
            Ok(Kind::Data(data)) => {
                let sum: u64 = data.segments().map(|s| u64::from(s.sectors())).sum();
                prop_assert!(sum > 0 && data.sector + sum <= DISK);
                prop_assert!(data.segments().all(|s| s.offset() + s.len() <= PAGE_SIZE));
            }
            Ok(Kind::Indirect(indirect)) => {
                prop_assert!((1..=256).contains(&indirect.segment_count()));
                prop_assert!(!indirect.grefs().is_empty());
            }
            Ok(Kind::Discard { sector, count, .. }) => prop_assert!(sector + count <= DISK),
            Ok(Kind::Flush | Kind::Barrier) | Err(_) => {}
        }
    }
}

#[test]
fn event_is_reached_by_the_move_that_ends_at_it_or_behind_it() {
    // The plain version: one of the counts that the move comes to is the event.
    for old in [0_u32, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_fffd, u32::MAX] {
        for step in 0..6_u32 {
            for event in (0..10).map(|n: u32| old.wrapping_sub(2).wrapping_add(n)) {
                let is_reached = (1..=step).any(|n| old.wrapping_add(n) == event);
                let new = old.wrapping_add(step);
                assert_eq!(need_event(event, new, old), is_reached, "{event} {new} {old}");
            }
        }
    }
}
