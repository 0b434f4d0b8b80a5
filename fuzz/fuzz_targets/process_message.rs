//! Door: what a device process tells the supervisor. Any bytes are a message or an error; a message
//! is read again as it was written.
#![no_main]

use manyring_daemon::processes::message::{Heard, emit, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(heard) = parse::<Heard>(bytes)
        && let Ok(written) = emit(&heard)
    {
        assert_eq!(parse::<Heard>(&written).ok(), Some(heard));
    }
});
