//! A host without space: writes wait for it, and nothing else does.

use crate::guest::{DATA, Guest, IOERR, NOT_WRITTEN, OK, RING, SECTORS, TIMEOUT, USUAL, until};
use manyring_backend::blk::Disk;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan, FaultSwitch};
use manyring_backend::blk::memory::MemoryDisk;
use manyring_device::blk::OnFull;
use manyring_wire::blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES};
use std::sync::Arc;

/// A disk in memory that is full until its switch is turned.
fn full() -> (Arc<dyn Disk>, FaultSwitch) {
    let memory = Arc::new(MemoryDisk::new(SECTORS * 512).unwrap());
    let disk = FaultDisk::new(memory, FaultPlan { full: true, ..FaultPlan::default() });
    let switch = disk.switch();
    (Arc::new(disk), switch)
}

/// A guest with two writes, of sectors 0 and 1, that wait for space.
fn waiting() -> (Guest, FaultSwitch) {
    let (disk, switch) = full();
    let mut guest = Guest::new(disk, &USUAL);
    rustix::io::pwrite(&guest.high, &[1; 512], 0).unwrap();
    rustix::io::pwrite(&guest.high, &[2; 512], 512).unwrap();
    for sector in 0..2 {
        guest.add(VIRTIO_BLK_T_OUT, sector, &[(DATA + sector * 512, 512)], &[]);
    }
    guest.publish();
    let stats = guest.stats();
    until("both wait", || stats.waiting_for_space.value() == 2);
    assert_eq!((guest.status(0), guest.status(1)), (NOT_WRITTEN, NOT_WRITTEN));
    assert_eq!(stats.in_flight.value(), 2, "the guest has not got them back");
    (guest, switch)
}

fn comes_back(guest: &mut Guest, status: u8) {
    for _ in 0..2 {
        guest.until_used();
    }
    assert_eq!((guest.status(0), guest.status(1)), (status, status));
}

#[test]
fn writes_wait_for_space_while_reads_and_flushes_go_on_and_then_all_is_on_the_disk() {
    let (mut guest, switch) = waiting();
    let read = guest.serve(VIRTIO_BLK_T_IN, 8, &[], &[(DATA + 1024, 512)]);
    assert_eq!((read, guest.flush()), (OK, OK));
    let stats = guest.stats();
    assert!(stats.host_errors_enospc.value() >= 2);
    assert_eq!((stats.errors.value(), stats.writes.value()), (0, 0));
    // Each try wakes the worker; between them it sleeps.
    let (sleeps, tries) = (guest.sleeps(), stats.host_errors_enospc.value());
    until("they were tried again", || stats.host_errors_enospc.value() >= tries + 2);
    let slept = guest.sleeps() - sleeps;
    assert!(slept < 20, "{slept} sleeps in two tries");
    switch.release();
    comes_back(&mut guest, OK);
    until("none waits", || stats.waiting_for_space.value() == 0);
    assert_eq!(stats.writes.value(), 2);
    assert_eq!(guest.read(0, 1024), OK);
    let mut found = [0; 1024];
    rustix::io::pread(&guest.high, &mut found, 0).unwrap();
    assert!(found == [[1; 512], [2; 512]].as_flattened());
    until("the queue has nothing", || stats.in_flight.value() == 0);
    assert_eq!(guest.stop(), 5);
}

#[test]
fn zeroes_wait_for_space_as_writes_do() {
    let (disk, switch) = full();
    let mut guest = Guest::new(disk, &USUAL);
    let stats = guest.stats();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until("they wait", || stats.waiting_for_space.value() == 1);
            switch.release();
        });
        assert_eq!(guest.range(VIRTIO_BLK_T_WRITE_ZEROES, 0, 8), OK);
    });
}

#[test]
fn a_guest_whose_operator_wants_it_gets_an_error_at_once() {
    let (disk, _switch) = full();
    let mut guest = Guest::with(disk, OnFull::Report);
    assert_eq!(guest.serve(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512)], &[]), IOERR);
    let stats = guest.stats();
    assert_eq!((stats.host_errors_enospc.value(), stats.errors.value()), (1, 1));
    assert_eq!(stats.waiting_for_space.value(), 0);
}

#[test]
fn a_queue_that_stops_puts_the_last_requests_back_for_the_next_one() {
    let (mut guest, _switch) = waiting();
    assert_eq!(guest.stop(), 0, "both are popped again");
    assert_eq!((guest.status(0), guest.status(1)), (NOT_WRITTEN, NOT_WRITTEN));
    let stats = guest.stats();
    assert_eq!((stats.in_flight.value(), stats.waiting_for_space.value()), (0, 0));
}

#[test]
fn a_queue_that_stops_fails_what_it_cannot_put_back() {
    let (mut guest, _switch) = waiting();
    assert_eq!(guest.read(8, 512), OK);
    assert_eq!(guest.stop(), 3);
    comes_back(&mut guest, IOERR);
    assert_eq!(guest.stats().errors.value(), 2);
}

#[test]
fn a_queue_that_is_disabled_keeps_nothing_of_its_guest() {
    let (mut guest, switch) = waiting();
    guest.set_enabled(false);
    assert_eq!(guest.stats().in_flight.value(), 0);
    switch.release();
    // The requests went back into the ring.
    guest.set_enabled(true);
    comes_back(&mut guest, OK);
}

#[test]
fn other_memory_is_acknowledged_while_writes_wait_which_are_served_in_it_then() {
    let (mut guest, switch) = waiting();
    let memory = Arc::new((*guest.memory).clone());
    guest.runtime.block_on(async {
        let changed = guest.handle().set_memory(memory, RING);
        let changed = tokio::time::timeout(TIMEOUT, changed).await;
        changed.expect("nothing uses the former memory").unwrap();
    });
    rustix::io::pwrite(&guest.high, &[3; 512], 512).unwrap();
    switch.release();
    comes_back(&mut guest, OK);
    assert_eq!(guest.read(1, 512), OK);
    let mut found = [0; 512];
    rustix::io::pread(&guest.high, &mut found, 0).unwrap();
    assert_eq!(found, [3; 512]);
}

#[test]
fn a_driver_that_spoils_a_chain_that_waits_stops_its_queue() {
    let (mut guest, _switch) = waiting();
    // Its first descriptor names memory that there is not.
    rustix::io::pwrite(&guest.low, &u64::MAX.to_le_bytes(), RING.descriptor).unwrap();
    guest.next_event();
    assert_eq!(guest.stats().faults.value(), 1);
    guest.stop();
}
