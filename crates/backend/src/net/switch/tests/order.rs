//! Two senders, two receivers, and everything that can happen to them, in any order.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Step {
    /// Sender, receiver, frames, bytes of each.
    Send(usize, usize, usize, usize),
    /// Receiver, frames at most.
    Take(usize, usize),
    Reap(usize),
    Recall(usize),
    Later(u64),
    /// The receiver's guest leaves and comes back.
    Again(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..2usize, 0..2usize, 1..40usize, prop_oneof![Just(60usize), 100..300usize])
            .prop_map(|(from, to, count, len)| Step::Send(from, to, count, len)),
        5 => (0..2usize, 0..100usize).prop_map(|(who, max)| Step::Take(who, max)),
        3 => (0..2usize).prop_map(Step::Reap),
        1 => (0..2usize).prop_map(Step::Recall),
        2 => prop_oneof![Just(1u64), Just(25), Just(600)].prop_map(Step::Later),
        1 => (0..2usize).prop_map(Step::Again),
    ]
}

proptest! {
    /// From one sender to one receiver nothing comes twice, and nothing overtakes; every frame that
    /// is lent comes back once, and all of them when they are recalled.
    #[test]
    fn frames_arrive_once_in_order_and_each_that_is_lent_comes_back_once(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let world = World::new();
        let mut senders = [world.guest(1), world.guest(2)];
        let mut receivers = [world.guest(11), world.guest(12)];
        for guest in &mut receivers {
            guest.send_all(&[frame([0xff; 6], mac(guest.n), 60, 0)]);
        }
        let mut sent = [0u32; 2];
        let mut seen = HashMap::<(usize, [u8; 6]), u32>::new();
        receivers.iter_mut().for_each(|guest| drop(guest.receive()));
        for step in steps {
            match step {
                Step::Send(from, to, count, len) => {
                    let (own, other) = (mac(senders[from].n), mac(receivers[to].n));
                    let frames: Vec<_> = (1..=u32::try_from(count).unwrap())
                        .map(|n| frame(other, own, len, sent[from] + n))
                        .collect();
                    sent[from] += u32::try_from(count).unwrap();
                    senders[from].send_all(&frames);
                }
                Step::Take(who, max) => {
                    for bytes in receivers[who].take(max) {
                        let from: [u8; 6] = bytes[6..12].try_into().unwrap();
                        let number = number(&bytes);
                        let last = seen.insert((who, from), number).unwrap_or(0);
                        prop_assert!(number > last, "{last}, then {number}");
                    }
                }
                Step::Reap(who) => drop(senders[who].reap()),
                Step::Recall(who) => {
                    senders[who].recall();
                    prop_assert!(senders[who].lent.is_empty());
                }
                Step::Later(ms) => world.later(ms),
                Step::Again(who) => {
                    receivers[who].rx = None;
                    receivers[who].rx = Some(receivers[who].port.open_rx(0).unwrap());
                }
            }
        }
        for guest in &mut senders {
            guest.recall();
            prop_assert!(guest.lent.is_empty(), "{:?}", guest.lent);
        }
    }
}
