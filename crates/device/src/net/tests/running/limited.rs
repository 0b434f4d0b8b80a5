//! Network queues with a limit: what may not pass stays in the ring, or in the port.

use super::*;
use manyring_engine::limit::Rates;

const SECOND_NS: u64 = 1_000_000_000;
const MS_NS: u64 = 1_000_000;

/// The limit of the device becomes this, and the queue hears of it.
fn limit(guest: &mut Guest, ops: [u64; 3], bytes: [u64; 3], now_ns: u64) {
    guest.limit.set(Rates { ops, bytes, burst_ms: 0 }, None, now_ns);
    guest.heed(Order::Refresh, now_ns);
}

fn sleeps(guest: &mut Guest, now_ns: u64) -> bool {
    assert!(guest.running.is_overdue(now_ns), "it has nothing to do for now");
    guest.settles((Decision::Sleep, false), now_ns)
}

#[test]
fn a_transmitq_sends_as_many_frames_as_may_pass_and_sleeps_until_the_next() {
    let mut guest = Guest::new(false);
    limit(&mut guest, [100, 0, 0], [0; 3], SECOND_NS);
    guest.send(9);
    guest.turn(SECOND_NS);
    guest.port.assert_sent(0..1);
    assert!(sleeps(&mut guest, SECOND_NS) && !guest.running.is_hot());
    assert_eq!(guest.running.deadline_ns(), Some(SECOND_NS + 10 * MS_NS));
    guest.running.wake(SECOND_NS + 30 * MS_NS);
    guest.turn(SECOND_NS + 30 * MS_NS);
    guest.port.assert_sent(0..4);
    let stats = guest.ring.stats.clone();
    assert_eq!((stats.limited.value(), stats.limited_ns.value()), (2, 30 * MS_NS));
    // Without a limit the rest goes at once, though the queue waited.
    limit(&mut guest, [0; 3], [0; 3], SECOND_NS + 31 * MS_NS);
    guest.turn(SECOND_NS + 31 * MS_NS);
    guest.port.assert_sent(0..9);
    assert_eq!(guest.returned(), 9);
}

#[test]
fn a_long_frame_costs_its_bytes_and_passes_in_one() {
    let mut guest = Guest::new(false);
    limit(&mut guest, [0; 3], [0, 0, 60_000], SECOND_NS);
    guest.send_long(3000, 1);
    guest.send(1);
    guest.turn(SECOND_NS);
    assert_eq!(guest.port.sent().len(), 1);
    guest.turn(SECOND_NS + 49 * MS_NS);
    assert_eq!(guest.port.sent().len(), 1);
    guest.turn(SECOND_NS + 50 * MS_NS);
    assert_eq!(guest.port.sent().len(), 2);
}

#[test]
fn a_transmitq_that_waits_for_its_limit_stops_at_once_and_loses_nothing() {
    let mut guest = Guest::new(false);
    limit(&mut guest, [0, 0, 1], [0; 3], SECOND_NS);
    guest.send(5);
    guest.turn(SECOND_NS);
    guest.drain(SECOND_NS + MS_NS);
    assert_eq!(guest.running.base(), 1.into());
    assert_eq!(guest.returned(), 1);
    guest.port.assert_sent(0..1);
}

#[test]
fn frames_that_are_dropped_wait_for_no_limit() {
    let mut guest = Guest::new(false);
    limit(&mut guest, [0, 0, 1], [0; 3], SECOND_NS);
    guest.send(5);
    guest.turn(SECOND_NS);
    guest.rules.set(Rules { link_up: false, ..open_rules() });
    guest.heed(Order::Refresh, SECOND_NS);
    guest.turn(SECOND_NS + MS_NS);
    assert_eq!((guest.returned(), guest.ring.stats.dropped_link_down.value()), (5, 4));
    assert!(guest.running.deadline_ns().is_none());
}

#[test]
fn a_receiveq_leaves_in_its_port_what_may_not_pass() {
    for lends in [false, true] {
        let mut guest = Guest::receiving(lends);
        guest.post();
        limit(&mut guest, [0, 100, 0], [0, 100_000, 0], SECOND_NS);
        for number in 0..10 {
            guest.port.arrive(RawNetHeader::default(), &frame(number, 500));
        }
        guest.turn(SECOND_NS);
        assert_eq!((guest.returned(), guest.port.script().arrives.len()), (1, 9), "{lends}");
        assert!(sleeps(&mut guest, SECOND_NS));
        assert_eq!(guest.running.deadline_ns(), Some(SECOND_NS + 10 * MS_NS));
        guest.running.wake(SECOND_NS + 20 * MS_NS);
        guest.turn(SECOND_NS + 20 * MS_NS);
        assert_eq!(guest.returned(), 2, "{lends}");
        // A frame of 3000 bytes is 30 ms of the bytes.
        guest.port.script().arrives.clear();
        guest.port.arrive(RawNetHeader::default(), &frame(10, 3000));
        guest.port.arrive(RawNetHeader::default(), &frame(11, 60));
        let now_ns = 5 * SECOND_NS;
        limit(&mut guest, [0; 3], [0; 3], now_ns);
        limit(&mut guest, [0; 3], [0, 0, 100_000], now_ns);
        guest.turn(now_ns);
        assert_eq!(guest.returned(), 2, "{lends}: one frame in two buffers");
        guest.turn(now_ns + 29 * MS_NS);
        assert_eq!(guest.returned(), 0, "{lends}");
        guest.turn(now_ns + 30 * MS_NS);
        assert_eq!(guest.returned(), 1, "{lends}");
        guest.drain(now_ns + 31 * MS_NS);
    }
}
