//! A blkif ring: front half against back half with a naive model as oracle, in any order of calls,
//! in every ABI and size, with counts that wrap; then the borders and what a hostile front writes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(not(loom))]

use manyring_memory::{GuestMemory, Mapping, Words};
use manyring_queue::blkif::{BackRing, FrontRing, Requests, RingConfig};
use manyring_queue::{BATCH_CHAINS, Base, Chain, QueueError, Ring, RingAddresses};
use manyring_wire::xen::blkif::{
    Abi, ENTRY_WORDS, OP_FLUSH_DISKCACHE, OP_READ, OP_WRITE, PAGE_SIZE, REQ_EVENT, REQ_PROD,
    RING_ENTRIES, RING_PAGE_ORDER_MAX, RSP_EVENT, RSP_PROD, RawRequest, Response, Segment, Status,
    ring_bytes,
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

fn response(id: u64) -> Response {
    let status = if id.is_multiple_of(3) { Status::Error } else { Status::Okay };
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

/// One call on one of the halves.
#[derive(Clone, Debug)]
enum Step {
    Add,
    Publish,
    Pop { max: usize },
    PutBack,
    Push { which: usize },
    PublishResponses,
    Take,
    ArmBack,
    DisarmBack,
    ArmFront,
    DisarmFront,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        7 => Just(Step::Add),
        3 => Just(Step::Publish),
        3 => prop_oneof![Just(BATCH_CHAINS), 0..4usize].prop_map(|max| Step::Pop { max }),
        1 => Just(Step::PutBack),
        6 => any::<usize>().prop_map(|which| Step::Push { which }),
        3 => Just(Step::PublishResponses),
        6 => Just(Step::Take),
        1 => Just(Step::ArmBack),
        1 => Just(Step::DisarmBack),
        1 => Just(Step::ArmFront),
        1 => Just(Step::DisarmFront),
    ]
}

/// Whether a half would be told of the next news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Armed {
    Yes,
    No,
    Unsaid,
}

/// Both halves, and beside them queues of ids: no counts, no memory orders.
struct Pair {
    abi: Abi,
    front: FrontRing,
    back: BackRing,
    requests: Requests,
    next_id: u64,
    added: VecDeque<u64>,
    available: VecDeque<u64>,
    /// Oldest first.
    in_flight: Vec<(u64, Chain)>,
    /// How many of the newest of them can be put back: nothing younger was answered.
    newest: usize,
    pushed: VecDeque<u64>,
    answered: VecDeque<u64>,
    back_armed: Armed,
    front_armed: Armed,
}

impl Pair {
    fn new(rig: &Rig, base: u32) -> Self {
        let (front, back) = rig.halves(base);
        Self {
            abi: rig.config.abi,
            front,
            back,
            requests: Requests::new(),
            next_id: u64::from(base) << 7,
            added: VecDeque::new(),
            available: VecDeque::new(),
            in_flight: Vec::new(),
            newest: 0,
            pushed: VecDeque::new(),
            answered: VecDeque::new(),
            // A new ring has both events at its first request and response.
            back_armed: Armed::Yes,
            front_armed: Armed::Yes,
        }
    }

    fn outstanding(&self) -> usize {
        let queues = [&self.added, &self.available, &self.pushed, &self.answered];
        queues.iter().map(|queue| queue.len()).sum::<usize>() + self.in_flight.len()
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Add => self.add(),
            Step::Publish => self.publish(),
            Step::Pop { max } => self.pop(*max),
            Step::PutBack => self.put_back(),
            Step::Push { which } => self.push(*which),
            Step::PublishResponses => self.publish_responses(),
            Step::Take => self.take(),
            Step::ArmBack => {
                let work = self.back.enable_notifications();
                assert_eq!(work, !self.available.is_empty());
                if !work {
                    self.back_armed = Armed::Yes;
                }
            }
            Step::DisarmBack => {
                self.back.disable_notifications();
                if self.available.is_empty() && self.back_armed == Armed::Yes {
                    self.back_armed = Armed::No;
                }
            }
            Step::ArmFront => {
                let work = self.front.enable_notifications();
                assert_eq!(work, !self.answered.is_empty());
                self.front_armed = if work { Armed::Unsaid } else { Armed::Yes };
            }
            Step::DisarmFront => {
                self.front.disable_notifications();
                self.front_armed = Armed::No;
            }
        }
        assert_eq!(usize::from(self.back.in_flight()), self.in_flight.len());
        assert_eq!(
            usize::from(self.front.free_count()),
            usize::from(self.front.size()) - self.outstanding()
        );
        assert_eq!(self.back.fault(), None);
    }

    fn add(&mut self) {
        let room = self.outstanding() < usize::from(self.front.size());
        assert_eq!(self.front.add(&request(self.abi, self.next_id)), room);
        if room {
            self.added.push_back(self.next_id);
            self.next_id += 1;
        }
    }

    fn publish(&mut self) {
        let wanted = self.front.publish();
        if self.added.is_empty() {
            assert!(!wanted, "a kick for nothing");
            return;
        }
        match self.back_armed {
            Armed::Yes => assert!(wanted, "a lost kick"),
            Armed::No => assert!(!wanted, "an unwanted kick"),
            Armed::Unsaid => {}
        }
        self.available.append(&mut self.added);
        if self.back_armed == Armed::Yes {
            self.back_armed = Armed::Unsaid;
        }
    }

    fn pop(&mut self, max: usize) {
        let popped = self.back.pop_batch(&mut self.requests, max);
        // What came after the last look at the count may come with the next batch.
        let most = self.available.len().min(BATCH_CHAINS).min(max);
        assert!(popped <= most && (popped == 0) == (most == 0), "{popped} of {most}");
        for index in 0..popped {
            let id = self.available.pop_front().unwrap();
            let (chain, copied) = self.requests.take(index).unwrap();
            assert_eq!(*copied, request(self.abi, id));
            let slot = chain.slot();
            assert!(slot < self.back.size());
            let is_other = |(_, other): &(u64, Chain)| other.slot() != slot;
            assert!(self.in_flight.iter().all(is_other), "two requests have slot {slot}");
            self.in_flight.push((id, chain));
            self.newest += 1;
        }
        assert!(self.requests.take(popped).is_none());
    }

    fn put_back(&mut self) {
        if self.newest == 0 {
            return;
        }
        self.newest -= 1;
        let (id, chain) = self.in_flight.pop().unwrap();
        self.back.unpop(chain);
        self.available.push_front(id);
    }

    fn push(&mut self, which: usize) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = which % self.in_flight.len();
        let (id, chain) = self.in_flight.remove(at);
        self.newest = self.newest.min(self.in_flight.len() - at);
        self.back.push_response(chain, response(id));
        self.pushed.push_back(id);
    }

    fn publish_responses(&mut self) {
        assert_eq!(usize::from(self.back.publish()), self.pushed.len());
        let wanted = self.back.needs_notification();
        if self.pushed.is_empty() {
            assert!(!wanted, "a call for nothing");
            return;
        }
        self.answered.append(&mut self.pushed);
        match self.front_armed {
            Armed::Yes => assert!(wanted, "a lost call"),
            Armed::No => assert!(!wanted, "an unwanted call"),
            Armed::Unsaid => {}
        }
        if self.front_armed == Armed::Yes {
            self.front_armed = Armed::Unsaid;
        }
    }

    fn take(&mut self) {
        let expected = self.answered.pop_front();
        assert_eq!(self.front.take_response(), expected.map(response));
        if expected.is_some() && self.front_armed == Armed::No {
            self.front_armed = Armed::Unsaid;
        }
    }

    /// Gives up every request, as a ring must before it is dropped.
    fn finish(&mut self) {
        for (_, chain) in self.in_flight.drain(..) {
            self.back.discard(chain);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn both_halves_agree_with_the_model_in_any_order(
        abi in prop::sample::select(Abi::ALL.to_vec()),
        order in 0..=RING_PAGE_ORDER_MAX,
        base in prop_oneof![Just(0_u32), u32::MAX - 40..=u32::MAX, any::<u32>()],
        steps in prop::collection::vec(step(), 1..500),
    ) {
        let mut pair = Pair::new(&Rig::new(abi, order), base);
        for step in &steps {
            pair.run(step);
        }
        pair.finish();
    }
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
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(0);
    let mut requests = Requests::new();
    for id in 0..32 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 32);
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
fn back_that_resumes_answers_what_the_former_one_had_taken_and_tells_a_front_that_waits() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(u32::MAX - 1);
    let mut requests = Requests::new();
    for id in 0..6 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, 4), 4);
    // The third is answered first; its response lies where the first request lay. The back ends
    // before it has told the front.
    let chains: Vec<Chain> = (0..4).map(|index| requests.take(index).unwrap().0).collect();
    for (id, chain) in (0..).zip(chains) {
        if id == 2 { back.push_response(chain, response(2)) } else { back.discard(chain) }
    }
    back.publish();
    let base = back.base();
    drop(back);
    let (mut back, chains) = BackRing::resume(rig.config, base, rig.memory.clone()).unwrap();
    assert_eq!((chains.len(), back.in_flight(), back.base()), (3, 3, base));
    assert!(back.needs_notification(), "a front that waits hears of nothing");
    assert_eq!(serve(&mut back, &mut requests), [4, 5]);
    for (id, chain) in [0, 1, 3].into_iter().zip(chains) {
        back.push_response(chain, response(id));
    }
    back.publish();
    let taken: Vec<u64> = std::iter::from_fn(|| front.take_response()).map(|r| r.id).collect();
    assert_eq!(taken, [2, 4, 5, 0, 1, 3]);
}

#[test]
fn base_that_no_ring_can_have_is_refused() {
    let rig = Rig::new(Abi::X86_64, 0);
    let resume = |base| {
        rig.halves(100);
        BackRing::resume(rig.config, Base::from_bits(base), rig.memory.clone()).map(
            |(ring, chains)| {
                let mut ring = ring;
                chains.into_iter().for_each(|chain| ring.discard(chain));
            },
        )
    };
    assert_eq!(resume(132), Ok(()));
    assert_eq!(resume(133).unwrap_err(), QueueError::Taken { taken: 33, size: 32 });
    assert_eq!(resume(99).unwrap_err(), QueueError::Taken { taken: u32::MAX, size: 32 });
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

/// Writes `req_prod` into a ring of 32 of which ten requests were taken and four answered, and
/// returns what comes of it.
fn after_req_prod(base: u32, ahead: u32) -> Option<QueueError> {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(base);
    let mut requests = Requests::new();
    for id in 0..10 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, 10), 10);
    let mut held = Vec::new();
    for index in 0..10 {
        let (chain, _) = requests.take(index).unwrap();
        if index < 4 { back.push_response(chain, response(0)) } else { held.push(chain) }
    }
    back.publish();
    rig.words.store_u32(REQ_PROD, base.wrapping_add(10).wrapping_add(ahead));
    let popped = back.pop_batch(&mut requests, BATCH_CHAINS);
    for index in 0..popped {
        held.push(requests.take(index).unwrap().0);
    }
    let fault = back.fault();
    if fault.is_some() {
        assert_eq!(popped, 0);
        // The front puts everything right again: a broken ring stays broken.
        rig.words.store_u32(REQ_PROD, base.wrapping_add(11));
        assert!(!back.has_available() && !back.enable_notifications());
        assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 0);
        assert_eq!(back.fault(), fault);
    }
    held.into_iter().for_each(|chain| back.discard(chain));
    fault
}

#[test]
fn req_prod_that_jumps_ahead_or_back_breaks_the_ring() {
    for base in [0, 5, u32::MAX - 12, u32::MAX] {
        // Six are taken and not answered: there is room for 26 more.
        assert_eq!(after_req_prod(base, 26), None);
        for ahead in [27, 32, 33, 0x7fff_ffff, 0x8000_0000, u32::MAX - 9, u32::MAX] {
            let (req_cons, rsp_prod) = (base.wrapping_add(10), base.wrapping_add(4));
            let req_prod = req_cons.wrapping_add(ahead);
            let fault = QueueError::ReqProd { req_prod, req_cons, rsp_prod, size: 32 };
            assert_eq!(after_req_prod(base, ahead), Some(fault));
        }
    }
    let fault = after_req_prod(0, 90).unwrap().to_string();
    let text = "req_prod is 100 in a ring of 32: 10 requests were taken, 4 answered";
    assert_eq!(fault, text);
}

#[test]
fn requests_that_were_given_up_are_not_room_for_new_ones() {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(0);
    let mut requests = Requests::new();
    for id in 0..32 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 32);
    for index in 0..32 {
        let (chain, _) = requests.take(index).unwrap();
        back.discard(chain);
    }
    rig.words.store_u32(REQ_PROD, 33);
    assert!(!back.has_available());
    assert!(matches!(back.fault(), Some(QueueError::ReqProd { req_prod: 33, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// A front that writes anything anywhere: the back takes no more than the ring holds, and its
    /// tokens stay different.
    #[test]
    fn scribbled_ring_is_served_or_broken_and_never_more(
        abi in prop::sample::select(Abi::ALL.to_vec()),
        base in prop_oneof![Just(0_u32), Just(u32::MAX - 3)],
        rounds in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<u32>(), 0..40_u32, 0..4_usize), 1..60
        ),
    ) {
        let rig = Rig::new(abi, 0);
        let (_, mut back) = rig.halves(base);
        let (mut requests, mut held) = (Requests::new(), VecDeque::new());
        let mut prod = base;
        for (place, value, ahead, answers) in rounds {
            rig.words.store_u32(4 * place.index(PAGE_SIZE / 4), value);
            // Counts that move by small steps break the ring late.
            prod = prod.wrapping_add(ahead);
            rig.words.store_u32(REQ_PROD, prod);
            let popped = back.pop_batch(&mut requests, BATCH_CHAINS);
            prop_assert!(popped + held.len() <= usize::from(back.size()));
            for index in 0..popped {
                let (chain, copied) = requests.take(index).unwrap();
                prop_assert!(copied.words().len() <= ENTRY_WORDS);
                held.push_back(chain);
            }
            let mut slots: Vec<u16> = held.iter().map(Chain::slot).collect();
            slots.sort_unstable();
            slots.dedup();
            prop_assert_eq!(slots.len(), held.len());
            for chain in held.drain(..answers.min(held.len())) {
                back.push_response(chain, response(0));
            }
            back.publish();
            back.needs_notification();
            back.enable_notifications();
        }
        held.into_iter().for_each(|chain| back.discard(chain));
    }
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
