//! A back-end that is killed before any of its stores, and the next one on its journal: every
//! request is served as it was laid, and answered once.

use super::*;
use manyring_memory::stores_before_the_end;
use manyring_queue::blkif::{JournalError, journal_size};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A sequence of numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
        (self.0 >> 33) % end
    }
}

/// The things that outlive a back-end: the ring and its front, the journal, and the ids that the
/// front waits for.
struct Shared {
    rig: Rig,
    journal: Words,
    front: FrontRing,
    next_id: u64,
    waited_for: BTreeSet<u64>,
}

impl Shared {
    fn new(abi: Abi, base: u32) -> Self {
        let rig = Rig::new(abi, 0);
        let front = FrontRing::new(rig.config, Base::from_bits(base), &rig.memory).unwrap();
        let journal = journal_of(abi, 0);
        Self { rig, journal, front, next_id: 0, waited_for: BTreeSet::new() }
    }

    fn begin(&self) -> Result<BackRing, QueueError> {
        let (config, memory) = (self.rig.config, self.rig.memory.clone());
        BackRing::begin(config, memory, Some(self.journal.clone()))
    }

    fn take_over(&self) -> Result<BackRing, QueueError> {
        let (config, memory) = (self.rig.config, self.rig.memory.clone());
        BackRing::take_over(config, memory, Some(self.journal.clone()))
    }

    fn add(&mut self, count: u64) {
        for _ in 0..count {
            if self.front.add(&request(self.rig.config.abi, self.next_id)) {
                self.waited_for.insert(self.next_id);
                self.next_id += 1;
            }
        }
        self.front.publish();
    }

    fn take(&mut self) {
        while let Some(taken) = self.front.take_response() {
            assert!(self.waited_for.remove(&taken.id), "{} is answered twice", taken.id);
            assert_eq!(taken, response(taken.id));
        }
    }
}

fn journal_of(abi: Abi, order: u32) -> Words {
    let size = journal_size(abi, order);
    let mapping = Arc::new(Mapping::anonymous(size as u64).unwrap());
    Words::new(mapping, 0, size, 8).unwrap()
}

/// The life of a back-end, which ends before one of its stores.
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
}

/// A back-end that serves.
struct Back {
    ring: BackRing,
    requests: Requests,
    held: Vec<(u64, Chain)>,
}

impl Back {
    fn new(ring: BackRing) -> Self {
        Self { ring, requests: Requests::new(), held: Vec::new() }
    }

    /// Pops up to `max` requests, checks them, and puts the last ones back.
    fn pop(&mut self, shared: &Shared, life: &mut Life, max: u64, back: u64) -> Option<()> {
        let max = usize::try_from(max).unwrap();
        let popped = life.run(|| self.ring.pop_batch(&mut self.requests, max))?;
        for index in 0..popped {
            let (chain, copied) = self.requests.take(index).unwrap();
            assert_eq!(*copied, request(shared.rig.config.abi, copied.id()));
            assert!(shared.waited_for.contains(&copied.id()), "{} is served again", copied.id());
            self.held.push((copied.id(), chain));
        }
        for _ in 0..back.min(popped as u64) {
            let (_, chain) = self.held.pop().unwrap();
            life.run(|| self.ring.unpop(chain))?;
        }
        Some(())
    }

    fn answer(&mut self, life: &mut Life, which: u64) -> Option<()> {
        if !self.held.is_empty() {
            let which = usize::try_from(which).unwrap() % self.held.len();
            let (id, chain) = self.held.remove(which);
            life.run(|| self.ring.push_response(chain, response(id)))?;
        }
        Some(())
    }

    /// Serves `rounds` of requests, answered in any order. `None`: it was killed.
    fn serve(
        &mut self,
        shared: &mut Shared,
        life: &mut Life,
        numbers: &mut Numbers,
        rounds: u32,
    ) -> Option<()> {
        for _ in 0..rounds {
            shared.add(numbers.below(12));
            let back = numbers.below(4).saturating_sub(1);
            self.pop(shared, life, numbers.below(12), back)?;
            for _ in 0..numbers.below(12) {
                self.answer(life, numbers.below(32))?;
            }
            if numbers.below(3) > 0 {
                life.run(|| self.ring.publish())?;
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
            let before = self.held.len();
            self.pop(shared, life, 64, 0)?;
            if self.held.len() == before {
                break;
            }
        }
        while !self.held.is_empty() {
            self.answer(life, 7)?;
        }
        life.run(|| self.ring.publish())?;
        shared.take();
        assert_eq!(self.ring.fault(), None);
        Some(())
    }
}

impl Drop for Back {
    /// Nobody gives back what a killed process held.
    fn drop(&mut self) {
        self.held.drain(..).for_each(|(_, chain)| std::mem::forget(chain));
        std::mem::forget(std::mem::take(&mut self.requests));
    }
}

const FOR_EVER: u64 = u64::MAX;

/// Kills a back-end before its store of this number, and the next ones before those that `again`
/// says. Returns false if the first was through before that.
fn kill(seed: u64, stores: u64, again: &[u64]) -> bool {
    let base = 0_u32.wrapping_sub(40);
    let mut shared = Shared::new(Abi::ALL[usize::try_from(seed).unwrap() % 3], base);
    let (mut life, mut numbers) = (Life { stores }, Numbers(seed));
    // The front need not wait for a back-end, nor clear what is no count. (It does: before its
    // first store, a back-end has not seen the ring.)
    shared.add(3);
    if seed % 2 == 1 && stores > 0 {
        shared.rig.words.store_u32(RING_ENTRIES - 4, 77);
    }
    let mut first = || {
        let mut back = Back::new(life.run(|| shared.begin())?.unwrap());
        back.serve(&mut shared, &mut life, &mut numbers, 14)
    };
    if first().is_some() {
        return false;
    }
    for stores in again.iter().copied().chain([FOR_EVER]) {
        let mut life = Life { stores };
        let mut next = || {
            let mut back = Back::new(life.run(|| shared.take_over())?.unwrap());
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
fn back_that_is_killed_before_any_of_its_stores_loses_and_doubles_nothing() {
    let mut kills = 0;
    for seed in 0..9 {
        kills += (0..).take_while(|stores| kill(seed, *stores, &[])).count();
    }
    assert!(kills > 5000, "{kills} kills");
}

#[test]
fn backs_that_are_killed_while_they_take_over_lose_and_double_nothing() {
    let mut numbers = Numbers(1);
    for seed in 0..3 {
        for stores in 0.. {
            // The first stores of a takeover are the rarer ones.
            let range = if stores % 2 == 0 { 40 } else { 900 };
            let again = [numbers.below(range), numbers.below(range), numbers.below(range)];
            if !kill(seed, stores, &again) {
                break;
            }
        }
    }
}

/// Serves a ring until `held` of its requests are taken and not answered, others are, and more are
/// in the ring; and ends there.
fn left_behind(held: usize) -> Shared {
    let mut shared = Shared::new(Abi::X86_64, 7);
    let mut back = Back::new(shared.begin().unwrap());
    let mut life = Life { stores: FOR_EVER };
    shared.add(20);
    back.pop(&shared, &mut life, 10, 0).unwrap();
    while back.held.len() > held {
        back.answer(&mut life, 3).unwrap();
    }
    back.ring.publish();
    shared.take();
    shared
}

fn finish(mut shared: Shared, ring: BackRing) {
    Back::new(ring).finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
    assert!(shared.waited_for.is_empty(), "{:?} are lost", shared.waited_for);
}

#[test]
fn what_was_taken_is_popped_first_and_in_its_order_and_can_be_put_back() {
    let shared = left_behind(4);
    let mut ring = shared.take_over().unwrap();
    assert_eq!((ring.owed_count(), ring.in_flight(), ring.available_count()), (4, 0, 4));
    let mut requests = Requests::new();
    let mut pop = |ring: &mut BackRing, max| -> Vec<(u64, Chain)> {
        let popped = ring.pop_batch(&mut requests, max);
        let take = |index| requests.take(index).map(|(chain, copied)| (copied.id(), chain));
        (0..popped).filter_map(take).collect()
    };
    let mut first = pop(&mut ring, 3);
    let ids: Vec<u64> = first.iter().map(|(id, _)| *id).collect();
    assert!(ids.is_sorted() && ids.len() == 3, "{ids:?}");
    ring.unpop(first.pop().unwrap().1);
    let second = pop(&mut ring, 64);
    assert_eq!((second.len(), second[0].0), (2, ids[2]));
    let third = pop(&mut ring, 64);
    assert_eq!(third.iter().map(|(id, _)| *id).collect::<Vec<_>>(), (10..20).collect::<Vec<_>>());
    assert_eq!(ring.in_flight(), 14);
    first.into_iter().chain(second).chain(third).for_each(|(_, chain)| ring.discard(chain));
    drop(ring);
    let ring = shared.take_over().unwrap();
    assert_eq!(ring.owed_count(), 14, "what was given up is owed");
    finish(shared, ring);
}

#[test]
fn ring_that_its_front_has_made_anew_is_served_from_its_start() {
    let mut shared = left_behind(4);
    let config = shared.rig.config;
    shared.front = FrontRing::new(config, Base::from_bits(7), &shared.rig.memory).unwrap();
    shared.waited_for.clear();
    shared.add(5);
    let ring = shared.take_over().unwrap();
    assert_eq!(ring.owed_count(), 0);
    finish(shared, ring);
}

#[test]
fn ring_that_nobody_has_served_needs_no_journal() {
    let mut shared = Shared::new(Abi::X86_64, 0);
    shared.add(5);
    let ring = shared.take_over().unwrap();
    finish(shared, ring);
}

#[test]
fn ring_of_which_nothing_is_owed_needs_no_journal() {
    for is_kept in [true, false] {
        let mut shared = left_behind(4);
        let ring = shared.take_over().unwrap();
        Back::new(ring).finish(&mut shared, &mut Life { stores: FOR_EVER }).unwrap();
        if is_kept {
            shared.journal.store_u32(0, 0);
        } else {
            let (config, memory) = (shared.rig.config, shared.rig.memory.clone());
            drop(BackRing::take_over(config, memory, None).unwrap());
        }
        let ring = shared.take_over().unwrap();
        shared.add(5);
        finish(shared, ring);
    }
}

fn refusal(shared: &Shared) -> JournalError {
    match shared.take_over() {
        Err(QueueError::Journal(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ring_whose_requests_nobody_wrote_down_is_not_taken_over() {
    let mut shared = Shared::new(Abi::X86_64, 0);
    let (config, memory) = (shared.rig.config, shared.rig.memory.clone());
    let mut back = Back::new(BackRing::begin(config, memory.clone(), None).unwrap());
    shared.add(5);
    back.pop(&shared, &mut Life { stores: FOR_EVER }, 2, 0).unwrap();
    drop(back);
    let found = BackRing::take_over(config, memory, None).map(drop);
    assert_eq!(found, Err(QueueError::Journal(JournalError::Missing)));
    // Nor with a journal that was begun afterwards.
    assert_eq!(refusal(&shared), JournalError::Foreign);
}

#[test]
fn journal_that_is_not_of_the_ring_or_not_whole_is_refused() {
    let mark = left_behind(4).journal.load_u32(8);
    assert!(mark > 1);
    let spoiled = |offset, value| {
        let shared = left_behind(4);
        shared.journal.store_u32(offset, value);
        refusal(&shared)
    };
    assert_eq!(spoiled(0, 7), JournalError::Foreign);
    assert_eq!(spoiled(4, 2), JournalError::Foreign);
    assert!(matches!(spoiled(8, 5), JournalError::OtherRing { journal: 5, .. }));
    let shape = JournalError::OtherShape { entries: 64, entry_size: 112 };
    assert_eq!(spoiled(12, 64), shape);
    let shape = JournalError::OtherShape { entries: 32, entry_size: 108 };
    assert_eq!(spoiled(16, 108), shape);
    assert!(matches!(spoiled(24, 500), JournalError::Taken { taken: 500, found: 17 }));
    assert!(matches!(spoiled(32, 500), JournalError::Responses { rsp_prod: 13, published: 500 }));
    // The records of the first slots: one that was lost, and one that is there twice.
    let shared = left_behind(10);
    shared.journal.store_u64(128, 0);
    assert_eq!(refusal(&shared), JournalError::Taken { taken: 17, found: 16 });
    let shared = left_behind(10);
    shared.journal.store_u64(128 + 8, 9);
    assert!(matches!(refusal(&shared), JournalError::Record { .. }));
    let shared = left_behind(10);
    shared.journal.store_u64(128, u64::MAX);
    assert_eq!(refusal(&shared), JournalError::Record { slot: 0 });
}

#[test]
fn journal_that_is_too_short_is_refused() {
    let mut shared = left_behind(4);
    let needed = journal_size(Abi::X86_64, 0);
    let mapping = Arc::new(Mapping::anonymous(needed as u64).unwrap());
    shared.journal = Words::new(mapping, 0, needed - 8, 8).unwrap();
    let short = JournalError::Short { len: needed - 8, needed };
    assert_eq!(refusal(&shared), short);
    assert_eq!(shared.begin().map(drop), Err(QueueError::Journal(short)));
}

#[test]
fn front_that_moves_the_count_of_responses_meanwhile_is_refused() {
    for rsp_prod in [0, 14, 15, u32::MAX] {
        let shared = left_behind(4);
        assert_eq!(shared.rig.words.load_u32(RSP_PROD), 13);
        shared.rig.words.store_u32(RSP_PROD, rsp_prod);
        match refusal(&shared) {
            JournalError::Responses { rsp_prod: found, published: 13 } => {
                assert_eq!(found, rsp_prod);
            }
            // As many as might be unpublished: then what is taken does not add up.
            JournalError::Taken { .. } => assert!(rsp_prod < 13),
            other => panic!("{other}"),
        }
    }
}

proptest! {
    #[test]
    fn scribbled_journal_is_refused_or_served_and_never_more(
        scribbles in prop::collection::vec((0..33 * 32_usize, any::<u32>()), 1..40),
        small in any::<bool>(),
    ) {
        let shared = left_behind(10);
        for (word, value) in scribbles {
            let value = if small { value % 40 } else { value };
            shared.journal.store_u32(word * 4, value);
        }
        if let Ok(mut ring) = shared.take_over() {
            let mut requests = Requests::new();
            while ring.pop_batch(&mut requests, 64) > 0 {
                for index in 0..requests.len() {
                    let (chain, copied) = requests.take(index).unwrap();
                    let response = response(copied.id());
                    ring.push_response(chain, response);
                }
                ring.publish();
            }
            prop_assert_eq!(ring.in_flight(), 0);
        }
    }
}
