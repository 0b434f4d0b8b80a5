//! Notifications of network queues that are held back as the operator wishes, and what the driver
//! has to say to it.

use super::*;
use manyring_engine::policy::moderation::Limits;

fn fixed(is_rx: bool, count_max: u32, delay_us_max: u32) -> Guest {
    let moderation = Moderation::Fixed(Limits { count_max, delay_us_max });
    let mut guest = Guest::ruled(is_rx, false, Scripted::default(), (moderation, Reclaim::Off));
    if is_rx {
        guest.post();
    }
    guest
}

/// A frame of its port for the driver; true if the driver was called.
fn arrive(guest: &mut Guest, now_ns: u64) -> bool {
    guest.port.arrive(RawNetHeader::default(), &frame(0, 60));
    guest.turn(now_ns);
    guest.is_called()
}

#[test]
fn a_receiveq_holds_calls_back_until_its_count_or_its_time() {
    let mut guest = fixed(true, 3, 1000);
    assert!(!arrive(&mut guest, 1000) && !arrive(&mut guest, 2000));
    assert_eq!(guest.returned(), 2, "frames come at once, only the call waits");
    assert_eq!(guest.running.deadline_ns(), Some(1_001_000));
    assert!(arrive(&mut guest, 3000), "three frames");
    assert!(!arrive(&mut guest, 4000));
    guest.turn(1_003_999);
    assert!(!guest.is_called());
    guest.turn(1_004_000);
    assert!(guest.is_called(), "a millisecond");
    let stats = &guest.ring.stats;
    assert_eq!((stats.calls_by_count.value(), stats.calls_by_time.value()), (1, 1));
}

#[test]
fn a_call_that_is_held_back_goes_before_a_sleep_that_would_end_too_late_for_it() {
    let mut guest = fixed(true, 3, 1000);
    guest.running.prepare_sleep();
    assert!(!guest.is_called(), "nothing is held back");
    assert!(!arrive(&mut guest, 1000));
    guest.running.prepare_sleep();
    assert!(guest.is_called());
    assert_eq!(guest.running.deadline_ns(), None);
    guest.running.prepare_sleep();
    assert!(!guest.is_called(), "it was sent once");
    assert_eq!(guest.ring.stats.calls_by_time.value(), 1);
}

#[test]
fn a_receiveq_whose_last_buffer_is_used_tells_so_at_once() {
    let mut guest = fixed(true, 0, 10_000);
    for buffer in 0..200 {
        let is_last = buffer == 199;
        assert_eq!(arrive(&mut guest, 1), is_last, "buffer {buffer}");
    }
    assert_eq!((guest.returned(), guest.ring.stats.calls_by_dry.value()), (200, 1));
}

#[test]
fn a_transmitq_tells_at_once_what_was_all_of_its_ring_and_else_waits_for_its_port() {
    use Next::{Block, Take};
    let mut guest = fixed(false, 0, 1000);
    guest.send(3);
    guest.turn(1000);
    assert!(guest.is_called(), "the driver may wait for its buffers");
    guest.port.script().sends.extend([Take, Take, Block]);
    guest.send(4);
    guest.turn(2000);
    assert!(!guest.is_called() && guest.returned() == 5);
    let ready =
        Woken { source: EventSource::Port { slot: 0, generation: 1 }, result: 4, ended: false };
    let mut io = QueueIo::new(&mut guest.wait, 0, 1, 3000);
    guest.running.on_event(Happened::Port, ready, &mut io);
    guest.turn(3000);
    assert!(guest.is_called() && guest.returned() == 2, "the last ones are gone");
    assert_eq!(guest.ring.stats.calls_by_dry.value(), 2);
}

#[test]
fn a_frame_that_the_driver_offers_meanwhile_is_waited_for() {
    // A port that finishes frames later gives none of them back in the turn that takes them.
    if late() {
        return;
    }
    let mut guest = fixed(false, 0, 1000);
    // More than a turn takes: the rest is in the ring.
    guest.send(100);
    guest.turn(1000);
    assert!(!guest.is_called() && (1..100).contains(&guest.returned()));
    guest.turn(1001);
    assert!(guest.is_called(), "now it is dry");
}

#[test]
fn what_the_driver_asks_for_wins_until_it_begins_anew() {
    let mut guest = fixed(true, 0, 5000);
    assert!(!arrive(&mut guest, 1000));
    guest.coalesce(2, 100);
    assert!(guest.is_called(), "what waited is told when the limits change");
    assert!(!arrive(&mut guest, 2000));
    assert_eq!(guest.running.deadline_ns(), Some(102_000), "its own time");
    assert!(arrive(&mut guest, 3000), "its own count");
    // Zeroes are a wish as well: nothing is held back (§5.1.6.5.9).
    guest.coalesce(0, 0);
    assert!(arrive(&mut guest, 4000));
    guest.heed(|reply| Order::Moderate(None, reply), 0);
    assert!(!arrive(&mut guest, 5000));
    assert_eq!(guest.running.deadline_ns(), Some(5_005_000), "the operator's");
}

#[test]
fn what_is_held_back_is_told_when_the_queue_is_disabled_moved_or_given_other_memory() {
    type Change = fn(&mut Guest);
    let memory: Change = |guest| guest.set_memory(2);
    let disable: Change = |guest| {
        assert_eq!(guest.heed(|fence| Order::Enable(false, fence), 2), Ok(()));
    };
    let drain: Change = |guest| guest.running.drain();
    for (what, change) in [("memory", memory), ("disable", disable), ("stop or move", drain)] {
        let mut guest = fixed(true, 0, 1000);
        assert!(!arrive(&mut guest, 1), "{what}");
        change(&mut guest);
        assert!(guest.is_called(), "{what}");
        assert_eq!(guest.running.deadline_ns(), None, "{what}");
    }
}

#[test]
fn a_queue_that_moved_goes_on_holding_back_as_the_operator_wishes() {
    let mut guest = fixed(true, 0, 1000);
    assert!(!arrive(&mut guest, 1));
    guest.running.drain();
    assert!(guest.is_called() && guest.running.is_drained());
    guest.running.attach(&mut QueueIo::new(&mut guest.wait, 0, 1, 10));
    assert!(!arrive(&mut guest, 10));
    assert_eq!(guest.running.deadline_ns(), Some(1_000_010));
}

#[test]
fn a_driver_that_asks_by_index_hears_of_all_that_was_held_back() {
    let moderation = Moderation::Fixed(Limits { count_max: 3, delay_us_max: 1000 });
    let mut guest = Guest::ruled(true, true, Scripted::default(), (moderation, Reclaim::Off));
    guest.post();
    for round in 0..5 {
        assert!(!guest.ring.driver.enable_notifications(), "round {round}");
        assert!(!arrive(&mut guest, 1) && !arrive(&mut guest, 2), "round {round}");
        // The first frame was what the driver has asked for: it does not ask for the third again.
        assert!(arrive(&mut guest, 3), "round {round}");
        assert_eq!(guest.returned(), 3);
    }
    let stats = &guest.ring.stats;
    assert_eq!((stats.calls_held.value(), stats.calls_suppressed.value()), (10, 0));
}

/// The driver sends a frame that the port does not take yet, and behind it seven chains that are
/// too short for a frame, which the device returns at once. Then the port takes the frame. For
/// each of the two turns: how many chains the driver got back, whether it was called, and the
/// gauge `in_flight`.
fn seven_behind_one_that_is_blocked(in_order: bool, is_held: bool) -> Vec<(usize, bool, u64)> {
    let scripted = Scripted::default();
    // Rings with EVENT_IDX return chains in order here.
    let mut guest = Guest::ruled(false, in_order, scripted, (Moderation::Off, Reclaim::Off));
    guest.coalesce(8, 60_000_000);
    let look = |guest: &mut Guest| {
        let seen = (guest.returned(), guest.is_called(), guest.ring.stats.in_flight.value());
        guest.ring.driver.enable_notifications();
        seen
    };
    if is_held {
        guest.send(1);
        guest.turn(500);
        look(&mut guest);
    }
    guest.port.script().sends.extend([Next::Block]);
    guest.send(1);
    for n in 0..7 {
        guest.ring.driver.add(&[(DATA + 0x10000 + n * 64, 4)], &[]).unwrap();
    }
    guest.ring.driver.publish();
    guest.turn(1000);
    let blocked = look(&mut guest);
    let ready =
        Woken { source: EventSource::Port { slot: 0, generation: 1 }, result: 4, ended: false };
    let mut io = QueueIo::new(&mut guest.wait, 0, 1, 3000);
    guest.running.on_event(Happened::Port, ready, &mut io);
    guest.turn(3000);
    vec![blocked, look(&mut guest)]
}

#[test]
fn a_driver_that_coalesces_is_told_of_what_it_can_see() {
    if late() {
        return;
    }
    for (in_order, is_held, expected) in [
        (false, false, [(7, false, 1), (1, true, 0)]),
        (true, false, [(0, false, 8), (8, true, 0)]),
        // The driver has not been called for the chain that `is_held` added. With it the seven are
        // eight, for which it is called; the call for the last chain is held back.
        (false, true, [(7, true, 1), (1, false, 0)]),
        (true, true, [(0, false, 8), (8, true, 0)]),
    ] {
        let seen = seven_behind_one_that_is_blocked(in_order, is_held);
        assert_eq!(seen, expected, "in order {in_order}, held {is_held}");
    }
}
