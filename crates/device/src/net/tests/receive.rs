//! A receiveq: what arrives is in the guest's buffers whole and in order, or counted.
//!
//! This file is two modules: the tests of `receive` run over a port that reads, those of
//! `receive_lent` over one that lends.

#[path = "receive/hash.rs"]
mod hash;
#[path = "receive/legacy.rs"]
mod legacy;
#[path = "receive/refused.rs"]
mod refused;

use super::*;
use crate::net::NetRx;
use manyring_queue::QueueError;
use manyring_wire::net::{
    HASH_HEADER_SIZE, HDR_F_DATA_VALID, HDR_GSO_TCPV4, HDR_GSO_UDP_L4, NUM_BUFFERS_OFFSET,
};
use proptest::prelude::*;
use std::collections::HashMap;
use zerocopy::FromBytes;

/// True in the module whose ports lend.
fn lends() -> bool {
    module_path!().ends_with("_lent")
}

struct Guest {
    ring: Ring,
    queue: DeviceQueue,
    rx: NetRx,
    port: Scripted,
    is_mergeable: bool,
    header_size: usize,
    buffer: usize,
    /// Where the buffer of each chain lies, by its head.
    posted: HashMap<u16, u64>,
    next: u64,
}

impl Guest {
    fn new(size: u16, buffer: usize, is_mergeable: bool) -> Self {
        Self::with(size, buffer, is_mergeable, open_rules())
    }

    fn with(size: u16, buffer: usize, is_mergeable: bool, rules: Rules) -> Self {
        let (ring, port) = (Ring::new(size, true), Scripted::default());
        port.script().lends = lends();
        let rx = NetRx::new(port.receiving(), Arc::new(rules), is_mergeable, size).unwrap();
        let (posted, next) = (HashMap::new(), 0);
        let (queue, header_size) = (ring.device_half(), HEADER_SIZE);
        Self { queue, ring, rx, port, is_mergeable, header_size, buffer, posted, next }
    }

    fn post(&mut self, count: usize) {
        let slots = (MEMORY - DATA) / self.buffer as u64;
        for _ in 0..count {
            let at = DATA + self.next % slots * self.buffer as u64;
            let head = self.ring.driver.add(&[], &[(at, len32(self.buffer))]).expect("room");
            self.posted.insert(head, at);
            self.next += 1;
        }
        self.ring.driver.publish();
    }

    fn post_all(&mut self) {
        self.post(usize::from(self.ring.driver.free_count()));
    }

    fn turn(&mut self) -> crate::net::NetTurn {
        let turn = self.rx.turn(&mut self.queue, &self.ring.stats);
        self.queue.publish();
        turn
    }

    fn let_go(&mut self) {
        self.rx.let_go(&mut self.queue, &self.ring.stats);
    }

    fn arrive(&self, number: u64, len: usize) {
        self.port.arrive(RawNetHeader::default(), &frame(number, len));
    }

    /// The next frame that the driver sees: header, frame, buffers. All of them must be there.
    fn take(&mut self) -> Option<(RawNetHeader, Vec<u8>, usize)> {
        let mut bytes = self.take_buffer()?;
        let count = match self.header_size {
            HEADER_SIZE | HASH_HEADER_SIZE => {
                u16::from_le_bytes([bytes[NUM_BUFFERS_OFFSET], bytes[NUM_BUFFERS_OFFSET + 1]])
            }
            _ => 1,
        };
        assert!(count > 0 && (self.is_mergeable || count == 1), "num_buffers {count}");
        for number in 1..count {
            assert_eq!(bytes.len(), usize::from(number) * self.buffer, "all but the last are full");
            bytes.extend(self.take_buffer().expect("all buffers of a frame are seen together"));
        }
        let frame = bytes.split_off(self.header_size);
        bytes.resize(HEADER_SIZE, 0);
        let header = RawNetHeader {
            num_buffers: 0.into(),
            ..RawNetHeader::read_from_bytes(&bytes).unwrap()
        };
        Some((header, frame, count.into()))
    }

    fn take_buffer(&mut self) -> Option<Vec<u8>> {
        let (head, written) = self.ring.driver.take_used()?;
        let at = self.posted.remove(&head).unwrap();
        assert!(written > 0 && written as usize <= self.buffer);
        Some(self.ring.read(at, written as usize))
    }

    fn expect(&mut self, number: u64, len: usize, buffers: usize) {
        let (header, bytes, count) = self.take().expect("a frame");
        assert!(header == RawNetHeader::default() && bytes == frame(number, len), "frame {number}");
        assert_eq!(count, buffers, "buffers of {len} bytes");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.let_go();
        assert!(std::thread::panicking() || self.queue.in_flight() == 0);
    }
}

#[test]
fn a_frame_fills_as_many_mergeable_buffers_as_it_needs() {
    // From one buffer to 45: the last byte of a buffer, the first of the next, the longest frame.
    let buffer = 1460;
    let mut guest = Guest::new(256, buffer, true);
    for count in 1..=45usize {
        for len in [count * buffer - HEADER_SIZE, count * buffer - HEADER_SIZE + 1] {
            let len = len.min(FRAME_SIZE_MAX);
            guest.post_all();
            guest.arrive(count as u64, len);
            guest.turn();
            guest.expect(count as u64, len, (len + HEADER_SIZE).div_ceil(buffer));
        }
    }
    assert_eq!(guest.ring.stats.packets.value(), 90);
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 0);
}

#[test]
fn without_mergeable_buffers_a_frame_fits_one_or_is_dropped() {
    let mut guest = Guest::new(16, 2048, false);
    guest.post_all();
    guest.arrive(0, 2048 - HEADER_SIZE);
    guest.arrive(1, 2048 - HEADER_SIZE + 1);
    guest.arrive(2, FRAME_SIZE_MAX);
    guest.arrive(3, 60);
    guest.turn();
    guest.expect(0, 2036, 1);
    guest.expect(3, 60, 1);
    assert!(guest.take().is_none());
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 2);
    assert_eq!(guest.ring.stats.packets.value(), 2);
}

#[test]
fn a_long_frame_after_many_short_ones_is_whole() {
    let mut guest = Guest::new(256, 1536, true);
    for number in 0..40 {
        guest.post_all();
        guest.arrive(number, 60);
        guest.turn();
        guest.expect(number, 60, 1);
    }
    if !lends() {
        let offered = *guest.port.script().rooms.last().unwrap();
        // The spill of our own comes behind what is offered.
        let spill = HEADER_SIZE + FRAME_SIZE_MAX;
        assert!(offered < 10 * 1536 + spill, "few buffers are offered by now");
    }
    for (number, len) in [(50, 9000), (51, FRAME_SIZE_MAX), (52, 1600), (53, 60)] {
        guest.post_all();
        guest.arrive(number, len);
        guest.turn();
        guest.expect(number, len, (len + HEADER_SIZE).div_ceil(1536));
    }
}

#[test]
fn a_tiny_ring_is_used_as_far_as_it_goes() {
    for size in [1, 2, 4, 8] {
        let mut guest = Guest::new(size, 1024, true);
        guest.post_all();
        guest.arrive(0, 100);
        guest.turn();
        guest.expect(0, 100, 1);
        guest.post_all();
        let most = usize::from(size) * 1024 - HEADER_SIZE;
        guest.arrive(1, most);
        guest.turn();
        guest.expect(1, most, size.into());
        guest.post_all();
        guest.arrive(2, most + 1);
        guest.arrive(3, 60);
        guest.turn();
        guest.expect(3, 60, 1);
        assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 1, "{size}");
    }
}

#[test]
fn a_guest_without_buffers_costs_no_frame_and_gets_all_when_it_has_some() {
    let mut guest = Guest::new(64, 2048, true);
    (0..10).for_each(|number| guest.arrive(number, 500));
    assert_eq!(guest.turn().packets, 0);
    assert!(!guest.rx.has_room());
    assert_eq!(guest.port.script().arrives.len(), 10, "nothing was read from the port");
    guest.post_all();
    guest.turn();
    (0..10).for_each(|number| guest.expect(number, 500, 1));
}

#[test]
fn a_guest_with_few_buffers_gets_what_they_hold_and_a_longer_frame_waits_for_more() {
    let mut guest = Guest::new(64, 1536, true);
    guest.post(3);
    guest.arrive(0, 60);
    guest.arrive(1, 3000);
    guest.arrive(2, 60);
    guest.turn();
    guest.expect(0, 60, 1);
    guest.expect(1, 3000, 2);
    assert!(guest.take().is_none(), "there is no buffer for it");
    guest.post(2);
    guest.arrive(3, 5000);
    guest.arrive(4, 70);
    for _ in 0..100 {
        guest.turn();
    }
    guest.expect(2, 60, 1);
    assert!(guest.take().is_none() && !guest.rx.has_room());
    let left = 1 + usize::from(lends());
    assert_eq!(guest.port.script().arrives.len(), left, "what comes later is not read before");
    assert_eq!(guest.ring.stats.out_of_buffers.value(), 2, "once each time, not once each look");
    guest.post(2);
    guest.turn();
    assert!(guest.take().is_none());
    guest.post(2);
    guest.turn();
    guest.expect(3, 5000, 4);
    guest.expect(4, 70, 1);
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 0);
    // One that was read is dropped where its buffers must go back, and counted; one that was lent
    // is lent again.
    guest.arrive(5, 1600);
    guest.post(1);
    guest.let_go();
    guest.turn();
    guest.let_go();
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), u64::from(!lends()));
    guest.arrive(6, 60);
    guest.turn();
    if lends() {
        assert!(guest.take().is_none(), "there is one buffer");
        guest.post(2);
        guest.turn();
        guest.expect(5, 1600, 2);
    }
    guest.expect(6, 60, 1);
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), u64::from(!lends()));
}

#[test]
fn buffers_of_many_pieces_are_used_though_few_chains_fill_the_ring() {
    let mut guest = Guest::new(64, 32, true);
    let writable: Vec<_> = (0..16).map(|n| (DATA + n * 32, 32)).collect();
    for _ in 0..4 {
        guest.ring.driver.add(&[], &writable).unwrap();
    }
    guest.ring.driver.publish();
    guest.arrive(0, 3000);
    guest.arrive(1, 60);
    guest.turn();
    assert_eq!(guest.ring.driver.take_used().map(|(_, written)| written), Some(72));
    assert_eq!(guest.ring.stats.dropped_small_buffers.value(), 1);
}

#[test]
fn buffers_that_wait_are_put_back_and_serve_again() {
    let mut guest = Guest::new(64, 2048, true);
    guest.post_all();
    guest.arrive(0, 5000);
    guest.turn();
    guest.expect(0, 5000, 3);
    assert!(guest.queue.in_flight() > 0, "buffers wait for the next frame");
    guest.let_go();
    assert_eq!((guest.queue.in_flight(), guest.queue.base()), (0, 3.into()));
    assert!(!guest.rx.has_room());
    // Move the ring to other memory: no byte of the old one may be written afterwards.
    let other = Arc::new((*guest.ring.memory).clone());
    guest.queue.relocate(guest.ring.config.addresses, other).unwrap();
    guest.arrive(1, 5000);
    guest.arrive(2, 60);
    guest.turn();
    guest.expect(1, 5000, 3);
    guest.expect(2, 60, 1);
    guest.let_go();
    assert_eq!((guest.queue.in_flight(), guest.queue.base()), (0, 7.into()));
}

#[test]
fn the_header_says_only_what_the_guest_takes() {
    let valid = RawNetHeader { flags: HDR_F_DATA_VALID, ..RawNetHeader::default() };
    let csum = RawNetHeader { flags: 1, csum_start: 34.into(), ..RawNetHeader::default() };
    let tso = RawNetHeader { gso_type: HDR_GSO_TCPV4, gso_size: 9.into(), ..csum };
    let uso = RawNetHeader { gso_type: HDR_GSO_UDP_L4, ..tso };
    let ecn = RawNetHeader { gso_type: HDR_GSO_TCPV4 | 0x80, ..tso };
    let unknown = RawNetHeader { gso_type: 99, ..tso };
    let csum_only = Offloads { csum: true, ..Offloads::default() };
    let tso4 = Offloads { tso4: true, ..csum_only };
    let (uso4, uso6) = (Offloads { uso4: true, ..csum_only }, Offloads { uso6: true, ..csum_only });
    let plain = RawNetHeader::default();
    for (given, header, seen) in [
        (Offloads::default(), valid, Some(plain)),
        (Offloads::default(), csum, None),
        (csum_only, valid, Some(valid)),
        (csum_only, csum, Some(csum)),
        (csum_only, tso, None),
        (tso4, tso, Some(tso)),
        (tso4, ecn, None),
        (tso4, uso, None),
        (uso4, uso, Some(uso)),
        (uso6, uso, Some(uso)),
        (ALL, ecn, Some(ecn)),
        (ALL, uso, Some(uso)),
        (ALL, unknown, None),
    ] {
        let mut guest = Guest::with(64, 2048, true, Rules { given, ..open_rules() });
        guest.post_all();
        guest.port.arrive(header, &frame(0, 100));
        guest.turn();
        assert_eq!(guest.take().map(|(header, ..)| header), seen, "{given:?} {header:?}");
        let dropped = u64::from(seen.is_none());
        assert_eq!(guest.ring.stats.dropped_offload.value(), dropped, "{given:?} {header:?}");
    }
}

#[test]
fn what_the_guest_does_not_want_is_counted_by_cause() {
    let rules = Rules { frame_size_max: 1518, filter: Some(broadcast_only()), ..open_rules() };
    let mut guest = Guest::with(64, 2048, true, rules);
    guest.post_all();
    let mut other = frame(1, 60);
    other[..6].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
    guest.port.arrive(RawNetHeader::default(), &other);
    guest.arrive(2, 1518);
    guest.arrive(3, 1519);
    guest.arrive(4, 13);
    guest.arrive(5, 0);
    guest.turn();
    guest.expect(2, 1518, 1);
    assert!(guest.take().is_none());
    // A frame that is to be cut may be longer than the MTU.
    let tso = RawNetHeader {
        flags: 1,
        gso_type: HDR_GSO_TCPV4,
        gso_size: 9.into(),
        ..RawNetHeader::default()
    };
    guest.port.arrive(tso, &frame(6, 5000));
    guest.turn();
    assert_eq!(guest.take(), Some((tso, frame(6, 5000), 3)));
    guest.rx.set_rules(Arc::new(Rules { link_up: false, ..open_rules() }));
    guest.arrive(7, 60);
    guest.turn();
    assert!(guest.take().is_none());
    let stats = &guest.ring.stats;
    assert_eq!((stats.dropped_filtered.value(), stats.dropped_short.value()), (2, 2));
    assert_eq!((stats.dropped_link_down.value(), stats.packets.value()), (1, 2));
}

#[test]
fn a_buffer_of_as_many_pieces_as_there_may_be_stops_nothing() {
    let mut guest = Guest::new(1024, 2048, true);
    let writable: Vec<_> = (0..512).map(|n| (DATA + n * 16, 16)).collect();
    guest.ring.driver.add(&[], &writable).unwrap();
    guest.ring.driver.publish();
    guest.arrive(0, 60);
    guest.turn();
    assert_eq!(guest.queue.fault(), None);
    guest.let_go();
}

#[test]
fn frames_are_seen_in_sixteens_and_lent_ones_go_back_behind_that() {
    let mut guest = Guest::new(256, 2048, true);
    guest.post_all();
    (0..64).for_each(|number| guest.arrive(number, 60));
    guest.port.script().watched = Some(guest.ring.memory.clone());
    assert_eq!(guest.rx.turn(&mut guest.queue, &guest.ring.stats).packets, 64);
    let seen = std::mem::take(&mut guest.port.script().seen);
    if lends() {
        // At each lending, and at each release.
        assert_eq!(seen, [0, 16, 16, 32, 32, 48, 48, 64]);
    } else {
        let expected: Vec<_> = (0..64).map(|number| number / 16 * 16).collect();
        assert_eq!(seen, expected, "at each frame that was read");
    }
}

/// A step of a driver, a port or a session.
#[derive(Clone, Copy, Debug)]
enum Step {
    Post(u8),
    Arrive(u16, u8),
    Turn,
    LetGo,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u8..64).prop_map(Step::Post),
        (0u16..3000, 1u8..20).prop_map(|(len, count)| Step::Arrive(len, count)),
        (0u16..u16::MAX, Just(1)).prop_map(|(len, count)| Step::Arrive(len, count)),
        Just(Step::Turn),
        Just(Step::LetGo),
    ]
}

proptest! {
    /// The naive device: a list of buffers, of which each frame takes the number that it needs.
    #[test]
    fn frames_lie_where_the_naive_device_puts_them(
        size in prop::sample::select(vec![1u16, 4, 32, 256]),
        buffer in prop::sample::select(vec![60usize, 1000, 1536, 4096, 65_600]),
        is_mergeable in any::<bool>(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let buffer = if size == 256 { buffer.min(4096) } else { buffer };
        let mut guest = Guest::new(size, buffer, is_mergeable);
        let (mut number, mut arrived, mut offered) = (0, VecDeque::new(), 0usize);
        let (mut seen, mut bytes, mut dropped) = (0, 0, 0);
        for step in steps.into_iter().chain([Step::Post(255), Step::Turn, Step::Turn]) {
            let mut turned = None;
            match step {
                Step::Post(count) => {
                    let count = usize::from(count).min(guest.ring.driver.free_count().into());
                    guest.post(count);
                    offered += count;
                }
                Step::Arrive(len, count) => for _ in 0..count {
                    let len = usize::from(len).max(14);
                    guest.arrive(number, len);
                    arrived.push_back((number, len));
                    number += 1;
                },
                Step::Turn => turned = Some(guest.turn()),
                Step::LetGo => guest.let_go(),
            }
            let unread = guest.port.script().arrives.len();
            let looked = matches!(step, Step::Turn | Step::LetGo);
            while looked && arrived.len() > unread {
                let (number, len) = arrived.pop_front().unwrap();
                let needed = (len + HEADER_SIZE).div_ceil(buffer);
                let fits = needed <= if is_mergeable { offered } else { 1 };
                if fits && matches!(step, Step::Turn) {
                    guest.expect(number, len, needed);
                    offered -= needed;
                    seen += 1;
                    bytes += len as u64;
                    continue;
                }
                let may_grow = is_mergeable && offered < usize::from(size) / 2;
                if may_grow && !matches!(step, Step::LetGo) {
                    prop_assert!(!lends(), "a frame that must wait stays with the port");
                    prop_assert_eq!(arrived.len(), unread, "what comes later is not read");
                    arrived.push_front((number, len));
                    break;
                }
                dropped += 1;
            }
            prop_assert!(guest.take().is_none(), "more than arrived");
            if let (Some(turn), Some((_, len))) = (turned, arrived.front())
                && turn.packets + turn.used == 0
            {
                let needed = (len + HEADER_SIZE).div_ceil(buffer);
                let is_short = is_mergeable && offered < needed.min(usize::from(size) / 2);
                prop_assert!(offered == 0 || is_short, "a frame of {len} bytes is left behind");
            }
        }
        let waits = arrived.len() > guest.port.script().arrives.len();
        guest.let_go();
        dropped += u64::from(waits);
        prop_assert_eq!(guest.queue.in_flight(), 0);
        prop_assert_eq!(guest.ring.stats.packets.value(), seen);
        prop_assert_eq!(guest.ring.stats.bytes_passed.value(), bytes);
        prop_assert_eq!(guest.ring.stats.dropped_small_buffers.value(), dropped);
    }
}
