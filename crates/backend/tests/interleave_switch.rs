//! Every interleaving of a bell and its owner, and of the giver and the taker of a hand-over, on
//! loom's words: no wake-up is lost, and each thing arrives once, in order, or is taken back. Run
//! with `RUSTFLAGS="--cfg loom" cargo test -p manyring-backend --release --test interleave_switch`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use manyring_backend::net::Alarm;
use manyring_backend::net::switch::{SpscQueue, TakeResult};

/// Runs `test` under every interleaving with up to `preemptions` switches nobody asked for.
fn explore(preemptions: usize, test: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    builder.check(test);
}

/// Takes what has arrived. Every thing is larger than the one before.
fn take(handoff: &SpscQueue<usize>, last: &mut usize) {
    loop {
        match handoff.take() {
            TakeResult::Thing(thing) => {
                handoff.finish();
                assert!(thing > *last, "{thing} after {last}");
                *last = thing;
            }
            TakeResult::Busy => thread::yield_now(),
            TakeResult::Nothing => return,
        }
    }
}

#[test]
fn work_that_is_left_while_its_owner_falls_asleep_wakes_it() {
    explore(4, || {
        let alarm = Arc::new(Alarm::new());
        let (work, wakes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let poster = thread::spawn({
            let (alarm, work, wakes) = (alarm.clone(), work.clone(), wakes.clone());
            move || {
                for _ in 0..2 {
                    work.fetch_add(1, Ordering::Relaxed);
                    if alarm.post(1) {
                        wakes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        // The owner looks until it may sleep.
        let mut seen = 0;
        let sleeps = loop {
            if alarm.arm() {
                break true;
            }
            alarm.take(1);
            seen = work.load(Ordering::Relaxed);
            if seen == 2 {
                break false;
            }
        };
        poster.join().unwrap();
        let is_woken = wakes.load(Ordering::Relaxed) > 0;
        assert!(!sleeps || seen == 2 || is_woken, "asleep with work left");
        assert!(seen == 2 || alarm.pending() != 0, "and the work is still announced");
    });
}

#[test]
fn things_that_are_added_to_arrive_once_in_order() {
    explore(3, || {
        let handoff = Arc::new(SpscQueue::new());
        let giver = thread::spawn({
            let handoff = handoff.clone();
            move || {
                handoff.put(1).unwrap();
                // As a burst that is added to: what was taken back goes on as something newer.
                if let Some(thing) = handoff.take_last() {
                    assert_eq!(thing, 1);
                }
                handoff.put(2).unwrap();
                handoff.put(3).unwrap();
            }
        });
        let mut last = 0;
        take(&handoff, &mut last);
        giver.join().unwrap();
        take(&handoff, &mut last);
        assert_eq!(last, 3);
    });
}

#[test]
fn what_is_recalled_does_not_arrive_and_what_is_put_back_is_not_lost() {
    explore(3, || {
        let handoff = Arc::new(SpscQueue::new());
        handoff.put(1).unwrap();
        handoff.put(2).unwrap();
        let giver = thread::spawn({
            let handoff = handoff.clone();
            move || {
                let mut recalled = Vec::new();
                handoff.recall(|thing| recalled.push(thing));
                recalled
            }
        });
        let mut kept = Vec::new();
        if let TakeResult::Thing(thing) = handoff.take() {
            // A receiver with few buffers puts the rest back, unless its sender is just there.
            if let Err(thing) = handoff.put_back(thing) {
                handoff.finish();
                kept.push(thing);
            }
        }
        let recalled = giver.join().unwrap();
        let mut last = 0;
        loop {
            match handoff.take() {
                TakeResult::Thing(thing) => {
                    handoff.finish();
                    assert!(thing > last);
                    last = thing;
                    kept.push(thing);
                }
                TakeResult::Busy => unreachable!("nobody else is there"),
                TakeResult::Nothing => break,
            }
        }
        let mut all = [recalled, kept].concat();
        all.sort_unstable();
        assert_eq!(all, [1, 2], "each is somewhere, once");
    });
}
