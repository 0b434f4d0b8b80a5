//! Door: what the supervisor tells a device process. Any bytes are a message or an error; a message
//! is read again as it was written.
#![no_main]

use manyring_daemon::processes::message::{Told, emit, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(told) = parse::<Told>(bytes)
        && let Ok(written) = emit(&told)
    {
        assert_eq!(parse::<Told>(&written).ok(), Some(told));
    }
});
