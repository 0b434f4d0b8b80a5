//! Input: a command to a device process. Any bytes are a command or an error; a command reads back
//! as it was written.
#![no_main]

use manyring_protocol::message::{Command, emit, parse};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(command) = parse::<Command>(bytes)
        && let Ok(written) = emit(&command)
    {
        assert_eq!(parse::<Command>(&written).ok(), Some(command));
    }
});
