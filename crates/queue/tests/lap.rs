//! A packed ring that goes on at its first descriptor, on an even lap, has the base 0, as a new one
//! has whose front-end does not know that packed rings begin on an odd lap.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, Rig};
use manyring_queue::{Base, Batch, DeviceQueue, DriverQueue, RingFeatures};

const SIZE: u16 = 4;

/// Serves what is available; returns how many chains.
fn serve(queue: &mut DeviceQueue) -> usize {
    let mut batch = Batch::new();
    let popped = queue.pop_batch(&mut batch, 64);
    for n in 0..popped {
        let (chain, ..) = batch.take(n).unwrap();
        queue.push_used(chain, 0);
    }
    queue.publish();
    popped
}

fn add(driver: &mut DriverQueue, descriptors: usize) {
    let parts = [(BUFFERS, 16), (BUFFERS + 64, 16), (BUFFERS + 128, 16), (BUFFERS + 192, 16)];
    driver.add(&parts[..descriptors], &[]).unwrap();
    driver.publish();
}

/// After four chains of three descriptors, three laps, the first descriptor was the last one of a
/// chain: the device has not used it on that lap.
#[test]
fn a_packed_ring_that_stopped_at_its_first_descriptor_goes_on_there() {
    for lens in [&[3, 3, 3, 3][..], &[1, 1, 1, 1], &[4], &[2, 2]] {
        // With nothing to do, or with a chain that came before the ring goes on.
        for is_early in [false, true] {
            let features = RingFeatures { packed: true, ..RingFeatures::default() };
            let mut rig = Rig::new(SIZE, features, 0);
            rig.config.base = Base::packed_start();
            let mut driver = rig.driver_queue();
            let mut queue = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
            for len in lens {
                add(&mut driver, *len);
                assert_eq!(serve(&mut queue), 1);
                assert!(driver.take_used().is_some());
            }
            assert_eq!(queue.base().bits(), 0, "{lens:?}");
            if is_early {
                add(&mut driver, 2);
            }
            rig.config.base = queue.base();
            let mut queue = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
            if !is_early {
                add(&mut driver, 2);
            }
            assert_eq!(serve(&mut queue), 1, "{lens:?} {is_early}");
            assert!(driver.take_used().is_some());
        }
    }
}

#[test]
fn a_new_packed_ring_begins_on_an_odd_lap_whatever_its_front_end_says() {
    for is_early in [false, true] {
        let features = RingFeatures { packed: true, ..RingFeatures::default() };
        let mut rig = Rig::new(SIZE, features, 0);
        rig.config.base = Base::packed_start();
        let mut driver = rig.driver_queue();
        if is_early {
            add(&mut driver, 4);
        }
        rig.config.base = Base::from_bits(0);
        // As a driver makes it: zeroes. The driver half marks each descriptor as used before.
        let mut queue = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
        if !is_early {
            add(&mut driver, 4);
        }
        assert_eq!(serve(&mut queue), 1, "{is_early}");
    }
}
