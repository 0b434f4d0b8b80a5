//! Writes of a Xen guest for which the host has no space, also beyond the end of a back-end.

use super::{Back, Guest};
use crate::guest::{TIMEOUT, World, memory, pattern, until};
use manyring_backend::blk::Disk;
use manyring_backend::blk::fault::{FaultDisk, FaultPlan, FaultSwitch};
use manyring_driver::XenOp;
use manyring_driver::wire::xen::blkif::BlkifStatus;
use std::sync::Arc;

/// A disk that is full until its switch is turned, on another one.
fn full(disk: Arc<dyn Disk>) -> (Arc<dyn Disk>, FaultSwitch) {
    let disk = FaultDisk::new(disk, FaultPlan { full: true, ..FaultPlan::default() });
    let switch = disk.switch();
    (Arc::new(disk), switch)
}

#[test]
fn writes_for_which_the_host_has_no_space_wait_and_a_barrier_waits_for_them() {
    let world = World::new();
    let (disk, switch) = full(memory());
    let mut guest = Guest::new(&world);
    let back = Back::start(disk, guest.attachment(false)).unwrap();
    let stats = back.device.stats(0).unwrap();
    let data: Vec<_> = (0..2).map(|n| pattern(if n == 0 { 4096 } else { 60 << 10 }, n)).collect();
    for (n, data) in data.iter().enumerate() {
        guest.queue.submit(XenOp::Write { sector: n as u64 * 128, data }).unwrap().unwrap();
    }
    guest.queue.publish();
    until("both wait", || stats.waiting_for_space.value() == 2);
    let mut found = [1; 4096];
    guest.queue.read(512, &mut found).unwrap();
    assert_eq!(found, [0; 4096]);
    let last = pattern(2048, 99);
    guest.queue.submit(XenOp::Barrier { sector: 0, data: &last }).unwrap().unwrap();
    guest.queue.publish();
    until("it was tried again", || stats.host_errors_enospc.value() > 2);
    assert_eq!(stats.writes.value(), 0);
    switch.release();
    for _ in 0..3 {
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    }
    for (sector, data) in [(0, &last), (128, &data[1])] {
        let mut found = vec![0; data.len()];
        guest.queue.read(sector, &mut found).unwrap();
        assert_eq!(found, *data);
    }
    until("none waits", || stats.waiting_for_space.value() == 0);
}

#[test]
fn writes_that_wait_for_space_are_served_by_the_next_back_end() {
    let world = World::new();
    let (disk, mut guest) = (memory(), Guest::new(&world));
    let (without_space, _switch) = full(disk.clone());
    let mut first = Back::start(without_space, guest.attachment(false)).unwrap();
    let data = pattern(4096, 5);
    guest.queue.submit(XenOp::Write { sector: 8, data: &data }).unwrap().unwrap();
    guest.queue.publish();
    let stats = first.device.stats(0).unwrap();
    until("it waits", || stats.waiting_for_space.value() == 1);
    // A queue that is stopped does not wait for the host.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stop = first.handle.take().unwrap().stop();
    runtime
        .block_on(async { tokio::time::timeout(TIMEOUT, stop).await })
        .expect("it stops")
        .unwrap();
    first.end();
    let _second = Back::start(disk, guest.attachment(true)).unwrap();
    assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
    let mut found = vec![0; data.len()];
    guest.queue.read(8, &mut found).unwrap();
    assert_eq!(found, data);
}
