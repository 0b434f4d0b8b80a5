//! The decorator by itself, before a port that keeps what it is given.

use super::*;
use crate::net::null::NullPort;
use manyring_memory::{Mapping, copy_from_slices};
use manyring_wire::net::HEADER_SIZE;

/// Keeps what it is given.
#[derive(Clone, Debug, Default)]
struct Keeper(Arc<Mutex<Vec<u8>>>);

impl PortTx for Keeper {
    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        for index in first..frames.count() {
            let mut bytes = [0; HEADER_SIZE + 1];
            assert_eq!(copy_from_slices(frames.slices(index), &mut bytes), bytes.len());
            self.0.lock().unwrap().push(bytes[HEADER_SIZE]);
        }
        Sent { taken: frames.count() - first, ..Sent::default() }
    }

    fn readiness(&self) -> Readiness<'_> {
        Readiness::Never
    }
}

struct Case {
    memory: Arc<Mapping>,
    frames: Frames,
    tx: LateTx,
    passed: Arc<Mutex<Vec<u8>>>,
    grip: Grip,
}

/// 64 frames of one byte, their number, which is their token too; all are taken.
fn case(calls_max: u32) -> (Case, u64) {
    let memory = Arc::new(Mapping::anonymous(4096).unwrap());
    let places: Vec<_> = (0..64).map(|n| (n, 1)).collect();
    let slices = SliceList::of_mapping(&memory, &places).unwrap();
    let mut frames = Frames::new().unwrap();
    for n in 0..64u8 {
        let at = usize::from(n);
        memory.slice(at, 1).unwrap().write_byte(n);
        frames.push_as(n.into(), &RawNetHeader::default(), slices.pieces(at..at + 1), 0, 1);
    }
    let options = LateOptions { seed: 5, calls_max, tells: false };
    let port = LatePort::new(Arc::new(NullPort::new(1, 0)), options);
    let (keeper, grip) = (Keeper::default(), port.grip());
    let passed = keeper.0.clone();
    let mut tx = port.decorator.half(Box::new(keeper)).unwrap();
    let (mut first, mut later) = (0, 0);
    while first < 64 {
        let sent = tx.send(&frames, first);
        assert!(sent.taken > 0 && sent.stop.is_none());
        (first, later) = (first + sent.taken, later | sent.later);
    }
    (Case { memory, frames, tx, passed, grip }, later)
}

fn tokens(returned: &[Returned], outcome: Outcome) -> Vec<Token> {
    assert!(returned.iter().all(|r| r.outcome == outcome), "{returned:?}");
    returned.iter().map(|r| r.token).collect()
}

#[test]
fn frames_pass_later_and_out_of_order_with_the_bytes_that_are_there_then() {
    let (mut case, later) = case(3);
    let at_once = case.passed.lock().unwrap().len();
    assert_eq!((at_once, case.grip.count()), (64 - later.count_ones() as usize, 64 - at_once));
    assert!((1..32).contains(&at_once), "{at_once}");
    // The burst is over, and the driver changes a byte although it has not got it back.
    case.frames.release();
    let changed = (0..64).find(|n| later >> n & 1 == 1).unwrap();
    case.memory.slice(changed, 1).unwrap().write_byte(0xee);
    let mut back = Vec::new();
    for _ in 0..4 {
        case.tx.reap(&mut back);
    }
    let order = tokens(&back, Outcome::Passed);
    assert!(!order.is_sorted(), "in order");
    let bit = |bits: u64, token: &Token| bits | 1 << token;
    assert_eq!((order.iter().fold(0, bit), order.len()), (later, 64 - at_once));
    let passed = case.passed.lock().unwrap();
    let expect = |token: &Token| if usize::from(*token) == changed { 0xee } else { *token };
    let expected: Vec<_> = order.iter().map(expect).map(|n| n.to_le_bytes()[0]).collect();
    assert_eq!(passed[at_once..], expected);
}

#[test]
fn what_is_held_stays_until_it_is_let_go_or_taken_back() {
    for has_begun in [false, true] {
        let (mut case, later) = case(0);
        case.grip.hold(has_begun);
        let (mut back, count) = (Vec::new(), later.count_ones() as usize);
        (0..100).for_each(|_| case.tx.reap(&mut back));
        assert!(back.is_empty());
        let left = case.tx.recall(&mut back);
        assert_eq!((left, case.grip.count()), if has_begun { (count, count) } else { (0, 0) });
        assert_eq!(tokens(&back, Outcome::Recalled).len(), count - left);
        back.clear();
        case.grip.let_go();
        case.tx.reap(&mut back);
        assert_eq!(tokens(&back, Outcome::Passed).len(), left);
    }
}

#[test]
fn what_somebody_has_begun_with_is_not_taken_back() {
    let (mut case, later) = case(1);
    let mut back = Vec::new();
    let left = case.tx.recall(&mut back);
    let recalled = tokens(&back, Outcome::Recalled).len();
    assert!(left > 0 && recalled > 0, "{left} {recalled}");
    back.clear();
    case.tx.reap(&mut back);
    assert_eq!(tokens(&back, Outcome::Passed).len(), left);
    assert_eq!(left + recalled, later.count_ones() as usize);
}
