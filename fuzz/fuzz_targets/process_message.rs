//! Input: a report to the supervisor. Any bytes are a report or an error; a report reads back as it
//! was written.
#![no_main]

use manyring_protocol::message::{Report, emit, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(report) = parse::<Report>(bytes)
        && let Ok(written) = emit(&report)
    {
        assert_eq!(parse::<Report>(&written).ok(), Some(report));
    }
});
