//! A device half that is killed before any of its stores, and the next one on its in-flight region:
//! every chain is served, and returned once. Regions that are not the ring's are refused.
//! Packed rings that have no region are tested in `trail.rs`.

mod given_up;
mod packed_regions;
mod put_back;
mod regions;
mod trail;

use crate::guest::{BUFFERS, Rig};
use manyring_memory::{Mapping, Words, copy_from_slices, copy_to_slices, stores_before_the_end};
use manyring_queue::{
    Batch, Chain, Chains, DeviceQueue, DriverQueue, Ring, RingFeatures, inflight_size,
    packed_inflight_size,
};
use manyring_wire::virtqueue::RING_IDX;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

const SIZE: u16 = 16;
/// Bytes of a request: its number, the answer, and the indirect table.
const AREA: u64 = 64;
const ANSWER: u64 = 0x5a5a_a5a5_0000_ffff;

/// The region's version, which it has when it is in use.
const VERSION: usize = 8;

/// A sequence of numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (self.0 >> 33) % end
    }

    fn count(&mut self, end: u64) -> usize {
        usize::try_from(self.below(end)).unwrap()
    }
}

/// The state that outlives a device half: the ring, its driver with its requests, and the region.
struct Shared {
    rig: Rig,
    region: Words,
    /// No region: the ring tells its own place.
    is_trailed: bool,
    driver: DriverQueue,
    next_id: u64,
    /// The numbers of requests, by their heads.
    waited_for: BTreeMap<u16, u64>,
}

impl Shared {
    fn new(features: RingFeatures, base: u16) -> Self {
        let rig = Rig::new(SIZE, features, base);
        let (driver, region) = (rig.driver_queue(), region_of(SIZE, features));
        let (is_trailed, next_id, waited_for) = (false, 0, BTreeMap::new());
        Self { rig, region, is_trailed, driver, next_id, waited_for }
    }

    /// The next device half. Its base is wrong: the region says where to go on.
    fn next(&self) -> DeviceQueue {
        let is_new = self.region.load_u16(VERSION) == 0;
        let mut config = self.rig.config;
        if !is_new {
            config.base = match config.features.packed {
                true => crate::guest::packed_base(SIZE, 5),
                false => 0x1234_u16.into(),
            };
        }
        let queue = DeviceQueue::unread(config, self.rig.memory.clone()).unwrap();
        if self.is_trailed {
            return queue.trailed();
        }
        queue.recorded(Some(self.region.clone()), None)
    }

    fn begin(&self) -> DeviceQueue {
        let mut queue = self.next();
        queue.begin();
        queue
    }

    fn add(&mut self, count: usize) {
        for _ in 0..count {
            let (id, area) = (self.next_id, BUFFERS + self.next_id * AREA);
            self.rig.write(area, &id.to_le_bytes());
            let (readable, writable) = ([(area, 8)], [(area + 8, 8)]);
            let head = if self.rig.config.features.indirect && id % 3 > 0 {
                let table = self.rig.table(area + 32, 2);
                self.driver.add_indirect(&readable, &writable, &table)
            } else {
                self.driver.add(&readable, &writable)
            };
            let Some(head) = head else { break };
            self.next_id += 1;
            assert_eq!(self.waited_for.insert(head, id), None);
        }
        self.driver.publish();
    }

    fn take(&mut self) {
        while let Some((head, written)) = self.driver.take_used() {
            let id = self.waited_for.remove(&head).expect("a chain is returned twice");
            if self.rig.config.features.in_order {
                assert!(self.waited_for.values().all(|other| *other > id), "{id} out of order");
            }
            if written == 0 && self.is_trailed {
                // Answered by a process that was killed before it could say so.
                continue;
            }
            assert_eq!(written, 8);
            let found = self.rig.read(BUFFERS + id * AREA + 8, 8);
            assert_eq!(found, (id ^ ANSWER).to_le_bytes(), "the answer of {id}");
        }
    }
}

fn region_of(entries: u16, features: RingFeatures) -> Words {
    let size = if features.packed { packed_inflight_size(entries) } else { inflight_size(entries) };
    let mapping = Arc::new(Mapping::anonymous(size as u64).unwrap());
    Words::new(mapping, 0, size, 8).unwrap()
}

/// The life of a device half, which ends before one of its stores.
struct Life {
    stores: u64,
}

impl Life {
    /// Runs a part of it. `None`: it was killed.
    fn run<T>(&mut self, part: impl FnOnce() -> T) -> Option<T> {
        stores_before_the_end(Some(self.stores));
        let result = catch_unwind(AssertUnwindSafe(part));
        self.stores = stores_before_the_end(None).unwrap();
        match result {
            Ok(value) => Some(value),
            Err(panic) => {
                let is_kill = panic.downcast_ref::<&str>() == Some(&"killed before a store");
                if is_kill { None } else { resume_unwind(panic) }
            }
        }
    }

    /// How many stores a part makes.
    fn count(part: impl FnOnce()) -> u64 {
        let mut life = Self { stores: FOR_EVER };
        life.run(part).unwrap();
        FOR_EVER - life.stores
    }
}

const FOR_EVER: u64 = u64::MAX;

/// A device half that serves.
struct Back {
    queue: DeviceQueue,
    batch: Batch,
    held: Vec<(u64, Chain)>,
}

impl Back {
    fn new(queue: DeviceQueue) -> Self {
        Self { queue, batch: Batch::new(), held: Vec::new() }
    }

    /// The first chain of the ring, and all that go on from a region.
    fn begin(shared: &Shared, life: &mut Life) -> Option<Self> {
        let mut queue = shared.next();
        life.run(|| queue.begin())?;
        assert_eq!(queue.fault(), None);
        Some(Self::new(queue))
    }

    /// Pops up to `max` chains, checks and answers them, and puts the last ones back.
    fn pop(&mut self, shared: &Shared, life: &mut Life, max: usize, back: usize) -> Option<usize> {
        let popped = life.run(|| self.queue.pop_batch(&mut self.batch, max))?;
        self.take(shared, popped);
        for _ in 0..back.min(popped) {
            let (_, chain) = self.held.pop().unwrap();
            life.run(|| self.queue.unpop(chain))?;
        }
        Some(popped)
    }

    /// Takes the chains of the batch, and does what they ask for.
    fn take(&mut self, shared: &Shared, popped: usize) {
        for index in 0..popped {
            let (chain, readable, writable) = self.batch.take(index).unwrap();
            let mut bytes = [0; 8];
            copy_from_slices(&readable, &mut bytes);
            let id = u64::from_le_bytes(bytes);
            let is_waited_for = match shared.rig.config.features.packed {
                true => shared.waited_for.values().any(|other| *other == id),
                false => shared.waited_for.get(&chain.slot()) == Some(&id),
            };
            assert!(is_waited_for, "{id} is not waited for any more");
            copy_to_slices(&writable, &(id ^ ANSWER).to_le_bytes());
            self.held.push((id, chain));
        }
    }

    fn push(&mut self, life: &mut Life, which: usize) -> Option<()> {
        if !self.held.is_empty() {
            let (_, chain) = self.held.remove(which % self.held.len());
            life.run(|| self.queue.push_used(chain, 8))?;
        }
        Some(())
    }

    /// Sets a chain aside, or pops those that were, or puts all of them back.
    fn set_aside(&mut self, shared: &Shared, life: &mut Life, which: u64) -> Option<()> {
        match which {
            0..4 if !self.held.is_empty() => {
                let at = usize::try_from(which).unwrap() % self.held.len();
                self.queue.set_aside(self.held.remove(at).1);
            }
            4 => {
                let popped = life.run(|| self.queue.pop_aside(&mut self.batch, 3))?;
                self.take(shared, popped);
            }
            5 => {
                while let Some((_, chain)) = self.held.pop() {
                    self.queue.set_aside(chain);
                }
                life.run(|| self.queue.unpop_aside())?;
            }
            _ => {}
        }
        Some(())
    }

    /// Serves `rounds` of chains, answered in any order. `None`: it was killed.
    fn serve(
        &mut self,
        shared: &mut Shared,
        life: &mut Life,
        numbers: &mut Numbers,
        rounds: u32,
    ) -> Option<()> {
        for _ in 0..rounds {
            shared.add(numbers.count(6));
            let (max, back) = (numbers.count(12), numbers.count(4).saturating_sub(1));
            self.pop(shared, life, max, back)?;
            for _ in 0..numbers.below(7) {
                self.push(life, numbers.count(32))?;
            }
            self.set_aside(shared, life, numbers.below(12))?;
            if numbers.below(3) > 0 {
                life.run(|| self.queue.publish())?;
            }
            if numbers.below(2) == 0 {
                shared.take();
            }
        }
        Some(())
    }

    /// Serves all that is left.
    fn finish(&mut self, shared: &mut Shared, life: &mut Life) -> Option<()> {
        loop {
            let aside = life.run(|| self.queue.pop_aside(&mut self.batch, 64))?;
            self.take(shared, aside);
            if self.pop(shared, life, 64, 0)? + aside == 0 {
                break;
            }
        }
        while !self.held.is_empty() {
            self.push(life, 7)?;
        }
        life.run(|| self.queue.publish())?;
        shared.take();
        assert_eq!((self.queue.fault(), self.queue.in_flight()), (None, 0));
        let base = self.queue.base().bits();
        let used = match shared.rig.config.features.packed {
            true => base >> 16,
            false => shared.rig.used.load_u16(RING_IDX).into(),
        };
        assert_eq!(base & 0xffff, used);
        Some(())
    }
}

impl Drop for Back {
    /// Nobody gives back what a killed process held.
    fn drop(&mut self) {
        self.held.drain(..).for_each(|(_, chain)| std::mem::forget(chain));
        std::mem::forget(std::mem::take(&mut self.batch));
    }
}

fn features(seed: u64) -> RingFeatures {
    let is_set = |bit: u64| seed & bit != 0;
    RingFeatures {
        in_order: is_set(1),
        indirect: is_set(2),
        event_idx: is_set(4),
        packed: is_set(8),
    }
}

fn kill(seed: u64, stores: u64, again: &[u64]) -> bool {
    kill_in(Shared::new(features(seed), 0_u16.wrapping_sub(20)), seed, stores, again)
}

/// Kills a device half before its store of this number, and the next ones before those that `again`
/// says. Returns false if the first was through before that.
fn kill_in(mut shared: Shared, seed: u64, stores: u64, again: &[u64]) -> bool {
    let (mut life, mut numbers) = (Life { stores }, Numbers(seed));
    let mut first = || {
        let mut back = Back::begin(&shared, &mut life)?;
        back.serve(&mut shared, &mut life, &mut numbers, 14)
    };
    if first().is_some() {
        return false;
    }
    for stores in again.iter().copied().chain([FOR_EVER]) {
        // Chains that were given to the driver are returned, even if it has not looked at them yet.
        shared.take();
        let mut life = Life { stores };
        let mut next = || {
            let mut back = Back::begin(&shared, &mut life)?;
            back.serve(&mut shared, &mut life, &mut numbers, 2)?;
            back.finish(&mut shared, &mut life)
        };
        next();
    }
    let lost = &shared.waited_for;
    assert!(lost.is_empty(), "seed {seed}, store {stores}, then {again:?}: {lost:?} are lost");
    true
}

#[test]
fn device_that_is_killed_before_any_of_its_stores_loses_and_doubles_nothing() {
    let mut kills = 0;
    for seed in 0..64 {
        kills += (0..).take_while(|stores| kill(seed, *stores, &[])).count();
    }
    assert!(kills > 5000, "{kills} kills");
}

#[test]
fn devices_that_are_killed_while_they_go_on_lose_and_double_nothing() {
    let mut numbers = Numbers(1);
    for seed in 0..32 {
        for stores in 0.. {
            // The first stores are the rarer ones.
            let range = if stores % 2 == 0 { 12 } else { 100 };
            let again = [numbers.below(range), numbers.below(range), numbers.below(range)];
            if !kill(seed, stores, &again) {
                break;
            }
        }
    }
}

#[test]
fn each_step_makes_the_stores_that_are_written_down() {
    let mut shared = Shared::new(RingFeatures::default(), 0);
    let mut queue = shared.next();
    assert_eq!(Life::count(|| assert!(!queue.begin())), 3, "entries, used index, version");
    let mut back = Back::new(queue);
    shared.add(5);
    let Back { queue, batch, .. } = &mut back;
    assert_eq!(Life::count(|| assert_eq!(queue.pop_batch(batch, 5), 5)), 10, "counter, flag");
    back.take(&shared, 5);
    let (_, chain) = back.held.pop().unwrap();
    assert_eq!(Life::count(|| back.queue.unpop(chain)), 1, "flag");
    for _ in 0..3 {
        let (_, chain) = back.held.pop().unwrap();
        let stores = Life::count(|| back.queue.push_used(chain, 8));
        assert_eq!(stores, 3, "next, the head answered last, the used entry");
    }
    let stores = Life::count(|| assert_eq!(back.queue.publish(), 3));
    assert_eq!(stores, 5, "the ring's used index, three flags, the region's used index");
    assert_eq!(Life::count(|| assert_eq!(back.queue.publish(), 0)), 0);
}

/// Serves a ring of five chains until `held` of them are not answered, with two more in the ring,
/// and ends there. The others are answered in one burst: `which` of those that are held, again and
/// again.
fn left_behind_of(held: usize, which: usize) -> Shared {
    left_behind_in(RingFeatures { indirect: true, ..Default::default() }, held, which)
}

fn left_behind_in(features: RingFeatures, held: usize, which: usize) -> Shared {
    let mut shared = Shared::new(features, 7);
    shared.next_id = 1;
    let mut back = Back::new(shared.begin());
    let mut life = Life { stores: FOR_EVER };
    shared.add(5);
    back.pop(&shared, &mut life, 5, 0).unwrap();
    while back.held.len() > held {
        back.push(&mut life, which).unwrap();
    }
    back.queue.publish();
    shared.take();
    shared.add(2);
    shared
}

/// Of the chains 1 to 5, the first ones are held.
fn left_behind(held: usize) -> Shared {
    left_behind_of(held, held)
}

fn finish(mut shared: Shared, queue: DeviceQueue) {
    Back::new(queue).finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
    assert!(shared.waited_for.is_empty(), "{:?} are lost", shared.waited_for);
}

#[test]
fn what_is_owed_is_popped_first_and_in_its_order_and_can_be_put_back() {
    let shared = left_behind(3);
    let mut queue = shared.next();
    assert!(queue.begin(), "the driver must be notified");
    assert!(!queue.begin(), "once");
    assert_eq!((queue.available_count(), queue.in_flight()), (3, 0));
    let mut back = Back::new(queue);
    let mut life = Life { stores: FOR_EVER };
    assert_eq!(back.pop(&shared, &mut life, 2, 1), Some(2));
    assert_eq!((back.queue.available_count(), back.queue.in_flight()), (2, 1));
    assert!(back.queue.has_available() && back.queue.enable_notifications());
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(2));
    assert_eq!(back.pop(&shared, &mut life, 64, 0), Some(2));
    let ids: Vec<u64> = back.held.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 2, 3, 6, 7]);
    // The device half still owes the chains that it discards.
    while let Some((_, chain)) = back.held.pop() {
        back.queue.discard(chain);
    }
    let queue = shared.begin();
    assert_eq!(queue.available_count(), 5);
    finish(shared, queue);
}

#[test]
fn chains_that_wait_aside_are_owed_until_they_are_put_back() {
    let mut shared = left_behind_of(3, 0);
    let mut life = Life { stores: FOR_EVER };
    let mut back = Back::begin(&shared, &mut life).unwrap();
    back.pop(&shared, &mut life, 64, 0).unwrap();
    back.held.drain(..).for_each(|(_, chain)| back.queue.set_aside(chain));
    assert_eq!(shared.begin().available_count(), 3);
    // They are the last ones that were popped: the base says all.
    assert!(back.queue.unpop_aside());
    let mut next = shared.begin();
    assert_eq!((next.available_count(), next.base()), (0, back.queue.base()));
    assert!(next.has_available());
    assert_eq!(next.available_count(), 5);
    shared.take();
    finish(shared, next);
}

#[test]
fn chains_are_not_put_aside_back_while_others_are_owed() {
    let shared = left_behind(3);
    let mut life = Life { stores: FOR_EVER };
    let mut back = Back::begin(&shared, &mut life).unwrap();
    back.pop(&shared, &mut life, 1, 0).unwrap();
    back.queue.set_aside(back.held.pop().unwrap().1);
    assert!(!back.queue.unpop_aside());
    drop(back);
    let queue = shared.begin();
    finish(shared, queue);
}
