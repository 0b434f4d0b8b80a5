//! Input: a frame and its header. A header that passes the check is true of the frame, passes again
//! and is left as it is; a receive filter looks at any bytes. A frame that could leave with others,
//! and leaves alone, has the headers with which it came.
#![no_main]

use libfuzzer_sys::fuzz_target;
use manyring_device::fuzzing::passes;
use manyring_wire::net::head::{HEAD_SIZE_MAX, Head, Joined};
use manyring_wire::net::{
    Command, HDR_F_NEEDS_CSUM, HDR_GSO_NONE, HEADER_SIZE, Offloads, PLACE_BYTES, RawNetHeader,
};
use zerocopy::FromBytes;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fuzz_target!(|input: (u64, [u8; HEADER_SIZE], u16, bool, Vec<Vec<u8>>, &[u8])| {
    let (features, header, len, filters_vlans, commands, bytes) = input;
    let (len, taken) = (usize::from(len), Offloads::of_host(features));
    let header = RawNetHeader::read_from_bytes(&header).unwrap();
    if let Ok(clean) = header.checked(len, taken) {
        assert_eq!(clean.checked(len, taken), Ok(clean));
        assert!(clean.flags & !HDR_F_NEEDS_CSUM == 0 && clean.num_buffers.get() == 0);
        assert!(usize::from(clean.hdr_len.get()) <= len);
        if clean.flags != 0 {
            let at = usize::from(clean.csum_start.get()) + usize::from(clean.csum_offset.get());
            assert!(taken.csum && at + 2 <= len);
        }
        if clean.gso_type != HDR_GSO_NONE {
            assert!(taken.has_gso() && clean.gso_size.get() > 0 && clean.flags != 0);
        }
    }
    let is_open = header.flags & HDR_F_NEEDS_CSUM != 0;
    if is_open && header.is_in_place(&bytes[..bytes.len().min(PLACE_BYTES)]) {
        // Behind Ethernet and the shortest header of IP, at least.
        assert!(header.csum_start.get() >= 34 && ![8, 6].eq(&bytes[12..14]));
    }
    let (mut start, known) = ([0; HEAD_SIZE_MAX], bytes.len().min(HEAD_SIZE_MAX));
    start[..known].copy_from_slice(&bytes[..known]);
    if let Ok(head) = Head::parse(&header, &start, known, bytes.len()) {
        let (size, mut alone) = (head.size(), [0; HEAD_SIZE_MAX]);
        assert_eq!(size + head.payload(), bytes.len());
        let written = Joined::new(head).write(&mut alone);
        assert_eq!((written.csum_start, written.hdr_len.get()), (header.csum_start, size as u16));
        // Both ways to write a checksum of nothing are right.
        let differ = (0..size).filter(|at| alone[*at] != start[*at]).count();
        assert!(differ <= 2, "{differ} bytes of the headers are others");
    }
    let commands = commands.iter().filter_map(|bytes| Command::parse(bytes).ok()).collect();
    let _ = passes(MAC, filters_vlans, commands, bytes);
});
