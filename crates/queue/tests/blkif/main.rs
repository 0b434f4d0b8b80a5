//! A blkif ring: front half against back half with a model as oracle (`model`), its borders, and
//! what a hostile front writes (`hostile`), and back halves that are killed (`takeover`).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

mod hostile;
mod model;
#[cfg(debug_assertions)]
mod takeover;

use manyring_memory::{GuestMemory, Mapping, Words};
use manyring_queue::blkif::{BackRing, FrontRing, Requests, RingConfig};
use manyring_queue::{BATCH_CHAINS, Base, Chain, QueueError, Ring, RingAddresses};
use manyring_wire::xen::blkif::{
    Abi, BlkifStatus, ENTRY_WORDS, OP_FLUSH_DISKCACHE, OP_READ, OP_WRITE, PAGE_SIZE, REQ_EVENT,
    REQ_PROD, RING_ENTRIES, RING_PAGE_ORDER_MAX, RSP_EVENT, RSP_PROD, RawRequest, Response,
    Segment, ring_bytes,
};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

/// A ring in pages of its own, behind one page of something else.
struct Rig {
    memory: Arc<GuestMemory>,
    config: RingConfig,
    words: Words,
}

impl Rig {
    fn new(abi: Abi, order: u32) -> Self {
        let size = (PAGE_SIZE + ring_bytes(order)) as u64;
        let mapping = Arc::new(Mapping::anonymous(size).unwrap());
        let memory = Arc::new(GuestMemory::of_mapping(mapping));
        let config = RingConfig { abi, order, addr: PAGE_SIZE as u64 };
        let words = memory.words(config.addr, ring_bytes(order), 4096).unwrap();
        Self { memory, config, words }
    }

    fn halves(&self, base: u32) -> (FrontRing, BackRing) {
        let front = FrontRing::new(self.config, Base::from_bits(base), &self.memory).unwrap();
        (front, self.back())
    }

    fn back(&self) -> BackRing {
        BackRing::new(self.config, self.memory.clone()).unwrap()
    }
}

/// The `id`th request: each is of another kind and length than the one before.
fn request(abi: Abi, id: u64) -> RawRequest {
    let grefs: Vec<u32> = (0..8).map(|n| u32::try_from(id % 1000).unwrap() * 10 + n).collect();
    let segments: Vec<Segment> = grefs.iter().map(|gref| Segment::page(*gref)).collect();
    let sector = id.wrapping_mul(3);
    match id % 4 {
        0 => RawRequest::data(abi, OP_READ, id, sector, &segments[..1]),
        1 => RawRequest::data(abi, OP_WRITE, id, sector, &segments),
        2 => RawRequest::data(abi, OP_FLUSH_DISKCACHE, id, sector, &[]),
        _ => RawRequest::indirect(abi, OP_READ, id, sector, (600, &grefs)),
    }
}

/// A ring of 32 whose requests are all taken.
fn full_ring() -> (Rig, FrontRing, BackRing, Requests) {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(0);
    let mut requests = Requests::new();
    for id in 0..32 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 32);
    (rig, front, back, requests)
}

fn response(id: u64) -> Response {
    let status = if id.is_multiple_of(3) { BlkifStatus::Error } else { BlkifStatus::Okay };
    Response { id, operation: u8::try_from(id % 7).unwrap(), status }
}

/// Pops and answers everything; returns the ids.
fn serve(back: &mut BackRing, requests: &mut Requests) -> Vec<u64> {
    let popped = back.pop_batch(requests, BATCH_CHAINS);
    let mut ids = Vec::new();
    for index in 0..popped {
        let (chain, request) = requests.take(index).unwrap();
        ids.push(request.id());
        let response = response(request.id());
        back.push_response(chain, response);
    }
    back.publish();
    ids
}

#[test]
fn full_ring_of_every_shape_goes_round_and_its_counts_wrap() {
    for abi in Abi::ALL {
        for order in 0..=RING_PAGE_ORDER_MAX {
            let rig = Rig::new(abi, order);
            let size = u32::from(abi.ring_size(order));
            let (mut front, mut back) = rig.halves(0_u32.wrapping_sub(3 * size + 5));
            let mut requests = Requests::new();
            let mut answered = 0;
            for round in 0..u64::from(8 * size) {
                assert!(front.add(&request(abi, round)));
                if front.free_count() == 0 {
                    assert!(!front.add(&request(abi, round)), "a full ring takes a request");
                    front.publish();
                    while !serve(&mut back, &mut requests).is_empty() {}
                    while let Some(taken) = front.take_response() {
                        assert_eq!(taken, response(answered));
                        answered += 1;
                    }
                }
            }
            assert_eq!(answered, u64::from(8 * size));
            assert_eq!(back.base(), Base::from_bits((5 * size).wrapping_sub(5)));
            assert_eq!(back.fault(), None);
        }
    }
}

#[test]
fn entry_that_crosses_the_border_of_two_pages_arrives_whole() {
    for (abi, crossing) in [(Abi::X86_64, 72_u64), (Abi::X86_32, 37)] {
        let offset = RING_ENTRIES + usize::try_from(crossing).unwrap() * abi.layout().entry_size;
        let end = offset + abi.layout().entry_size;
        assert!(offset / PAGE_SIZE < (end - 1) / PAGE_SIZE, "{abi:?} crosses no border there");
        let rig = Rig::new(abi, 2);
        let (mut front, mut back) = rig.halves(0);
        let mut requests = Requests::new();
        let whole = |id| {
            let segments = [Segment::page(u32::try_from(id).unwrap()); 11];
            RawRequest::data(abi, OP_WRITE, id, id, &segments)
        };
        for id in 0..=crossing {
            assert!(front.add(&whole(id)));
        }
        front.publish();
        let mut next = 0;
        while back.pop_batch(&mut requests, BATCH_CHAINS) > 0 {
            for index in 0..requests.len() {
                let (chain, copied) = requests.take(index).unwrap();
                assert_eq!(*copied, whole(next));
                next += 1;
                back.push_response(chain, response(copied.id()));
            }
        }
        assert_eq!(next, crossing + 1);
        back.publish();
    }
}

#[test]
fn oldest_request_in_flight_keeps_its_slot_while_its_place_is_used_again() {
    let (_rig, mut front, mut back, mut requests) = full_ring();
    let (oldest, _) = requests.take(0).unwrap();
    for index in 1..32 {
        let (chain, copied) = requests.take(index).unwrap();
        let response = response(copied.id());
        back.push_response(chain, response);
    }
    back.publish();
    for _ in 1..32 {
        front.take_response().unwrap();
    }
    for id in 32..63 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    assert!(!front.add(&request(Abi::X86_64, 63)), "the place of an unanswered request is free");
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 31);
    for index in 0..31 {
        let (chain, copied) = requests.take(index).unwrap();
        assert_ne!(chain.slot(), oldest.slot());
        let response = response(copied.id());
        back.push_response(chain, response);
    }
    back.push_response(oldest, response(0));
    assert_eq!(back.publish(), 32);
    let taken: Vec<u64> = std::iter::from_fn(|| front.take_response()).map(|r| r.id).collect();
    assert_eq!(taken, (32..63).chain([0]).collect::<Vec<_>>());
}

#[test]
fn back_that_begins_owes_its_front_no_notification() {
    for requests_before in [0, 3] {
        let rig = Rig::new(Abi::X86_64, 0);
        let (mut front, mut back) = rig.halves(5);
        for id in 0..requests_before {
            assert!(front.add(&request(Abi::X86_64, id)));
        }
        front.publish();
        // The one who takes a ring over notifies; a worker that begins to run it does not.
        assert!(!Ring::begin(&mut back), "with {requests_before} requests");
        assert!(!back.needs_notification());
        let served = serve(&mut back, &mut Requests::new());
        assert_eq!(served.len() as u64, requests_before);
        assert_eq!(back.needs_notification(), requests_before > 0);
    }
}

#[test]
fn request_that_changes_after_it_was_taken_stays_as_it_was() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(0);
    let mut requests = Requests::new();
    assert!(front.add(&request(Abi::X86_64, 1)));
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, 1), 1);
    rig.words.store_u32s(RING_ENTRIES, &[u32::MAX; ENTRY_WORDS]);
    let (chain, copied) = requests.take(0).unwrap();
    assert_eq!(*copied, request(Abi::X86_64, 1));
    back.discard(chain);
}

#[test]
fn armed_back_that_becomes_busy_by_itself_takes_its_event_back() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(7);
    let mut requests = Requests::new();
    back.disable_notifications();
    assert!(front.add(&request(Abi::X86_64, 0)));
    assert!(!front.publish(), "an unwanted kick");
    assert_eq!(serve(&mut back, &mut requests), [0]);
    assert!(!back.enable_notifications());
    assert!(front.add(&request(Abi::X86_64, 1)));
    assert!(front.publish(), "a lost kick");
    assert!(back.enable_notifications(), "it goes to sleep beside a request");
    assert_eq!(serve(&mut back, &mut requests), [1]);
}

#[test]
fn back_that_starts_behind_a_former_one_goes_on_at_the_first_unanswered_request() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(u32::MAX - 1);
    let mut requests = Requests::new();
    for id in 0..6 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, 2), 2);
    for index in 0..2 {
        let (chain, _) = requests.take(index).unwrap();
        back.push_response(chain, response(index as u64));
    }
    back.publish();
    drop(back);
    let mut back = rig.back();
    assert_eq!(serve(&mut back, &mut requests), [2, 3, 4, 5]);
    let taken: Vec<u64> = std::iter::from_fn(|| front.take_response()).map(|r| r.id).collect();
    assert_eq!(taken, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn ring_that_is_too_large_or_not_mapped_or_between_pages_is_refused() {
    let rig = Rig::new(Abi::X86_64, 1);
    let refused = |config| BackRing::new(config, rig.memory.clone()).unwrap_err();
    let order = RING_PAGE_ORDER_MAX + 1;
    assert_eq!(refused(RingConfig { order, ..rig.config }), QueueError::PageOrder { order });
    let order = u32::MAX;
    assert_eq!(refused(RingConfig { order, ..rig.config }), QueueError::PageOrder { order });
    assert!(matches!(refused(RingConfig { order: 2, ..rig.config }), QueueError::Ring(_)));
    assert!(matches!(refused(RingConfig { addr: 64, ..rig.config }), QueueError::Ring(_)));
    let mut back = rig.back();
    let addresses = RingAddresses { descriptor: 0, available: 0, used: 0 };
    assert_eq!(back.relocate(addresses, rig.memory.clone()), Err(QueueError::Granted));
}

#[test]
fn new_ring_has_its_counts_at_the_start_and_its_events_one_ahead() {
    let rig = Rig::new(Abi::X86_32, 0);
    rig.words.store_u32s(0, &[9; 16]);
    rig.halves(0);
    let counts = [REQ_PROD, REQ_EVENT, RSP_PROD, RSP_EVENT].map(|at| rig.words.load_u32(at));
    assert_eq!(counts, [0, 1, 0, 1]);
    let mut rest = [1; 12];
    rig.words.load_u32s(16, &mut rest);
    assert_eq!(rest, [0; 12]);
}

#[test]
fn requests_are_lent_until_they_are_taken_and_those_left_are_taken_the_last_first() {
    let (_rig, _front, mut back, mut requests) = full_ring();
    assert_eq!((requests.len(), requests.is_empty()), (32, false));
    let ids = |requests: &Requests| [0, 31].map(|at| requests.peek(at).map(RawRequest::id));
    assert_eq!(ids(&requests), [Some(0), Some(31)]);
    assert!(requests.peek(32).is_none() && requests.take(32).is_none());
    let (first, _) = requests.take(0).unwrap();
    assert_eq!(ids(&requests), [None, Some(31)]);
    assert!(requests.take(0).is_none());
    let left: Vec<Chain> = requests.take_all().collect();
    let slots: Vec<u16> = left.iter().map(Chain::slot).collect();
    assert_eq!(slots, (1..32).rev().collect::<Vec<_>>());
    assert!(requests.take_all().next().is_none());
    [first].into_iter().chain(left).for_each(|chain| back.discard(chain));
    assert_eq!(back.in_flight(), 0);
}

/// A ring of Xen says nothing of these, and a driver may always be asked.
#[test]
fn ring_that_cannot_tell_wants_calls_and_has_nothing_that_waits() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (_front, mut back) = rig.halves(0);
    assert!(back.wants_call_within(0) && back.wants_call_within(1));
    assert_eq!((back.waiting(), Ring::owed(&back), Ring::owes(&back)), (0, 0, false));
    assert!(!back.put_back_owed() && !back.leave_aside() && !back.is_faulted());
    back.latch_fault(QueueError::Granted);
    assert!(back.is_faulted());
}
