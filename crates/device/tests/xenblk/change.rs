//! A queue that stops, moves or whose disk changes its size, with requests in flight.

use crate::guest::{SECTORS, TIMEOUT, World, holding, memory, pattern, until};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::{Image, ImageOptions};
use manyring_device::blk::Resize;
use manyring_device::blk::blkif::{XenBlkOptions, disk_nodes};
use manyring_driver::wire::xen::blkif::BlkifStatus;
use manyring_driver::{BlkfrontOptions, XenOp};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_queue_stops_when_nothing_is_in_flight_and_its_pages_are_let_go_of() {
    for (persistent, number) in [(true, 1), (false, 2)] {
        let world = World::new();
        let front = BlkfrontOptions { persistent, ..Default::default() };
        let (disk, switch) = holding(1);
        let mut guest = world.guest(number, disk, &front);
        for sector in 0..3 {
            guest.queue.submit(XenOp::Read { sector, len: 8192 }).unwrap();
        }
        guest.queue.publish();
        until("the disk has them", || guest.stats().in_flight.value() == 3);
        let handle = guest.handle.take().unwrap();
        let base = guest.runtime.block_on(async {
            let mut stop = std::pin::pin!(handle.stop());
            let early = tokio::time::timeout(Duration::from_millis(20), &mut stop).await;
            assert!(early.is_err(), "{early:?} while the disk may still write");
            switch.release();
            // The disk reports requests that it has held when the worker looks again.
            guest.queue.channel().notify();
            tokio::time::timeout(TIMEOUT, stop).await.expect("it stops").unwrap()
        });
        assert_eq!(base.bits(), 3);
        for _ in 0..3 {
            let done = guest.queue.wait(TIMEOUT).unwrap();
            assert_eq!(done.status, BlkifStatus::Error, "what this disk has held fails");
        }
        assert_eq!(guest.queue.end_grants(), 0);
    }
}

#[test]
fn workers_that_end_leave_pages_mapped_that_a_disk_may_still_use() {
    let world = World::new();
    let (disk, _held_for_ever) = holding(1);
    let mut guest = world.guest(1, disk, &BlkfrontOptions::default());
    guest.queue.submit(XenOp::Read { sector: 0, len: 4096 }).unwrap();
    guest.queue.publish();
    until("the disk has it", || guest.stats().in_flight.value() == 1);
    world.pool.quit();
    until("the worker has ended", || guest.stats().running.value() == 0);
    assert_eq!(guest.queue.end_grants(), 1, "the page of its request, and no other");
}

#[test]
fn a_queue_goes_on_on_another_worker() {
    let world = World::new();
    let front = BlkfrontOptions { persistent: false, ..Default::default() };
    let mut guest = world.guest(1, memory(), &front);
    for round in 0..20_u64 {
        let data = pattern(16 << 10, round as u8);
        guest.queue.submit(XenOp::Write { sector: round * 32, data: &data }).unwrap();
        guest.queue.publish();
        let handle = guest.handle.as_ref().unwrap();
        let to = usize::from(round % 2 == 0);
        assert!(guest.runtime.block_on(handle.move_to(to)));
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, BlkifStatus::Okay);
        let mut read = vec![0; 16 << 10];
        guest.queue.read(round * 32, &mut read).unwrap();
        assert!(read == data, "round {round}");
    }
    assert_eq!(guest.stats().moves.value(), 20);
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn a_disk_that_has_become_smaller_refuses_what_lies_behind_its_end() {
    let world = World::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let image = Image::open(file.path(), ImageOptions::default()).unwrap();
    let mut guest = world.guest(1, Arc::new(FileDisk::new(image)), &BlkfrontOptions::default());
    let changes = guest.device.host().changes();
    let last = XenOp::Read { sector: SECTORS - 1, len: 512 };
    assert_eq!(guest.status(last), BlkifStatus::Okay);
    guest.device.resize(Some((SECTORS - 8) * 512)).unwrap();
    assert!(changes.has_changed().unwrap());
    assert_eq!(disk_nodes(guest.device.host()).sectors, SECTORS - 8);
    assert_eq!(guest.status(last), BlkifStatus::Error);
    assert_eq!(guest.status(XenOp::Read { sector: SECTORS - 9, len: 512 }), BlkifStatus::Okay);
    guest.device.resize(Some(2 * SECTORS * 512)).unwrap();
    assert_eq!(guest.status(XenOp::Read { sector: 2 * SECTORS - 1, len: 512 }), BlkifStatus::Okay);
}

#[test]
fn a_disk_is_cut_when_its_requests_in_flight_are_done() {
    // Also those of a queue beyond the ones that it offers, as a takeover can leave it.
    for (number, offered) in [(1, 1), (2, 0)] {
        let world = World::new();
        let (disk, switch) = holding(1);
        let options = XenBlkOptions::new("test", offered);
        let mut guest = world.guest_of(number, disk, &BlkfrontOptions::default(), options);
        assert_eq!(guest.device.all_stats().count(), 1);
        guest.queue.submit(XenOp::Read { sector: SECTORS - 1, len: 512 }).unwrap();
        guest.queue.publish();
        until("the disk has it", || guest.stats().in_flight.value() == 1);
        std::thread::scope(|scope| {
            let device = &guest.device;
            let resize = scope.spawn(|| device.resize(Some(512)));
            until("the smaller size is heeded", || device.host().size() == 512);
            assert!(!resize.is_finished());
            switch.release();
            guest.queue.channel().notify();
            guest.queue.wait(TIMEOUT).unwrap();
            // This disk cannot be cut: the size is what it was.
            assert!(resize.join().unwrap().is_err());
        });
        assert_eq!(guest.device.host().size(), SECTORS * 512);
    }
}

#[test]
fn guests_of_one_disk_read_what_the_others_wrote() {
    let world = World::new();
    let disk = memory();
    let front = BlkfrontOptions::default();
    let mut guests: Vec<_> = (1..=4).map(|n| world.guest(n, disk.clone(), &front)).collect();
    for (n, guest) in guests.iter_mut().enumerate() {
        guest.queue.write(n as u64 * 8, &pattern(4096, n as u8)).unwrap();
    }
    for guest in &mut guests {
        let mut read = vec![0; 16 << 10];
        guest.queue.read(0, &mut read).unwrap();
        let all: Vec<u8> = (0..4).flat_map(|n| pattern(4096, n)).collect();
        assert!(read == all);
    }
}
