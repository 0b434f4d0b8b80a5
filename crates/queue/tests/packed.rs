//! Words that a hostile driver writes into a packed ring: each input ends in its own fault and then
//! in silence; random words reach nothing but guest memory. And peculiarities of packed rings: ids
//! of any 16 bits, used descriptors that overwrite other chains, laps.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::{BUFFERS, GUEST, Rig, SIZE, packed_base};
use manyring_memory::copy_from_slices;
use manyring_queue::packed::PackedDeviceHalf;
use manyring_queue::{Base, Batch, Chain, Chains, QueueError, Ring, RingFeatures};
use manyring_wire::virtqueue::{
    DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESCRIPTOR_SIZE, Descriptor,
};
use proptest::prelude::*;
use std::collections::HashSet;

/// No power of two.
const RING: u16 = 5;
const FEATURES: RingFeatures =
    RingFeatures { event_idx: false, indirect: true, in_order: false, packed: true };
const TABLE: u64 = BUFFERS + 0x8000;
/// Available on the first lap.
const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

fn rig(features: RingFeatures) -> Rig {
    let rig = Rig::new(RING, features, 0);
    rig.driver_queue();
    rig
}

fn device(rig: &Rig) -> PackedDeviceHalf {
    PackedDeviceHalf::new(rig.config, rig.memory.clone()).unwrap()
}

/// Makes a descriptor available on the first lap.
fn offer(rig: &Rig, at: u16, id: u16, (addr, len, flags): (u64, u32, u16)) {
    let desc = Descriptor { addr, len, flags: flags | F_AVAIL, next: 0 };
    let (low, high) = desc.emit_packed(id);
    rig.desc.store_u64(usize::from(at) * DESCRIPTOR_SIZE, low);
    rig.desc.store_u64(usize::from(at) * DESCRIPTOR_SIZE + 8, high);
}

/// Pops the chains that are there.
fn pop(device: &mut PackedDeviceHalf) -> Vec<(Chain, Vec<u8>)> {
    let mut batch = Batch::new();
    let popped = device.pop_batch(&mut batch, 64);
    take(&mut batch, popped)
}

fn take(batch: &mut Batch, popped: usize) -> Vec<(Chain, Vec<u8>)> {
    let mut chains = Vec::new();
    for index in 0..popped {
        let (chain, readable, _) = batch.take(index).unwrap();
        let mut bytes = vec![0; readable.iter().map(|slice| slice.len()).sum()];
        copy_from_slices(&readable, &mut bytes);
        chains.push((chain, bytes));
    }
    chains
}

/// The fault of a ring with these descriptors, which is its last word.
fn fault_of(features: RingFeatures, descs: &[(u64, u32, u16)]) -> Option<QueueError> {
    let rig = rig(features);
    for (at, desc) in (0..).zip(descs) {
        offer(&rig, at, at, *desc);
    }
    let mut device = device(&rig);
    assert!(pop(&mut device).is_empty());
    let fault = device.fault();
    assert!(!device.has_available() && !device.enable_notifications());
    assert!(pop(&mut device).is_empty(), "a broken queue goes on");
    assert_eq!(device.fault(), fault);
    fault
}

/// Writes an indirect table, and makes it available alone.
fn fault_of_table(entries: &[(u64, u32, u16)], len: u32) -> Option<QueueError> {
    let rig = rig(FEATURES);
    let table = rig.table(TABLE, 8);
    for (n, (addr, len, flags)) in entries.iter().enumerate() {
        let (low, high) =
            Descriptor { addr: *addr, len: *len, flags: *flags, next: 0 }.emit_packed(9);
        table.words.store_u64(n * DESCRIPTOR_SIZE, low);
        table.words.store_u64(n * DESCRIPTOR_SIZE + 8, high);
    }
    offer(&rig, 0, 0, (TABLE, len, DESC_F_INDIRECT));
    let mut device = device(&rig);
    for (chain, _) in pop(&mut device) {
        device.push_used(chain, 0);
    }
    device.fault()
}

#[test]
fn each_wrong_chain_has_its_own_fault() {
    let (next, write) = (DESC_F_NEXT, DESC_F_WRITE);
    let faults = [
        fault_of(FEATURES, &[(BUFFERS, 1, next); RING as usize]),
        fault_of(FEATURES, &[(BUFFERS, 1, next | write), (BUFFERS, 1, 0)]),
        fault_of(FEATURES, &[(TABLE, 16, DESC_F_INDIRECT | next)]),
        fault_of(RingFeatures { indirect: false, ..FEATURES }, &[(TABLE, 16, DESC_F_INDIRECT)]),
        fault_of_table(&[(TABLE, 16, DESC_F_INDIRECT)], 16),
        fault_of_table(&[], 0),
        fault_of_table(&[], 17),
    ];
    let expected = [
        QueueError::Overfull { available: 1, in_flight: RING, size: RING },
        QueueError::ReadableAfterWritable,
        QueueError::IndirectNext,
        QueueError::IndirectNotNegotiated,
        QueueError::IndirectNested,
        QueueError::IndirectSize { len: 0 },
        QueueError::IndirectSize { len: 17 },
    ];
    assert_eq!(faults, expected.map(Some));
    assert!(matches!(fault_of(FEATURES, &[(GUEST + SIZE, 1, 0)]), Some(QueueError::Buffer(_))));
}

#[test]
fn a_table_is_taken_in_order_and_its_links_and_ids_say_nothing() {
    let entries = [(BUFFERS, 4, DESC_F_NEXT), (BUFFERS, 4, F_USED), (BUFFERS, 4, DESC_F_WRITE)];
    assert_eq!(fault_of_table(&entries, 48), None);
}

#[test]
fn bases_outside_of_the_ring_are_refused() {
    let rig = rig(FEATURES);
    let built = |bits: u32| {
        let config = manyring_queue::QueueConfig { base: Base::from_bits(bits), ..rig.config };
        PackedDeviceHalf::new(config, rig.memory.clone()).map(|device| device.base().bits())
    };
    let refused = |bits| Err(QueueError::PackedBase { bits, size: RING });
    for bits in [0x8000_8005, 0x8005_8000, 0x7fff_7fff, 0x8001_8000, 0x8003_0004] {
        assert_eq!(
            built(bits).map_err(|_| ()),
            refused(bits).map_err(|_: QueueError| ()),
            "{bits:#x}"
        );
    }
    // DPDK hands on the lower half alone. Chains that were taken and not answered are taken again.
    assert_eq!(built(0x8003), Ok(0x8003_8003));
    assert_eq!(built(0x8001_8003), Ok(0x8001_8001));
    // A new ring, for front-ends that do not think of laps.
    assert_eq!(built(0), Ok(0x8000_8000));
    offer(&rig, 0, 0, (BUFFERS, 1, F_USED));
    assert_eq!(built(0), Ok(0), "it was used on an odd lap");
}

#[test]
fn ids_are_given_back_as_they_came_whatever_they_are() {
    let rig = rig(FEATURES);
    for (at, id) in [(0, 0xffff), (1, 7), (2, 7)] {
        offer(&rig, at, id, (BUFFERS, 1, 0));
    }
    let mut device = device(&rig);
    let chains = pop(&mut device);
    let slots: HashSet<u16> = chains.iter().map(|(chain, _)| chain.slot()).collect();
    assert!(slots.len() == 3 && slots.iter().all(|slot| *slot < RING), "{slots:?}");
    for (n, (chain, _)) in (0..).zip(chains) {
        device.push_used(chain, n);
    }
    assert_eq!(device.publish(), 3);
    let used: Vec<(u16, u32)> = (0..3)
        .map(|at| {
            let high = rig.desc.load_u64_acquire(at * DESCRIPTOR_SIZE + 8);
            let (desc, id) = Descriptor::parse_packed(0, high);
            assert_eq!(desc.flags & (F_AVAIL | F_USED), F_AVAIL | F_USED);
            (id, desc.len)
        })
        .collect();
    assert_eq!(used, [(0xffff, 0), (7, 1), (7, 2)]);
}

#[test]
fn a_chain_that_was_set_aside_is_what_it_was_though_its_place_is_overwritten() {
    let rig = rig(FEATURES);
    rig.write(BUFFERS, b"onetwo");
    offer(&rig, 0, 1, (BUFFERS, 3, 0));
    offer(&rig, 1, 2, (BUFFERS + 3, 3, 0));
    let mut device = device(&rig);
    let mut chains = pop(&mut device);
    let (second, bytes) = chains.pop().unwrap();
    assert_eq!(bytes, b"two");
    device.set_aside(chains.pop().unwrap().0);
    // The second goes back where the first lay.
    device.push_used(second, 0);
    device.publish();
    assert!(!device.unpop_aside(), "its place is gone");
    let mut batch = Batch::new();
    let popped = device.pop_aside(&mut batch, 9);
    let (chain, bytes) = take(&mut batch, popped).pop().unwrap();
    assert_eq!(bytes, b"one");
    device.push_used(chain, 0);
    assert_eq!((device.publish(), device.base().bits()), (1, 0x8002_8002));
}

#[test]
fn chains_that_were_popped_last_can_all_be_put_back() {
    let rig = rig(FEATURES);
    for at in 0..4 {
        offer(&rig, at, at, (BUFFERS, 1, 0));
    }
    let mut device = device(&rig);
    let mut chains = pop(&mut device);
    device.push_used(chains.remove(0).0, 0);
    device.publish();
    chains.into_iter().for_each(|(chain, _)| device.set_aside(chain));
    assert!(device.unpop_aside());
    assert_eq!(device.base().bits(), 0x8001_8001);
    let chains = pop(&mut device);
    assert_eq!(chains.len(), 3);
    chains.into_iter().for_each(|(chain, _)| device.push_used(chain, 0));
}

proptest! {
    #[test]
    fn random_words_reach_nothing_but_guest_memory(
        words in prop::collection::vec((any::<u16>(), GUEST..GUEST + SIZE, any::<u16>()), 1..80),
        base in any::<u16>(),
    ) {
        let mut rig = rig(FEATURES);
        rig.config.base = packed_base(RING, base);
        let mut device = device(&rig);
        for (n, (len, addr, flags)) in words.into_iter().enumerate() {
            let desc = Descriptor { addr, len: len.into(), flags, next: 0 };
            let (low, high) = desc.emit_packed(flags ^ len);
            let at = n % usize::from(RING) * DESCRIPTOR_SIZE;
            rig.desc.store_u64(at, low);
            rig.desc.store_u64(at + 8, high);
            let chains = pop(&mut device);
            prop_assert!(device.in_flight() <= RING);
            for (chain, _) in chains {
                if n % 7 == 6 { device.discard(chain) } else { device.push_used(chain, 1) }
            }
            device.publish();
            device.needs_notification();
        }
    }
}
