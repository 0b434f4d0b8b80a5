//! Input: what an NBD server sends. Any bytes are a negotiation, replies or an error; replies write
//! where the guest has asked for it and nowhere else; any text is an address or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manyring_nbd::fuzzing::replies;
use manyring_wire::nbd::{ExportRequest, Handshake, Progress, Uri};

fuzz_target!(|input: (bool, bool, u8, String, &[u8])| {
    let (tls, structured, cut, text, bytes) = input;
    if let Ok(uri) = Uri::parse(&text) {
        assert!(!uri.export.contains('\0'));
    }
    let mut handshake = Handshake::new(ExportRequest { name: text, tls }).ok();
    let (mut rest, mut out) = (bytes, Vec::new());
    while let Some(negotiation) = &mut handshake
        && negotiation.needs() > 0
        && negotiation.needs() <= rest.len()
    {
        let (now, later) = rest.split_at(negotiation.needs());
        rest = later;
        match negotiation.take(now, &mut out) {
            Ok(Progress::Done(export)) => {
                assert!(export.blocks.min.is_power_of_two() && export.size <= i64::MAX as u64);
            }
            Ok(_) => {}
            Err(_) => break,
        }
    }
    replies(structured, usize::from(cut) + 1, bytes);
});
