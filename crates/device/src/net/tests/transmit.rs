//! A transmitq: what is sent arrives in order, what is not is counted, every chain comes back.
//!
//! This file is two modules: the tests of `transmit` run over a port that is done with a frame when
//! it has taken it, those of `transmit_late` over one that is done with it later.

#[path = "transmit/headers.rs"]
mod headers;
#[path = "transmit/legacy.rs"]
mod legacy;
#[path = "transmit/overtaking.rs"]
mod overtaking;
#[path = "transmit/turns.rs"]
mod turns;

use super::*;
use crate::net::NetTx;
use crate::policy::burst::BurstBounds;
use manyring_wire::net::{HDR_F_NEEDS_CSUM, HDR_GSO_TCPV4};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::HashMap;

/// Bytes of guest memory for each chain.
const ROOM: u64 = 0x1000;
const RETRY_NS: u64 = 1_000_000;

/// True in the module whose ports finish frames later.
fn late() -> bool {
    module_path!().ends_with("_late")
}

struct Guest {
    ring: Ring,
    queue: DeviceQueue,
    tx: NetTx,
    port: Scripted,
    /// Room for chains that is free, and where that of each chain is, by its head.
    free: VecDeque<u64>,
    rooms: HashMap<u16, u64>,
    now_ns: u64,
    /// The clock, and what passes from one look at it to the next.
    clock_ns: Cell<u64>,
    look_ns: u64,
}

impl Guest {
    fn new(sends: impl IntoIterator<Item = Next>) -> Self {
        Self::with(sends, ALL)
    }

    fn with(sends: impl IntoIterator<Item = Next>, taken: Offloads) -> Self {
        let (ring, port) = (Ring::new(256, true), Scripted::default());
        port.script().sends.extend(sends);
        if late() {
            port.delay(false);
        }
        Self {
            queue: ring.device_half(),
            tx: NetTx::new(port.sending(), Arc::new(open_rules()), taken).unwrap(),
            ring,
            port,
            free: (0..128).map(|n| DATA + n * ROOM).collect(),
            rooms: HashMap::new(),
            now_ns: 1,
            clock_ns: Cell::new(1),
            look_ns: 0,
        }
    }

    /// Offers `bytes` in pieces of these lengths.
    fn offer(&mut self, bytes: &[u8], pieces: &[usize]) {
        let at = self.free.pop_front().expect("room");
        self.ring.write(at, bytes);
        let mut addr = at;
        let mut readable = Vec::new();
        for len in pieces {
            readable.push((addr, len32(*len)));
            addr += *len as u64;
        }
        let head = self.ring.driver.add(&readable, &[]).expect("the ring has room");
        self.rooms.insert(head, at);
        self.ring.driver.publish();
    }

    /// Offers frame `number` behind a header of zeroes.
    fn offer_frame(&mut self, number: u64) {
        let bytes = [&[0; HEADER_SIZE][..], &frame(number, 60)].concat();
        self.offer(&bytes, &[HEADER_SIZE, 60]);
    }

    /// One turn.
    fn look(&mut self) -> super::super::NetTurn {
        let now_ns = self.now_ns;
        let clock = || {
            self.clock_ns.set(self.clock_ns.get() + self.look_ns);
            self.clock_ns.get()
        };
        let turn = self.tx.turn(&mut self.queue, &self.ring.stats, true, (now_ns, clock));
        self.queue.publish();
        turn
    }

    /// One turn, and what comes of it later.
    fn turn(&mut self) -> super::super::NetTurn {
        let mut turn = self.look();
        self.finish(&mut turn);
        turn
    }

    /// Takes back what the port finishes, until it has nothing any more.
    fn finish(&mut self, turn: &mut super::super::NetTurn) {
        while self.tx.late_count() > 0 {
            self.tx.reap(&mut self.queue, &self.ring.stats, self.now_ns, turn);
            self.queue.publish();
        }
    }

    /// How many chains come back; the driver half panics where one does twice.
    fn returned(&mut self) -> usize {
        let mut count = 0;
        while let Some((head, written)) = self.ring.driver.take_used() {
            assert_eq!(written, 0, "nothing is written to what is sent");
            // The room is used again while later frames are still with the port.
            self.free.extend(self.rooms.remove(&head));
            count += 1;
        }
        count
    }

    fn let_go(&mut self) {
        self.tx.let_go(&mut self.queue, &self.ring.stats);
        self.queue.publish();
        self.finish(&mut super::super::NetTurn::default());
    }

    /// Lets go, and waits for nothing.
    fn give_up(&mut self) {
        self.tx.let_go(&mut self.queue, &self.ring.stats);
        self.queue.publish();
    }

    fn recall(&mut self) {
        self.tx.recall(&mut self.queue, &self.ring.stats);
        self.queue.publish();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.tx.abandon(&mut self.queue);
    }
}

fn frames(numbers: impl IntoIterator<Item = u64>) -> Vec<Vec<u8>> {
    numbers.into_iter().map(|number| frame(number, 60)).collect()
}

#[test]
fn frames_leave_in_order_and_their_chains_come_back() {
    let mut guest = Guest::new([]);
    (0..100).for_each(|number| guest.offer_frame(number));
    assert_eq!((guest.turn().packets, guest.turn().packets, guest.turn().packets), (64, 36, 0));
    guest.port.assert_sent(0..100);
    assert_eq!(guest.returned(), 100);
    let stats = &guest.ring.stats;
    assert_eq!((stats.packets.value(), stats.bytes_passed.value()), (100, 6000));
}

#[test]
fn the_driver_sees_what_was_sent_while_the_rest_of_the_burst_is_not() {
    for group in [0, 16] {
        let mut guest = Guest::new([]);
        (0..64).for_each(|number| guest.offer_frame(number));
        guest.port.script().group = group;
        let behind = guest.port.script().late.as_ref().map(|delay| delay.behind.clone());
        let behind = behind.unwrap_or(guest.port.clone());
        behind.script().watched = Some(guest.ring.memory.clone());
        guest.turn();
        let seen = std::mem::take(&mut behind.script().seen);
        if late() {
            // No chain is back before its frame has passed.
            let early = |(passed, seen): (usize, &u16)| usize::from(*seen) > passed;
            assert!(seen.len() == 64 && !seen.iter().enumerate().any(early), "{seen:?}");
        } else {
            // A port that takes a burst at once is as fast as the driver could look.
            let expect = |number: u16| if group == 0 { 0 } else { number / 16 * 16 };
            let expected: Vec<_> = (0..64).map(expect).collect();
            assert_eq!(seen, expected, "at each frame that is sent");
        }
        assert_eq!(guest.returned(), 64);
        guest.port.assert_sent(0..64);
    }
}

#[test]
fn a_port_that_takes_a_burst_in_groups_gets_all_of_it_before_the_queue_stops() {
    use Next::{Block, Down, Take};
    let mut guest = Guest::new([Take, Take, Block, Take, Down]);
    guest.port.script().group = 2;
    (0..9).for_each(|number| guest.offer_frame(number));
    guest.turn();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (2, 7));
    guest.let_go();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (7, 0));
    let sent = [0, 1, 2, 4, 5, 6, 7, 8];
    guest.port.assert_sent(sent);
    let stats = &guest.ring.stats;
    assert_eq!((stats.dropped_port_down.value(), stats.dropped_port_full.value()), (1, 0));
}

#[test]
fn a_port_that_blocks_in_a_burst_gets_the_rest_in_order() {
    use Next::{Block, NoMemory, Take};
    let mut guest = Guest::new([Take, Take, Take, Block, Take, NoMemory]);
    (0..6).for_each(|number| guest.offer_frame(number));
    guest.turn();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (3, 3));
    assert!(guest.tx.is_blocked() && guest.tx.retry_at_ns().is_none());
    // Later frames do not overtake the waiting ones, and without an event nothing is retried.
    (6..9).for_each(|number| guest.offer_frame(number));
    assert_eq!((guest.turn().used, guest.returned()), (0, 0));
    guest.tx.on_port();
    guest.turn();
    assert_eq!(guest.returned(), 1);
    assert_eq!(guest.tx.retry_at_ns(), Some(1 + RETRY_NS));
    guest.now_ns = RETRY_NS;
    assert_eq!(guest.turn().used, 0, "it is too early");
    guest.now_ns += 1;
    guest.turn();
    guest.turn();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (5, 0));
    guest.port.assert_sent(0..9);
    assert_eq!((guest.ring.stats.packets.value(), guest.ring.stats.blocked.value()), (9, 1));
}

#[test]
fn a_frame_that_the_host_has_no_memory_for_is_given_up_alone() {
    let mut guest = Guest::new([Next::Take]);
    guest.port.script().then = Some(Next::NoMemory);
    (0..4).for_each(|number| guest.offer_frame(number));
    let mut tries = 0;
    while guest.queue.in_flight() == 0 || guest.ring.stats.dropped_no_memory.value() == 0 {
        guest.turn();
        guest.now_ns += RETRY_NS;
        tries += 1;
        assert!(tries < 1000, "it is tried for ever");
    }
    guest.port.script().then = None;
    guest.turn();
    guest.port.assert_sent([0, 2, 3]);
    assert_eq!(guest.returned(), 4);
    let stats = &guest.ring.stats;
    assert_eq!((stats.packets.value(), stats.dropped_no_memory.value()), (3, 1));
}

#[test]
fn what_waits_for_the_port_when_the_queue_lets_go_is_sent_or_counted() {
    use Next::{Block, Take};
    let mut guest = Guest::new([Take, Block, Take, Block]);
    (0..5).for_each(|number| guest.offer_frame(number));
    guest.turn();
    guest.let_go();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (5, 0));
    guest.port.assert_sent(0..2);
    let stats = &guest.ring.stats;
    assert_eq!((stats.packets.value(), stats.dropped_port_full.value()), (2, 3));
    assert!(!guest.tx.waits_for_port());
    // The queue goes on, with other memory or on another worker.
    guest.offer_frame(5);
    guest.turn();
    assert_eq!((guest.returned(), guest.port.sent().len()), (1, 3));
    assert_eq!(guest.queue.base(), 6.into());
}

#[test]
fn frames_lost_while_the_queue_lets_go_are_counted_by_cause() {
    use Next::{Block, Down, Fault, Refuse, Take};
    let mut guest = Guest::new([Block, Take, Refuse, Down, Fault, Block]);
    (0..6).for_each(|number| guest.offer_frame(number));
    guest.turn();
    guest.let_go();
    assert_eq!(guest.returned(), 6);
    let stats = &guest.ring.stats;
    assert_eq!(stats.packets.value(), 1);
    assert_eq!(stats.dropped_refused.value(), 1);
    assert_eq!((stats.dropped_port_down.value(), stats.dropped_memory.value()), (1, 1));
    assert_eq!(stats.dropped_port_full.value(), 2);
}

#[test]
fn frames_the_host_refuses_are_counted_by_cause_and_hold_nothing_up() {
    use Next::{Down, Fault, Refuse, Take};
    let mut guest = Guest::new([Refuse, Take, Down, Take, Refuse]);
    (0..6).for_each(|number| guest.offer_frame(number));
    assert!(!guest.turn().memory_lost);
    assert_eq!(guest.returned(), 6);
    guest.port.assert_sent([1, 3, 5]);
    let stats = &guest.ring.stats;
    assert_eq!((stats.dropped_refused.value(), stats.dropped_port_down.value()), (2, 1));
    assert_eq!(stats.packets.value(), 3);
    guest.port.script().sends.push_back(Fault);
    guest.offer_frame(6);
    assert!(guest.turn().memory_lost, "guest memory is not there");
    assert_eq!(guest.returned(), 1);
}

#[test]
fn a_queue_that_is_disabled_or_has_no_link_drops_and_says_why() {
    let mut guest = Guest::new([]);
    guest.offer_frame(0);
    guest.tx.turn(&mut guest.queue, &guest.ring.stats, false, (1, || 1));
    guest.tx.set_rules(Arc::new(Rules { link_up: false, ..open_rules() }));
    guest.offer_frame(1);
    guest.turn();
    assert_eq!((guest.returned(), guest.port.sent().len()), (2, 0));
    let stats = &guest.ring.stats;
    assert_eq!((stats.dropped_disabled.value(), stats.dropped_link_down.value()), (1, 1));
    assert_eq!((stats.packets.value(), stats.bytes_passed.value()), (0, 0));
}

#[test]
fn chains_that_are_no_frames_come_back_counted_and_the_next_one_passes() {
    let long = vec![0; HEADER_SIZE + FRAME_SIZE_MAX + 1];
    for len in [1, 11, 12, 13, HEADER_SIZE + 13] {
        let mut guest = Guest::new([]);
        guest.offer(&long[..len], &[len]);
        guest.offer_frame(1);
        guest.turn();
        assert_eq!(guest.returned(), 2, "{len}");
        guest.port.assert_sent([1]);
        assert_eq!(guest.ring.stats.dropped_short.value(), 1, "{len}");
    }
    let mut guest = Guest::new([]);
    guest.offer(&long, &[long.len()]);
    guest.offer(&long[1..], &[long.len() - 1]);
    // Empty, and with nothing to read.
    guest.ring.driver.add(&[(DATA, 0)], &[]).unwrap();
    guest.ring.driver.add(&[], &[(DATA, 2000)]).unwrap();
    guest.ring.driver.publish();
    guest.turn();
    let lens: Vec<_> = guest.port.sent().iter().map(Vec::len).collect();
    assert_eq!((guest.returned(), lens), (4, vec![FRAME_SIZE_MAX]));
    let stats = &guest.ring.stats;
    assert_eq!((stats.dropped_too_long.value(), stats.dropped_short.value()), (1, 2));
    assert!(guest.queue.fault().is_none());
}

#[test]
fn bytes_and_segments_are_counted_of_the_frames_that_were_passed_on_only() {
    use Next::{Block, Down, Fault, NoMemory, Refuse, Take};
    let gso = RawNetHeader {
        flags: HDR_F_NEEDS_CSUM,
        gso_type: HDR_GSO_TCPV4,
        gso_size: 10.into(),
        csum_start: 34.into(),
        csum_offset: 16.into(),
        ..RawNetHeader::default()
    };
    let lens = [100, 200, 300, 400, 500, 600];
    let counts = |sends: &[Next], then: Option<Next>| {
        let mut guest = Guest::new(sends.iter().copied());
        guest.port.script().then = then;
        for (number, len) in (0..).zip(lens) {
            let header = if number % 2 == 0 { gso } else { RawNetHeader::default() };
            guest.offer(&[header.as_bytes(), &tcp_frame(number, len)].concat(), &[12, len]);
        }
        for _ in 0..1000 {
            guest.turn();
            guest.now_ns += RETRY_NS;
        }
        guest.let_go();
        assert_eq!(guest.returned(), lens.len());
        let stats = &guest.ring.stats;
        (stats.packets.value(), stats.bytes_passed.value(), stats.gso_packets.value())
    };
    assert_eq!(counts(&[], None), (6, 2100, 3));
    assert_eq!(counts(&[Refuse, Take, Down, Take, Take, Fault], None), (3, 1100, 1));
    // Some are lost after the port was full, and what waits for it in the end is dropped.
    assert_eq!(counts(&[Take, Block, Take, Refuse], Some(Block)), (2, 300, 1));
    // The host is out of memory from the third on: each is given up in its turn.
    assert_eq!(counts(&[Take, Take], Some(NoMemory)), (2, 300, 1));
}

/// A step of a driver, a port or a session.
#[derive(Clone, Copy, Debug)]
enum Step {
    Offer(u8),
    OfferShort,
    Turn,
    Port,
    Later,
    LetGo,
    Recall,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u8..40).prop_map(Step::Offer),
        Just(Step::OfferShort),
        Just(Step::Turn),
        Just(Step::Turn),
        Just(Step::Port),
        Just(Step::Later),
        Just(Step::LetGo),
        Just(Step::Recall),
    ]
}

fn next() -> impl Strategy<Value = Next> {
    use Next::{Block, Down, NoMemory, Refuse, Take};
    prop_oneof![
        8 => Just(Take),
        1 => Just(Block),
        1 => Just(NoMemory),
        1 => Just(Refuse),
        1 => Just(Down),
    ]
}

proptest! {
    /// Whatever the port does: what arrives is whole, and in order unless the port finishes it
    /// later; every chain comes back once, and every frame is passed on or counted as dropped.
    #[test]
    fn every_frame_is_sent_in_order_or_counted(
        sends in prop::collection::vec(next(), 0..200),
        steps in prop::collection::vec(step(), 1..60),
        group in prop::sample::select(vec![0usize, 1, 3, 16]),
        turn_bytes in prop::sample::select(vec![1usize, 200, 1000, 1 << 18]),
    ) {
        let mut guest = Guest::new(sends);
        guest.port.script().group = group;
        guest.tx.burst = BurstBounds::of(turn_bytes);
        let (mut number, mut shorts, mut back) = (0, 0, 0);
        for step in steps {
            match step {
                Step::Offer(count) => {
                    for _ in 0..u64::from(count).min(120 - (number + shorts - back)) {
                        guest.offer_frame(number);
                        number += 1;
                    }
                }
                Step::OfferShort => {
                    if number + shorts - back < 120 {
                        guest.offer(&[0; 20], &[20]);
                        shorts += 1;
                    }
                }
                Step::Turn => drop(guest.look()),
                Step::Port => guest.tx.on_port(),
                Step::Later => guest.now_ns += RETRY_NS,
                Step::LetGo => guest.give_up(),
                Step::Recall => guest.recall(),
            }
            back += guest.returned() as u64;
        }
        guest.port.script().sends.clear();
        for _ in 0..400 {
            guest.now_ns += RETRY_NS;
            guest.tx.on_port();
            guest.turn();
        }
        back += guest.returned() as u64;
        prop_assert_eq!(back, number + shorts);
        prop_assert_eq!(guest.queue.in_flight(), 0);
        let sent = guest.port.sent();
        let mut all = frames(0..number);
        let mut next = 0;
        for bytes in &sent {
            let at = all[next..].iter().position(|frame| frame == bytes);
            let at = at.expect("a frame out of order, twice or changed");
            if late() {
                all.remove(at);
            } else {
                next += at + 1;
            }
        }
        let stats = &guest.ring.stats;
        prop_assert_eq!(stats.packets.value(), sent.len() as u64);
        prop_assert_eq!(stats.bytes_passed.value(), sent.len() as u64 * 60);
        prop_assert_eq!(stats.dropped_short.value(), shorts);
        let dropped = stats.dropped_refused.value() + stats.dropped_port_down.value()
            + stats.dropped_port_full.value() + stats.dropped_no_memory.value();
        prop_assert_eq!(stats.packets.value() + dropped, number);
    }
}
