//! Requests that are served and requests that are refused, and their counters.

use crate::guest::{
    DATA, Guest, IOERR, NOT_WRITTEN, OK, SECTORS, Start, USUAL, is_rung, null, ring, until,
};
use manyring_backend::blk::fault::{FaultDisk, FaultPlan};
use manyring_device::blk::Resize;
use manyring_engine::EventKind;
use manyring_queue::QueueError;
use manyring_wire::blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use std::sync::Arc;

#[test]
fn a_request_that_starts_inside_the_disk_and_ends_past_it_is_refused() {
    // This disk would do anything: nobody but the device looks.
    let mut guest = Guest::new(null(), &USUAL);
    for (sector, sectors, status) in [
        (SECTORS - 1, 1, OK),
        (SECTORS - 2, 2, OK),
        (SECTORS - 1, 2, IOERR),
        (SECTORS - 8, 9, IOERR),
        (SECTORS, 1, IOERR),
        (SECTORS + 1, 1, IOERR),
    ] {
        let what = format!("{sectors} sectors from {sector} on");
        assert_eq!(guest.read(sector, sectors * 512), status, "read {what}");
        let data = [(DATA, sectors * 512)];
        assert_eq!(guest.serve(VIRTIO_BLK_T_OUT, sector, &data, &[]), status, "write {what}");
        for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(guest.range(kind, sector, sectors), status, "{kind} {what}");
        }
    }
    // Sectors that the larger disk had are outside of the smaller one.
    guest.device.resize(Some((SECTORS - 8) * 512)).unwrap();
    assert_eq!(guest.read(SECTORS - 9, 512), OK);
    assert_eq!(guest.read(SECTORS - 9, 1024), IOERR);
    assert_eq!(guest.read(SECTORS - 8, 512), IOERR);
}

#[test]
fn a_disk_that_fails_is_no_lost_memory() {
    let plan = FaultPlan { read_error_every: 1, ..FaultPlan::default() };
    let mut guest = Guest::new(Arc::new(FaultDisk::new(null(), plan)), &USUAL);
    assert_eq!(guest.read(0, 512), IOERR);
    assert_eq!(guest.flush(), OK, "the queue goes on");
    assert!(guest.events.try_recv().is_err());
    assert_eq!((guest.stats().errors.value(), guest.stats().faults.value()), (1, 0));
}

#[test]
fn batches_are_counted_by_whether_a_kick_brought_them() {
    let mut guest = Guest::new(null(), &Start { enabled: false, ..USUAL });
    guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    guest.driver.publish();
    guest.set_enabled(true);
    guest.until_used();
    let stats = guest.stats();
    assert_eq!((stats.kicks.value(), stats.kicks_suppressed.value()), (0, 1), "found by looking");
    let sleeps = guest.sleeps();
    guest.set_enabled(true);
    guest.until_asleep(sleeps);
    guest.flush();
    assert_eq!((stats.kicks.value(), stats.kicks_suppressed.value()), (1, 1), "kicked");
}

#[test]
fn a_fault_of_the_driver_is_told_once_and_stops_the_queue() {
    let mut guest = Guest::new(null(), &USUAL);
    assert_eq!(guest.flush(), OK);
    assert!(!is_rung(&guest.err));
    guest.driver.add(&[(1 << 50, 16)], &[]).unwrap();
    guest.publish();
    ring(&guest.kick);
    assert!(matches!(guest.next_event(), EventKind::Fault(QueueError::Buffer(_))));
    until("the err", || is_rung(&guest.err));
    let number = guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    guest.publish();
    ring(&guest.kick);
    guest.set_enabled(true);
    guest.set_enabled(true);
    assert_eq!((guest.driver.take_used(), guest.status(number)), (None, NOT_WRITTEN));
    assert!(guest.events.try_recv().is_err() && !is_rung(&guest.err), "told once");
    assert_eq!(guest.stats().faults.value(), 1);
    assert_eq!(guest.stop(), 1);
}
