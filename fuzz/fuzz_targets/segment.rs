//! Input: a frame that a guest leaves unfinished, segmented and checksummed for one that takes it
//! finished. Any bytes behind any header become frames that carry exactly the payload, or nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manyring_wire::net::segment::finish;
use manyring_wire::net::{HDR_GSO_NONE, HEADER_SIZE, Offloads, RawNetHeader};
use zerocopy::FromBytes;

const ALL: Offloads =
    Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: false, uso6: false };
/// Pieces that a frame becomes at most.
const PIECES_MAX: usize = 512;

fuzz_target!(|input: ([u8; HEADER_SIZE], Vec<u8>)| {
    let (header, frame) = input;
    let raw = RawNetHeader::read_from_bytes(&header).unwrap();
    // A guest's header is checked on arrival; one that was not must do no harm either.
    for header in [Some(raw), raw.checked(frame.len(), ALL).ok()].into_iter().flatten() {
        let (mut pieces, mut copy) = (Vec::new(), frame.clone());
        let Ok(count) = finish(&header, &mut copy, |piece| pieces.push(piece.to_vec())) else {
            assert!(pieces.is_empty());
            continue;
        };
        assert!(count == pieces.len() && (1..=PIECES_MAX).contains(&count));
        if header.gso_type == HDR_GSO_NONE {
            assert_eq!(pieces[0].len(), frame.len());
            continue;
        }
        let size = usize::from(header.gso_size.get());
        // All pieces have the headers of the frame; the rest of them is its payload, in order.
        let headers = pieces[0].len().saturating_sub(size.min(pieces[0].len()));
        let rest: usize = pieces.iter().map(|piece| piece.len()).sum();
        if count > 1 {
            assert_eq!(rest - headers * count, frame.len() - headers);
            let payload: Vec<u8> =
                pieces.iter().flat_map(|piece| piece[headers..].to_vec()).collect();
            assert!(payload == frame[headers..]);
        }
    }
});
