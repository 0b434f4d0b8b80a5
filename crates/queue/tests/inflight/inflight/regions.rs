//! Regions that are laid out as the specification says, and those that are refused.

use super::*;
use manyring_queue::{InflightError, QueueError};
use manyring_wire::virtqueue::avail_entry;
use proptest::prelude::*;

const ENTRIES: usize = 10;
const LAST: usize = 12;
const USED: usize = 14;
const FLAG: usize = 16;
const NEXT: usize = 22;
const COUNTER: usize = 24;

#[test]
fn region_may_have_more_entries_than_the_ring() {
    let mut shared = Shared::new(RingFeatures::default(), 3);
    shared.region = region_of(4 * SIZE, RingFeatures::default());
    for _ in 0..3 {
        shared.add(4);
        let mut back = Back::new(shared.begin());
        back.pop(&shared, &mut Life { stores: FOR_EVER }, 3, 1).unwrap();
    }
    assert_eq!(shared.region.load_u16(ENTRIES), 4 * SIZE);
    let queue = shared.begin();
    finish(shared, queue);
}

fn refusal(shared: &Shared) -> InflightError {
    let mut queue = shared.next();
    assert!(!queue.begin());
    assert_eq!((queue.has_available(), queue.pop_batch(&mut Batch::new(), 64)), (false, 0));
    match queue.fault() {
        Some(QueueError::Inflight(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn region_that_is_not_of_the_ring_is_refused() {
    let spoiled = |offset, value| {
        let shared = left_behind(3);
        shared.region.store_u16(offset, value);
        refusal(&shared)
    };
    assert_eq!(spoiled(VERSION, 2), InflightError::Version { version: 2 });
    assert_eq!(spoiled(ENTRIES, 8), InflightError::Entries { entries: 8, size: SIZE });
    assert_eq!(spoiled(ENTRIES, 0), InflightError::Entries { entries: 0, size: SIZE });
    assert_eq!(spoiled(ENTRIES, 17), InflightError::Room { entries: 17, room: 16 });
    // Two chains were returned since 7, and the last burst had both.
    assert_eq!(spoiled(USED, 10), InflightError::Used { ring: 9, region: 10 });
    assert_eq!(spoiled(USED, 9 + 40000), InflightError::Used { ring: 9, region: 40009 });
    let shared = left_behind(3);
    shared.region.store_u16(USED, 7);
    shared.region.store_u16(LAST, SIZE);
    assert_eq!(refusal(&shared), InflightError::Burst { head: SIZE });
    let shared = left_behind(3);
    let last = shared.region.load_u16(LAST);
    shared.region.store_u16(USED, 7);
    shared.region.store_u16(NEXT + 16 * usize::from(last), last);
    assert_eq!(refusal(&shared), InflightError::Burst { head: last });
}

#[test]
fn region_that_is_too_small_is_refused() {
    let mut shared = left_behind(3);
    for is_new in [false, true] {
        shared.region = region_of(SIZE - 1, RingFeatures::default());
        if !is_new {
            shared.region.store_u16(VERSION, 1);
            shared.region.store_u16(ENTRIES, SIZE);
        }
        let refused = match is_new {
            true => InflightError::Entries { entries: SIZE - 1, size: SIZE },
            false => InflightError::Room { entries: SIZE, room: SIZE - 1 },
        };
        assert_eq!(refusal(&shared), refused);
    }
}

/// The region of a ring that was smaller, or of the other format.
#[test]
fn ring_that_is_served_without_a_record_empties_the_region_and_starts_at_its_base() {
    let shared = left_behind(3);
    let words = || (0..shared.region.size()).step_by(8);
    let load = |at: usize| shared.region.load_u64_acquire(at);
    assert!(words().any(|at| load(at) != 0));
    for packed in [false, true] {
        shared.region.store_u16(VERSION, 1);
        let mut config = shared.rig.config;
        config.features.packed = packed;
        let build = || DeviceQueue::unread(config, shared.rig.memory.clone()).unwrap();
        let mut queue = build().recorded(None, Some(shared.region.clone()));
        assert_ne!(load(VERSION & !7), 0, "guest memory is not touched before the ring begins");
        assert!(!queue.begin());
        assert_eq!((queue.owed(), queue.base(), queue.fault()), (0, build().base(), None));
        assert!(words().all(|at| load(at) == 0));
        // It is of a ring that begins now.
        shared.region.store_u16(VERSION, 1);
        assert!(!queue.begin());
        assert_ne!(load(VERSION & !7), 0);
    }
}

#[test]
fn chain_in_flight_beyond_the_ring_is_refused() {
    let mut shared = Shared::new(RingFeatures::default(), 0);
    shared.region = region_of(2 * SIZE, RingFeatures::default());
    shared.begin();
    shared.region.store_u16(FLAG + 16 * usize::from(SIZE), 1);
    assert_eq!(refusal(&shared), InflightError::Head { head: SIZE, size: SIZE });
}

#[test]
fn padding_of_an_entry_says_nothing() {
    let shared = left_behind(0);
    shared.region.store_u16(FLAG, 0xff00);
    let queue = shared.begin();
    assert_eq!(queue.available_count(), 0);
    finish(shared, queue);
}

#[test]
fn driver_that_makes_an_owed_chain_available_again_breaks_its_queue() {
    let mut shared = left_behind(3);
    let head = *shared.waited_for.keys().next().unwrap();
    let mut back = Back::new(shared.begin());
    let mut life = Life { stores: FOR_EVER };
    let next = u16::try_from(back.queue.base().bits() & 0xffff).unwrap();
    for slot in next..next + 2 {
        shared.rig.avail.store_u16(avail_entry(slot & (SIZE - 1)), head);
    }
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(3));
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(0));
    assert_eq!(back.queue.fault(), Some(QueueError::InFlight { head }));
    shared.waited_for.clear();
}

proptest! {
    #[test]
    fn scribbled_region_is_refused_or_served_and_never_more(
        scribbles in prop::collection::vec((0..usize::from(SIZE + 1) * 8, any::<u16>()), 1..40),
        small in any::<bool>(),
    ) {
        let shared = left_behind(3);
        for (word, value) in scribbles {
            let value = if small { value % (2 * SIZE) } else { value };
            shared.region.store_u16(word * 2, value);
        }
        let mut queue = shared.begin();
        let mut batch = Batch::new();
        loop {
            let popped = queue.pop_batch(&mut batch, 64);
            for index in 0..popped {
                let (chain, ..) = batch.take(index).unwrap();
                queue.push_used(chain, 8);
            }
            queue.publish();
            if popped == 0 {
                break;
            }
        }
        prop_assert_eq!(queue.in_flight(), 0);
        // Whatever it was before, the region is the ring's now, unless it was refused.
        if queue.fault().is_none() {
            prop_assert_eq!(shared.begin().fault(), None);
        }
    }
}

/// The words of an entry, as other back-ends lay them out.
#[test]
fn region_is_laid_out_as_the_specification_says() {
    let shared = left_behind(1);
    let entry = |head: usize| {
        let word = |offset| shared.region.load_u16(offset + 16 * head);
        (word(FLAG), shared.region.load_u64_acquire(COUNTER + 16 * head))
    };
    let (head, _) = shared.waited_for.iter().find(|(_, id)| **id == 1).unwrap();
    assert_eq!(entry(usize::from(*head)), (1, 0));
    assert_eq!(shared.region.load_u64_acquire(0), 0, "no features");
    let header = [VERSION, ENTRIES, USED].map(|offset| shared.region.load_u16(offset));
    assert_eq!(header, [1, SIZE, 11]);
    let flags = (0..usize::from(SIZE)).filter(|head| entry(*head).0 != 0).count();
    assert_eq!(flags, 1);
}

#[test]
fn record_in_a_region_of_the_devices_own_has_the_entries_of_its_ring() {
    for packed in [false, true] {
        let features = RingFeatures { packed, ..RingFeatures::default() };
        let mut shared = Shared::new(features, 0);
        shared.region = region_of(4 * SIZE, features);
        let begin = |shared: &Shared| {
            let mut queue = shared.next().in_own_region();
            queue.begin();
            queue
        };
        for _ in 0..3 {
            shared.add(4);
            let mut back = Back::new(begin(&shared));
            back.pop(&shared, &mut Life { stores: FOR_EVER }, 3, 1).unwrap();
        }
        assert_eq!(shared.region.load_u16(ENTRIES), SIZE);
        let queue = begin(&shared);
        finish(shared, queue);
    }
}
