//! `Flows`: the table from which the kernel learns the queue pair of each flow to the guest (virtio
//! 1.3 §5.1.6.5.6.1): the pair on whose transmitq the guest sends that flow.
//!
//! The kernel has such a table of its own, and fills it by parsing each frame that is written to a
//! tap of several queues; for a short frame this is a fifth of the frame's cost. The worker has the
//! same frames in its cache, so it fills a table in shared memory, and attaches a program that
//! looks flows up there ([`super::program`]). Worker and program share these words:
//! ```text
//! 0 .. 256      for each pair its place among the queues that the host uses, plus one; 0: not used
//! 256 .. 4352   4096 slots: the flow's tag (16 bits, never 0) | second (8) | pair (8)
//! 4352 .. 4608  for flows without a slot, by eight bits of their number: the place, plus one, or 0
//! 4608          the pairs to which the host delivers, the first ones in its order; 0: to all
//! 4609          the frames that each queue holds; 0: unknown
//! 4610          how often word 4608 was changed
//! ```
//! 1. A flow may have the slot that its number names, or the slot beside it (`slot ^ 1`).
//! 2. Each word is read and written whole, and words are not ordered against each other. If both
//!    sides race, a frame may go to the queue that was right a moment ago.
//! 3. A slot belongs to its flow while the guest sends that flow. A third flow with the same two
//!    slots has none, and the kernel chooses its queue by the flow's number. If flows took slots
//!    from each other, the frames of each would alternate between queues.
//! 4. Only connections have slots. A tunnel, or a series of fragments, can carry several senders on
//!    several pairs, and belongs to no pair.
//!
//! The kernel chooses queues by its own table if it does not allow the program. It also does so
//! once other processes attach queues to the tap: the places in this table are wrong then.

use super::program::{SPREAD_AT, program};
use crate::net::steer::{PAIR_MASK, note_one};
#[cfg(test)]
use crate::net::steer::{slots_of, tag_of};
use crate::sys::bpf::{self, Words};
use crate::sys::tuntap;
use manyring_memory::{GuestSlice, copy_from_slices};
use manyring_wire::net::HEADER_SIZE;
use manyring_wire::net::flow::{FLOW_BYTES, Flow, flow_of};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicBool, Ordering};

/// Queue pairs that the table has places for.
const PAIRS: usize = super::TAP_QUEUE_PAIRS_MAX;
const _: () = assert!(PAIRS == PAIR_MASK as usize + 1, "a slot has eight bits for its pair");
const RECEIVING_AT: usize = SPREAD_AT + PAIRS;
const LENGTH_AT: usize = RECEIVING_AT + 1;
const CHANGES_AT: usize = LENGTH_AT + 1;

/// Returns which of `count` places, 1 or more, has the flows of `index`. With one place more, some
/// flows move to that place, and all others stay.
fn place_of(index: u32, count: u32) -> u32 {
    let joins = |place: &u32| {
        let mixed = (index << 16 | place).wrapping_mul(0x9e37_79b9);
        ((mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) >> 16).is_multiple_of(place + 1)
    };
    (1..count).rev().find(joins).unwrap_or(0)
}

/// The table of a tap.
#[derive(Debug)]
pub struct Flows {
    words: Words,
    /// The secret key of the hash that makes the numbers of this tap's flows.
    key: u64,
    /// The host uses several queues, and chooses among them by this table, so flows must be noted.
    is_shared: AtomicBool,
    map: OwnedFd,
    /// `None`: another process has loaded the program, and this one only notes flows.
    program: Option<OwnedFd>,
}

impl Flows {
    /// A table without flows, and its program. The program keeps the table's memory alive.
    ///
    /// # Errors
    /// `EPERM`: this process may not load programs (`CAP_BPF`). Any other: the kernel has no memory
    /// for the table, or does not know such programs.
    pub(super) fn new() -> Result<Self, Errno> {
        let (words, map) = Words::new(CHANGES_AT + 1)?;
        // The standard library's own seed, which nobody outside can guess.
        let key = RandomState::new().build_hasher().finish();
        let program = Some(bpf::load(&program(map.as_raw_fd(), key))?);
        Ok(Self { words, key, is_shared: AtomicBool::new(false), map, program })
    }

    /// The table of another process, which loads the program. A wrong word in the table can only
    /// send a frame of this tap to another queue of this tap.
    ///
    /// # Errors
    /// `EINVAL`: the descriptor is no such table. Any other: the kernel cannot map it.
    pub(super) fn lent(map: OwnedFd, key: u64) -> Result<Self, Errno> {
        let words = Words::of(&map, CHANGES_AT + 1)?;
        Ok(Self { words, key, is_shared: AtomicBool::new(false), map, program: None })
    }

    /// The place of a pair among the queues that the host uses; the first one's if it has none.
    #[cfg(test)]
    pub(super) fn place_of(&self, pair: usize) -> u32 {
        self.words.as_slice()[pair].load(Ordering::Relaxed).saturating_sub(1)
    }

    pub(super) fn map(&self) -> &OwnedFd {
        &self.map
    }

    pub(super) fn key(&self) -> u64 {
        self.key
    }

    /// Notes whether the host uses several queues: if not, no flows are noted.
    pub(super) fn share(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Returns to how many pairs the host delivers, of those that it uses; `None`: to all.
    #[must_use]
    pub fn receiving(&self) -> Option<usize> {
        let word = self.words.as_slice()[RECEIVING_AT].load(Ordering::Relaxed);
        usize::try_from(word).ok().filter(|pairs| *pairs > 0)
    }

    /// Has the host deliver to the first `pairs` of `order`, 1 or more (`None`: all): the pairs
    /// that it uses, in the order of its queues. With one pair more, flows move to that pair only.
    pub fn deliver(&self, order: &[usize], pairs: Option<usize>) {
        let word = u32::try_from(pairs.unwrap_or(0)).unwrap_or(0);
        let words = self.words.as_slice();
        let is_new = words[RECEIVING_AT].swap(word, Ordering::Relaxed) != word;
        words[CHANGES_AT].fetch_add(is_new.into(), Ordering::Relaxed);
        self.set_queues(order);
    }

    /// Returns the frames that each queue holds (0: unknown), and the number of changes so far.
    #[must_use]
    pub fn length_and_changes(&self) -> [u32; 2] {
        [LENGTH_AT, CHANGES_AT].map(|at| self.words.as_slice()[at].load(Ordering::Relaxed))
    }

    pub(super) fn set_length(&self, frames: u32) {
        self.words.as_slice()[LENGTH_AT].store(frames, Ordering::Relaxed);
    }

    /// Notes which pairs the host uses now, in the order of its queues.
    pub(super) fn set_queues(&self, pairs: &[usize]) {
        let receiving = self.receiving().map(|receiving| receiving.min(pairs.len()).max(1));
        let receiving = receiving.and_then(|receiving| u32::try_from(receiving).ok());
        let mut places = [0; PAIRS];
        for (pair, place) in pairs.iter().zip(0..) {
            if let Some(own) = places.get_mut(*pair) {
                let others = receiving.filter(|receiving| place >= *receiving);
                *own = others.map_or(place, |receiving| place_of(place, receiving)) + 1;
            }
        }
        let words = self.words.as_slice();
        for (word, place) in words.iter().zip(places) {
            word.store(place, Ordering::Relaxed);
        }
        for (word, index) in words[SPREAD_AT..RECEIVING_AT].iter().zip(0..) {
            let place = receiving.map_or(0, |receiving| place_of(index, receiving) + 1);
            word.store(place, Ordering::Relaxed);
        }
        // Forget the flows of pairs that the host does not use: if such a pair is used again, the
        // guest need not send the same flows by it.
        for slot in &words[PAIRS..SPREAD_AT] {
            let [pair, ..] = slot.load(Ordering::Relaxed).to_le_bytes();
            if places[usize::from(pair)] == 0 {
                slot.store(0, Ordering::Relaxed);
            }
        }
        self.share(pairs.len() > 1);
    }

    /// Attaches the program to the tap whose queue is `tap`.
    ///
    /// # Errors
    /// The error of `TUNSETSTEERINGEBPF`.
    pub(super) fn attach(&self, tap: BorrowedFd<'_>) -> Result<(), Errno> {
        let program = self.program.as_ref().ok_or(Errno::INVAL)?;
        tuntap::set_steering(tap, Some(program.as_fd()))
    }

    /// Stops noting flows: the kernel uses its own table from now on.
    pub(super) fn rest(&self) {
        self.share(false);
    }
}

/// Makes the table of the tap whose first queue is `tap`, and attaches its program. `None`: the
/// kernel does not allow the program, and keeps using its own table.
pub(super) fn steer(name: &str, tap: BorrowedFd<'_>) -> Option<Arc<Flows>> {
    let flows = Flows::new().and_then(|flows| {
        flows.attach(tap)?;
        Ok(flows)
    });
    match flows {
        Ok(flows) => return Some(Arc::new(flows)),
        // Before Linux 5.11 also if the limit of locked memory (`RLIMIT_MEMLOCK`) is reached.
        Err(Errno::PERM) => {
            tracing::info!(name, "steer: off (needs CAP_BPF); the host chooses the queues");
        }
        Err(errno) => tracing::warn!(name, %errno, "steer: failed; the host chooses the queues"),
    }
    None
}

/// Notes the flows that one sending half sends.
#[derive(Debug)]
pub(super) struct FlowRecorder {
    flows: Arc<Flows>,
    pair: u8,
    /// The second in which the present burst began; `None`: flows need not be noted.
    second: Option<u8>,
    /// Flows of the present burst that are sent to another pair now than before.
    steered: usize,
}

impl FlowRecorder {
    /// The notes of pair `pair`; `None` if the table has no place for the pair.
    pub(super) fn new(flows: Arc<Flows>, pair: usize) -> Option<Self> {
        Some(Self { flows, pair: u8::try_from(pair).ok()?, second: None, steered: 0 })
    }

    /// Begins a burst: reads the second at which its flows are noted.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.second = self.flows.is_shared.load(Ordering::Relaxed).then(|| {
            // This clock is exact to a few milliseconds, and read without a system call.
            let [second, ..] = clock_gettime(ClockId::MonotonicCoarse).tv_sec.to_le_bytes();
            second
        });
    }

    /// Notes the flow of a frame that is sent and begins with these bytes.
    #[inline]
    pub(super) fn note(&mut self, start: &[u8]) {
        if let Some(second) = self.second
            && let Some(Flow { number, is_connection: true }) = flow_of(start, self.flows.key)
        {
            let slots = &self.flows.words.as_slice()[PAIRS..SPREAD_AT];
            self.steered += usize::from(note_one(slots, number, self.pair, second));
        }
    }

    /// Notes the flow of a frame that is sent and lies in these slices, header included. The first
    /// slice may hold more than the header.
    #[inline]
    pub(super) fn note_slices(&mut self, frame: &[GuestSlice]) {
        if self.second.is_some() {
            let mut start = [0; HEADER_SIZE + FLOW_BYTES];
            let known = copy_from_slices(frame, &mut start);
            self.note(start[..known].get(HEADER_SIZE..).unwrap_or_default());
        }
    }

    /// Ends a burst. Returns how many of its flows had no slot, or belonged to another pair.
    #[inline]
    pub(super) fn end(&mut self) -> usize {
        std::mem::take(&mut self.steered)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::net::steer::{SLOT_SHIFT, SLOTS, TAG_IN_SLOT, TAG_SHIFT};
    use proptest::prelude::*;

    /// A flow of slot 7, told from others by `n`.
    fn flow(n: u64) -> u64 {
        7 << SLOT_SHIFT | n << (TAG_SHIFT + 1)
    }

    #[test]
    fn a_slot_belongs_to_a_flow_until_the_guest_sends_it_no_more() {
        let slots: Vec<_> = (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
        // In each row: the second, the flow, the pair on which it is sent; whether the note counts
        // as new, and the flow and pair that slots 7 and 6 have then.
        for (second, of, pair, is_new, owners) in [
            (250, 0, 3, true, [Some((0, 3)), None]),
            (250, 0, 3, false, [Some((0, 3)), None]),
            (250, 1, 5, true, [Some((0, 3)), Some((1, 5))]),
            (250, 2, 9, false, [Some((0, 3)), Some((1, 5))]),
            (251, 0, 2, true, [Some((0, 2)), Some((1, 5))]),
            (252, 1, 4, true, [Some((0, 2)), Some((1, 4))]),
            (254, 2, 9, false, [Some((0, 2)), Some((1, 4))]),
            (254, 0, 2, false, [Some((0, 2)), Some((1, 4))]),
            // The seconds wrap around to 0.
            (255, 2, 9, false, [Some((0, 2)), Some((1, 4))]),
            (0, 2, 9, true, [Some((0, 2)), Some((2, 9))]),
            (0, 1, 4, false, [Some((0, 2)), Some((2, 9))]),
            (2, 1, 4, true, [Some((1, 4)), Some((2, 9))]),
            // The flow of the first slot is idle, but this flow keeps its own slot.
            (3, 2, 9, false, [Some((1, 4)), Some((2, 9))]),
            (6, 2, 9, false, [Some((1, 4)), Some((2, 9))]),
            (6, 0, 1, true, [Some((0, 1)), Some((2, 9))]),
        ] {
            let what = format!("second {second}, flow {of}, pair {pair}");
            assert_eq!(note_one(&slots, flow(of), pair, second), is_new, "{what}");
            let seen = [7, 6].map(|at: usize| slots[at].load(Ordering::Relaxed));
            let seen = seen.map(|word| (word != 0).then_some((word >> TAG_IN_SLOT, word & 0xff)));
            let owners = owners.map(|owner| owner.map(|(n, pair)| (tag_of(flow(n)), pair)));
            assert_eq!(seen, owners, "{what}");
        }
        let used = slots.iter().filter(|slot| slot.load(Ordering::Relaxed) != 0).count();
        assert_eq!(used, 2);
    }

    #[test]
    fn a_flow_of_a_tag_of_zeroes_is_told_from_no_flow() {
        let slots: Vec<_> = (0..SLOTS).map(|_| AtomicU32::new(0)).collect();
        assert_ne!(tag_of(0), 0);
        assert!(note_one(&slots, 0, 0, 0));
        assert!(!note_one(&slots, 0, 0, 0));
        assert!(note_one(&slots, u64::MAX, 255, 255));
        assert_ne!(slots[SLOTS - 1].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_place_more_takes_its_part_from_the_others_and_moves_nothing_else() {
        for count in 1..17 {
            let mut shares = [0; 17];
            for index in 0..256 {
                let (before, now) = (place_of(index, count), place_of(index, count + 1));
                assert!(before < count && (now == before || now == count), "{index} of {count}");
                shares[usize::try_from(before).unwrap()] += 1;
            }
            let shares = &shares[..usize::try_from(count).unwrap()];
            let even = 256 / count;
            assert!(shares.iter().all(|share| *share * 3 > even), "{shares:?}");
            assert!(shares.iter().all(|share| *share < even * 2), "{shares:?}");
        }
    }

    /// The queue that the program chooses for this frame, and the one that the table means.
    fn both((flows, program): (&Flows, &OwnedFd), frame: &[u8]) -> (u32, u32) {
        let said = bpf::run(program.as_fd(), frame).unwrap();
        let Some(Flow { number, .. }) = flow_of(frame, flows.key) else { return (said, 0) };
        let words = flows.words.as_slice();
        let (first, other) = slots_of(&words[PAIRS..SPREAD_AT], number).unwrap();
        let slots = [first, other].map(|slot| slot.load(Ordering::Relaxed));
        let known = slots.iter().find(|word| *word >> TAG_IN_SLOT == tag_of(number));
        let at = |at: usize| words[at].load(Ordering::Relaxed).checked_sub(1);
        let place = known.and_then(|word| at(usize::try_from(word & 0xff).unwrap()));
        let high = u32::try_from(number >> 48).unwrap();
        let spread = at(SPREAD_AT + usize::try_from(high & 0xff).unwrap());
        (said, place.or(spread).unwrap_or(high))
    }

    /// Ethernet frames with tags, PPPoE headers and IP packets, some with wrong fields.
    pub(in crate::net::tap) fn frames() -> impl Strategy<Value = Vec<u8>> {
        let kind = prop::sample::select(vec![0x0800u16, 0x86dd, 0x0806, 0x21, 0x57]);
        let tag = prop::sample::select(vec![0x8100u16, 0x88a8, 0x8864]);
        let first = prop::sample::select(vec![0x45u8, 0x45, 0x46, 0x4f, 0x40, 0x60]);
        let protocol = prop::sample::select(vec![6u8, 17, 132, 1, 58, 0, 43, 60, 44]);
        let extensions = prop::collection::vec((protocol.clone(), 0u8..4), 0..4);
        let fragment = prop::sample::select(vec![0u16, 0x4000, 0x2000, 0x00b9]);
        let bytes = prop::collection::vec(any::<u8>(), 0..130);
        let tags = prop::collection::vec(tag, 0..4);
        (kind, tags, first, (protocol, extensions), fragment, bytes).prop_map(
            |(kind, tags, first, (protocol, extensions), fragment, mut bytes)| {
                if let Some(ip) = bytes.get_mut(..10) {
                    ip[0] = first;
                    if [0x86dd, 0x57].contains(&kind) {
                        ip[6] = protocol;
                        let mut at = 40;
                        for (next, units) in extensions {
                            let Some(header) = bytes.get_mut(at..at + 2) else { break };
                            header.copy_from_slice(&[next, units]);
                            at += (usize::from(units) + 1) * 8;
                        }
                    } else {
                        ip[6..8].copy_from_slice(&fragment.to_be_bytes());
                        ip[9] = protocol;
                    }
                }
                let mut frame = vec![2; 12];
                for tag in tags {
                    frame.extend(tag.to_be_bytes());
                    let more = if tag == 0x8864 { 6 } else { 2 };
                    frame.extend([0x11, 0, 0, 5, 0, 60].iter().take(more));
                }
                frame.extend(kind.to_be_bytes());
                frame.extend(bytes);
                frame
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Needs root: the kernel runs the program.
        #[test]
        fn the_host_comes_to_what_we_do(
            frame in frames(),
            pair in 0u8..5,
            at in 0usize..5,
            is_second: bool,
            receiving in 0usize..6,
        ) {
            let flows = Flows::new().expect("these tests need root");
            flows.deliver(&[1, 3, 0], Some(receiving).filter(|pairs| *pairs > 0));
            let (said, expected) = both((&flows, flows.program.as_ref().unwrap()), &frame);
            prop_assert_eq!(said, expected, "before it is sent");
            let flow = flow_of(&frame, flows.key);
            let is_noted = flow.is_some_and(|flow| flow.is_connection);
            let mut steering = FlowRecorder::new(Arc::new(flows), pair.into()).unwrap();
            steering.begin();
            if let (true, Some(flow)) = (is_second, flow) {
                // Another flow has the first of its slots.
                let slots = &steering.flows.words.as_slice()[PAIRS..SPREAD_AT];
                let others = 1 << (TAG_SHIFT + 3);
                note_one(slots, flow.number ^ others, 4, steering.second.unwrap());
            }
            steering.note(&frame);
            prop_assert_eq!(steering.end(), usize::from(is_noted));
            let program = steering.flows.program.as_ref().unwrap();
            let (said, expected) = both((&steering.flows, program), &frame);
            prop_assert_eq!(said, expected, "after it was sent");
            let place = [Some(2), Some(0), None, Some(1), None][usize::from(pair)];
            let pairs = if receiving == 0 { 3 } else { u32::try_from(receiving.min(3)).unwrap() };
            if let (true, Some(place)) = (is_noted, place.filter(|place| *place < pairs)) {
                prop_assert_eq!(said, place);
            }
            prop_assert!(said < pairs || receiving == 0 || flow.is_none(), "{said} of {pairs}");
            // A table in which every fifth word is wrong.
            let words = steering.flows.words.as_slice();
            words.iter().skip(at).step_by(5).for_each(|word| word.store(!0, Ordering::Relaxed));
            let program = steering.flows.program.as_ref().unwrap();
            prop_assert!(bpf::run(program.as_fd(), &frame).is_ok());
        }
    }
}
