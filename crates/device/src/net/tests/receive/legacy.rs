//! Buffers of a legacy driver: without mergeable buffers its header has 10 bytes.

use super::*;
use manyring_wire::net::{HDR_F_NEEDS_CSUM, LEGACY_HEADER_SIZE};

impl Guest {
    fn legacy(buffer: usize) -> Self {
        let mut guest = Self::new(256, buffer, false);
        guest.header_size = LEGACY_HEADER_SIZE;
        guest.rx.set_headers(LEGACY_HEADER_SIZE);
        guest
    }

    /// Posts a buffer whose pieces have these lengths and lie one behind the other.
    fn post_pieces(&mut self, lens: &[usize]) {
        let at = DATA + self.next * 0x1_0000;
        let ends = lens.iter().scan(at, |end, len| {
            *end += *len as u64;
            Some((*end - *len as u64, len32(*len)))
        });
        let head = self.ring.driver.add(&[], &ends.collect::<Vec<_>>()).expect("room");
        self.posted.insert(head, at);
        self.next += 1;
        self.ring.driver.publish();
    }
}

#[test]
fn a_legacy_drivers_frame_begins_after_ten_bytes_whatever_the_layout() {
    for lens in [
        &[2048][..],
        &[10, 2048],
        &[12, 2048],
        &[9, 2048],
        &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2038],
        &[10, 14, 2024],
    ] {
        let mut guest = Guest::legacy(4096);
        // More short frames than the fast path needs in a row, then a long one.
        for (number, len) in (0..40).zip(60..) {
            guest.post_pieces(lens);
            guest.arrive(number, len);
            guest.turn();
            guest.expect(number, len, 1);
        }
        guest.post_pieces(lens);
        guest.arrive(40, 1514);
        guest.turn();
        guest.expect(40, 1514, 1);
        assert_eq!(guest.ring.stats.bytes_passed.value(), (0..40).sum::<u64>() + 40 * 60 + 1514);
    }
}

#[test]
fn a_legacy_drivers_buffer_holds_a_frame_to_its_last_byte_and_no_longer_one() {
    let mut guest = Guest::legacy(1524);
    guest.post(2);
    for (number, len) in [(0, 1514), (1, 1515), (2, 1514)] {
        guest.arrive(number, len);
        guest.turn();
    }
    guest.expect(0, 1514, 1);
    guest.expect(2, 1514, 1);
    assert!(guest.take().is_none());
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 1);
}

#[test]
fn nothing_is_written_behind_a_legacy_drivers_frame() {
    for len in [60, 1000] {
        let mut guest = Guest::legacy(2048);
        guest.ring.write(DATA, &[0xee; 2048]);
        guest.post(1);
        guest.arrive(1, len);
        guest.turn();
        let (header, bytes, _) = guest.take().unwrap();
        assert!(header == RawNetHeader::default() && bytes == frame(1, len));
        let rest = guest.ring.read(DATA, 2048).split_off(LEGACY_HEADER_SIZE + len);
        assert!(rest.iter().all(|byte| *byte == 0xee), "{len}");
    }
}

#[test]
fn a_legacy_driver_gets_unfinished_frames_with_their_header() {
    let cut = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        hdr_len: 54.into(),
        gso_size: 1448.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        num_buffers: 0.into(),
    };
    let mut guest = Guest::legacy(0x1_0800);
    guest.post(2);
    for (number, len) in [(0, 60), (1, FRAME_SIZE_MAX)] {
        guest.port.arrive(cut, &frame(number, len));
        guest.turn();
        let (header, bytes, _) = guest.take().unwrap();
        assert!(header == cut && bytes == frame(number, len), "{len}");
    }
    assert_eq!(guest.ring.stats.gso_packets.value(), 2);
}

#[test]
fn a_legacy_drivers_buffer_of_nine_bytes_can_hold_nothing() {
    let mut guest = Guest::legacy(2048);
    guest.post_pieces(&[4, 5]);
    guest.arrive(0, 60);
    guest.turn();
    assert!(matches!(guest.queue.fault(), Some(QueueError::Request(_))));
    let mut guest = Guest::legacy(2048);
    guest.post_pieces(&[10]);
    guest.arrive(0, 60);
    guest.turn();
    assert!(guest.queue.fault().is_none() && guest.take().is_none());
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 1);
}
