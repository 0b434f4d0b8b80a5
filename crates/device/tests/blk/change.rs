//! Changes of a running queue: it stops, moves, is disabled, gets other doorbells.

use crate::guest::{
    DATA, Guest, NOT_WRITTEN, OK, Start, TIMEOUT, USUAL, call, doorbell, holding, is_rung, kick,
    null, ring, until,
};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_device::Device;
use manyring_engine::EventKind;
use manyring_wire::blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_queue_stops_when_nothing_is_in_flight_and_says_where() {
    let (disk, switch) = holding();
    let mut guest = Guest::new(disk, &USUAL);
    guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    assert_eq!(guest.stats().running.value(), 1);
    let base = guest.runtime.block_on(async {
        let handle = guest.handle.take().unwrap();
        let mut stop = std::pin::pin!(guest.device.stop(0, handle));
        let max_wait = Duration::from_millis(20);
        let early = tokio::time::timeout(max_wait, &mut stop).await;
        assert!(early.is_err(), "{early:?} while the disk may still write");
        switch.release();
        // The disk reports requests that it has held when the worker looks again.
        ring(&guest.kick);
        tokio::time::timeout(TIMEOUT, stop).await.expect("it stops")
    });
    assert_eq!(base, Ok(1.into()));
    guest.until_used();
    let stats = guest.stats();
    assert_eq!((stats.in_flight.value(), stats.running.value()), (0, 0));
}

#[test]
fn a_queue_whose_move_is_withdrawn_serves_what_came_meanwhile() {
    let plan = FaultPlan { hold_every: 2, ..FaultPlan::default() };
    let mut guest = Guest::new(Arc::new(FaultDisk::new(null(), plan)), &USUAL);
    assert_eq!(guest.read(0, 512), OK);
    let held = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    let meanwhile = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    let (handle, before) = (guest.handle.take().unwrap(), guest.sleeps());
    let (worker, driver) = (guest.pool.worker_stats()[0].clone(), &mut guest.driver);
    let moved = guest.runtime.block_on(async {
        let publish = async {
            // It has heard of the move and waits for the request that the disk holds.
            while worker.sleeps.value() == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            driver.publish();
        };
        tokio::join!(handle.move_to(1), publish).0
    });
    assert!(!moved, "the disk may still write");
    assert_eq!(handle.worker(), Some(0));
    guest.handle = Some(handle);
    // The driver was not asked for a kick while the queue was to move, and has given none.
    guest.until_used();
    assert_eq!((guest.status(held), guest.status(meanwhile)), (NOT_WRITTEN, OK));
    // The next one is held again, and the one after that is served.
    guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    assert_eq!(guest.flush(), OK);
}

#[test]
fn a_disabled_queue_serves_nothing_and_loses_nothing() {
    let mut guest = Guest::new(null(), &Start { enabled: false, ..USUAL });
    // The worker watches the kick from here on.
    guest.set_enabled(false);
    for _ in 0..3 {
        guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    }
    guest.driver.publish();
    ring(&guest.kick);
    until("the kick is heard", || guest.stats().kicks.value() == 1);
    // Twice: the worker has taken a turn between the commands.
    guest.set_enabled(false);
    guest.set_enabled(false);
    assert_eq!((guest.driver.take_used(), guest.status(0)), (None, NOT_WRITTEN));
    guest.set_enabled(true);
    for _ in 0..3 {
        guest.until_used();
    }
    let stats = guest.stats();
    assert_eq!((stats.batch_size().count(), stats.batch_size().sum()), (1, 3), "all at once");
    assert_eq!(
        (stats.requests.value(), stats.reads.value(), stats.bytes_read.value()),
        (3, 3, 1536)
    );
    assert_eq!((stats.ring_occupancy.value(), stats.serve_ns.count()), (3, 3));
    guest.set_enabled(false);
    let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.driver.publish();
    ring(&guest.kick);
    until("the kick is heard", || stats.kicks.value() == 2);
    guest.set_enabled(false);
    guest.set_enabled(false);
    assert_eq!((guest.driver.take_used(), guest.status(number)), (None, NOT_WRITTEN));
    assert_eq!(guest.stop(), 3);
    assert_eq!(guest.status(number), NOT_WRITTEN);
}

#[test]
fn doorbells_of_a_running_queue_are_replaced() {
    let mut guest = Guest::new(null(), &USUAL);
    guest.flush();
    let (new_kick, new_call, new_err) = (doorbell(), doorbell(), doorbell());
    let (handle, runtime) = (guest.handle.take().unwrap(), &guest.runtime);
    runtime.block_on(async {
        handle.set_kick(Some(kick(&new_kick))).await;
        handle.set_call(Some(call(&new_call))).await;
        handle.set_err(Some(call(&new_err))).await;
        handle.set_enabled(true).await;
    });
    guest.handle = Some(handle);
    assert!(is_rung(&new_call), "the driver may wait for what went to the former one");
    while is_rung(&guest.call) {}
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    let kicks = guest.stats().kicks.value();
    assert!(!guest.driver.enable_notifications());
    let number = guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    assert!(guest.driver.publish());
    ring(&new_kick);
    guest.until_used();
    until("the new call", || is_rung(&new_call));
    assert_eq!((guest.status(number), guest.stats().kicks.value()), (OK, kicks + 1));
    assert!(!is_rung(&guest.call), "the former call is forgotten");
    // A fault goes to the new err.
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.driver.publish();
    ring(&new_kick);
    assert!(matches!(guest.next_event(), EventKind::Fault(_)));
    until("the new err", || is_rung(&new_err));
    assert!(!is_rung(&guest.err));
}
