//! A device half that was killed, and the next one that does not serve but says where the ring
//! stands: whoever goes on there, without the region, serves each chain, and serves none again that
//! was returned.

use super::*;

/// Serves chains in their order, as a receiveq does, until it is killed. True: it was not.
fn receives(shared: &mut Shared, life: &mut Life, numbers: &mut Numbers) -> bool {
    let mut through = || {
        let mut back = Back::begin(shared, life)?;
        for _ in 0..10 {
            shared.add(numbers.count(6));
            back.pop(shared, life, numbers.count(12), numbers.count(3))?;
            for _ in 0..numbers.below(5) {
                back.push(life, 0)?;
            }
            life.run(|| back.queue.publish())?;
            if numbers.below(2) == 0 {
                shared.take();
            }
        }
        Some(())
    };
    through().is_some()
}

/// Where a ring stands of which nothing is taken that was not returned.
fn stand(shared: &Shared) -> u32 {
    match shared.rig.config.features.packed {
        // A new record begins at the used place.
        true => shared.begin().base().bits(),
        false => shared.rig.used.load_u16(RING_IDX).into(),
    }
}

/// The next process pops some chains that are owed, and some that are not, puts all back, and says
/// where the ring stands. `None`: it was killed meanwhile.
fn told(shared: &Shared, life: &mut Life, pops: usize) -> Option<u32> {
    let mut back = Back::begin(shared, life)?;
    back.pop(shared, life, pops, 0)?;
    while let Some((_, chain)) = back.held.pop() {
        life.run(|| back.queue.unpop(chain))?;
    }
    let is_told = life.run(|| back.queue.put_back_owed())?;
    assert!(is_told && !back.queue.owes() && back.queue.in_flight() == 0);
    Some(back.queue.base().bits())
}

/// A process without the region goes on at `base`, and serves all that is left.
fn elsewhere(mut shared: Shared, base: u32) {
    shared.region = region_of(SIZE, shared.rig.config.features);
    shared.rig.config.base = manyring_queue::Base::from_bits(base);
    shared.take();
    shared.add(3);
    let queue = shared.begin();
    finish(shared, queue);
}

#[test]
fn chains_that_a_killed_receiveq_had_taken_are_told_as_available() {
    let mut told_of = 0;
    for seed in 0..32 {
        for stores in 0.. {
            let mut shared = Shared::new(features(seed), 0_u16.wrapping_sub(20));
            let (mut life, mut numbers) = (Life { stores }, Numbers(seed));
            if receives(&mut shared, &mut life, &mut numbers) {
                break;
            }
            let base = told(&shared, &mut Life { stores: FOR_EVER }, numbers.count(9)).unwrap();
            assert_eq!(base, stand(&shared), "seed {seed}, store {stores}");
            // The region says the same.
            let next = shared.begin();
            assert_eq!((next.base().bits(), next.owed()), (base, 0));
            elsewhere(shared, base);
            told_of += 1;
        }
    }
    assert!(told_of > 2000, "{told_of} kills");
}

#[test]
fn a_process_that_is_killed_while_it_puts_owed_chains_back_loses_none() {
    let mut kills = 0;
    for seed in 0..16 {
        for stores in 0.. {
            let mut shared = Shared::new(features(seed), 7);
            let mut numbers = Numbers(seed);
            if receives(&mut shared, &mut Life { stores: 50 }, &mut numbers) {
                break;
            }
            let mut life = Life { stores };
            let is_through = told(&shared, &mut life, 5).is_some();
            // The region still tells the next process.
            let mut next = Back::begin(&shared, &mut Life { stores: FOR_EVER }).unwrap();
            shared.take();
            next.finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
            assert!(shared.waited_for.is_empty(), "seed {seed}, store {stores}");
            if is_through {
                break;
            }
            kills += 1;
        }
    }
    assert!(kills > 100, "{kills} kills");
}

/// A ring of five chains, of which the third was returned when its process died.
fn left_with_a_gap(packed: bool) -> Shared {
    let mut shared = Shared::new(RingFeatures { packed, ..Default::default() }, 7);
    assert!(shared.next().is_new(), "its base is all that is known");
    let (mut back, mut life) = (Back::new(shared.begin()), Life { stores: FOR_EVER });
    assert!(!shared.next().is_new());
    shared.add(5);
    back.pop(&shared, &mut life, 5, 0).unwrap();
    back.push(&mut life, 2).unwrap();
    back.queue.publish();
    drop(back);
    shared.take();
    shared
}

#[test]
fn chains_of_a_split_ring_behind_which_others_were_returned_are_served_and_not_put_back() {
    let shared = left_with_a_gap(false);
    let mut queue = shared.begin();
    let base = queue.base();
    assert!(!queue.put_back_owed());
    assert_eq!((queue.base(), queue.owed()), (base, 4), "nothing has changed");
    finish(shared, queue);
}

#[test]
fn chains_of_a_packed_ring_are_laid_out_again_whatever_was_returned() {
    let shared = left_with_a_gap(true);
    let mut queue = shared.begin();
    assert!(queue.put_back_owed());
    let base = queue.base().bits();
    assert_eq!((base & 0xffff, queue.owed()), (base >> 16, 0));
    elsewhere(shared, base);
}

#[test]
fn chains_in_flight_are_not_put_back() {
    let shared = left_behind(3);
    let mut back = Back::begin(&shared, &mut Life { stores: FOR_EVER }).unwrap();
    back.pop(&shared, &mut Life { stores: FOR_EVER }, 1, 0).unwrap();
    assert!(!back.queue.put_back_owed());
    let (_, chain) = back.held.pop().unwrap();
    back.queue.unpop(chain);
    drop(back);
    let queue = shared.begin();
    assert_eq!(queue.owed(), 3);
    finish(shared, queue);
}
