//! Every interleaving of both halves of either format, on loom's words: what is published is seen
//! whole, with the data that it stands for, and no notification is lost. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p manyring-queue --release --test interleave`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(loom)]

use loom::sync::Arc as LoomArc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::thread;
use manyring_memory::{GuestMemory, Mapping, RegionSpec, Words};
use manyring_queue::split::{self, RingAreas};
use manyring_queue::{
    BATCH_CHAINS, Base, Batch, DeviceQueue, DriverQueue, QueueConfig, RingAddresses, RingFeatures,
    packed,
};
use manyring_wire::virtqueue::{EVENT_SIZE, avail_ring_size, desc_table_size, used_ring_size};
use std::sync::Arc;

const SIZE: u16 = 2;
const GUEST: u64 = 0x1000;

/// Runs `test` under every interleaving with up to `preemptions` switches nobody asked for, for
/// both formats, with and without EVENT_IDX.
fn explore(preemptions: usize, test: fn(RingFeatures)) {
    for (event_idx, packed) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 20_000;
        let features = RingFeatures { event_idx, indirect: false, in_order: event_idx, packed };
        builder.check(move || test(features));
    }
}

/// The areas of a split ring whose indexes begin at `base`.
fn split_areas(features: RingFeatures, base: u16) -> RingAreas {
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
    areas
}

/// Both halves of a ring at the end of a lap, and the host address of the memory.
fn halves(features: RingFeatures) -> (DriverQueue, DeviceQueue, usize) {
    let mapping = Arc::new(Mapping::anonymous(4096).unwrap());
    let host = mapping.slice(0, 1).unwrap().address();
    let spec = RegionSpec { guest_addr: GUEST, size: 4096, user_addr: 0, mmap_offset: 0 };
    let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping).unwrap());
    let addresses = RingAddresses { descriptor: 0, available: 0, used: 0 };
    let config = |base| QueueConfig { size: SIZE, addresses, base, features };
    if features.packed {
        // The last descriptor, on an odd lap.
        let place = 0x8000 | u32::from(SIZE - 1);
        let config = config(Base::from_bits(place | place << 16));
        let areas = RingAreas {
            desc: Words::zeroed_long(desc_table_size(SIZE)),
            avail: Words::zeroed_wide(EVENT_SIZE),
            used: Words::zeroed_wide(EVENT_SIZE),
        };
        let driver = packed::PackedDriverHalf::with_areas(config, areas.clone()).unwrap();
        let mut device = packed::PackedDeviceHalf::with_areas(config, areas, memory).unwrap();
        if features.in_order {
            device = device.trailed();
        }
        return (DriverQueue::Packed(driver), DeviceQueue::Packed(device), host);
    }
    let (base, config) = (u16::MAX, config(u16::MAX.into()));
    let areas = split_areas(features, base);
    let driver = split::SplitDriverHalf::with_areas(config, areas.clone()).unwrap();
    let device = split::SplitDeviceHalf::with_areas(config, areas, memory).unwrap();
    (DriverQueue::Split(driver), DeviceQueue::Split(device), host)
}

/// The bytes of the buffers of two chains, written and read without order, as data is: the ring
/// alone orders it.
#[derive(Clone)]
struct Buffers {
    /// The word that the driver writes for the device.
    asked: LoomArc<[AtomicU32; 2]>,
    /// The word that the device answers.
    answered: LoomArc<[AtomicU32; 2]>,
}

impl Buffers {
    fn new() -> Self {
        let empty = || LoomArc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        Self { asked: empty(), answered: empty() }
    }

    /// The driver writes the data of chain `n` and adds the chain.
    fn add(&self, driver: &mut DriverQueue, n: u32) {
        self.asked[n as usize].store(n + 1, Ordering::Relaxed);
        driver.add(&[(GUEST + 16 * u64::from(n), n + 1)], &[]).unwrap();
    }

    /// The device pops what there is, and checks that chain `n` is the one that the driver added
    /// as its `n`-th, and its data. Answers them. Returns how many there were.
    fn pop(&self, device: &mut DeviceQueue, host: usize, seen: &mut u32) -> usize {
        let mut batch = Batch::new();
        let popped = device.pop_batch(&mut batch, BATCH_CHAINS);
        assert_eq!(device.fault(), None);
        for index in 0..popped {
            let (chain, readable, writable) = batch.take(index).unwrap();
            let n = *seen as usize;
            assert_eq!((readable.len(), writable.len()), (1, 0));
            assert_eq!((readable[0].address(), readable[0].len()), (host + 16 * n, n + 1));
            let asked = self.asked[n].load(Ordering::Relaxed);
            assert_eq!(asked, *seen + 1, "the device reads what was there before");
            self.answered[n].store(*seen + 1, Ordering::Relaxed);
            device.push_used(chain, *seen + 100);
            *seen += 1;
        }
        popped
    }

    /// The driver takes chain `n`, if it is used, and checks its answer.
    fn take_used(&self, driver: &mut DriverQueue, n: u32) -> bool {
        let Some((id, written)) = driver.take_used() else { return false };
        assert_eq!((u32::from(id), written), (n, n + 100));
        let answered = self.answered[n as usize].load(Ordering::Relaxed);
        assert_eq!(answered, n + 1, "the driver reads what was there before");
        true
    }
}

#[test]
fn a_popped_chain_has_what_was_written_and_comes_back_with_its_answer() {
    explore(4, |features| {
        let (mut driver, mut device, host) = halves(features);
        let buffers = Buffers::new();
        let of_guest = buffers.clone();
        let guest = thread::spawn(move || {
            for n in 0..2 {
                of_guest.add(&mut driver, n);
                driver.publish();
            }
            let mut next = 0;
            while next < 2 {
                if of_guest.take_used(&mut driver, next) {
                    next += 1;
                } else {
                    thread::yield_now();
                }
            }
        });
        let mut seen = 0;
        while seen < 2 {
            if buffers.pop(&mut device, host, &mut seen) == 0 {
                thread::yield_now();
            }
            device.publish();
        }
        guest.join().unwrap();
    });
}

#[test]
fn a_device_that_asked_for_notifications_and_sleeps_is_kicked() {
    explore(5, |features| {
        let (mut driver, mut device, host) = halves(features);
        let buffers = Buffers::new();
        let of_guest = buffers.clone();
        let kicked = LoomArc::new(AtomicBool::new(false));
        let kick = kicked.clone();
        let guest = thread::spawn(move || {
            for n in 0..2 {
                of_guest.add(&mut driver, n);
                if driver.publish() {
                    kick.store(true, Ordering::Relaxed);
                }
            }
        });
        let mut seen = 0;
        device.disable_notifications();
        buffers.pop(&mut device, host, &mut seen);
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
        let (mut driver, mut device, _) = halves(features);
        let buffers = Buffers::new();
        buffers.add(&mut driver, 0);
        buffers.add(&mut driver, 1);
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

#[test]
fn a_burst_is_seen_whole_with_its_answers() {
    explore(5, |features| {
        let (mut driver, mut device, host) = halves(features);
        let buffers = Buffers::new();
        buffers.add(&mut driver, 0);
        buffers.add(&mut driver, 1);
        driver.publish();
        let of_host = buffers.clone();
        let host_side = thread::spawn(move || {
            assert_eq!(of_host.pop(&mut device, host, &mut 0), 2);
            device.publish();
        });
        if buffers.take_used(&mut driver, 0) {
            assert!(buffers.take_used(&mut driver, 1), "the second is not there");
        }
        host_side.join().unwrap();
    });
}
