//! Memory that is cut away or replaced under a queue.

use crate::guest::{
    DATA, Guest, IOERR, OK, RING, SECTORS, TIMEOUT, USUAL, holding, null, ring, until,
};
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::{Image, ImageOptions};
use manyring_engine::EventKind;
use manyring_memory::{GuestAddr, GuestMemory, LastHit};
use manyring_queue::QueueError;
use manyring_wire::blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN};
use rustix::fs::ftruncate;
use std::sync::Arc;

#[test]
fn a_read_into_memory_that_was_cut_away_ends_the_session() {
    manyring_memory::install_sigbus_handler();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SECTORS * 512).unwrap();
    let options = ImageOptions::default();
    let disk = FileDisk::new(Image::open(file.path(), options).unwrap());
    let mut guest = Guest::new(Arc::new(disk), &USUAL);
    assert_eq!(guest.read(0, 4096), OK);
    // The ring and the status byte are in another region: only the disk's data is not.
    ftruncate(&guest.high, 0).unwrap();
    assert_eq!(guest.read(0, 4096), IOERR);
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
    assert_eq!(guest.stats().faults.value(), 1);
}

#[test]
fn memory_that_is_cut_away_ends_the_session_whoever_touches_it_first() {
    manyring_memory::install_sigbus_handler();
    let mut guest = Guest::new(null(), &USUAL);
    assert_eq!(guest.flush(), OK);
    ftruncate(&guest.high, 0).unwrap();
    // As another queue of the guest does. This one never touches its data.
    let mut slices = Vec::new();
    guest.memory.slices(GuestAddr(DATA), 1, &mut LastHit::default(), &mut slices).unwrap();
    slices[0].write_byte(1);
    drop(slices);
    guest.add(VIRTIO_BLK_T_FLUSH, 0, &[], &[]);
    guest.publish();
    ring(&guest.kick);
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
}

#[test]
fn a_ring_that_was_cut_away_is_lost_memory_and_no_fault_of_the_driver() {
    manyring_memory::install_sigbus_handler();
    let mut guest = Guest::new(null(), &USUAL);
    assert_eq!(guest.flush(), OK);
    let sleeps = guest.sleeps();
    ftruncate(&guest.low, 0).unwrap();
    ring(&guest.kick);
    assert_eq!(guest.next_event(), EventKind::MemoryLost);
    guest.until_asleep(sleeps);
    assert!(guest.events.try_recv().is_err(), "said once");
    assert_eq!(guest.stats().faults.value(), 1);
}

#[test]
fn other_memory_is_acknowledged_when_no_request_uses_the_former() {
    let (disk, switch) = holding();
    let mut guest = Guest::new(disk, &USUAL);
    let number = guest.add(VIRTIO_BLK_T_IN, 0, &[], &[(DATA, 512)]);
    guest.publish();
    until("the disk has the request", || guest.stats().in_flight.value() == 1);
    let memory = Arc::new((*guest.memory).clone());
    guest.runtime.block_on(async {
        let handle = guest.handle.as_ref().unwrap();
        let mut change = std::pin::pin!(handle.set_memory(memory, RING));
        // The worker obeys in order: it has heard of the memory when it answers the second.
        tokio::select! {
            biased;
            done = &mut change => panic!("{done:?} while the disk may still write"),
            () = handle.set_enabled(true) => {}
        }
        switch.release();
        ring(&guest.kick);
        let done = tokio::time::timeout(TIMEOUT, change).await;
        assert_eq!(done.expect("the change is acknowledged"), Ok(()));
    });
    guest.until_used();
    assert_eq!(guest.status(number), IOERR, "what this disk has held fails");
    assert_eq!(guest.read(0, 512), OK, "it goes on in the new memory");
}

#[test]
fn memory_without_the_ring_is_refused() {
    let mut guest = Guest::new(null(), &USUAL);
    let handle = guest.handle();
    let empty = handle.set_memory(Arc::new(GuestMemory::default()), RING);
    let refused = guest.runtime.block_on(empty);
    assert!(matches!(refused, Err(QueueError::Ring(_))), "{refused:?}");
    assert_eq!(guest.flush(), OK, "the queue goes on where it was");
}
