//! Chains that the driver half of a packed ring takes back: each used descriptor is read once, a
//! batch that is returned by its last chain comes back whole, and the next device goes on behind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, Rig};
use manyring_queue::{BATCH_CHAINS, Batch, DeviceQueue, DriverQueue, RingFeatures};
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, Descriptor};

/// No power of two.
const RING: u16 = 7;
const PLAIN: RingFeatures =
    RingFeatures { event_idx: false, indirect: false, in_order: false, packed: true };
const IN_ORDER: RingFeatures = RingFeatures { in_order: true, ..PLAIN };
/// Flags of a descriptor that was used on an odd lap. On an even one there are none.
const USED_ON_ODD: u16 = 1 << 7 | 1 << 15;

/// Adds a chain of `buffers` writable buffers of 16 bytes.
fn add(driver: &mut DriverQueue, buffers: usize) -> u16 {
    let list: Vec<_> = (0..buffers as u64).map(|n| (BUFFERS + n * 16, 16)).collect();
    driver.add(&[], &list).unwrap()
}

/// Pops all chains and returns each of them.
fn serve(device: &mut DeviceQueue, written: u32) {
    let mut batch = Batch::new();
    for n in 0..device.pop_batch(&mut batch, BATCH_CHAINS) {
        device.push_used(batch.take(n).unwrap().0, written);
    }
    device.publish();
}

/// Returns a chain as a device does, at descriptor `at`, which is reached on an odd or even lap.
fn return_at(rig: &Rig, at: u16, is_odd: bool, id: u16, written: u32) {
    let flags = if is_odd { USED_ON_ODD } else { 0 };
    let desc = Descriptor { addr: 0, len: written, flags, next: 0 };
    let word = desc.emit_packed(id).1;
    rig.desc.store_u64_release(usize::from(at) * DESCRIPTOR_SIZE + 8, word);
}

fn taken(driver: &mut DriverQueue) -> Vec<(u16, u32)> {
    std::iter::from_fn(|| driver.take_used()).collect()
}

#[test]
fn the_driver_counts_what_became_visible_together_until_it_looks_again() {
    for base in [0, 5, 9, 13] {
        let rig = Rig::new(RING, PLAIN, base);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        let first: Vec<_> = (0..3).map(|_| add(&mut driver, 1)).collect();
        driver.publish();
        serve(&mut device, 1);
        assert_eq!(driver.used_count(), 0, "it has not looked");
        assert_eq!(driver.take_used(), Some((first[0], 1)));
        assert_eq!(driver.used_count(), 2);
        let second = [add(&mut driver, 2), add(&mut driver, 1)];
        driver.publish();
        serve(&mut device, 2);
        assert_eq!(driver.used_count(), 2, "what came later is not of the same look");
        assert_eq!(driver.free_count(), RING - 5, "what was seen is free when it is taken");
        let expected = [(first[1], 1), (first[2], 1), (second[0], 2), (second[1], 2)];
        assert_eq!(taken(&mut driver), expected);
        assert_eq!((driver.used_count(), driver.free_count()), (0, RING));
    }
}

#[test]
fn a_used_descriptor_is_read_once_whatever_becomes_of_it() {
    let rig = Rig::new(RING, PLAIN, 0);
    let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
    let ids: Vec<_> = (0..RING).map(|_| add(&mut driver, 1)).collect();
    driver.publish();
    serve(&mut device, 3);
    assert_eq!(driver.take_used(), Some((ids[0], 3)));
    for at in 0..RING {
        return_at(&rig, at, true, 999, 77);
    }
    assert!(driver.enable_notifications(), "what was seen is work");
    let rest: Vec<_> = ids[1..].iter().map(|id| (*id, 3)).collect();
    assert_eq!(taken(&mut driver), rest);
}

#[test]
fn a_batch_that_is_returned_by_its_last_chain_comes_back_whole() {
    let rig = Rig::new(RING, IN_ORDER, 0);
    let mut driver = rig.driver_queue();
    let ids = [1, 2, 1, 2].map(|buffers| add(&mut driver, buffers));
    driver.publish();
    // The first three, of four descriptors, in the place of the first; then the last one.
    return_at(&rig, 0, true, ids[2], 5);
    assert_eq!(taken(&mut driver), [(ids[0], 16), (ids[1], 32), (ids[2], 5)]);
    assert_eq!(driver.free_count(), RING - 2);
    return_at(&rig, 4, true, ids[3], 6);
    assert_eq!(taken(&mut driver), [(ids[3], 6)]);
    // A batch that crosses the end of the ring, and one of a single chain behind it.
    let ids = [1, 3, 1].map(|buffers| add(&mut driver, buffers));
    driver.publish();
    assert!(!driver.enable_notifications());
    return_at(&rig, 6, true, ids[1], 8);
    assert!(driver.enable_notifications());
    assert_eq!(taken(&mut driver), [(ids[0], 16), (ids[1], 8)]);
    return_at(&rig, 3, false, ids[2], 9);
    assert_eq!(taken(&mut driver), [(ids[2], 9)]);
    assert_eq!(driver.free_count(), RING);
}

#[test]
#[should_panic(expected = "which is not in flight")]
fn a_chain_that_is_returned_behind_a_later_one_is_a_fault() {
    let rig = Rig::new(RING, IN_ORDER, 0);
    let mut driver = rig.driver_queue();
    let ids = [1, 1, 1].map(|buffers| add(&mut driver, buffers));
    driver.publish();
    // The second one ends a batch of two, so the first one cannot come behind it.
    return_at(&rig, 0, true, ids[1], 1);
    return_at(&rig, 2, true, ids[0], 1);
    driver.take_used();
}

#[test]
#[should_panic(expected = "which is not in flight")]
fn an_id_that_no_chain_has_is_a_fault() {
    let rig = Rig::new(RING, PLAIN, 0);
    let mut driver = rig.driver_queue();
    add(&mut driver, 1);
    driver.publish();
    return_at(&rig, 0, true, 60_000, 1);
    driver.take_used();
}

/// Of three chains two are taken and one is returned when the process of the device is killed.
#[test]
fn the_driver_says_where_the_next_device_goes_on_after_one_that_was_killed() {
    for features in [PLAIN, IN_ORDER, RingFeatures { packed: false, ..PLAIN }] {
        let size = if features.packed { RING } else { 8 };
        // On either lap, and across the end of the ring.
        for base in 0..2 * size {
            let mut rig = Rig::new(size, features, base);
            let (mut driver, mut killed) = (rig.driver_queue(), rig.device_queue());
            assert_eq!(driver.resume_base(), rig.config.base, "nothing was returned");
            let ids = [2, 1, 1].map(|buffers| add(&mut driver, buffers));
            driver.publish();
            let mut batch = Batch::new();
            assert_eq!(killed.pop_batch(&mut batch, 2), 2);
            killed.push_used(batch.take(0).unwrap().0, 1);
            killed.publish();
            std::mem::forget(batch);
            rig.config.base = driver.resume_base();
            serve(&mut rig.device_queue(), 2);
            let expected = [(ids[0], 1), (ids[1], 2), (ids[2], 2)];
            assert_eq!(taken(&mut driver), expected, "{features:?} from {base}");
        }
    }
}

#[test]
fn a_chain_by_a_table_needs_a_buffer_a_free_descriptor_and_room_in_its_table() {
    let rig = Rig::new(2, RingFeatures { indirect: true, ..PLAIN }, 0);
    let mut driver = rig.driver_queue();
    let (buffer, table) = ((BUFFERS, 16), rig.table(BUFFERS + 4096, 2));
    assert_eq!(driver.add_indirect(&[], &[], &table), None, "no buffer");
    assert_eq!(driver.add_indirect(&[buffer; 2], &[buffer], &table), None, "three of two");
    assert_eq!((driver.add(&[], &[]), driver.free_count()), (None, 2));
    for left in [1, 0] {
        assert!(driver.add_indirect(&[buffer], &[buffer], &table).is_some());
        assert_eq!(driver.free_count(), left);
    }
    assert_eq!(driver.add_indirect(&[buffer], &[], &table), None, "no descriptor");
    assert_eq!(driver.add(&[buffer], &[]), None);
}
