//! Feeds a session with a few requests the bytes that a server might answer with. The fuzz target
//! `nbd` and a property test of this crate use it.

use super::session::NbdSession;
use manyring_backend::blk::{Burst, Op};
use manyring_memory::{GuestAddr, LastHit, Mapping, SliceList};
use manyring_wire::nbd::{Blocks, Export, HAS_FLAGS, SEND_FLUSH};
use std::sync::Arc;

/// Bytes of the memory; requests lie in the middle of it.
const MEMORY: u64 = 64 << 10;
const FIRST: u64 = 16 << 10;
const READ: u64 = 8 << 10;

/// Feeds `bytes`, as the server's stream in pieces of `cut`, to a session that has sent two reads,
/// a write and a flush. The session's first cookies are `1 << 32` to `1 << 32 | 3`.
///
/// # Panics
/// If bytes land where no read was asked for, or a request ends twice.
pub fn replies(structured: bool, cut: usize, bytes: &[u8]) {
    let blocks = Blocks { min: 1, preferred: 4096, max: 4096 };
    let export = Export { size: MEMORY, flags: HAS_FLAGS | SEND_FLUSH, blocks, structured };
    let mut session = NbdSession::new(&export);
    let Ok(mapping) = Mapping::anonymous(MEMORY).map(Arc::new) else { return };
    let Ok(memory) = SliceList::of_mapping(&mapping, &[]) else { return };
    let mut burst = Burst::default();
    burst.slices().restart(memory.memory());
    let places = [FIRST, FIRST + READ];
    for (token, at) in (0..).zip(places) {
        for part in [at, at + READ / 2] {
            let (at, len) = (GuestAddr(part), u32::try_from(READ / 2).unwrap_or(0));
            assert!(burst.slices().resolve(at, len, &mut LastHit::default()).is_ok(), "mapped");
        }
        burst.push(token, Op::Read, at, READ);
    }
    burst.push(2, Op::Flush, 0, 0);
    let (mut done, mut out) = (Vec::new(), Vec::new());
    for (request, pieces) in burst.iter() {
        assert!(session.begin(request, pieces).is_none(), "the server is asked");
    }
    session.emit(&mut out, usize::MAX);
    let mut kept = Vec::new();
    for part in bytes.chunks(cut.max(1)) {
        kept.extend_from_slice(part);
        let Ok(taken) = session.take(&kept, &mut done) else { break };
        kept.drain(..taken);
        assert!(kept.len() < 64, "the head of a reply is no longer");
    }
    let mut tokens: Vec<_> = done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), done.len(), "each request ends once");
    assert_eq!(session.in_flight(), 3 - done.len());
    let mut all = vec![0; usize::try_from(MEMORY).unwrap_or(0)];
    if let Some(slice) = mapping.slice(0, all.len()) {
        slice.read_into(&mut all);
    }
    let [first, end] = [FIRST, FIRST + 2 * READ].map(manyring_wire::host_size);
    assert!(all[..first].iter().chain(&all[end..]).all(|byte| *byte == 0), "nothing was asked");
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_wire::nbd::Reply;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn replies_that_nearly_fit_are_taken_or_refused(
            cut in 1usize..100,
            parts in proptest::collection::vec((0u64..6, 0u32..3, 0usize..5000), 0..12),
        ) {
            let mut bytes = Vec::new();
            for (place, error, len) in parts {
                bytes.extend(Reply::simple(error, 1 << 32 | place));
                bytes.extend(vec![7; if error == 0 && place < 4 { 4096 } else { len }]);
            }
            replies(false, cut, &bytes);
        }
    }
}
