//! Driver half against device half, with a naive model as oracle: any order of calls, all
//! features, all sizes, indexes that wrap.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod guest;

use guest::model::{Model, ModelChain};
use guest::{BUFFERS, Rig};
use manyring_memory::{GuestSlice, SliceList, copy_from_slices, copy_to_slices, total_len};
use manyring_queue::{BATCH_CHAINS, Batch, Chain, DeviceQueue, DriverQueue, RingFeatures};
use proptest::prelude::*;
use std::collections::HashMap;

/// One call on one of the halves.
#[derive(Clone, Debug)]
enum Step {
    Add { readable: Vec<u8>, writable: Vec<u8>, indirect: bool },
    Publish,
    Pop { max: usize },
    PutBack,
    Push { which: usize, written: u32 },
    PublishUsed,
    TakeUsed,
    ArmDevice,
    DisarmDevice,
    ArmDriver,
    DisarmDriver,
}

fn step() -> impl Strategy<Value = Step> {
    let lens = || prop::collection::vec(1..=60u8, 0..4);
    prop_oneof![
        6 => (lens(), lens(), any::<bool>())
            .prop_map(|(readable, writable, indirect)| Step::Add { readable, writable, indirect }),
        3 => Just(Step::Publish),
        3 => prop_oneof![Just(BATCH_CHAINS), 0..4usize].prop_map(|max| Step::Pop { max }),
        1 => Just(Step::PutBack),
        5 => (any::<usize>(), 0..300u32)
            .prop_map(|(which, written)| Step::Push { which, written }),
        3 => Just(Step::PublishUsed),
        5 => Just(Step::TakeUsed),
        1 => Just(Step::ArmDevice),
        1 => Just(Step::DisarmDevice),
        1 => Just(Step::ArmDriver),
        1 => Just(Step::DisarmDriver),
    ]
}

/// Bytes of guest memory that a chain's buffers and its table may take.
const AREA: u64 = 1024;

/// Whether a half would be told of the next news.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Armed {
    Yes,
    No,
    Unsaid,
}

struct Pair {
    rig: Rig,
    driver: DriverQueue,
    device: DeviceQueue,
    model: Model,
    batch: Batch,
    /// Chains in flight with their slices, by id.
    held: HashMap<u16, (Chain, SliceList)>,
    areas: Vec<u64>,
    area_of: HashMap<u16, u64>,
    fill: u8,
    device_armed: Armed,
    driver_armed: Armed,
}

impl Pair {
    fn new(size: u16, features: RingFeatures, base: u16) -> Self {
        let rig = Rig::new(size, features, base);
        let (driver, device) = (rig.driver_queue(), rig.device_queue());
        let areas = (0..u64::from(size)).map(|n| BUFFERS + n * AREA).collect();
        Self {
            rig,
            driver,
            device,
            model: Model::new(size, features.in_order),
            batch: Batch::new(),
            held: HashMap::new(),
            areas,
            area_of: HashMap::new(),
            fill: 0,
            device_armed: Armed::Unsaid,
            driver_armed: Armed::Unsaid,
        }
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Add { readable, writable, indirect } => self.add(readable, writable, *indirect),
            Step::Publish => self.publish(),
            Step::Pop { max } => self.pop(*max),
            Step::PutBack => self.put_back(),
            Step::Push { which, written } => self.push(*which, *written),
            Step::PublishUsed => self.publish_used(),
            Step::TakeUsed => self.take_used(),
            Step::ArmDevice => {
                let work = self.device.enable_notifications();
                assert_eq!(work, !self.model.available.is_empty());
                self.device_armed = if work { Armed::Unsaid } else { Armed::Yes };
            }
            Step::DisarmDevice => {
                self.device.disable_notifications();
                // With EVENT_IDX the event of a split ring lies where it was.
                if !self.rig.config.features.event_idx || self.rig.config.features.packed {
                    self.device_armed = Armed::No;
                }
            }
            Step::ArmDriver => {
                let work = self.driver.enable_notifications();
                assert_eq!(work, !self.model.used.is_empty());
                self.driver_armed = if work { Armed::Unsaid } else { Armed::Yes };
            }
            Step::DisarmDriver => {
                self.driver.disable_notifications();
                self.driver_armed = Armed::No;
            }
        }
        assert!(self.model.is_balanced());
        assert_eq!(usize::from(self.device.in_flight()), self.model.in_flight.len());
        assert_eq!(self.driver.free_count(), self.model.size - self.model.taken);
        assert_eq!(self.device.fault(), None);
    }

    fn add(&mut self, readable: &[u8], writable: &[u8], indirect: bool) {
        let indirect = indirect && self.rig.config.features.indirect;
        let Some(&area) = self.areas.last() else { return };
        let mut at = area;
        let mut place = |lens: &[u8]| -> Vec<(u64, u32)> {
            let mut list = Vec::new();
            for len in lens {
                list.push((at, u32::from(*len)));
                at += u64::from(*len);
            }
            list
        };
        let (readable, writable) = (place(readable), place(writable));
        let count = readable.len() + writable.len();
        let cost = if indirect && count > 0 { 1 } else { u16::try_from(count).unwrap() };
        self.fill = self.fill.wrapping_add(1);
        for (addr, len) in &readable {
            self.rig.write(*addr, &vec![self.fill; *len as usize]);
        }
        let id = if indirect {
            let table = self.rig.table(area + AREA / 2, 8);
            self.driver.add_indirect(&readable, &writable, &table)
        } else {
            self.driver.add(&readable, &writable)
        };
        assert_eq!(id.is_some(), self.model.fits(cost));
        let Some(id) = id else { return };
        self.areas.pop();
        self.area_of.insert(id, area);
        self.model.add(ModelChain { id, readable, writable, fill: self.fill, cost });
    }

    fn publish(&mut self) {
        let wanted = self.driver.publish();
        let count = self.model.publish();
        if count == 0 {
            assert!(!wanted, "a kick for nothing");
            return;
        }
        match self.device_armed {
            Armed::Yes => assert!(wanted, "a lost kick"),
            Armed::No => assert!(!wanted, "an unwanted kick"),
            Armed::Unsaid => {}
        }
        if self.device_armed == Armed::Yes && self.rig.config.features.event_idx {
            self.device_armed = Armed::Unsaid;
        }
    }

    fn pop(&mut self, max: usize) {
        let popped = self.device.pop_batch(&mut self.batch, max);
        // Chains that came after the last look at the index may come with the next batch.
        let most = self.model.available.len().min(BATCH_CHAINS).min(max);
        assert!(popped <= most && (popped == 0) == (most == 0), "{popped} of {most}");
        for index in 0..popped {
            let expected = self.model.pop().unwrap();
            let (chain, readable, writable) = self.batch.take(index).unwrap();
            let is_packed = self.rig.config.features.packed;
            assert!(chain.slot() == expected.id || is_packed && chain.slot() < self.model.size);
            let mut bytes = vec![0; usize::try_from(total_len(&readable)).unwrap()];
            copy_from_slices(&readable, &mut bytes);
            let places = |list: &[(u64, u32)]| -> Vec<(usize, usize)> {
                list.iter().map(|(a, len)| (self.rig.host(*a), *len as usize)).collect()
            };
            let found = |slices: &[GuestSlice]| -> Vec<(usize, usize)> {
                slices.iter().map(|s| (s.address(), s.len())).collect()
            };
            assert_eq!(found(&readable), places(&expected.readable));
            assert_eq!(found(&writable), places(&expected.writable));
            assert!(bytes.iter().all(|byte| *byte == expected.fill));
            let mut kept = SliceList::new();
            kept.extend(writable);
            self.held.insert(expected.id, (chain, kept));
            if self.rig.config.features.event_idx {
                self.device_armed = Armed::Unsaid;
            }
        }
    }

    fn put_back(&mut self) {
        let Some(newest) = self.model.newest() else { return };
        let (chain, _) = self.held.remove(&newest.id).unwrap();
        self.device.unpop(chain);
        self.model.unpop();
        if self.device_armed == Armed::Yes {
            self.device_armed = Armed::Unsaid;
        }
    }

    fn push(&mut self, which: usize, written: u32) {
        if self.model.in_flight.is_empty() {
            return;
        }
        let at = which % self.model.in_flight.len();
        let id = self.model.in_flight[at].id;
        let (chain, writable) = self.held.remove(&id).unwrap();
        let room = u32::try_from(total_len(writable.as_slices())).unwrap();
        let written = written.min(room);
        copy_to_slices(
            writable.as_slices(),
            &vec![!self.model.in_flight[at].fill; written as usize],
        );
        self.device.push_used(chain, written);
        self.model.push(at, written);
    }

    fn publish_used(&mut self) {
        let count = self.model.publish_used();
        assert_eq!(usize::from(self.device.publish()), count);
        let wanted = self.device.needs_notification();
        if count == 0 {
            assert!(!wanted, "a call for nothing");
            return;
        }
        match self.driver_armed {
            Armed::Yes => assert!(wanted, "a lost call"),
            Armed::No => assert!(!wanted, "an unwanted call"),
            Armed::Unsaid => {}
        }
        if self.driver_armed == Armed::Yes && self.rig.config.features.event_idx {
            self.driver_armed = Armed::Unsaid;
        }
    }

    fn take_used(&mut self) {
        let expected = self.model.take_used();
        let used = self.driver.take_used();
        assert_eq!(used, expected.as_ref().map(|(chain, written)| (chain.id, *written)));
        let Some((chain, written)) = expected else { return };
        let mut left = written as usize;
        for (addr, len) in chain.writable {
            let part = left.min(len as usize);
            assert_eq!(self.rig.read(addr, part), vec![!chain.fill; part]);
            left -= part;
        }
        self.areas.push(self.area_of.remove(&chain.id).unwrap());
        if self.rig.config.features.event_idx {
            self.driver_armed = Armed::Unsaid;
        }
    }

    /// Returns every chain, as a queue must before it is dropped.
    fn finish(&mut self) {
        for (_, (chain, _)) in self.held.drain() {
            self.device.discard(chain);
        }
    }
}

fn features() -> impl Strategy<Value = RingFeatures> {
    any::<(bool, bool, bool, bool)>().prop_map(|(event_idx, indirect, in_order, packed)| {
        RingFeatures { event_idx, indirect, in_order, packed }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn both_halves_agree_with_the_model_in_any_order(
        size in prop::sample::select(vec![1u16, 2, 4, 8, 32, 128, 256, 32768]),
        odd_size in prop::sample::select(vec![1u16, 2, 3, 5, 7, 100, 257, 32767, 32768]),
        features in features(),
        base in prop_oneof![Just(0u16), 65500..=65535u16, any::<u16>()],
        steps in prop::collection::vec(step(), 1..400),
    ) {
        // Only a packed ring may have a size that is no power of two.
        let size = if features.packed { odd_size } else { size };
        let mut pair = Pair::new(size, features, base);
        for step in &steps {
            pair.run(step);
        }
        pair.finish();
    }
}

#[test]
fn a_full_ring_goes_round_70000_times_and_the_indexes_wrap() {
    for features in 0..16u8 {
        let [event_idx, indirect, in_order, packed] = [1, 2, 4, 8].map(|bit| features & bit != 0);
        let mut pair = Pair::new(4, RingFeatures { event_idx, indirect, in_order, packed }, 3);
        for round in 0..17_500 {
            for _ in 0..4 {
                pair.run(&Step::Add { readable: vec![3], writable: vec![], indirect });
            }
            pair.run(&Step::Publish);
            pair.run(&Step::Pop { max: 4 });
            for which in [round, round + 1, round / 2, 0] {
                pair.run(&Step::Push { which, written: 0 });
            }
            pair.run(&Step::PublishUsed);
            for _ in 0..4 {
                pair.run(&Step::TakeUsed);
            }
            assert_eq!(pair.model.taken, 0);
        }
        let next = 3u16.wrapping_add(u16::try_from(70_000 % 65_536).unwrap());
        let expected = if packed { guest::packed_base(4, next) } else { next.into() };
        assert_eq!(pair.device.base(), expected);
    }
}
