//! Words that a hostile driver writes into a valid ring: each input ends in its own fault and then
//! in silence; random words reach nothing but guest memory.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, GUEST, Rig, SIZE, set};
use manyring_queue::split::SplitDeviceHalf;
use manyring_queue::{BATCH_CHAINS, Batch, Chain, Chains, QueueError, Ring, RingFeatures};
use manyring_wire::virtqueue::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor, QUEUE_SIZE_MAX, RING_IDX, avail_entry,
};
use proptest::prelude::*;
use std::collections::HashSet;

const SIZE_OF_RING: u16 = 8;
const WITH_INDIRECT: RingFeatures =
    RingFeatures { event_idx: false, indirect: true, in_order: false, packed: false };
/// Where the tests put an indirect table.
const TABLE: u64 = BUFFERS + 0x8000;

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

fn rig() -> Rig {
    let rig = Rig::new(SIZE_OF_RING, WITH_INDIRECT, 65_533);
    rig.driver();
    rig
}

/// Three descriptors of a request in order.
fn request() -> [Descriptor; 3] {
    [
        desc(BUFFERS, 16, DESC_F_NEXT, 1),
        desc(BUFFERS + 4096, 512, DESC_F_WRITE | DESC_F_NEXT, 2),
        desc(BUFFERS + 64, 1, DESC_F_WRITE, 0),
    ]
}

/// Pops once: the fault; then pops again and again: nothing comes.
fn fault_of(rig: &Rig, device: &mut SplitDeviceHalf) -> Option<QueueError> {
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 0);
    let fault = device.fault();
    set_valid(rig, 4);
    rig.offer(4);
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 0, "a broken queue goes on");
    assert!(!device.has_available() && !device.enable_notifications());
    assert_eq!(device.is_faulted(), fault.is_some());
    assert_eq!(device.fault(), fault, "the first fault is not the one that stays");
    fault
}

fn set_valid(rig: &Rig, at: u16) {
    rig.set(at, desc(BUFFERS, 16, 0, 0));
}

/// A device half whose driver has made chains of one descriptor available.
fn device_of(rig: &Rig, heads: &[u16]) -> SplitDeviceHalf {
    rig.driver();
    for head in heads {
        set_valid(rig, *head);
        rig.offer(*head);
    }
    rig.device()
}

/// Offers the request after `spoil` and returns the fault.
fn fault_after(spoil: impl FnOnce(&mut [Descriptor; 3])) -> QueueError {
    let rig = rig();
    let mut device = rig.device();
    let mut parts = request();
    spoil(&mut parts);
    for (index, part) in (0..).zip(parts) {
        rig.set(index, part);
    }
    rig.offer(0);
    fault_of(&rig, &mut device).expect("no fault")
}

/// Offers the request in an indirect table after `spoil` and returns the fault.
fn indirect_fault_after(
    features: RingFeatures,
    spoil: impl FnOnce(&mut Descriptor, &mut [Descriptor; 3]),
) -> QueueError {
    let mut rig = rig();
    rig.config.features = features;
    let mut device = rig.device();
    let mut parts = request();
    let mut outer = desc(TABLE, 48, DESC_F_INDIRECT, 0);
    spoil(&mut outer, &mut parts);
    let table = rig.table(TABLE, 3);
    for (index, part) in (0..).zip(parts) {
        set(&table.words, index, part);
    }
    rig.set(0, outer);
    rig.offer(0);
    fault_of(&rig, &mut device).expect("no fault")
}

#[test]
fn the_request_that_is_spoiled_below_is_valid_by_itself() {
    let rig = rig();
    let mut device = rig.device();
    for (index, part) in (0..).zip(request()) {
        rig.set(index, part);
    }
    rig.offer(0);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    let (chain, readable, writable) = batch.take(0).unwrap();
    assert_eq!((readable.len(), writable.len()), (1, 2));
    device.push_used(chain, 513);
}

#[test]
fn a_chain_that_goes_back_to_its_head_is_a_loop() {
    let fault = fault_after(|parts| {
        for part in parts.iter_mut() {
            part.flags = DESC_F_NEXT;
        }
        parts[2].next = 0;
    });
    assert_eq!(fault, QueueError::ChainLength { max: 8 });
}

#[test]
fn a_descriptor_that_is_its_own_next_is_a_loop() {
    let fault = fault_after(|parts| parts[1].next = 1);
    assert_eq!(fault, QueueError::ChainLength { max: 8 });
}

#[test]
fn a_loop_of_empty_descriptors_ends_too() {
    let fault = fault_after(|parts| {
        parts[1].len = 0;
        parts[1].next = 1;
    });
    assert_eq!(fault, QueueError::ChainLength { max: 8 });
}

#[test]
fn a_next_past_the_table_is_refused() {
    let fault = fault_after(|parts| parts[1].next = SIZE_OF_RING);
    assert_eq!(fault, QueueError::DescriptorIndex { index: 8, size: 8 });
}

#[test]
fn a_head_past_the_table_is_refused() {
    for head in [SIZE_OF_RING, u16::MAX] {
        let rig = rig();
        let mut device = rig.device();
        rig.offer(head);
        let fault = fault_of(&rig, &mut device);
        assert_eq!(fault, Some(QueueError::DescriptorIndex { index: head, size: 8 }));
    }
}

#[test]
fn buffers_outside_of_memory_are_refused() {
    for (addr, len) in [
        (0, 16),
        (GUEST - 1, 16),
        (GUEST + SIZE, 1),
        (GUEST + SIZE - 1, 2),
        (u64::MAX, 1),
        (u64::MAX - 7, 16),
        (BUFFERS, 1 << 30),
    ] {
        let fault = fault_after(|parts| (parts[1].addr, parts[1].len) = (addr, len));
        assert!(matches!(fault, QueueError::Buffer(_)), "{addr:#x}+{len:#x}: {fault}");
    }
}

#[test]
fn a_chain_of_more_than_4_gib_is_refused() {
    let fault = fault_after(|parts| parts[1].len = u32::MAX);
    assert_eq!(fault, QueueError::ChainBytes);
}

#[test]
fn an_available_index_that_jumps_is_refused() {
    for jump in [9, 100, 32_768, 65_535] {
        let rig = rig();
        let mut device = rig.device();
        let to = 65_533u16.wrapping_add(jump);
        rig.avail.store_u16_release(RING_IDX, to);
        let fault = fault_of(&rig, &mut device);
        assert_eq!(fault, Some(QueueError::AvailJump { from: 65_533, to, size: 8 }));
    }
}

#[test]
fn more_chains_than_the_ring_holds_are_never_in_flight() {
    let rig = rig();
    let mut device = rig.device();
    let mut batch = Batch::new();
    let mut held = Vec::new();
    for head in 0..8 {
        set_valid(&rig, head);
        rig.offer(head);
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
        held.push(batch.take(0).unwrap().0);
    }
    rig.offer(4);
    let expected = QueueError::Overfull { available: 1, in_flight: 8, size: 8 };
    assert_eq!(fault_of(&rig, &mut device), Some(expected));
    held.into_iter().for_each(|chain| device.discard(chain));
}

#[test]
fn a_head_that_is_available_again_while_its_chain_is_in_flight_is_refused() {
    let in_flight = Some(QueueError::InFlight { head: 3 });
    // Twice in a batch: the first of them is delivered.
    let rig = rig();
    let mut device = rig.device();
    set_valid(&rig, 3);
    rig.offer(3);
    rig.offer(3);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    assert_eq!((device.fault(), device.in_flight()), (in_flight, 1));
    device.discard(batch.take(0).unwrap().0);
    assert_eq!(fault_of(&rig, &mut device), in_flight);
    // In a later batch, after another chain has come and gone.
    let mut device = device_of(&rig, &[3, 4]);
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 2);
    let (held, other) = (batch.take(0).unwrap().0, batch.take(1).unwrap().0);
    device.push_used(other, 0);
    device.publish();
    rig.offer(4);
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    device.push_used(batch.take(0).unwrap().0, 0);
    rig.offer(3);
    assert_eq!(fault_of(&rig, &mut device), in_flight);
    device.discard(held);
}

#[test]
fn a_head_may_come_again_once_its_chain_was_pushed_or_put_back_or_given_up() {
    let rig = rig();
    let mut device = device_of(&rig, &[7]);
    let mut batch = Batch::new();
    for round in 0..9 {
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1, "{round}: {:?}", device.fault());
        let (chain, ..) = batch.take(0).unwrap();
        assert_eq!(chain.slot(), 7);
        match round % 3 {
            // It is popped again without another offer.
            0 => {
                device.unpop(chain);
                continue;
            }
            1 => device.push_used(chain, 0),
            _ => device.discard(chain),
        }
        device.publish();
        rig.offer(7);
    }
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_refused() {
    let fault = fault_after(|parts| parts[2].flags = 0);
    assert_eq!(fault, QueueError::ReadableAfterWritable);
}

#[test]
fn an_indirect_table_that_was_not_negotiated_is_refused() {
    let fault = indirect_fault_after(RingFeatures::default(), |_, _| {});
    assert_eq!(fault, QueueError::IndirectNotNegotiated);
}

#[test]
fn an_indirect_descriptor_in_an_indirect_table_is_refused() {
    let fault = indirect_fault_after(WITH_INDIRECT, |_, parts| parts[1].flags |= DESC_F_INDIRECT);
    assert_eq!(fault, QueueError::IndirectNested);
}

#[test]
fn an_indirect_descriptor_with_next_is_refused() {
    let fault = indirect_fault_after(WITH_INDIRECT, |outer, _| outer.flags |= DESC_F_NEXT);
    assert_eq!(fault, QueueError::IndirectNext);
}

#[test]
fn indirect_tables_of_a_wrong_size_are_refused() {
    for len in [0, 1, 15, 47, 49, 1025 * 16, u32::MAX, u32::MAX - 15] {
        let fault = indirect_fault_after(WITH_INDIRECT, |outer, _| outer.len = len);
        assert_eq!(fault, QueueError::IndirectSize { len });
    }
}

#[test]
fn an_indirect_table_outside_of_memory_is_refused() {
    for addr in [0, GUEST + SIZE - 47, u64::MAX - 46] {
        let fault = indirect_fault_after(WITH_INDIRECT, |outer, _| outer.addr = addr);
        assert!(matches!(fault, QueueError::Buffer(_)), "{addr:#x}: {fault}");
    }
}

#[test]
fn a_next_past_the_indirect_table_is_refused() {
    let fault = indirect_fault_after(WITH_INDIRECT, |_, parts| parts[1].next = 3);
    assert_eq!(fault, QueueError::DescriptorIndex { index: 3, size: 3 });
}

#[test]
fn an_indirect_table_that_loops_is_refused() {
    let fault = indirect_fault_after(WITH_INDIRECT, |_, parts| parts[1].next = 1);
    assert_eq!(fault, QueueError::ChainLength { max: 3 });
}

#[test]
fn chains_before_the_fault_are_delivered() {
    let rig = rig();
    let mut device = rig.device();
    set_valid(&rig, 4);
    rig.offer(4);
    rig.offer(SIZE_OF_RING);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    let (chain, ..) = batch.take(0).unwrap();
    assert!(device.fault().is_some());
    device.push_used(chain, 0);
    assert_eq!(device.publish(), 1);
}

/// A receive buffer, and a chain whose second piece lies nowhere: nothing may be written to the
/// first piece of that, which belongs to no buffer.
#[test]
fn what_a_broken_chain_has_begun_with_is_lent_to_nobody() {
    let rig = rig();
    rig.set(0, desc(BUFFERS, 64, DESC_F_WRITE, 0));
    rig.set(1, desc(BUFFERS + 4096, 512, DESC_F_WRITE | DESC_F_NEXT, 2));
    rig.set(2, desc(GUEST + SIZE, 512, DESC_F_WRITE, 0));
    rig.offer(0);
    rig.offer(1);
    let (mut device, mut batch) = (rig.device(), Batch::new());
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    assert!(matches!(device.fault(), Some(QueueError::Buffer(_))));
    let lens = batch.all_writable().map(|all| all.iter().map(|slice| slice.len()).collect());
    assert_eq!(lens, Some(vec![64]));
    let (chain, ..) = batch.take(0).unwrap();
    device.unpop(chain);
    // A chain with something to read is no receive buffer; without chains there is nothing.
    let rig = self::rig();
    rig.set(0, desc(BUFFERS, 64, DESC_F_NEXT, 1));
    rig.set(1, desc(BUFFERS + 4096, 512, DESC_F_WRITE, 0));
    let mut device = rig.device();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 0);
    assert!(batch.all_writable().is_some_and(|all| all.is_empty()));
    rig.offer(0);
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    assert!(batch.all_writable().is_none());
    let (chain, ..) = batch.take(0).unwrap();
    device.unpop(chain);
}

/// The largest ring there is, with chains of empty descriptors that all end at the same one.
fn rig_of_empty_chains(longest: u16) -> Rig {
    let rig = Rig::new(QUEUE_SIZE_MAX, RingFeatures::default(), 0);
    rig.driver();
    (0..longest).for_each(|n| rig.set(n, desc(BUFFERS, 0, DESC_F_NEXT, n + 1)));
    rig.set(longest - 1, desc(BUFFERS, 0, 0, 0));
    rig
}

#[test]
fn a_chain_of_more_empty_descriptors_than_a_chain_may_have_pieces_is_refused() {
    let rig = rig_of_empty_chains(2049);
    let mut device = rig.device();
    rig.offer(0);
    assert_eq!(fault_of(&rig, &mut device), Some(QueueError::ChainSlices { max: 2048 }));
    let rig = rig_of_empty_chains(2048);
    let mut device = rig.device();
    rig.offer(0);
    let mut batch = Batch::new();
    assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), 1);
    device.push_used(batch.take(0).unwrap().0, 0);
}

#[test]
fn a_batch_of_long_chains_ends_early_also_where_their_descriptors_are_empty() {
    let rig = rig_of_empty_chains(600);
    let mut device = rig.device();
    (0..8).for_each(|head| rig.offer(head));
    let mut batch = Batch::new();
    for expected in [2, 2, 2, 2, 0] {
        assert_eq!(device.pop_batch(&mut batch, BATCH_CHAINS), expected);
        for index in 0..expected {
            let (chain, readable, writable) = batch.take(index).unwrap();
            assert!(readable.is_empty() && writable.is_empty());
            device.push_used(chain, 0);
        }
    }
    assert_eq!(device.fault(), None);
}

/// One word of the ring's memory, or of an indirect table, set to something.
#[derive(Clone, Debug)]
enum Scribble {
    Descriptor(u16, Descriptor),
    Table(u16, Descriptor),
    Entry(u16, u16),
    Idx(u16),
    Offer(u16),
    Flags(u16),
    Pop,
    Return,
}

fn any_descriptor() -> impl Strategy<Value = Descriptor> {
    let addr = prop_oneof![
        4 => (0..0x1_0000u64).prop_map(|n| BUFFERS + n),
        1 => Just(TABLE),
        1 => (0..64u64).prop_map(|n| GUEST + SIZE - n),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![4 => 0..4096u32, 1 => (0..8u32).prop_map(|n| n * 16), 1 => any::<u32>()];
    let flags = prop_oneof![8 => 0..8u16, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..9u16, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| desc(addr, len, flags, next))
}

fn scribble() -> impl Strategy<Value = Scribble> {
    prop_oneof![
        6 => (0..SIZE_OF_RING, any_descriptor()).prop_map(|(i, d)| Scribble::Descriptor(i, d)),
        3 => (0..8u16, any_descriptor()).prop_map(|(i, d)| Scribble::Table(i, d)),
        1 => (0..SIZE_OF_RING, 0..10u16).prop_map(|(i, n)| Scribble::Entry(i, n)),
        1 => any::<u16>().prop_map(Scribble::Idx),
        6 => (0..9u16).prop_map(Scribble::Offer),
        1 => any::<u16>().prop_map(Scribble::Flags),
        6 => Just(Scribble::Pop),
        2 => Just(Scribble::Return),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn random_words_in_a_ring_reach_nothing_but_guest_memory(
        features in any::<(bool, bool, bool)>(),
        scribbles in prop::collection::vec(scribble(), 1..80),
    ) {
        let (event_idx, indirect, in_order) = features;
        let features = RingFeatures { event_idx, indirect, in_order, packed: false };
        let rig = Rig::new(SIZE_OF_RING, features, 65_530);
        rig.driver();
        let mut device = rig.device();
        let table = rig.table(TABLE, 8);
        let (low, high) = (rig.host(GUEST), rig.host(GUEST) + usize::try_from(SIZE).unwrap());
        let mut batch = Batch::new();
        let mut held = Vec::new();
        for scribble in scribbles {
            match scribble {
                Scribble::Descriptor(index, desc) => rig.set(index, desc),
                Scribble::Table(index, desc) => set(&table.words, index, desc),
                Scribble::Entry(slot, head) => rig.avail.store_u16(avail_entry(slot), head),
                Scribble::Idx(idx) => rig.avail.store_u16_release(RING_IDX, idx),
                Scribble::Offer(head) => rig.offer(head),
                Scribble::Flags(flags) => rig.avail.store_u16(0, flags),
                Scribble::Pop => {
                    let broken = device.fault().is_some();
                    let popped = device.pop_batch(&mut batch, BATCH_CHAINS);
                    prop_assert!(!broken || popped == 0);
                    for index in 0..popped {
                        let (chain, readable, writable) = batch.take(index).unwrap();
                        for slice in readable.iter().chain(writable.iter()) {
                            let (from, to) = (slice.address(), slice.address() + slice.len());
                            prop_assert!(low <= from && to <= high && !slice.is_empty());
                        }
                        held.push(chain);
                    }
                    // A handler that keeps state by slot finds each slot free.
                    let slots: HashSet<u16> = held.iter().map(Chain::slot).collect();
                    assert_eq!(slots.len(), held.len(), "a slot twice");
                    assert!(slots.iter().all(|slot| *slot < SIZE_OF_RING));
                    prop_assert_eq!(held.len(), usize::from(device.in_flight()));
                }
                Scribble::Return => {
                    held.drain(..).for_each(|chain| device.push_used(chain, 1));
                    device.publish();
                    device.needs_notification();
                }
            }
        }
        held.into_iter().for_each(|chain| device.discard(chain));
    }
}
