//! How much a turn sends: long frames beside other guests and alone, and a host that takes long.

use super::*;

/// Offers frames of 64,000 bytes, all in the same memory.
fn offer_long(guest: &mut Guest, frames: usize) {
    let at = guest.free[0];
    guest.ring.write(at, &[0; HEADER_SIZE]);
    let header = (at, len32(HEADER_SIZE));
    let readable = [vec![header], vec![(at, 8000); 8]].concat();
    for _ in 0..frames {
        guest.ring.driver.add(&readable, &[]).expect("the ring has room");
    }
    guest.ring.driver.publish();
}

/// Offers long frames, and takes turns until nothing is left.
/// Returns how many chains came back in each.
fn long_turns(guest: &mut Guest, frames: usize, is_alone: bool) -> Vec<usize> {
    offer_long(guest, frames);
    guest.tx.burst.set_alone(is_alone);
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < frames {
        let has_more = guest.turn().has_more;
        assert_eq!(has_more, guest.tx.holds_frames());
        turns.push(guest.returned());
    }
    turns
}

#[test]
fn a_turn_of_long_frames_is_short_beside_other_guests() {
    let mut guest = Guest::new([]);
    guest.port.script().group = 2;
    // The first burst is popped as if its frames were short; their bytes end the turn.
    (0..3).for_each(|number| guest.offer_frame(number));
    guest.turn();
    assert_eq!(guest.returned(), 3);
    assert_eq!(long_turns(&mut guest, 14, false), [6, 6, 2]);
    assert_eq!(long_turns(&mut guest, 14, false), [4, 4, 4, 2]);
    // A guest that comes to be alone sends one short burst before it sends long ones.
    assert_eq!(long_turns(&mut guest, 14, true), [4, 10]);
    assert_eq!(long_turns(&mut guest, 28, true), [28]);
    assert_eq!(long_turns(&mut guest, 14, false), [4, 4, 4, 2]);
}

#[test]
fn a_turn_of_a_guest_alone_ends_where_the_host_takes_long() {
    let mut guest = Guest::new([]);
    guest.port.script().group = 2;
    long_turns(&mut guest, 4, true);
    for (look_ns, turns) in [(100_000, vec![12, 12, 4]), (300_000, vec![6, 6, 6, 6, 4])] {
        guest.look_ns = look_ns;
        assert_eq!(long_turns(&mut guest, 28, true), turns, "{look_ns}");
    }
    // Time that passes does not matter beside others, whose turns are short in any case.
    assert_eq!(long_turns(&mut guest, 8, false), [4, 4]);
}

#[test]
fn one_turn_of_what_waits_is_sent_before_the_queue_is_let_go_and_the_rest_is_dropped() {
    let mut guest = Guest::new([]);
    guest.port.script().group = 2;
    (0..3).for_each(|number| guest.offer_frame(number));
    guest.turn();
    assert_eq!(guest.returned(), 3);
    offer_long(&mut guest, 14);
    assert!(guest.turn().has_more);
    assert_eq!(guest.returned(), 6);
    guest.let_go();
    assert_eq!((guest.returned(), guest.queue.in_flight()), (8, 0));
    // The third group completes the bytes that a turn may send.
    assert_eq!((guest.ring.stats.packets.value(), guest.port.sent().len()), (15, 15));
    assert_eq!(guest.ring.stats.dropped_port_full.value(), 2);
}
