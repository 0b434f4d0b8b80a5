//! Every limit of a ring, from both of its sides: what is just allowed is served, what is one more
//! is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, GUEST, Rig, USER, set};
use manyring_memory::{GuestMemory, Mapping, RegionSpec, total_len};
use manyring_queue::split::SplitDeviceHalf;
use manyring_queue::{
    BATCH_CHAINS, Base, Batch, Chains, DeviceQueue, DriverQueue, IndirectTable, QueueConfig,
    QueueError, Ring, RingFeatures,
};
use manyring_wire::virtqueue::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor, RING_IDX};
use std::sync::Arc;

const INDIRECT: RingFeatures =
    RingFeatures { event_idx: false, indirect: true, in_order: false, packed: false };
/// Where the tests put an indirect table.
const TABLE: u64 = BUFFERS + 0x8000;

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

/// A rig whose ring is clear, as its driver leaves it at first.
fn rig(size: u16) -> Rig {
    let rig = Rig::new(size, INDIRECT, 0);
    rig.driver();
    rig
}

/// A chain of `count` descriptors of one byte in the ring's table, from entry `first` on.
fn write_chain(rig: &Rig, first: u16, count: u16) {
    for n in 0..count {
        let flags = if n + 1 < count { DESC_F_NEXT } else { 0 };
        rig.set(first + n, desc(BUFFERS, 1, flags, first + n + 1));
    }
}

/// Pops once and drops what comes: the sizes of the chains in slices.
fn pop(device: &mut SplitDeviceHalf) -> Vec<usize> {
    let mut batch = Batch::new();
    let popped = device.pop_batch(&mut batch, BATCH_CHAINS);
    let sizes = (0..popped).map(|index| {
        let (chain, readable, writable) = batch.take(index).unwrap();
        let size = readable.len() + writable.len();
        device.push_used(chain, 0);
        size
    });
    let sizes = sizes.collect();
    device.publish();
    sizes
}

#[test]
fn a_chain_has_2048_pieces_at_most() {
    let rig = rig(4096);
    let mut device = rig.device();
    write_chain(&rig, 0, 2048);
    write_chain(&rig, 2048, 1);
    // The limit is the chain's: it does not matter what came before in the batch.
    rig.offer(2048);
    rig.offer(0);
    assert_eq!(pop(&mut device), [1, 2048]);
    write_chain(&rig, 0, 2049);
    rig.offer(0);
    assert_eq!(pop(&mut device), []);
    assert_eq!(device.fault(), Some(QueueError::ChainSlices { max: 2048 }));
}

#[test]
fn a_chain_may_be_as_long_as_its_ring() {
    let rig = rig(8);
    let mut device = rig.device();
    write_chain(&rig, 0, 8);
    rig.offer(0);
    assert_eq!(pop(&mut device), [8]);
}

#[test]
fn a_batch_ends_with_the_chain_that_fills_it() {
    let rig = rig(2048);
    let mut device = rig.device();
    write_chain(&rig, 0, 1023);
    write_chain(&rig, 1023, 1);
    for head in [0, 1023, 1023] {
        rig.offer(head);
    }
    assert_eq!(pop(&mut device), [1023, 1], "1024 pieces are enough");
    assert_eq!(device.available_count(), 1);
    assert_eq!(pop(&mut device), [1]);
    // No more chains than a batch has, and no more than were asked for.
    for head in (1024..).take(BATCH_CHAINS + 1) {
        write_chain(&rig, head, 1);
        rig.offer(head);
    }
    assert_eq!(pop(&mut device).len(), BATCH_CHAINS);
    rig.offer(1023);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, 0), 0);
    assert!(batch.is_empty());
    assert_eq!(device.pop_batch(&mut batch, 1), 1);
    assert_eq!((batch.len(), batch.is_empty()), (1, false));
    assert!(batch.take(1).is_none());
    let (chain, ..) = batch.take(0).unwrap();
    assert!(batch.take(0).is_none(), "it was taken before");
    device.push_used(chain, 0);
}

#[test]
fn an_indirect_table_has_1024_entries_at_most() {
    let rig = rig(8);
    let mut device = rig.device();
    let table = rig.table(TABLE, 1024);
    for n in 0..1024 {
        let flags = if n < 1023 { DESC_F_NEXT } else { 0 };
        set(&table.words, n, desc(BUFFERS, 1, flags, n + 1));
    }
    rig.set(0, desc(TABLE, 1024 * 16, DESC_F_INDIRECT, 0));
    rig.offer(0);
    assert_eq!(pop(&mut device), [1024]);
    assert_eq!(device.fault(), None);
    rig.set(0, desc(TABLE, 1025 * 16, DESC_F_INDIRECT, 0));
    rig.offer(0);
    assert_eq!(pop(&mut device), []);
    assert_eq!(device.fault(), Some(QueueError::IndirectSize { len: 1025 * 16 }));
}

#[test]
fn a_ring_may_go_on_in_an_indirect_table_behind_direct_descriptors() {
    let rig = rig(8);
    let mut device = rig.device();
    let table = rig.table(TABLE, 2);
    set(&table.words, 0, desc(BUFFERS, 2, DESC_F_NEXT | DESC_F_WRITE, 1));
    set(&table.words, 1, desc(BUFFERS, 3, DESC_F_WRITE, 0));
    rig.set(0, desc(BUFFERS, 1, DESC_F_NEXT, 7));
    rig.set(7, desc(TABLE, 32, DESC_F_INDIRECT, 0));
    rig.offer(0);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    let (chain, readable, writable) = batch.take(0).unwrap();
    assert_eq!((total_len(&readable), total_len(&writable)), (1, 5));
    device.push_used(chain, 5);
}

#[test]
fn a_chain_has_one_byte_less_than_4_gib_at_most() {
    let rig = rig(8);
    // A region of 2 GiB, which is never touched.
    let (guest_addr, size) = (1 << 40, 2u64 << 30);
    let spec = RegionSpec { guest_addr, size, user_addr: 1 << 50, mmap_offset: 0 };
    let mapping = Arc::new(Mapping::anonymous(size).unwrap());
    let memory = Arc::new(rig.memory.with_mapping(spec, mapping).unwrap());
    let half = 2u32 << 30;
    let fault_with = |last: u32| {
        let mut device = SplitDeviceHalf::new(rig.config, memory.clone()).unwrap();
        rig.set(0, desc(guest_addr, half, DESC_F_NEXT, 1));
        rig.set(1, desc(guest_addr, half - 1, DESC_F_NEXT, 2));
        rig.set(2, desc(guest_addr, last, 0, 0));
        rig.avail.store_u16(RING_IDX, 0);
        rig.offer(0);
        pop(&mut device);
        device.fault()
    };
    assert_eq!(fault_with(0), None, "4 GiB - 1");
    assert_eq!(fault_with(1), Some(QueueError::ChainBytes), "4 GiB");
}

#[test]
fn a_full_ring_is_popped_and_what_was_given_up_makes_room() {
    for discards in [false, true] {
        let rig = rig(8);
        let mut device = rig.device();
        for index in 0..8 {
            rig.set(index, desc(BUFFERS, 1, 0, 0));
            rig.offer(index);
        }
        let mut batch = Batch::new();
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 8, "{:?}", device.fault());
        assert_eq!((device.in_flight(), device.available_count()), (8, 0));
        let mut chains: Vec<_> = (0..8).map(|n| batch.take(n).unwrap().0).collect();
        for _ in 0..2 {
            let chain = chains.pop().unwrap();
            if discards {
                device.discard(chain);
            } else {
                device.push_used(chain, 1);
            }
        }
        assert_eq!(device.in_flight(), 6);
        assert_eq!(device.publish(), if discards { 0 } else { 2 });
        // Two more fit, a third does not.
        rig.offer(6);
        rig.offer(7);
        assert!(device.has_available(), "{:?}", device.fault());
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
        chains.extend((0..2).map(|n| batch.take(n).unwrap().0));
        rig.offer(6);
        assert!(!device.has_available());
        let overfull = QueueError::Overfull { available: 1, in_flight: 8, size: 8 };
        assert_eq!(device.fault(), Some(overfull));
        chains.into_iter().for_each(|chain| device.discard(chain));
        assert_eq!(device.in_flight(), 0);
    }
}

#[test]
fn rings_of_every_size_that_the_specification_allows_are_built() {
    let size = 1u64 << 20;
    let user_addr = GUEST + USER;
    let spec = RegionSpec { guest_addr: GUEST, size, user_addr, mmap_offset: 0 };
    let mapping = Arc::new(Mapping::anonymous(size).unwrap());
    let memory = Arc::new(GuestMemory::default().with_mapping(spec, mapping).unwrap());
    for size in (0..16).map(|n| 1u16 << n) {
        let available = user_addr + 0x8_0000;
        let addresses = manyring_queue::RingAddresses {
            descriptor: user_addr,
            available,
            used: user_addr + 0xa_0000,
        };
        let config = QueueConfig { size, addresses, base: 0.into(), features: INDIRECT };
        let queue = DeviceQueue::new(config, memory.clone()).unwrap();
        assert_eq!(queue.size(), size);
    }
}

#[test]
fn a_split_ring_has_no_base_above_16_bits() {
    let mut rig = Rig::new(4, INDIRECT, 0);
    // As the front-end of a packed ring says it: both wrap counters are 1.
    for bits in [0x1_0000, 0x8000_8000, u32::MAX] {
        rig.config.base = Base::from_bits(bits);
        let refused = Some(QueueError::Base { bits });
        assert_eq!(DeviceQueue::new(rig.config, rig.memory.clone()).err(), refused);
        assert_eq!(DriverQueue::new(rig.config, &rig.memory).err(), refused);
    }
    rig.config.base = Base::from_bits(0xffff);
    let device = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
    assert_eq!((device.base().bits(), device.base().split()), (0xffff, Ok(0xffff)));
}

#[test]
fn ring_features_are_four_of_the_negotiated_bits() {
    for (bits, [event_idx, indirect, packed, in_order]) in [
        (0, [false; 4]),
        (1 << 28, [false, true, false, false]),
        (1 << 29, [true, false, false, false]),
        (1 << 34, [false, false, true, false]),
        (1 << 35, [false, false, false, true]),
        (!(1 << 28), [true, false, true, true]),
        (!(1 << 29), [false, true, true, true]),
        (!(1 << 34), [true, true, false, true]),
        (!(1 << 35), [true, true, true, false]),
        (u64::MAX, [true; 4]),
    ] {
        let features = RingFeatures { event_idx, indirect, in_order, packed };
        assert_eq!(RingFeatures::from_bits(bits), features);
    }
}

/// Both halves as transport, device and driver hold them: by the ring's format.
fn pair(rig: &Rig) -> (DriverQueue, DeviceQueue) {
    let driver = DriverQueue::new(rig.config, &rig.memory).unwrap();
    (driver, DeviceQueue::new(rig.config, rig.memory.clone()).unwrap())
}

#[test]
fn a_queue_of_any_format_does_what_its_halves_do() {
    let rig = Rig::new(4, INDIRECT, 5);
    let (mut driver, mut device) = pair(&rig);
    assert_eq!((driver.free_count(), device.base(), device.size()), (4, 5.into(), 4));
    assert!(!device.has_available() && driver.take_used().is_none());
    assert!(!driver.publish(), "nothing was added");
    assert_eq!(driver.add(&[(BUFFERS, 1)], &[(BUFFERS + 8, 2)]), Some(0));
    let table = IndirectTable { addr: TABLE, words: rig.table(TABLE, 2).words };
    let indirect = driver.add_indirect(&[(BUFFERS, 3)], &[(BUFFERS + 8, 4)], &table);
    assert_eq!((indirect, driver.free_count()), (Some(2), 1));
    assert!(driver.publish(), "the device asks for kicks until it says otherwise");
    assert!(device.has_available());
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, 1), 1);
    assert_eq!((device.in_flight(), device.available_count(), device.base()), (1, 1, 6.into()));
    let (chain, ..) = batch.take(0).unwrap();
    device.unpop(chain);
    assert_eq!((device.in_flight(), device.available_count(), device.base()), (0, 2, 5.into()));
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
    let (first, readable, writable) = batch.take(0).unwrap();
    assert_eq!((first.slot(), total_len(&readable), total_len(&writable)), (0, 1, 2));
    device.push_used(first, 2);
    let (second, readable, writable) = batch.take(1).unwrap();
    assert_eq!((second.slot(), total_len(&readable), total_len(&writable)), (2, 3, 4));
    device.push_used(second, 4);
    assert_eq!((device.publish(), device.publish()), (2, 0));
    assert!(device.needs_notification() && !device.needs_notification());
    assert_eq!(driver.take_used(), Some((0, 2)));
    assert_eq!(driver.used_count(), 1);
    assert!(driver.enable_notifications(), "there is one more");
    assert_eq!(driver.take_used(), Some((2, 4)));
    assert_eq!(driver.used_count(), 0);
    assert!(!driver.enable_notifications());
    assert_eq!(driver.free_count(), 4);
}

#[test]
fn each_side_asks_for_notifications_and_takes_it_back() {
    for event_idx in [false, true] {
        let rig = Rig::new(
            4,
            RingFeatures { event_idx, indirect: false, in_order: false, packed: false },
            0,
        );
        let (mut driver, mut device) = pair(&rig);
        let mut batch = Batch::new();
        let mut serve = |device: &mut DeviceQueue| {
            assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
            device.push_used(batch.take(0).unwrap().0, 0);
            device.publish();
            device.needs_notification()
        };
        assert!(!device.enable_notifications(), "nothing is there");
        driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        assert!(driver.publish(), "{event_idx}: the device sleeps");
        assert!(device.enable_notifications(), "something is there");
        assert!(serve(&mut device));
        // With EVENT_IDX the event lies behind from now on; without, a flag says so.
        device.disable_notifications();
        driver.take_used().unwrap();
        driver.disable_notifications();
        driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        assert!(!driver.publish(), "{event_idx}: the device looks by itself");
        assert!(!serve(&mut device), "{event_idx}: the driver looks by itself");
        driver.take_used().unwrap();
        assert!(!driver.enable_notifications());
        assert!(!device.enable_notifications());
        driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        assert!(driver.publish() && serve(&mut device), "{event_idx}");
    }
}

#[test]
fn a_latched_fault_and_a_discarded_chain_reach_the_queue_of_any_format() {
    let rig = Rig::new(4, INDIRECT, 0);
    let (mut driver, mut device) = pair(&rig);
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, 1), 1);
    assert_eq!(device.fault(), None);
    device.latch_fault(QueueError::Request("of a test"));
    device.latch_fault(QueueError::ChainBytes);
    assert_eq!(device.fault(), Some(QueueError::Request("of a test")), "the first one stays");
    device.discard(batch.take(0).unwrap().0);
    assert_eq!((device.in_flight(), device.publish()), (0, 0));
    assert!(!device.has_available() && !device.enable_notifications());
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 0);
    assert_eq!(driver.take_used(), None);
}

#[test]
fn a_driver_adds_as_many_chains_as_it_has_descriptors() {
    let rig = Rig::new(4, INDIRECT, 0);
    let (mut driver, _) = pair(&rig);
    let table = IndirectTable { addr: TABLE, words: rig.table(TABLE, 2).words };
    let buffer = (BUFFERS, 1);
    assert_eq!(driver.add(&[], &[]), None);
    assert_eq!(driver.add_indirect(&[], &[], &table), None);
    assert_eq!(driver.add(&[buffer; 3], &[buffer; 2]), None, "five of four");
    assert_eq!(driver.add_indirect(&[buffer; 2], &[buffer], &table), None, "three of two");
    assert_eq!(driver.add(&[buffer; 2], &[buffer]), Some(0));
    assert_eq!(driver.add_indirect(&[buffer], &[buffer], &table), Some(3));
    assert_eq!(driver.free_count(), 0);
    assert_eq!(driver.add(&[buffer], &[]), None);
    assert_eq!(driver.add_indirect(&[buffer], &[], &table), None);
}
