//! Messages that a front-end can send, at every limit: headers, payloads, regions, vring indexes.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use manyring_wire::vhost_user::{
    CONFIG_SIZE_MAX, ConfigAccess, Fds, Header, PAYLOAD_SIZE_MAX, PROTOCOL_F_CONFIG,
    PROTOCOL_F_STATUS, ParseError, Payload, REQUESTS, Region, Reply, Request, Row,
    TABLE_REGIONS_MAX, VringAddr, VringState, row_of,
};
use zerocopy::IntoBytes;

const REGION: Region =
    Region { guest_addr: 0x1000, size: 0x2000, user_addr: 0x7000, mmap_offset: 0x3000 };

fn row(name: &str) -> &'static Row {
    REQUESTS.iter().find(|row| row.name == name).unwrap()
}

fn parse(name: &str, payload: &[u8], fds: usize) -> Result<Request, ParseError> {
    Request::parse(row(name), payload, fds)
}

fn table(count: usize) -> Vec<u8> {
    let regions = [REGION; TABLE_REGIONS_MAX + 1];
    let count32 = u32::try_from(count).unwrap();
    [&count32.to_ne_bytes()[..], &[0; 4], regions[..count].as_bytes()].concat()
}

#[test]
fn a_header_is_read_and_written_word_by_word() {
    let bytes = [[1, 0, 0, 0], [9, 0, 0, 0], [0, 1, 0, 0]].concat();
    let header = Header::parse(bytes[..].try_into().unwrap()).unwrap();
    assert_eq!(header, Header { request: 1, flags: 9, size: 256 });
    assert_eq!(header.emit()[..], bytes);
    assert!(header.needs_reply());
    for flags in [1, 1 | 4, 1 | 16, !8] {
        assert!(!Header { flags, ..header }.needs_reply(), "{flags:#x}");
    }
}

#[test]
fn the_version_is_two_bits_and_the_payload_has_a_largest_size() {
    let size_max = u32::try_from(PAYLOAD_SIZE_MAX).unwrap();
    let parse = |flags, size| Header::parse(&Header { request: 1, flags, size }.emit());
    for flags in [1, 5, 9, 0xffff_fffd] {
        assert!(parse(flags, size_max).is_ok(), "{flags:#x}");
    }
    for flags in [0, 2, 3, 7, 0xffff_ffff] {
        assert_eq!(parse(flags, 0), Err(ParseError::Version { flags }));
    }
    let size = size_max + 1;
    assert_eq!(parse(1, size), Err(ParseError::TooLong { request: 1, size }));
}

#[test]
fn a_region_may_reach_the_end_of_every_address_space_and_not_past_it() {
    let last = u64::MAX - REGION.size;
    assert!(Region { guest_addr: last, ..REGION }.is_sound());
    assert!(Region { user_addr: last, ..REGION }.is_sound());
    assert!(Region { mmap_offset: last, ..REGION }.is_sound());
    assert!(!Region { guest_addr: last + 1, ..REGION }.is_sound());
    assert!(!Region { user_addr: last + 1, ..REGION }.is_sound());
    assert!(!Region { mmap_offset: last + 1, ..REGION }.is_sound());
    assert!(Region { size: 1, ..REGION }.is_sound() && !Region { size: 0, ..REGION }.is_sound());
}

#[test]
fn payloads_have_the_sizes_of_the_specification() {
    for (payload, sizes) in [
        (Payload::None, (0, 0)),
        (Payload::U64, (8, 8)),
        (Payload::VringState, (8, 8)),
        (Payload::VringAddr, (40, 40)),
        (Payload::MemRegion, (40, 40)),
        (Payload::MemTable, (8, 8 + 8 * 32)),
        (Payload::Log, (16, 16)),
        (Payload::Iotlb, (32, 32)),
        (Payload::Inflight, (20, 24)),
        (Payload::Opaque, (0, PAYLOAD_SIZE_MAX)),
    ] {
        assert_eq!(payload.sizes(), sizes, "{payload:?}");
    }
    // SPDK's is longer than what it says, and is refused with an answer.
    assert_eq!(Payload::Config.sizes(), (12, PAYLOAD_SIZE_MAX));
}

#[test]
fn a_payload_that_is_too_short_or_too_long_is_refused() {
    for served in REQUESTS.iter().filter(|row| row.served) {
        let (min, max) = served.payload.sizes();
        let sizes = [min.checked_sub(1), Some(max + 1)];
        for size in sizes.into_iter().flatten() {
            let refused = Request::parse(served, &vec![0; size], served.fds.count_max());
            assert_eq!(refused, Err(ParseError::Size { name: served.name, size }));
        }
    }
}

#[test]
fn no_message_brings_more_fds_than_its_row_allows() {
    assert_eq!(Fds::None.count_max(), 0);
    for fds in [Fds::One, Fds::OneUnlessFlag, Fds::Any] {
        assert_eq!(fds.count_max(), 1);
    }
    assert_eq!(Fds::PerRegion.count_max(), TABLE_REGIONS_MAX);
    let number = 0u64.to_ne_bytes();
    for (name, payload, fds) in [
        ("SET_BACKEND_REQ_FD", &[][..], 0),
        ("SET_BACKEND_REQ_FD", &[], 2),
        ("SET_FEATURES", &number, 1),
        ("SET_VRING_CALL", &number, 0),
        ("SET_VRING_ERR", &number, 2),
    ] {
        let refused = parse(name, payload, fds);
        assert!(matches!(refused, Err(ParseError::Fds { .. })), "{name} {fds}: {refused:?}");
    }
    assert_eq!(parse("SET_BACKEND_REQ_FD", &[], 1), Ok(Request::SetBackendReqFd));
    // QEMU sends the region's file with its removal, libblkio does not.
    let removal = [&[0; 8], REGION.as_bytes()].concat();
    for fds in [0, 1] {
        assert_eq!(parse("REM_MEM_REG", &removal, fds), Ok(Request::RemMemReg(REGION)));
    }
}

#[test]
fn a_doorbells_index_has_eight_bits_and_bit_8_says_that_no_fd_comes() {
    let kick = |value: u64, fds| parse("SET_VRING_KICK", &value.to_ne_bytes(), fds);
    assert_eq!(kick(0xff, 1), Ok(Request::SetVringKick { index: 0xff, fd: true }));
    assert_eq!(kick(0x1ff, 0), Ok(Request::SetVringKick { index: 0xff, fd: false }));
    // Bits that mean nothing name no other vring.
    assert_eq!(kick(0xffff_fe02, 1), Ok(Request::SetVringKick { index: 2, fd: true }));
    let call = parse("SET_VRING_CALL", &0x103u64.to_ne_bytes(), 0);
    assert_eq!(call, Ok(Request::SetVringCall { index: 3, fd: false }));
    let err = parse("SET_VRING_ERR", &4u64.to_ne_bytes(), 1);
    assert_eq!(err, Ok(Request::SetVringErr { index: 4, fd: true }));
}

#[test]
fn a_memory_table_has_at_most_eight_regions_each_with_its_file() {
    for count in [0, 1, TABLE_REGIONS_MAX] {
        let parsed = parse("SET_MEM_TABLE", &table(count), count);
        assert_eq!(parsed, Ok(Request::SetMemTable(vec![REGION; count])));
        assert!(parse("SET_MEM_TABLE", &table(count), count + 1).is_err());
    }
    assert!(parse("SET_MEM_TABLE", &table(TABLE_REGIONS_MAX + 1), TABLE_REGIONS_MAX + 1).is_err());
    // One byte of the second region is missing.
    let short = &table(2)[..8 + 2 * 32 - 1];
    let wrong = ParseError::Regions { name: "SET_MEM_TABLE", count: 2, size: short.len() };
    assert_eq!(parse("SET_MEM_TABLE", short, 2), Err(wrong));
    // The second of two is empty.
    let empty = Region { size: 0, ..REGION };
    let bytes = [&[2, 0, 0, 0, 0, 0, 0, 0], REGION.as_bytes(), empty.as_bytes()].concat();
    let wrong = ParseError::Region { name: "SET_MEM_TABLE" };
    assert_eq!(parse("SET_MEM_TABLE", &bytes, 2), Err(wrong));
}

#[test]
fn a_region_follows_its_padding() {
    let payload = [&[0xff; 8], REGION.as_bytes()].concat();
    assert_eq!(parse("ADD_MEM_REG", &payload, 1), Ok(Request::AddMemReg(REGION)));
    let empty = [&[0; 8], Region { size: 0, ..REGION }.as_bytes()].concat();
    let wrong = ParseError::Region { name: "ADD_MEM_REG" };
    assert_eq!(parse("ADD_MEM_REG", &empty, 1), Err(wrong));
}

#[test]
fn numbers_states_and_addresses_are_read_as_they_are_written() {
    let number = 0x8877_6655_4433_2211u64.to_ne_bytes();
    let value = u64::from_ne_bytes(number);
    assert_eq!(parse("SET_FEATURES", &number, 0), Ok(Request::SetFeatures(value)));
    assert_eq!(parse("SET_PROTOCOL_FEATURES", &number, 0), Ok(Request::SetProtocolFeatures(value)));
    assert_eq!(parse("SET_STATUS", &number, 0), Ok(Request::SetStatus(value)));
    assert_eq!(parse("NET_SET_MTU", &number, 0), Ok(Request::NetSetMtu(value)));
    let mac = *number.first_chunk().unwrap();
    assert_eq!(parse("SEND_RARP", &number, 0), Ok(Request::SendRarp(mac)));
    let state = VringState { index: 7, num: 256 };
    assert_eq!(parse("SET_VRING_NUM", state.as_bytes(), 0), Ok(Request::SetVringNum(state)));
    assert_eq!(parse("SET_VRING_BASE", state.as_bytes(), 0), Ok(Request::SetVringBase(state)));
    assert_eq!(parse("GET_VRING_BASE", state.as_bytes(), 0), Ok(Request::GetVringBase(state)));
    assert_eq!(parse("SET_VRING_ENABLE", state.as_bytes(), 0), Ok(Request::SetVringEnable(state)));
    let addr = VringAddr { index: 1, flags: 0, descriptor: 2, used: 3, available: 4, log: 5 };
    assert_eq!(parse("SET_VRING_ADDR", addr.as_bytes(), 0), Ok(Request::SetVringAddr(addr)));
}

#[test]
fn requests_without_a_payload_are_told_by_their_number() {
    for (name, request) in [
        ("GET_FEATURES", Request::GetFeatures),
        ("SET_OWNER", Request::SetOwner),
        ("RESET_OWNER", Request::ResetOwner),
        ("GET_PROTOCOL_FEATURES", Request::GetProtocolFeatures),
        ("GET_QUEUE_NUM", Request::GetQueueNum),
        ("RESET_DEVICE", Request::ResetDevice),
        ("GET_MAX_MEM_SLOTS", Request::GetMaxMemSlots),
        ("GET_STATUS", Request::GetStatus),
    ] {
        assert_eq!(parse(name, &[], 0), Ok(request));
    }
}

#[test]
fn a_config_access_inside_the_space_is_read_with_its_bytes() {
    let words = |offset: u32, size: u32| [offset, size, 1].as_bytes().to_vec();
    let payload = [&words(CONFIG_SIZE_MAX - 4, 4)[..], &[1, 2, 3, 4]].concat();
    let access = ConfigAccess { offset: CONFIG_SIZE_MAX - 4, size: 4, flags: 1 };
    assert_eq!(parse("GET_CONFIG", &payload, 0), Ok(Request::GetConfig(access)));
    let set = Request::SetConfig(access, vec![1, 2, 3, 4]);
    assert_eq!(parse("SET_CONFIG", &payload, 0), Ok(set));
}

#[test]
fn the_table_says_what_is_answered_what_is_needed_and_what_is_served() {
    let (config, status) = (row("GET_CONFIG"), row("SET_STATUS"));
    assert!(config.replies && config.served && config.needs == PROTOCOL_F_CONFIG);
    assert!(!status.replies && status.served && status.needs == PROTOCOL_F_STATUS);
    let log = row("SET_LOG_BASE");
    assert!(log.replies && log.served && log.needs != 0);
    let features = row("SET_FEATURES");
    assert!(!features.replies && features.served && features.needs == 0);
    assert_eq!(row_of(0), None);
    assert_eq!((row_of(1).unwrap().id, row_of(44).unwrap().id, row_of(45)), (1, 44, None));
    assert_eq!(row_of(u32::MAX), None);
}

#[test]
fn replies_are_the_header_of_their_request_and_their_payload() {
    let number = Reply::U64(0x0102_0304_0506_0708);
    assert_eq!(number.emit(), 0x0102_0304_0506_0708u64.to_ne_bytes());
    let state = VringState { index: 3, num: 4 };
    assert_eq!(Reply::VringState(state).emit(), [3u32, 4].as_bytes());
    let config = Reply::Config(ConfigAccess { offset: 5, size: 2, flags: 7 }, vec![8, 9]);
    let payload = [[5u32, 2, 7].as_bytes(), &[8, 9]].concat();
    assert_eq!(config.emit(), payload);
    // Version 1, and the flag of a reply.
    let message = [[24u32, 1 | 4, 14].as_bytes(), &payload].concat();
    assert_eq!(config.message(24), message);
}
