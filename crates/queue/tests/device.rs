//! Corners of the device half: put back, notifications at the wrap, a ring that moves.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, GUEST, Rig, USER, packed_base};
use manyring_memory::{GuestAddr, GuestMemory, LastHit, MemoryError, MemoryFiles, RegionSpec};
use manyring_queue::split::SplitDeviceHalf;
use manyring_queue::{
    BATCH_CHAINS, Base, Batch, Chains, DeviceQueue, QueueError, Ring, RingAddresses, RingFeatures,
};
use manyring_wire::virtqueue::{RING_FLAGS, RING_IDX, used_entry, used_event};
use std::fs::File;
use std::sync::Arc;

const EVENT_IDX: RingFeatures =
    RingFeatures { event_idx: true, indirect: false, in_order: false, packed: false };

#[test]
fn chains_put_back_newest_first_are_popped_again_in_order() {
    let rig = Rig::new(8, RingFeatures::default(), 65_534);
    let mut driver = rig.driver();
    let mut device = rig.device();
    let ids: Vec<_> = (0..4).map(|n| driver.add(&[(BUFFERS + n, 1)], &[]).unwrap()).collect();
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 4);
    let mut chains: Vec<_> = (0..4).map(|n| batch.take(n).unwrap().0).collect();
    device.unpop(chains.pop().unwrap());
    device.unpop(chains.pop().unwrap());
    assert_eq!((device.base(), device.in_flight(), device.available_count()), (0.into(), 2, 2));
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
    chains.extend((0..2).map(|n| batch.take(n).unwrap().0));
    let heads: Vec<_> = chains.iter().map(manyring_queue::Chain::slot).collect();
    assert_eq!(heads, ids);
    chains.into_iter().for_each(|chain| device.push_used(chain, 0));
    assert_eq!(device.publish(), 4);
}

#[test]
fn a_batch_counts_its_chains_and_keeps_their_memory_until_it_is_released() {
    let rig = Rig::new(8, RingFeatures::default(), 0);
    let mut driver = rig.driver();
    let memory = Arc::new((*rig.memory).clone());
    let mut device = DeviceQueue::new(rig.config, memory.clone()).unwrap();
    let mut batch = Batch::new();
    for count in [0, 1, 3] {
        (0..count).for_each(|_| assert!(driver.add(&[(BUFFERS, 1)], &[]).is_some()));
        driver.publish();
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), count);
        assert_eq!((batch.len(), batch.is_empty()), (count, count == 0));
        (0..count).for_each(|n| device.push_used(batch.take(n).unwrap().0, 0));
    }
    drop(device);
    assert_eq!(Arc::strong_count(&memory), 2, "kept for the next batch");
    batch.release();
    assert_eq!((batch.len(), Arc::strong_count(&memory)), (0, 1), "it may be unmapped now");
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "chain 0 was not returned")]
fn a_chain_that_is_dropped_is_told() {
    let rig = Rig::new(8, RingFeatures::default(), 0);
    let mut driver = rig.driver();
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(rig.device().pop_batch(&mut batch, BATCH_CHAINS), 1);
    drop(batch.take(0));
}

#[test]
fn a_driver_does_not_believe_a_device_that_returns_what_its_ring_cannot_hold() {
    let rig = Rig::new(8, RingFeatures::default(), 0);
    for id in [8, 9, u32::MAX] {
        let mut driver = rig.driver();
        driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        driver.publish();
        rig.used.store_pair(used_entry(0), (id, 0));
        rig.used.store_u16_release(RING_IDX, 1);
        assert_eq!(driver.take_used(), None, "{id}");
    }
}

#[test]
fn a_ring_is_broken_when_its_memory_was_cut_away_and_that_is_no_fault() {
    manyring_memory::install_sigbus_handler();
    let rig = Rig::new(8, RingFeatures::default(), 0);
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/cut-away");
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.unwrap();
    file.set_len(4096).unwrap();
    let spec = RegionSpec { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let memory = rig.memory.with_region_in(MemoryFiles::LocalDisk, spec, &file);
    let memory = Arc::new(memory.unwrap());
    let device = SplitDeviceHalf::new(rig.config, memory.clone()).unwrap();
    assert!(!device.is_broken() && !device.is_faulted());
    file.set_len(0).unwrap();
    let mut slices = Vec::new();
    memory.slices(GuestAddr(0), 1, &mut LastHit::default(), &mut slices).unwrap();
    slices[0].write_byte(1);
    assert!(device.is_broken() && !device.is_faulted());
}

#[test]
fn with_event_idx_a_call_is_wanted_when_the_used_index_passes_the_event_over_the_wrap() {
    let rig = Rig::new(4, EVENT_IDX, 65_535);
    let mut driver = rig.driver();
    let mut device = rig.device();
    let mut batch = Batch::new();
    let mut round = |count: usize| {
        for _ in 0..count {
            driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        }
        driver.publish();
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), count);
        for index in 0..count {
            device.push_used(batch.take(index).unwrap().0, 0);
        }
        device.publish();
        let wanted = device.needs_notification();
        while driver.take_used().is_some() {}
        wanted
    };
    // The event is 65535 + 0: the first used entry passes it, the next ones do not.
    rig.avail.store_u16(used_event(4), 65_535);
    assert!(round(1));
    assert!(!round(2));
    // The event two ahead, at index 3: used.idx is 2 now.
    rig.avail.store_u16(used_event(4), 3);
    assert!(!round(1));
    assert!(round(1));
}

#[test]
fn needs_notification_answers_once_for_each_publish() {
    let rig = Rig::new(4, RingFeatures::default(), 0);
    let mut driver = rig.driver();
    let mut device = rig.device();
    assert!(!device.needs_notification(), "nothing was published");
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    let mut batch = Batch::new();
    device.pop_batch(&mut batch, BATCH_CHAINS);
    device.push_used(batch.take(0).unwrap().0, 0);
    assert!(!device.needs_notification(), "pushed is not published");
    device.publish();
    assert!(device.needs_notification());
    assert!(!device.needs_notification());
}

#[test]
fn a_ring_that_moves_goes_on_where_it_was() {
    let rig = Rig::new(4, EVENT_IDX, 7);
    let mut driver = rig.driver();
    let mut device = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    let chain = batch.take(0).unwrap().0;
    // The front-end has mapped the same memory elsewhere.
    let spec = *rig.memory.specs().next().unwrap();
    let moved = RegionSpec { user_addr: spec.user_addr + (1 << 30), ..spec };
    let memory = GuestMemory::default().with_mapping(moved, rig.mapping.clone()).unwrap();
    let shift = |addr: u64| addr + (1 << 30);
    let old = rig.config.addresses;
    let addresses = RingAddresses {
        descriptor: shift(old.descriptor),
        available: shift(old.available),
        used: shift(old.used),
    };
    let memory = Arc::new(memory);
    assert!(Arc::ptr_eq(device.memory(), &rig.memory));
    device.relocate(addresses, memory.clone()).unwrap();
    assert!(Arc::ptr_eq(device.memory(), &memory), "chains are resolved in the new snapshot");
    device.push_used(chain, 5);
    device.publish();
    assert_eq!(driver.take_used(), Some((0, 5)));
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    device.push_used(batch.take(0).unwrap().0, 0);
    assert!(!device.enable_notifications());
    assert_eq!(device.base(), 9.into());
}

#[test]
fn a_ring_that_moves_out_of_memory_stays_where_it_was() {
    let rig = Rig::new(4, RingFeatures::default(), 0);
    let mut driver = rig.driver();
    let mut device = DeviceQueue::new(rig.config, rig.memory.clone()).unwrap();
    let nowhere = RingAddresses { descriptor: 0, ..rig.config.addresses };
    let refused = device.relocate(nowhere, Arc::new((*rig.memory).clone()));
    assert!(matches!(refused, Err(QueueError::Ring(MemoryError::UserRange { .. }))));
    assert!(Arc::ptr_eq(device.memory(), &rig.memory));
    driver.add(&[(BUFFERS, 1)], &[]).unwrap();
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    device.push_used(batch.take(0).unwrap().0, 0);
}

#[test]
fn rings_of_a_wrong_size_or_place_are_not_built() {
    let rig = Rig::new(4, RingFeatures::default(), 0);
    for size in [0, 3, 255, 32_769, u16::MAX] {
        let config = manyring_queue::QueueConfig { size, ..rig.config };
        let refused = DeviceQueue::new(config, rig.memory.clone());
        assert_eq!(refused.err(), Some(QueueError::Size { size }));
    }
    let mut config = rig.config;
    config.addresses.used = GUEST + USER + 2;
    let refused = DeviceQueue::new(config, rig.memory.clone());
    assert!(matches!(refused, Err(QueueError::Ring(MemoryError::Align { .. }))));
}

#[test]
fn a_chain_across_two_regions_and_a_table_across_two_regions_are_followed() {
    let rig = Rig::new(
        4,
        RingFeatures { event_idx: false, indirect: true, in_order: false, packed: false },
        0,
    );
    let mut driver = rig.driver();
    // The neighbour begins where the rig's region ends.
    let end = GUEST + guest::SIZE;
    let spec = RegionSpec { guest_addr: end, size: 4096, user_addr: 0x1000, mmap_offset: 0 };
    let next = Arc::new(manyring_memory::Mapping::anonymous(4096).unwrap());
    let memory = Arc::new(rig.memory.with_mapping(spec, next.clone()).unwrap());
    let mut device = DeviceQueue::new(rig.config, memory).unwrap();
    driver.add(&[(end - 8, 24)], &[]).unwrap();
    // A table of two entries, the second in the neighbour.
    let table = rig.table(end - 16, 1);
    driver.add_indirect(&[(BUFFERS, 5)], &[], &table).unwrap();
    let (low, high) =
        manyring_wire::virtqueue::Descriptor { addr: BUFFERS + 64, len: 7, flags: 0, next: 0 }
            .emit();
    let bytes = [low.to_ne_bytes(), high.to_ne_bytes()].concat();
    next.slice(0, 16).unwrap().write_from(&bytes);
    let first = manyring_wire::virtqueue::Descriptor { addr: BUFFERS, len: 5, flags: 1, next: 1 };
    guest::set(&table.words, 0, first);
    rig.set(1, manyring_wire::virtqueue::Descriptor { addr: end - 16, len: 32, flags: 4, next: 0 });
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2, "{:?}", device.fault());
    let (chain, readable, _) = batch.take(0).unwrap();
    assert_eq!(readable.iter().map(|s| s.len()).collect::<Vec<_>>(), [8, 16]);
    device.push_used(chain, 0);
    let (chain, readable, _) = batch.take(1).unwrap();
    assert_eq!(readable.iter().map(|s| s.len()).collect::<Vec<_>>(), [5, 7]);
    device.push_used(chain, 0);
}

#[test]
fn the_driver_counts_what_became_visible_together_until_it_looks_again() {
    let rig = Rig::new(8, EVENT_IDX, 65_534);
    let mut driver = rig.driver();
    let mut device = rig.device();
    for n in 0..5 {
        driver.add(&[], &[(BUFFERS + n, 1)]).unwrap();
    }
    driver.publish();
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 5);
    let mut return_chains = |which: std::ops::Range<usize>| {
        which.for_each(|n| device.push_used(batch.take(n).unwrap().0, 1));
        device.publish();
    };
    assert_eq!(driver.used_count(), 0);
    return_chains(0..3);
    assert!(driver.take_used().is_some());
    assert_eq!(driver.used_count(), 2);
    return_chains(3..5);
    assert_eq!(driver.used_count(), 2, "what came later is not of the same look");
    assert_eq!((0..4).filter(|_| driver.take_used().is_some()).count(), 4);
    assert_eq!((driver.used_count(), driver.take_used()), (0, None));
}

const PACKED: RingFeatures = RingFeatures { packed: true, ..EVENT_IDX };

#[test]
fn a_call_within_the_next_chains_is_wanted_if_the_driver_has_asked_for_one_of_them() {
    let size = 8;
    let plain = RingFeatures { event_idx: false, ..EVENT_IDX };
    for base in [0, 3, 65_533] {
        let (rig, flagged) = (Rig::new(size, EVENT_IDX, base), Rig::new(size, plain, base));
        let _drivers = (rig.driver_queue(), flagged.driver_queue());
        let (queue, by_flag) = (rig.device_queue(), flagged.device_queue());
        for (ahead, chains) in (0..5u16).flat_map(|ahead| (0..5).map(move |n| (ahead, n))) {
            rig.avail.store_u16(used_event(size), base.wrapping_add(ahead));
            assert_eq!(queue.wants_call_within(chains), ahead < chains, "{ahead} {chains}");
        }
        rig.avail.store_u16(used_event(size), base.wrapping_sub(1));
        assert!(!queue.wants_call_within(5), "an event that has passed");
        for (flags, is_wanted) in [(0, true), (1, false), (2, true), (3, false)] {
            flagged.avail.store_u16(RING_FLAGS, flags);
            assert_eq!(by_flag.wants_call_within(1), is_wanted, "{flags}");
        }
    }
}

#[test]
fn a_call_within_the_next_chains_of_a_packed_ring_is_wanted_as_of_a_split_one() {
    let size = 7;
    for base in 0..2 * size {
        let rig = Rig::new(size, PACKED, base);
        let _driver = rig.driver_queue();
        let queue = rig.device_queue();
        let event = |place: u32, flags: u32| rig.avail.store_u32(0, place & 0xffff | flags << 16);
        for (ahead, chains) in (0..5u16).flat_map(|ahead| (0..5).map(move |n| (ahead, n))) {
            event(packed_base(size, base + ahead).bits(), 2);
            assert_eq!(queue.wants_call_within(chains), ahead < chains, "{ahead} {chains}");
            event(packed_base(size, base + ahead).bits(), 0);
            assert!(queue.wants_call_within(chains), "for each buffer");
            event(packed_base(size, base + ahead).bits(), 1);
            assert!(!queue.wants_call_within(chains), "for none");
        }
        // A driver cannot ask for an event that lies further ahead than its ring is long.
        event(packed_base(size, base + size - 1).bits(), 2);
        assert!(queue.wants_call_within(u16::MAX) && !queue.wants_call_within(size - 1));
    }
}

#[test]
fn chains_that_are_pushed_before_their_turn_wait_in_their_ring() {
    let in_order = RingFeatures { in_order: true, ..EVENT_IDX };
    for features in [in_order, RingFeatures { packed: true, ..in_order }] {
        let rig = Rig::new(8, features, 0);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        let ids = [0; 4].map(|_| driver.add(&[(BUFFERS, 1)], &[]).unwrap());
        driver.publish();
        let mut batch = Batch::new();
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 4);
        let mut push = |device: &mut DeviceQueue, n| {
            device.push_used(batch.take(n).unwrap().0, u32::try_from(n).unwrap());
        };
        push(&mut device, 2);
        push(&mut device, 1);
        assert_eq!((device.waiting(), device.publish(), device.waiting()), (2, 0, 2));
        push(&mut device, 0);
        assert_eq!((device.waiting(), device.publish(), device.waiting()), (2, 3, 0));
        push(&mut device, 3);
        assert_eq!((device.waiting(), device.publish(), device.in_flight()), (0, 1, 0));
        let taken: Vec<_> = std::iter::from_fn(|| driver.take_used()).collect();
        assert_eq!(taken, [(ids[0], 0), (ids[1], 1), (ids[2], 2), (ids[3], 3)], "{features:?}");
    }
}

#[test]
fn a_batch_says_what_it_has_walked_over_and_lends_what_is_not_taken() {
    for features in [EVENT_IDX, PACKED] {
        let rig = Rig::new(8, features, 0);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        // A descriptor of no bytes has no slice.
        driver.add(&[(BUFFERS, 8), (BUFFERS + 8, 0)], &[(BUFFERS + 64, 4)]).unwrap();
        driver.add(&[(BUFFERS, 2)], &[]).unwrap();
        driver.publish();
        let mut batch = Batch::new();
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
        assert_eq!(batch.walked(), 4);
        let lens = |batch: &Batch, index| {
            let (readable, writable) = batch.peek(index)?;
            let lens = |pieces: manyring_memory::Pieces<'_>| {
                pieces.iter().map(manyring_memory::GuestSlice::len).collect::<Vec<_>>()
            };
            Some((lens(readable), lens(writable)))
        };
        assert_eq!(lens(&batch, 0), Some((vec![8], vec![4])));
        assert_eq!((lens(&batch, 1), lens(&batch, 2)), (Some((vec![2], vec![])), None));
        let first = batch.take(0).unwrap().0;
        assert_eq!(lens(&batch, 0), None, "it was taken");
        let rest: Vec<_> = batch.take_from(1).collect();
        assert_eq!(rest.len(), 1);
        assert!(batch.take_from(0).next().is_none());
        [first].into_iter().chain(rest).for_each(|chain| device.push_used(chain, 0));
        assert_eq!(device.publish(), 2);
    }
}

#[test]
fn a_ring_begins_at_its_first_descriptor_and_a_packed_one_on_either_lap() {
    let is_start = |bits, features| Base::from_bits(bits).is_start(features);
    for bits in [0, 0x8000, 0x8000_8000] {
        assert!(is_start(bits, PACKED), "{bits:#x}");
        assert_eq!(is_start(bits, EVENT_IDX), bits == 0, "{bits:#x}");
    }
    for bits in [1, 0x8001, 0x8000_0000, 0x8001_8000, 0x8000_8001] {
        assert!(!is_start(bits, PACKED) && !is_start(bits, EVENT_IDX), "{bits:#x}");
    }
}

#[test]
fn chains_that_are_popped_again_count_as_those_that_are_popped_first() {
    for features in [EVENT_IDX, PACKED] {
        let rig = Rig::new(8, features, 0);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        let empty = (BUFFERS + 8, 0);
        for _ in 0..2 {
            driver.add(&[(BUFFERS, 8), empty, empty], &[]).unwrap();
        }
        driver.publish();
        let mut batch = Batch::new();
        assert_eq!((device.pop_batch(&mut batch, 2), batch.walked()), (2, 6));
        (0..2).for_each(|n| device.set_aside(batch.take(n).unwrap().0));
        assert_eq!((device.pop_aside(&mut batch, 8), batch.walked()), (2, 6), "{features:?}");
        (0..2).for_each(|n| device.push_used(batch.take(n).unwrap().0, 0));
        assert_eq!(device.publish(), 2);
    }
}

#[test]
fn a_chain_that_is_set_aside_is_returned_before_those_that_were_popped_after_it() {
    let in_order = RingFeatures { in_order: true, ..EVENT_IDX };
    for features in [in_order, RingFeatures { packed: true, ..in_order }] {
        let rig = Rig::new(8, features, 0);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        let ids = [0; 3].map(|_| driver.add(&[], &[(BUFFERS, 4)]).unwrap());
        driver.publish();
        let mut batch = Batch::new();
        assert_eq!(device.pop_batch(&mut batch, 1), 1);
        device.set_aside(batch.take(0).unwrap().0);
        // Each of the others is popped while no chain is in flight, or one.
        for written in [2, 3] {
            assert_eq!(device.pop_batch(&mut batch, 1), 1);
            device.push_used(batch.take(0).unwrap().0, written);
            assert_eq!(device.publish(), 0, "not before the first");
        }
        assert_eq!((device.waiting(), driver.take_used()), (2, None));
        assert_eq!(device.pop_aside(&mut batch, 1), 1);
        device.push_used(batch.take(0).unwrap().0, 1);
        assert_eq!((device.publish(), device.waiting()), (3, 0));
        let taken: Vec<_> = std::iter::from_fn(|| driver.take_used()).collect();
        assert_eq!(taken, [(ids[0], 1), (ids[1], 2), (ids[2], 3)], "{features:?}");
    }
}

#[test]
fn a_fault_that_a_device_finds_stops_the_ring_and_the_first_one_stays() {
    for features in [EVENT_IDX, PACKED] {
        let rig = Rig::new(8, features, 0);
        let (mut driver, mut device) = (rig.driver_queue(), rig.device_queue());
        driver.add(&[(BUFFERS, 1)], &[]).unwrap();
        driver.publish();
        assert_eq!(device.fault(), None);
        device.latch_fault(QueueError::Request("of a test"));
        device.latch_fault(QueueError::ChainBytes);
        assert_eq!(device.fault(), Some(QueueError::Request("of a test")));
        assert_eq!(device.pop_batch(&mut Batch::new(), BATCH_CHAINS), 0, "{features:?}");
        assert!(device.is_faulted() && !device.has_available());
    }
}
