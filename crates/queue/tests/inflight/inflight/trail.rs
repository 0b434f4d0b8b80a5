//! Packed rings without a region: their own flags tell the next device half where to go on,
//! whatever base it is given.

use super::{Back, FOR_EVER, Life, Numbers, SIZE, Shared, features, kill_in};
use crate::guest::packed_base;
use manyring_queue::{Batch, DeviceQueue, QueueConfig, Ring, RingFeatures};
use manyring_wire::virtqueue::DESCRIPTOR_SIZE;

fn shared(seed: u64, base: u16) -> Shared {
    let features = RingFeatures { packed: true, ..features(seed) };
    Shared { is_trailed: true, ..Shared::new(features, base) }
}

fn kill(seed: u64, stores: u64, again: &[u64]) -> bool {
    kill_in(shared(seed, u16::try_from(seed % 32).unwrap()), seed, stores, again)
}

#[test]
fn device_that_is_killed_before_any_of_its_stores_goes_on_by_its_trail() {
    let mut kills = 0;
    for seed in 0..128 {
        kills += (0..).take_while(|stores| kill(seed, *stores, &[])).count();
    }
    assert!(kills > 2000, "{kills} kills");
}

#[test]
fn devices_that_are_killed_while_they_go_on_by_their_trail_lose_no_chain() {
    let mut numbers = Numbers(1);
    for seed in 0..64 {
        for stores in 0.. {
            let again = [numbers.below(8), numbers.below(40), numbers.below(8)];
            if !kill(seed, stores, &again) {
                break;
            }
        }
    }
}

#[test]
fn burst_that_was_not_shown_is_returned_empty_and_the_driver_is_notified() {
    let mut shared = shared(0, 0);
    let mut queue = shared.next();
    assert!(!queue.begin(), "a ring that goes on where its base says");
    let mut back = Back::new(queue);
    let mut life = Life { stores: FOR_EVER };
    shared.add(5);
    back.pop(&shared, &mut life, 3, 0).unwrap();
    (0..3).for_each(|_| back.push(&mut life, 0).unwrap());
    // Three chains of two descriptors: the last is written whole, and of the second the latter.
    life.stores = 3;
    assert!(life.run(|| back.queue.publish()).is_none());
    shared.take();
    assert_eq!(shared.waited_for.len(), 5, "the driver sees nothing yet");

    let mut queue = shared.next();
    assert!(queue.begin(), "the former process may not have notified the driver");
    assert_eq!(queue.base(), packed_base(SIZE, 6));
    shared.take();
    assert_eq!(shared.waited_for.values().copied().collect::<Vec<_>>(), [3, 4]);
    Back::new(queue).finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
    assert!(shared.waited_for.is_empty());
}

#[test]
fn base_of_a_ring_that_another_back_end_has_used_is_kept() {
    let mut shared = shared(0, 0);
    let mut other = shared.rig.device_queue();
    let mut batch = Batch::new();
    // Chains of two descriptors, of which this device half marks the first alone.
    shared.add(6);
    let popped = other.pop_batch(&mut batch, 4);
    for index in 0..popped {
        other.push_used(batch.take(index).unwrap().0, 0);
    }
    other.publish();
    shared.take();
    let config = QueueConfig { base: other.base(), ..shared.rig.config };
    let queue = DeviceQueue::unread(config, shared.rig.memory.clone()).unwrap();
    let mut queue = queue.trailed();
    assert!(!queue.begin());
    assert_eq!(queue.base(), packed_base(SIZE, 8));
    Back::new(queue).finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
    assert!(shared.waited_for.is_empty());
}

#[test]
fn whatever_a_driver_has_written_the_place_lies_in_the_ring() {
    let mut numbers = Numbers(3);
    for round in 0..2000 {
        let mut shared = shared(0, 0);
        for at in 0..usize::from(SIZE) {
            // Few kinds of flags, so that many rings look like an unfinished burst.
            let flags = [0, 0x80, 0x8000, 0x8080][numbers.count(4)] | [0, 1][numbers.count(2)];
            let word = numbers.below(1 << 31) | flags << 48;
            shared.rig.desc.store_u64(at * DESCRIPTOR_SIZE + 8, word);
        }
        if round % 2 == 0 {
            for at in 4..usize::from(SIZE) {
                shared.rig.desc.store_u64(at * DESCRIPTOR_SIZE + 8, 0x8080 << 48);
            }
        }
        let mut back = Back::new(shared.next());
        back.queue.begin();
        assert!(back.queue.base().check(SIZE, shared.rig.config.features).is_ok());
        let popped = back.queue.pop_batch(&mut back.batch, 64);
        back.batch.take_from(0).for_each(|chain| back.queue.push_used(chain, 1));
        assert!(popped <= usize::from(SIZE));
        back.queue.publish();
        shared.waited_for.clear();
    }
}
