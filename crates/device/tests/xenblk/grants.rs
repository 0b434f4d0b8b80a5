//! Which pages of a guest are mapped, for how long, and what it is told of those that cannot be.

use crate::guest::{TIMEOUT, World, holding, memory, null, pattern, until, usual};
use manyring_device::blk::blkif::XenBlkOptions;
use manyring_driver::wire::xen::blkif::{BlkifStatus, OP_READ, OP_WRITE, RawRequest, Segment};
use manyring_driver::{BlkfrontOptions, XenOp};
use manyring_memory::GrantAccess;

fn front(persistent: bool) -> BlkfrontOptions {
    BlkfrontOptions { persistent, ..Default::default() }
}

#[test]
fn persistent_grants_are_mapped_once_and_found_again() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &front(true));
    for _ in 0..10 {
        guest.queue.write(0, &[1; 8192]).unwrap();
    }
    guest.sync();
    let stats = guest.stats();
    assert_eq!((stats.grant_misses.value(), stats.grant_hits.value()), (2, 18));
    assert_eq!((stats.grants_mapped.value(), stats.grants_transient.value()), (2, 0));
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn grants_of_a_front_end_without_persistent_ones_end_with_each_request() {
    let world = World::new();
    let mut guest = world.guest(1, null(), &front(false));
    // The front-end ends each grant when it takes the response, and fails if that is refused.
    for _ in 0..10 {
        guest.queue.write(0, &[1; 8192]).unwrap();
        guest.queue.read(0, &mut [0; 60 << 10]).unwrap();
    }
    guest.sync();
    let stats = guest.stats();
    assert_eq!((stats.grants_mapped.value(), stats.grant_hits.value()), (0, 0));
    assert_eq!(stats.grants_transient.value(), 10 * (2 + 15 + 1));
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn a_back_end_that_keeps_no_grants_lets_go_of_persistent_ones_too() {
    let world = World::new();
    let options = XenBlkOptions { persistent: false, ..usual() };
    let mut guest = world.guest_of(1, memory(), &front(true), options);
    assert!(!guest.device.offer().persistent);
    let data = pattern(4096, 3);
    guest.queue.write(0, &data).unwrap();
    let mut read = vec![0; 4096];
    guest.queue.read(0, &mut read).unwrap();
    guest.sync();
    assert!(read == data && guest.stats().grants_mapped.value() == 0);
}

#[test]
fn more_persistent_grants_than_the_limit_are_mapped_for_their_request_and_some_are_purged() {
    let world = World::new();
    let options = XenBlkOptions { persistent_max: 20, ..usual() };
    let mut guest = world.guest_of(1, memory(), &front(true), options);
    let data = pattern(64 << 10, 3);
    for _ in 0..4 {
        guest.queue.write(0, &data).unwrap();
        let mut read = vec![0; 64 << 10];
        guest.queue.read(0, &mut read).unwrap();
        assert!(read == data);
    }
    // Two requests at a time use more pages than are kept.
    let both = [XenOp::Write { sector: 0, data: &data }, XenOp::Write { sector: 500, data: &data }];
    assert_eq!(guest.run_all(&both), [BlkifStatus::Okay; 2]);
    guest.sync();
    let stats = guest.stats();
    assert!(stats.grants_transient.value() > 0);
    // Nobody sends anything: the queue wakes by itself.
    until("a purge", || stats.grants_purged.value() > 0);
    assert!(stats.grants_mapped.value() < 20);
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn a_grant_that_cannot_be_mapped_fails_its_request_alone() {
    let world = World::new();
    for (number, persistent) in [(1, true), (2, false)] {
        let mut guest = world.guest(number, memory(), &front(persistent));
        let abi = guest.queue.options().abi;
        // One of two references is of nothing.
        let bad = guest.queue.submit_raw(OP_WRITE, |id, grefs, _| {
            let segments = [Segment::page(grefs[0].0), Segment::page(20_000)];
            RawRequest::data(abi, OP_WRITE, id, 0, &segments)
        });
        let bad = bad.unwrap();
        let good = guest.queue.submit(XenOp::Write { sector: 9, data: &[7; 512] }).unwrap();
        guest.queue.publish();
        let mut done = [guest.queue.wait(TIMEOUT).unwrap(), guest.queue.wait(TIMEOUT).unwrap()];
        done.sort_by_key(|done| done.tag != bad);
        assert_eq!(done.map(|done| done.status), [BlkifStatus::Error, BlkifStatus::Okay]);
        assert_eq!(Some(done[1].tag), good);
        guest.sync();
        assert_eq!(guest.stats().grants_refused.value(), 1);
        assert_eq!(guest.stats().faults.value(), 0);
        let mut read = [0; 512];
        guest.queue.read(9, &mut read).unwrap();
        assert_eq!(read, [7; 512]);
        assert_eq!(guest.stop().1, 0, "what was mapped of the bad request is let go of");
    }
}

#[test]
fn a_page_that_was_granted_read_only_is_written_to_the_disk_and_never_read_into() {
    let world = World::new();
    let mut guest = world.guest(1, memory(), &front(false));
    let page = guest.domain.alloc_pages(1).unwrap();
    guest.domain.page(page).unwrap().write_from(&[3; 4096]);
    let gref = guest.domain.grant(0, page, GrantAccess::Read).unwrap();
    let abi = guest.queue.options().abi;
    for (operation, status) in [(OP_WRITE, BlkifStatus::Okay), (OP_READ, BlkifStatus::Error)] {
        let request = |id, _: &[_], _: &[_]| {
            RawRequest::data(abi, operation, id, 0, &[Segment::page(gref.0)])
        };
        guest.queue.submit_raw(operation, request).unwrap();
        guest.queue.publish();
        assert_eq!(guest.queue.wait(TIMEOUT).unwrap().status, status);
    }
    assert!(guest.domain.end_access(gref), "it is let go of");
}

#[test]
fn a_grant_whose_entry_is_overwritten_while_it_is_mapped_stays_the_page_that_it_was() {
    let world = World::new();
    let (disk, switch) = holding(2);
    let mut guest = world.guest(1, disk, &front(false));
    let page = guest.domain.alloc_pages(1).unwrap();
    let gref = guest.domain.grant(0, page, GrantAccess::Write).unwrap();
    let abi = guest.queue.options().abi;
    guest.queue.write(0, &[1; 512]).unwrap();
    let request =
        |id, _: &[_], _: &[_]| RawRequest::data(abi, OP_READ, id, 0, &[Segment::page(gref.0)]);
    guest.queue.submit_raw(OP_READ, request).unwrap();
    guest.queue.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    assert!(!guest.domain.end_access(gref), "it is mapped");
    // The domain spoils its entry all the same.
    let other = guest.domain.alloc_pages(1).unwrap();
    let entry = manyring_memory::simgrant::GrantEntry::new(0, other, GrantAccess::Write).unwrap();
    guest.domain.table().update(gref, |_| Ok(entry)).unwrap();
    switch.release();
    guest.queue.publish();
    guest.queue.channel().notify();
    assert_eq!(
        guest.queue.wait(TIMEOUT).unwrap().status,
        BlkifStatus::Error,
        "what was held fails"
    );
    guest.queue.write(0, &[2; 512]).unwrap();
    let mut read = [0; 512];
    guest.queue.read(0, &mut read).unwrap();
    assert_eq!(read, [2; 512], "the queue goes on");
    assert_eq!(guest.stop().1, 0);
}

#[test]
fn requests_that_need_more_pages_than_a_queue_has_addresses_for_wait_and_none_fails() {
    let world = World::new();
    let len = 1 << 20;
    let front = BlkfrontOptions {
        persistent: false,
        indirect_segments: 256,
        buffer_size: len,
        ..Default::default()
    };
    let mut guest = world.guest(1, memory(), &front);
    let data = pattern(len as usize, 5);
    guest.queue.write(0, &data).unwrap();
    let read = XenOp::Read { sector: 0, len: len as usize };
    let ring = usize::from(guest.queue.ring().size());
    let tags: Vec<_> = (0..ring).map(|_| guest.queue.submit(read).unwrap().unwrap()).collect();
    guest.queue.publish();
    for _ in &tags {
        let done = guest.queue.wait(TIMEOUT).unwrap();
        let mut read = vec![0; len as usize];
        guest.queue.read_data(done.tag, &mut read).unwrap();
        assert!(done.status == BlkifStatus::Okay && read == data);
    }
    guest.sync();
    assert_eq!((guest.stats().errors.value(), guest.stats().grants_refused.value()), (0, 0));
    assert_eq!(guest.stop().1, 0);
}
