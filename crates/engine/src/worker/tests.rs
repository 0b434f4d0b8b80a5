//! A worker with a queue, without its thread.

use super::*;
use crate::policy::polling::Polling;
use crate::policy::share::ALONE_NS;
use crate::run::still::Still;
use std::sync::atomic::Ordering;

/// A worker that never spins, waits with epoll and has no queue yet.
fn new_worker() -> Worker {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let lot = Lot { told: Arc::default(), stays: true };
    let law = Law::new(Polling::NEVER, 0, 0);
    Worker::new(false, law, mailbox, Arc::default(), lot).unwrap()
}

#[test]
fn a_call_that_is_held_back_goes_before_a_sleep_that_would_end_too_late() {
    for (delay_ns, goes) in [(39_000, true), (1_000_000_000, false)] {
        let mut worker = new_worker();
        let mailbox = worker.mailbox.clone();
        worker.now_ns = worker.wait.now_ns();
        let queue = Still { due_ns: Some(worker.now_ns + delay_ns), ..Still::default() };
        let is_sent = queue.is_sent.clone();
        worker.start(QueueId(1), Box::new(queue), None);
        worker.turn_hot();
        worker.settle_hot();
        assert_eq!((worker.hot.len(), worker.timed.len()), (0, 1), "{delay_ns}");
        // Ends the sleep at once.
        mailbox.send(Command::Quit);
        worker.sleep();
        assert_eq!(is_sent.load(Ordering::Relaxed), goes, "{delay_ns}");
        assert_eq!(worker.timed.is_empty(), goes, "{delay_ns}");
    }
}

#[test]
fn a_queue_is_told_that_its_guest_is_alone_while_no_other_guest_comes() {
    let mut worker = new_worker();
    let (queue, visitor) = (Still::default(), Still::default());
    let (is_alone, guest) = (queue.is_alone.clone(), queue.guest.clone());
    let is_alone_at = |worker: &mut Worker, now_ns: u64| {
        worker.now_ns = now_ns;
        worker.turn_hot();
        is_alone.load(Ordering::Relaxed)
    };
    let second = 1_000_000_000;
    worker.start(QueueId(1), Box::new(queue), None);
    worker.start(QueueId(2), Box::new(Still { guest, ..Still::default() }), None);
    assert!(is_alone_at(&mut worker, second), "both queues are its own");
    worker.start(QueueId(3), Box::new(visitor), None);
    assert!(!is_alone_at(&mut worker, 2 * second));
    // The visitor has nothing more to do.
    let slot = worker.by_id[&QueueId(3)];
    worker.hot.retain(|hot| *hot != slot);
    assert!(!is_alone_at(&mut worker, 2 * second + ALONE_NS - 1));
    assert!(is_alone_at(&mut worker, 2 * second + ALONE_NS));
}

#[test]
fn a_queue_pays_nothing_for_the_one_that_had_its_slot_before() {
    let mut worker = new_worker();
    let guest = Still::default().guest;
    let queue = || Still { works: true, guest: guest.clone(), ..Still::default() };
    let (former, stays, next) = (queue(), queue(), queue());
    let paid = [&former, &stays, &next].map(|queue| queue.stats.clone());
    let at = |worker: &mut Worker, now_ns: u64| {
        worker.now_ns = now_ns;
        worker.turn_hot();
    };
    worker.start(QueueId(1), Box::new(former), None);
    worker.start(QueueId(2), Box::new(stays), None);
    at(&mut worker, 1_000_000);
    at(&mut worker, 1_000_400);
    // It leaves in the round in which it has worked, and another one comes to its slot.
    let slot = worker.by_id[&QueueId(1)];
    worker.end(slot, Ending::Stop(tokio::sync::oneshot::channel().0));
    worker.finish_drained();
    worker.start(QueueId(3), Box::new(next), None);
    assert_eq!(worker.by_id[&QueueId(3)], slot);
    at(&mut worker, 1_001_000);
    assert_eq!(paid.each_ref().map(|stats| stats.busy_ns.value()), [200, 500, 0]);
    at(&mut worker, 1_002_000);
    assert_eq!(paid.map(|stats| stats.busy_ns.value()), [200, 1000, 500]);
}
