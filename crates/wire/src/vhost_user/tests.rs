//! The table and its payloads.

use super::*;
use zerocopy::IntoBytes;

fn parse(id: u32, payload: &[u8], fds: usize) -> Result<Request, ParseError> {
    Request::parse(row_of(id).unwrap(), payload, fds)
}

fn table(count: u32, regions: &[Region]) -> Vec<u8> {
    let mut bytes = count.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&[0; 4]);
    for region in regions {
        bytes.extend_from_slice(region.as_bytes());
    }
    bytes
}

const REGION: Region =
    Region { guest_addr: 0x1000, size: 0x2000, user_addr: 0x7000, mmap_offset: 0 };

#[test]
fn row_n_is_request_n_plus_1() {
    for (n, row) in REQUESTS.iter().enumerate() {
        assert_eq!(row.id as usize, n + 1, "{}", row.name);
    }
    assert!(row_of(0).is_none() && row_of(45).is_none());
}

#[test]
fn served_rows_parse_and_others_say_so() {
    for row in &REQUESTS {
        let payload = vec![0; row.payload.sizes().0];
        let parsed = Request::parse(row, &payload, usize::from(row.fds.count_max() == 1));
        assert_eq!(
            matches!(parsed, Err(ParseError::NotServed { .. })),
            !row.served,
            "{}",
            row.name
        );
    }
}

#[test]
fn a_memory_table_longer_than_its_count_is_accepted() {
    let parsed = parse(5, &table(1, &[REGION, REGION]), 1);
    assert_eq!(parsed, Ok(Request::SetMemTable(vec![REGION])));
}

#[test]
fn a_memory_table_shorter_than_its_count_is_refused() {
    assert!(matches!(parse(5, &table(2, &[REGION]), 2), Err(ParseError::Regions { .. })));
}

#[test]
fn regions_that_overflow_or_are_empty_are_refused() {
    let overflow = Region { guest_addr: u64::MAX, ..REGION };
    assert!(matches!(parse(5, &table(1, &[overflow]), 1), Err(ParseError::Region { .. })));
    let empty = Region { size: 0, ..REGION };
    assert!(matches!(parse(5, &table(1, &[empty]), 1), Err(ParseError::Region { .. })));
}

#[test]
fn file_descriptors_must_match_the_message() {
    let wrong = |r| matches!(r, Err(ParseError::Fds { .. }));
    assert!(wrong(parse(5, &table(1, &[REGION]), 0)));
    assert!(wrong(parse(1, &[], 1)));
    assert!(wrong(parse(12, &3u64.to_ne_bytes(), 0)));
    assert!(wrong(parse(12, &(3u64 | 256).to_ne_bytes(), 1)));
    let polled = parse(12, &(3u64 | 256).to_ne_bytes(), 0);
    assert_eq!(polled, Ok(Request::SetVringKick { index: 3, fd: false }));
}

#[test]
fn a_config_access_must_carry_its_size() {
    let mut payload = [0u32, 256, 0].as_bytes().to_vec();
    assert!(matches!(parse(24, &payload, 0), Err(ParseError::Config { .. })));
    payload.extend_from_slice(&[0; 256]);
    let access = ConfigAccess { offset: 0, size: 256, flags: 0 };
    assert_eq!(parse(24, &payload, 0), Ok(Request::GetConfig(access)));
    payload[0] = 1;
    let wrong = ParseError::Config { name: "GET_CONFIG", offset: 1, size: 256, payload: 256 };
    assert_eq!(parse(24, &payload, 0), Err(wrong));
}

#[test]
fn header_of_another_version_or_too_long_is_refused() {
    let bytes = |flags: u32, size: u32| Header { request: 1, flags, size }.emit();
    assert!(Header::parse(&bytes(1, 0)).is_ok());
    assert!(matches!(Header::parse(&bytes(2, 0)), Err(ParseError::Version { .. })));
    assert!(matches!(Header::parse(&bytes(1, 5000)), Err(ParseError::TooLong { .. })));
}
