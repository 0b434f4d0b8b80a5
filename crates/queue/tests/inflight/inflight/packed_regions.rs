//! Regions of packed rings: those that are refused, and drivers that lie to a ring with a region.

use super::*;
use manyring_queue::{InflightError, QueueError};
use manyring_wire::virtqueue::{DESCRIPTOR_SIZE, Descriptor};
use proptest::prelude::*;

const PACKED: RingFeatures =
    RingFeatures { event_idx: false, indirect: false, in_order: false, packed: true };

const FREE: usize = 12;
const OLD_FREE: usize = 14;
/// Words of the region: its header, and as much for each entry.
const WORDS: usize = (SIZE as usize + 1) * 16;

const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// Writes a descriptor of one byte, with these flags, at a place of the ring.
fn write_descriptor(shared: &Shared, at: u16, flags: u16) {
    let (low, high) = Descriptor { addr: BUFFERS, len: 1, flags, next: 0 }.emit_packed(at);
    shared.rig.desc.store_u64(usize::from(at) * DESCRIPTOR_SIZE, low);
    shared.rig.desc.store_u64(usize::from(at) * DESCRIPTOR_SIZE + 8, high);
}

/// A ring of which all descriptors are popped as chains of their own.
fn all_popped(shared: &Shared) -> (DeviceQueue, Vec<Chain>) {
    (0..SIZE).for_each(|at| write_descriptor(shared, at, F_AVAIL));
    let (mut queue, mut batch) = (shared.begin(), Batch::new());
    assert_eq!(queue.pop_batch(&mut batch, 64), usize::from(SIZE));
    let chains = (0..usize::from(SIZE)).map(|index| batch.take(index).unwrap().0).collect();
    (queue, chains)
}

#[test]
fn driver_that_offers_what_no_burst_has_shown_breaks_its_queue() {
    let shared = Shared::new(PACKED, 0);
    let (mut queue, mut chains) = all_popped(&shared);
    for _ in 0..2 {
        queue.push_used(chains.remove(0), 1);
    }
    // The device has not published, and yet the driver writes the next lap over both descriptors.
    (0..2).for_each(|at| write_descriptor(&shared, at, F_USED));
    assert_eq!(queue.pop_batch(&mut Batch::new(), 64), 0);
    assert_eq!(
        queue.fault(),
        Some(QueueError::Overfull { available: 1, in_flight: SIZE, size: SIZE })
    );
    chains.into_iter().for_each(|chain| queue.discard(chain));
}

#[test]
fn descriptors_of_a_burst_are_free_once_it_is_shown() {
    let shared = Shared::new(PACKED, 0);
    let (mut queue, mut chains) = all_popped(&shared);
    queue.push_used(chains.remove(0), 1);
    assert_eq!(queue.publish(), 1);
    write_descriptor(&shared, 0, F_USED);
    let mut batch = Batch::new();
    assert_eq!((queue.pop_batch(&mut batch, 64), queue.fault()), (1, None));
    chains.push(batch.take(0).unwrap().0);
    chains.into_iter().for_each(|chain| queue.discard(chain));
}

#[test]
fn region_that_has_lost_entries_is_refused() {
    let shared = Shared::new(PACKED, 0);
    shared.begin();
    for offset in [FREE, OLD_FREE] {
        // The list begins at its second entry, and the first is in no chain.
        shared.region.store_u16(offset, 1);
    }
    let queue = shared.begin();
    let lost = InflightError::Lost { entry: 0 };
    assert_eq!(queue.fault(), Some(QueueError::Inflight(lost)));
}

#[test]
fn entries_on_the_free_list_are_not_in_flight_whatever_their_flags_say() {
    // A process that is killed between the two stores which free an entry leaves its flag, and
    // another back-end's flag may be any byte but 0.
    for flag in [1, 0x80, 0xff] {
        let shared = Shared::new(PACKED, 0);
        shared.begin();
        let flags = |at: usize| (at + 1) * 32;
        for at in [0, 5, usize::from(SIZE) - 1] {
            shared.region.store_u16(flags(at), flag);
        }
        let mut queue = shared.begin();
        assert_eq!((queue.fault(), queue.owed()), (None, 0), "{flag:#x}");
        assert!((0..SIZE.into()).all(|at| shared.region.load_u16(flags(at)) == 0), "{flag:#x}");
        // As many entries are free as the ring has descriptors.
        drop(queue);
        let chains;
        (queue, chains) = all_popped(&shared);
        assert_eq!(queue.fault(), None);
        chains.into_iter().for_each(|chain| queue.discard(chain));
        assert_eq!(shared.begin().owed(), SIZE, "{flag:#x}");
    }
}

#[test]
fn ring_that_goes_on_leaves_the_entries_that_are_clear_untouched() {
    let mut shared = Shared::new(PACKED, 0);
    shared.begin();
    let stores = Life::count(|| assert!(shared.next().begin()));
    assert_eq!(stores, 2, "the other free list, the used places");
    // An entry of three on the list that was freed in part.
    shared.region.store_u16(32 * 3, 1);
    let stores = Life::count(|| assert!(shared.next().begin()));
    assert_eq!(stores, 3, "its flag");
    shared.add(1);
    let queue = shared.begin();
    finish(shared, queue);
}

proptest! {
    #[test]
    fn scribbled_region_is_refused_or_served_and_never_more(
        scribbles in prop::collection::vec((0..WORDS, any::<u16>()), 1..8),
        small in any::<bool>(),
    ) {
        let mut shared = Shared::new(PACKED, 0);
        shared.add(5);
        let (mut queue, mut batch) = (shared.begin(), Batch::new());
        for index in 0..queue.pop_batch(&mut batch, 3) {
            queue.discard(batch.take(index).unwrap().0);
        }
        for (word, value) in scribbles {
            let value = if small { value % (2 * SIZE) } else { value };
            shared.region.store_u16(word * 2, value);
        }
        let mut queue = shared.begin();
        // The driver offers all that it can, whatever the device says.
        for flags in [F_AVAIL, F_USED, F_AVAIL, F_USED] {
            let popped = queue.pop_batch(&mut batch, 64);
            for index in 0..popped {
                let (chain, ..) = batch.take(index).unwrap();
                queue.push_used(chain, 0);
            }
            (0..SIZE).for_each(|at| write_descriptor(&shared, at, flags));
            let popped = queue.pop_batch(&mut batch, 64);
            for index in 0..popped {
                let (chain, ..) = batch.take(index).unwrap();
                queue.push_used(chain, 0);
            }
            queue.publish();
        }
        prop_assert_eq!(queue.in_flight(), 0);
    }
}
