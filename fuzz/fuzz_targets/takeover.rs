//! Input: what a daemon hands to the one that takes over. Any bytes are a message or an error; a
//! message is read again as it was written.
#![no_main]

use manyring_supervisor::processes::HandoffMessage;
use manyring_protocol::message::{emit, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(left) = parse::<HandoffMessage>(bytes)
        && let Ok(written) = emit(&left)
    {
        assert_eq!(parse::<HandoffMessage>(&written).ok(), Some(left));
    }
});
