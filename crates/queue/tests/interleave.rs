//! Every interleaving of both halves, on loom's words: what is published is seen whole, and no
//! notification is lost. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p manyring-queue --release --test interleave`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(loom)]

use loom::sync::Arc as LoomArc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use manyring_memory::{GuestMemory, Mapping, RegionSpec, Words};
use manyring_queue::split::{DeviceHalf, DriverHalf, RingAreas};
use manyring_queue::{BATCH_CHAINS, Batch, Chains, QueueConfig, Ring, RingAddresses, RingFeatures};
use manyring_wire::virtqueue::{avail_ring_size, desc_table_size, used_ring_size};
use std::sync::Arc;

const SIZE: u16 = 2;
const GUEST: u64 = 0x1000;

/// Runs `test` under every interleaving with up to `preemptions` switches nobody asked for, with
/// and without EVENT_IDX.
fn explore(preemptions: usize, test: fn(RingFeatures)) {
    for event_idx in [false, true] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 20_000;
        let features =
            RingFeatures { event_idx, indirect: false, in_order: event_idx, packed: false };
        builder.check(move || test(features));
    }
}

/// Both halves of a ring whose indexes begin at `base`, and the host address of the memory.
fn halves(features: RingFeatures, base: u16) -> (DriverHalf, DeviceHalf, usize) {
    let areas = RingAreas {
        desc: Words::zeroed(desc_table_size(SIZE)),
        avail: Words::zeroed(avail_ring_size(SIZE)),
        used: Words::zeroed(used_ring_size(SIZE)),
    };
    areas.avail.store_u16(2, base);
    areas.used.store_u16(2, base);
    if features.event_idx {
        // As a driver and a device that have run so far leave them.
        areas.avail.store_u16(avail_ring_size(SIZE) - 2, base);
        areas.used.store_u16(used_ring_size(SIZE) - 2, base);
    }
    let mapping = Arc::new(Mapping::anonymous(4096).unwrap());
    let host = mapping.slice(0, 1).unwrap().address();
    let spec = RegionSpec { guest_addr: GUEST, size: 4096, user_addr: 0, mmap_offset: 0 };
    let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping).unwrap());
    let addresses = RingAddresses { descriptor: 0, available: 0, used: 0 };
    let config = QueueConfig { size: SIZE, addresses, base: base.into(), features };
    let driver = DriverHalf::with_areas(config, areas.clone()).unwrap();
    (driver, DeviceHalf::with_areas(config, areas, memory).unwrap(), host)
}

/// Pops what there is and checks that chain `n` is the one the driver added as its `n`-th.
fn pop_checked(device: &mut DeviceHalf, batch: &mut Batch, host: usize, seen: &mut u64) -> u64 {
    let popped = device.pop_batch(batch, BATCH_CHAINS);
    assert_eq!(device.fault(), None);
    for index in 0..popped {
        let (chain, readable, writable) = batch.take(index).unwrap();
        let n = usize::try_from(*seen).unwrap();
        assert_eq!((readable.len(), writable.len()), (1, 0));
        assert_eq!((readable[0].address(), readable[0].len()), (host + 16 * n, n + 1));
        device.push_used(chain, u32::try_from(n).unwrap() + 100);
        *seen += 1;
    }
    popped as u64
}

fn add(driver: &mut DriverHalf, n: u64) {
    let len = u32::try_from(n).unwrap() + 1;
    driver.add(&[(GUEST + 16 * n, len)], &[]).unwrap();
}

#[test]
fn a_popped_chain_has_the_descriptors_that_were_written_and_comes_back_whole() {
    explore(5, |features| {
        let (mut driver, mut device, host) = halves(features, 65_535);
        let guest = thread::spawn(move || {
            for n in 0..2 {
                add(&mut driver, n);
                driver.publish();
            }
            let mut next = 0;
            while next < 2 {
                match driver.take_used() {
                    Some((head, written)) => {
                        assert_eq!((u32::from(head), written), (next, next + 100));
                        next += 1;
                    }
                    None => thread::yield_now(),
                }
            }
        });
        let (mut batch, mut seen) = (Batch::new(), 0);
        while seen < 2 {
            if pop_checked(&mut device, &mut batch, host, &mut seen) == 0 {
                thread::yield_now();
            }
            device.publish();
        }
        guest.join().unwrap();
    });
}

#[test]
fn a_device_that_asked_for_notifications_and_sleeps_is_kicked() {
    explore(6, |features| {
        let (mut driver, mut device, host) = halves(features, 65_535);
        let kicked = LoomArc::new(AtomicBool::new(false));
        let kick = kicked.clone();
        let guest = thread::spawn(move || {
            for n in 0..2 {
                add(&mut driver, n);
                if driver.publish() {
                    kick.store(true, Ordering::Relaxed);
                }
            }
        });
        let (mut batch, mut seen) = (Batch::new(), 0);
        device.disable_notifications();
        pop_checked(&mut device, &mut batch, host, &mut seen);
        // A kick that came before is drained: only a later one wakes.
        kicked.store(false, Ordering::Relaxed);
        let work = device.enable_notifications();
        guest.join().unwrap();
        let kicked = kicked.load(Ordering::Relaxed);
        assert!(seen == 2 || work || kicked, "a lost kick");
    });
}

#[test]
fn a_driver_that_asked_for_notifications_and_sleeps_is_called() {
    explore(6, |features| {
        let (mut driver, mut device, _) = halves(features, 65_535);
        add(&mut driver, 0);
        add(&mut driver, 1);
        driver.publish();
        let called = LoomArc::new(AtomicBool::new(false));
        let call = called.clone();
        let host_side = thread::spawn(move || {
            let mut batch = Batch::new();
            assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
            for index in 0..2 {
                let (chain, ..) = batch.take(index).unwrap();
                device.push_used(chain, 0);
                device.publish();
                if device.needs_notification() {
                    call.store(true, Ordering::Relaxed);
                }
            }
        });
        driver.disable_notifications();
        let mut taken = 0;
        while driver.take_used().is_some() {
            taken += 1;
        }
        let work = driver.enable_notifications();
        host_side.join().unwrap();
        let called = called.load(Ordering::Relaxed);
        assert!(taken == 2 || work || called, "a lost call");
    });
}
