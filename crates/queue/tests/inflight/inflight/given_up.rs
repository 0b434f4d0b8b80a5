//! Chains that a device half gives up: it owes them no longer, and the next one on the region does.

use super::*;

const SPLIT: RingFeatures =
    RingFeatures { event_idx: false, indirect: true, in_order: false, packed: false };
const PACKED: RingFeatures = RingFeatures { packed: true, ..SPLIT };

/// A device half on the region of a killed one, which had taken three chains. It has popped these
/// and two more.
fn popped(features: RingFeatures) -> (Shared, Back) {
    let shared = left_behind_in(features, 3, 3);
    let mut life = Life { stores: FOR_EVER };
    let mut back = Back::begin(&shared, &mut life).unwrap();
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(3));
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(2));
    assert!(back.queue.owes());
    (shared, back)
}

/// The next device half owes these chains, the oldest first, and serves all.
fn next_owes(shared: Shared, ids: &[u64]) {
    let mut life = Life { stores: FOR_EVER };
    let mut next = Back::begin(&shared, &mut life).unwrap();
    assert_eq!(usize::from(next.queue.owed()), ids.len());
    assert_eq!(next.pop(&shared, &mut life, 64, 0), Some(ids.len()));
    assert!(next.held.iter().map(|(id, _)| id).eq(ids), "{ids:?}");
    drop(next);
    let queue = shared.begin();
    finish(shared, queue);
}

#[test]
fn ring_that_has_discarded_all_that_it_owed_owes_nothing() {
    for features in [SPLIT, PACKED] {
        let (shared, mut back) = popped(features);
        let later = back.held.split_off(3);
        // While it owes, its device does not put back what nobody has begun.
        for (id, chain) in back.held.drain(..) {
            assert!(back.queue.owes(), "{features:?}: {id} is owed");
            back.queue.discard(chain);
        }
        assert!(!back.queue.owes(), "{features:?}");
        later.into_iter().rev().for_each(|(_, chain)| back.queue.unpop(chain));
        drop(back);
        next_owes(shared, &[1, 2, 3]);
    }
}

#[test]
fn chains_that_are_left_aside_are_gone_here_and_owed_by_the_next_process() {
    for features in [SPLIT, PACKED] {
        let (shared, mut back) = popped(features);
        back.held.drain(..).for_each(|(_, chain)| back.queue.set_aside(chain));
        assert_eq!((back.queue.aside(), back.queue.in_flight()), (5, 0));
        assert!(back.queue.leave_aside(), "{features:?}");
        assert_eq!((back.queue.aside(), back.queue.owes()), (0, false), "{features:?}");
        // Both processes would serve them otherwise.
        assert_eq!(back.queue.pop_aside(&mut back.batch, 64), 0);
        drop(back);
        next_owes(shared, &[1, 2, 3, 6, 7]);
    }
}

#[test]
fn chains_are_not_left_aside_if_the_ring_has_no_record_or_an_order() {
    for (features, has_record) in [
        (SPLIT, false),
        (PACKED, false),
        (RingFeatures { in_order: true, ..SPLIT }, true),
        (RingFeatures { in_order: true, ..PACKED }, true),
    ] {
        let mut shared = Shared::new(features, 0);
        let queue = if has_record { shared.begin() } else { shared.rig.device_queue() };
        let (mut back, mut life) = (Back::new(queue), Life { stores: FOR_EVER });
        shared.add(4);
        assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(4));
        back.held.drain(..).for_each(|(_, chain)| back.queue.set_aside(chain));
        assert!(!back.queue.leave_aside(), "{features:?}");
        assert_eq!(back.queue.aside(), 4);
        // They are served here.
        back.finish(&mut shared, &mut life).unwrap();
        assert!(shared.waited_for.is_empty(), "{features:?}: {:?}", shared.waited_for);
    }
}

#[test]
fn slots_of_chains_that_are_given_up_go_to_the_next_chains() {
    // A device keeps a table by slots, which is to be no longer than its chains in flight.
    let mut shared = Shared::new(PACKED, 0);
    let (mut back, mut life) = (Back::new(shared.begin()), Life { stores: FOR_EVER });
    for round in 0..3 {
        shared.add(4);
        assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(4));
        for (id, chain) in back.held.drain(..) {
            assert!(chain.slot() < 4, "round {round}: request {id} has slot {}", chain.slot());
            back.queue.discard(chain);
        }
    }
    drop(back);
    let queue = shared.begin();
    finish(shared, queue);
}

#[test]
fn driver_of_a_ring_that_goes_on_from_nothing_is_not_notified() {
    for features in [SPLIT, PACKED] {
        let shared = Shared::new(features, 9);
        let mut alone = DeviceQueue::unread(shared.rig.config, shared.rig.memory.clone()).unwrap();
        assert!(!alone.begin(), "{features:?} without a region");
        assert!(!shared.next().begin(), "{features:?}: a new region");
        assert!(shared.next().begin(), "{features:?}: a region that was in use");
    }
}
