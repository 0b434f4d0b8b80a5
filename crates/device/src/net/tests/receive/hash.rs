//! A driver that has hashes reported: its header has 20 bytes, with the hash in the last eight.

use super::*;
use manyring_wire::net::rss::{HashConfig, HashReport, Hasher, hash_type};

fn hasher() -> Hasher {
    Hasher::new(HashConfig { types: hash_type::ALL, key: (1..=40).collect() })
}

/// A TCP segment of `len` bytes from this port.
fn segment(port: u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![2; 12];
    bytes.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([9, port, 0, 80]);
    bytes.resize(len, port);
    bytes
}

fn guest(buffer: usize, hash: Option<Arc<Hasher>>) -> Guest {
    let mut guest = Guest::with(256, buffer, true, Rules { hash, ..open_rules() });
    guest.header_size = HASH_HEADER_SIZE;
    guest.rx.set_headers(HASH_HEADER_SIZE);
    guest
}

/// The hash in the first buffer of the next frame, and that frame.
fn take(guest: &mut Guest) -> ([u8; 8], Vec<u8>, usize) {
    let at = guest.posted.values().min().copied().unwrap();
    let hash = guest.ring.read(at + HEADER_SIZE as u64, 8).try_into().unwrap();
    let (_, frame, count) = guest.take().expect("a frame");
    (hash, frame, count)
}

#[test]
fn each_frame_has_its_hash_however_many_buffers_it_fills() {
    for buffer in [24, 40, 100, 2048] {
        for len in [60, 61, 200, 1514] {
            let mut guest = guest(buffer, Some(Arc::new(hasher())));
            guest.post_all();
            guest.port.arrive(RawNetHeader::default(), &segment(7, len));
            guest.turn();
            let expected = hasher().hash_of(&segment(7, len));
            assert_eq!(expected.report, HashReport::Tcpv4);
            let (hash, frame, count) = take(&mut guest);
            assert_eq!(hash, expected.emit(), "{buffer} {len}");
            assert!(frame == segment(7, len), "{buffer} {len}");
            assert_eq!(count, (len + HASH_HEADER_SIZE).div_ceil(buffer));
        }
    }
}

#[test]
fn a_frame_without_a_hash_says_so() {
    for hash in [None, Some(Arc::new(hasher()))] {
        let is_set = hash.is_some();
        let mut guest = guest(2048, hash);
        guest.post(1);
        let at = *guest.posted.values().next().unwrap();
        guest.ring.write(at, &[0xff; 64]);
        // No IP packet; and a TCP segment, for which no hash may have been set.
        let arrives = if is_set { frame(1, 60) } else { segment(1, 60) };
        guest.port.arrive(RawNetHeader::default(), &arrives);
        guest.turn();
        let (hash, frame, _) = take(&mut guest);
        assert!(hash == [0; 8] && frame == arrives);
    }
}

#[test]
fn a_buffer_without_room_for_the_hash_breaks_the_queue() {
    let mut guest = guest(HASH_HEADER_SIZE - 1, None);
    guest.post(1);
    guest.port.arrive(RawNetHeader::default(), &segment(1, 60));
    guest.turn();
    assert!(guest.queue.fault().is_some());
}
