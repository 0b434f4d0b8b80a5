//! When a queue is looked at, and what the events of its kick say.

use super::*;

#[test]
fn a_port_is_looked_at_only_while_its_worker_looks_at_rings_anyway() {
    let mut guest = Guest::new(true);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    guest.set_kick(Kick::new(kick).unwrap());
    guest.post();
    guest.port.arrive(RawNetHeader::default(), &frame(0, 60));
    guest.turn(1000);
    assert_eq!(guest.returned(), 1);
    let settles = |guest: &mut Guest, looks_on, now_ns| guest.settles((LOOK, looks_on), now_ns);
    assert!(!guest.running.looks_at_ring(LOOK, 2000), "its next work is the port's");
    assert!(!guest.running.awaits_disk(), "whatever buffers it holds");
    assert!(!settles(&mut guest, true, 2000));
    assert!(settles(&mut guest, true, 40_000), "it looked long enough");
    assert!(!guest.running.is_hot());
    guest.running.wake(41_000);
    assert!(guest.running.is_hot(), "its time has come: it asks for a kick again when it settles");
    assert!(settles(&mut guest, false, 41_000));
    // A transmitq waits for its ring.
    let guest = Guest::new(false);
    assert!(guest.running.looks_at_ring(LOOK, 2000));
    assert!(!guest.running.looks_at_ring(LOOK, 40_000));
}

/// The events of watched kicks within some 30 milliseconds.
fn kick_events(wait: &mut Wait) -> Vec<Woken> {
    let (mut all, mut woken) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        wait.sleep(&mut woken, Some(std::time::Duration::from_millis(10)));
        all.append(&mut woken);
    }
    all.retain(|event| matches!(event.source, EventSource::Kick { .. }));
    all
}

#[test]
fn a_late_event_of_a_replaced_kick_is_no_kick_and_leaves_one_watch() {
    for uring in [true, false] {
        let mut guest = Guest::new(false);
        guest.wait = Wait::new(uring).unwrap();
        let eventfds = [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let kick = |at: usize| Kick::new(eventfds[at].try_clone().unwrap()).unwrap();
        let ring = |at: usize| rustix::io::write(&eventfds[at], &1u64.to_ne_bytes()).unwrap();
        guest.set_kick(kick(0));
        ring(0);
        let [late] = kick_events(&mut guest.wait)[..] else { panic!("one event of one kick") };
        guest.set_kick(kick(1));
        // As if the kernel had ended the former watch before it heard of the change.
        guest.hear(Woken { ended: true, ..late }, 1);
        let kicks = guest.ring.stats.kicks.value();
        assert_eq!(kicks, 0, "uring {uring}: the former kick was heard");
        kick_events(&mut guest.wait);
        ring(1);
        let events = kick_events(&mut guest.wait);
        assert_eq!(events.len(), 1, "uring {uring}: {events:?}");
    }
}

#[test]
fn a_queue_that_has_left_is_woken_by_its_kick_no_more() {
    for uring in [true, false] {
        let mut guest = Guest::new(false);
        guest.wait = Wait::new(uring).unwrap();
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        guest.set_kick(Kick::new(kick.try_clone().unwrap()).unwrap());
        guest.running.detach(&mut QueueIo::new(&mut guest.wait, 0, 1, 0));
        kick_events(&mut guest.wait);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        let events = kick_events(&mut guest.wait);
        assert!(events.is_empty(), "uring {uring}: {events:?}");
    }
}

#[test]
fn a_kick_of_a_disabled_queue_counts_if_the_queue_is_enabled_before_it_is_heard() {
    for (is_enabled, kicks) in [(true, 1), (false, 0)] {
        let mut guest = Guest::new(false);
        assert_eq!(guest.heed(|fence| Order::Enable(false, fence), 1), Ok(()));
        let kick = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        guest.set_kick(Kick::new(kick).unwrap());
        if is_enabled {
            assert_eq!(guest.heed(|fence| Order::Enable(true, fence), 2), Ok(()));
        }
        let [event] = kick_events(&mut guest.wait)[..] else { panic!("one event of one kick") };
        guest.hear(event, 3);
        assert_eq!(guest.ring.stats.kicks.value(), kicks, "enabled: {is_enabled}");
    }
}

#[test]
fn a_disabled_transmitq_that_is_kicked_again_asks_for_the_next_kick() {
    let mut guest = Guest::with(false, true);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    guest.set_kick(Kick::new(kick.try_clone().unwrap()).unwrap());
    assert_eq!(guest.heed(|fence| Order::Enable(false, fence), 1), Ok(()));
    guest.send(1);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    let [event] = kick_events(&mut guest.wait)[..] else { panic!("one event of one kick") };
    guest.hear(event, 2);
    guest.turn(2);
    assert_eq!(guest.returned(), 1, "dropped");
    guest.hear(event, 3);
    guest.turn(3);
    assert!(guest.settles((Decision::Sleep, false), 4));
    guest.ring.driver.add(&[(DATA, 72)], &[]).unwrap();
    assert!(guest.ring.driver.publish(), "nobody would look at it again");
}

#[test]
fn a_queue_beside_a_busy_one_settles_when_it_had_nothing_for_a_millisecond() {
    let mut guest = Guest::new(false);
    guest.send(1);
    guest.turn(5000);
    assert!(!guest.running.is_overdue(5000) && !guest.running.is_overdue(1_004_999));
    assert!(guest.running.is_overdue(1_005_000));
}

#[test]
fn a_batch_waits_from_its_kick_on_or_from_the_last_look_at_the_ring() {
    let mut guest = Guest::new(false);
    let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let ours = Kick::new(kick.try_clone().unwrap()).unwrap();
    guest.set_kick(ours);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    let [event] = kick_events(&mut guest.wait)[..] else { panic!("one event of one kick") };
    let mut waited = 0;
    let mut wait_of_batch = |guest: &mut Guest| {
        let sum = guest.ring.stats.wait_ns().sum();
        sum - std::mem::replace(&mut waited, sum)
    };
    guest.send(1);
    guest.turn(1000);
    wait_of_batch(&mut guest);
    // The ring was looked at until here: the frame may have come right behind that.
    guest.turn(2000);
    guest.send(1);
    guest.hear(event, 2300);
    guest.turn(2500);
    assert_eq!(wait_of_batch(&mut guest), 500, "since the last look");
    // Nobody looks until the kick.
    guest.turn(3000);
    assert!(guest.settles((Decision::Sleep, false), 4000));
    guest.send(1);
    guest.hear(event, 1_000_000);
    guest.turn(1_000_700);
    assert_eq!(wait_of_batch(&mut guest), 700, "since the kick");
}

#[test]
fn a_transmitq_that_is_disabled_is_emptied_before_that_is_answered() {
    for is_alone in [false, true] {
        let mut guest = Guest::new(false);
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        guest.set_kick(Kick::new(kick).unwrap());
        guest.send(1);
        // As a worker has it turn, round by round.
        guest.running.turn(&mut QueueIo::new(&mut guest.wait, 0, 1, 1).alone(is_alone));
        if guest.is_late() {
            guest.turn(2);
        }
        guest.returned();
        guest.send(600);
        let mut answer = guest.disable();
        let at_once = guest.returned();
        assert!(at_once <= 2 * 64, "an order takes two turns, not as many as its driver likes");
        let (mut before, mut now_ns) = (at_once, 4);
        while answer.try_recv().is_err() {
            assert!(now_ns < 50, "an answer that never comes");
            guest.turn(now_ns);
            before += guest.returned();
            now_ns += 1;
        }
        // From here on the driver may have its memory back.
        guest.turn(now_ns);
        assert_eq!((before, guest.returned()), (600, 0), "alone: {is_alone}");
    }
}

#[test]
fn the_count_of_buffers_in_flight_is_that_of_a_queue_that_rests_too() {
    let mut guest = Guest::new(true);
    guest.set_kick(Kick::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()).unwrap());
    guest.post();
    guest.turn(1);
    assert!(guest.settles((Decision::Sleep, false), 2));
    let waiting = guest.ring.stats.in_flight.value();
    assert!(waiting > 0, "buffers wait for a frame");
    guest.port.arrive(RawNetHeader::default(), &frame(0, 60));
    guest.running.wake(3);
    guest.turn(3);
    assert_eq!(guest.ring.stats.in_flight.value(), waiting - 1);
    assert_eq!(guest.heed(|fence| Order::Enable(false, fence), 4), Ok(()));
    assert_eq!(guest.ring.stats.in_flight.value(), 0, "the driver has all of them back");
}
