//! Front half against back half with a naive model as oracle, in any order of calls, in every ABI
//! and size, with counts that wrap.

use super::*;

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
        // Requests that came after the last look at the count may come with the next batch.
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
