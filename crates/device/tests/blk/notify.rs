//! Kicks and calls: when the worker sleeps, and when the driver is called.

use crate::guest::{DATA, Guest, OK, Start, USUAL, is_rung, null, until};
use manyring_engine::EventKind;
use manyring_queue::QueueError;
use manyring_wire::blk::VIRTIO_BLK_T_IN;
use std::time::Duration;

#[test]
fn a_worker_sleeps_between_requests_and_a_kick_wakes_it() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.set_enabled(true);
    for round in 1..=3 {
        let sleeps = guest.sleeps();
        guest.set_enabled(true);
        guest.until_asleep(sleeps);
        let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
        assert!(guest.publish(), "a worker that sleeps has asked for a kick");
        guest.until_used();
        assert_eq!(guest.status(number), OK);
        assert_eq!(guest.stats().kicks.value(), round);
        assert!(guest.stats().wait_ns().sum() < 10_000_000_000, "it did not wait since the start");
    }
    assert_eq!(guest.stats().batch_size().count(), 3);
    assert_eq!(guest.stop(), 3);
}

#[test]
fn without_a_kick_the_ring_is_looked_at_for_ever() {
    let mut guest = Guest::new(null(), &Start { has_kick: false, ..USUAL });
    guest.set_enabled(true);
    let sleeps = guest.sleeps();
    for _ in 0..3 {
        let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
        guest.driver.publish();
        guest.until_used();
        assert_eq!(guest.status(number), OK);
        // Long enough for a worker that would sleep.
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((guest.sleeps(), guest.stats().kicks.value()), (sleeps, 0));
}

#[test]
fn a_broken_queue_without_a_kick_lets_its_worker_sleep() {
    let mut guest = Guest::new(null(), &Start { has_kick: false, ..USUAL });
    guest.set_enabled(true);
    let sleeps = guest.sleeps();
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.driver.publish();
    assert!(matches!(guest.next_event(), EventKind::Fault(QueueError::Buffer(_))));
    guest.until_asleep(sleeps);
}

#[test]
fn the_driver_is_called_if_it_wants_to_be() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.driver.disable_notifications();
    guest.flush();
    until("the burst is over", || guest.stats().calls_suppressed.value() == 1);
    assert!(!is_rung(&guest.call));
    assert!(!guest.driver.enable_notifications());
    guest.flush();
    until("the call", || is_rung(&guest.call));
    assert_eq!((guest.stats().calls.value(), guest.stats().calls_suppressed.value()), (1, 1));
}
