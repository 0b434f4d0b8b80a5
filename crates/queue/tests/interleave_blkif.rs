//! Every interleaving of both halves of a blkif ring, on loom's words: what is published is seen
//! whole, and no notification is lost. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p manyring-queue --release --test interleave_blkif`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(loom)]

use loom::sync::Arc as LoomArc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use manyring_memory::{GuestMemory, Words};
use manyring_queue::blkif::{BackRing, FrontRing, Requests, RingConfig};
use manyring_queue::{BATCH_CHAINS, Base, Ring};
use manyring_wire::xen::blkif::{
    Abi, BlkifStatus, OP_FLUSH_DISKCACHE, RING_ENTRIES, RawRequest, Response,
};
use std::sync::Arc;

/// Counts begin here and wrap after the first request, which has the last place of the ring; the
/// second has the first.
const BASE: u32 = u32::MAX;
/// A guest of 32 bits on x86: its requests are the shortest.
const ABI: Abi = Abi::X86_32;

/// Runs `test` under every interleaving with up to `preemptions` switches nobody asked for.
fn explore(preemptions: usize, test: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(test);
}

/// Both halves of a ring.
fn halves() -> (FrontRing, BackRing) {
    let config = RingConfig { abi: ABI, order: 0, addr: 0 };
    let words = Words::zeroed_wide(RING_ENTRIES + 32 * ABI.layout().entry_size);
    let front = FrontRing::with_words(config, Base::from_bits(BASE), words.clone()).unwrap();
    let memory = Arc::new(GuestMemory::default());
    (front, BackRing::with_words(config, words, memory).unwrap())
}

fn request(id: u64) -> RawRequest {
    RawRequest::data(ABI, OP_FLUSH_DISKCACHE, id + 7, id + 9, &[])
}

fn response(id: u64) -> Response {
    Response { id: id + 7, operation: OP_FLUSH_DISKCACHE, status: BlkifStatus::Unsupported }
}

/// Pops what there is, checks that it is what the front added next, and answers it.
fn serve(back: &mut BackRing, requests: &mut Requests, seen: &mut u64) -> usize {
    let popped = back.pop_batch(requests, BATCH_CHAINS);
    assert_eq!(back.fault(), None);
    for index in 0..popped {
        let (chain, copied) = requests.take(index).unwrap();
        assert_eq!(*copied, request(*seen));
        back.push_response(chain, response(*seen));
        *seen += 1;
    }
    popped
}

#[test]
fn a_popped_request_is_the_one_that_was_written_and_its_response_comes_back_whole() {
    explore(5, || {
        let (mut front, mut back) = halves();
        let guest = thread::spawn(move || {
            for n in 0..2 {
                assert!(front.add(&request(n)));
                front.publish();
            }
            let mut next = 0;
            while next < 2 {
                match front.take_response() {
                    Some(taken) => {
                        assert_eq!(taken, response(next));
                        next += 1;
                    }
                    None => thread::yield_now(),
                }
            }
        });
        let (mut requests, mut seen) = (Requests::new(), 0);
        while seen < 2 {
            if serve(&mut back, &mut requests, &mut seen) == 0 {
                thread::yield_now();
            }
            back.publish();
        }
        guest.join().unwrap();
    });
}

#[test]
fn a_back_that_asked_for_notifications_and_sleeps_is_kicked() {
    explore(6, || {
        let (mut front, mut back) = halves();
        let kicked = LoomArc::new(AtomicBool::new(false));
        let kick = kicked.clone();
        let guest = thread::spawn(move || {
            for n in 0..2 {
                assert!(front.add(&request(n)));
                if front.publish() {
                    kick.store(true, Ordering::Relaxed);
                }
            }
        });
        let (mut requests, mut seen) = (Requests::new(), 0);
        back.disable_notifications();
        serve(&mut back, &mut requests, &mut seen);
        // A kick that came before is drained: only a later one wakes.
        kicked.store(false, Ordering::Relaxed);
        let work = back.enable_notifications();
        guest.join().unwrap();
        let kicked = kicked.load(Ordering::Relaxed);
        assert!(seen == 2 || work || kicked, "a lost kick");
    });
}

#[test]
fn a_front_that_asked_for_notifications_and_sleeps_is_called() {
    explore(6, || {
        let (mut front, mut back) = halves();
        for n in 0..2 {
            assert!(front.add(&request(n)));
        }
        front.publish();
        let called = LoomArc::new(AtomicBool::new(false));
        let call = called.clone();
        let host_side = thread::spawn(move || {
            let mut requests = Requests::new();
            assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 2);
            for index in 0..2 {
                let (chain, _) = requests.take(index).unwrap();
                back.push_response(chain, response(index as u64));
                back.publish();
                if back.needs_notification() {
                    call.store(true, Ordering::Relaxed);
                }
            }
        });
        front.disable_notifications();
        let mut taken = 0;
        while front.take_response().is_some() {
            taken += 1;
        }
        let work = front.enable_notifications();
        host_side.join().unwrap();
        let called = called.load(Ordering::Relaxed);
        assert!(taken == 2 || work || called, "a lost call");
    });
}
