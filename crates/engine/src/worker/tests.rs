//! A worker with a queue, without its thread.

mod owed;

use super::*;
use crate::policy::polling::Polling;
use crate::policy::share::ALONE_NS;
use crate::running::orders::Order;
use crate::running::run::still::Still;
use crate::worker::mailbox::Command;
use std::sync::atomic::Ordering;

fn post() -> Arc<Post> {
    Post::new(crate::watch::Serves::Device(String::new()))
}

/// A worker that never spins, waits with epoll and has no queue yet.
fn new_worker() -> Worker {
    worker(false)
}

fn worker(uring: bool) -> Worker {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let lot = WorkerContext {
        reports: Arc::default(),
        stays: true,
        is_irreplaceable: false,
        post: post(),
    };
    let policy = Policy::new(Polling::NEVER, 0, 0);
    Worker::new(uring, policy, mailbox, Arc::default(), lot).unwrap()
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
fn a_guest_that_has_left_is_nobody_beside_whom_the_other_must_be_short() {
    let mut worker = new_worker();
    let (visitor, stays) = (Still::default(), Still { works: true, ..Still::default() });
    let is_alone = stays.is_alone.clone();
    worker.start(QueueId(1), Box::new(visitor), None);
    worker.start(QueueId(2), Box::new(stays), None);
    worker.now_ns = 1_000_000_000;
    worker.turn_hot();
    worker.end(worker.by_id[&QueueId(1)], DrainAction::Stop(tokio::sync::oneshot::channel().0));
    worker.finish_drained();
    // The other one always has work, so that no queue settles.
    worker.turn_hot();
    worker.now_ns += ALONE_NS;
    worker.turn_hot();
    assert!(is_alone.load(Ordering::Relaxed));
}

#[test]
fn the_submission_is_charged_to_the_guests_that_have_placed_something() {
    let mut worker = worker(true);
    if !worker.has_ring() {
        println!("io_uring is refused here");
        return;
    }
    let queue = |places| Still { works: true, places, ..Still::default() };
    let queues = [queue(10), queue(0), queue(1)];
    let stats = queues.each_ref().map(|queue| queue.stats.clone());
    for (id, queue) in queues.into_iter().enumerate() {
        worker.start(QueueId(id as u64), Box::new(queue), None);
    }
    worker.now_ns = worker.wait.now_ns();
    let began_ns = worker.now_ns;
    worker.settle_bill();
    worker.turn_hot();
    let before = stats.each_ref().map(|stats| stats.busy_ns.value());
    worker.submit();
    let paid = [0, 1, 2].map(|at| stats[at].busy_ns.value() - before[at]);
    assert_eq!(paid[1], 0);
    assert!(paid[2] > 0, "{paid:?}");
    // A part of a nanosecond is nobody's.
    assert!(paid[0].abs_diff(paid[2] * 10) <= 10, "{paid:?}");
    // The bill of the whole round does not charge it again.
    worker.now_ns = worker.wait.now_ns();
    worker.settle_bill();
    let all: u64 = stats.iter().map(|stats| stats.busy_ns.value()).sum();
    assert!(all <= worker.now_ns - began_ns, "{all} of {}", worker.now_ns - began_ns);
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
        worker.settle_bill();
        worker.turn_hot();
    };
    worker.start(QueueId(1), Box::new(former), None);
    worker.start(QueueId(2), Box::new(stays), None);
    at(&mut worker, 1_000_000);
    at(&mut worker, 1_000_400);
    // It leaves in the round in which it has worked, and another one comes to its slot.
    let slot = worker.by_id[&QueueId(1)];
    worker.end(slot, DrainAction::Stop(tokio::sync::oneshot::channel().0));
    worker.finish_drained();
    worker.start(QueueId(3), Box::new(next), None);
    assert_eq!(worker.by_id[&QueueId(3)], slot);
    at(&mut worker, 1_001_000);
    assert_eq!(paid.each_ref().map(|stats| stats.busy_ns.value()), [200, 500, 0]);
    at(&mut worker, 1_002_000);
    assert_eq!(paid.map(|stats| stats.busy_ns.value()), [200, 1000, 500]);
}

#[test]
fn orders_that_would_end_a_burst_wait_for_its_end_and_later_ones_behind_them() {
    let mut worker = new_worker();
    let queue = Still { works: true, ..Still::default() };
    let burst = queue.burst.clone();
    worker.start(QueueId(1), Box::new(queue), None);
    let give = |worker: &mut Worker, is_enabled: bool| {
        let (fence, answer) = tokio::sync::oneshot::channel();
        worker.mailbox.send(Command::Order(QueueId(1), Order::Enable(is_enabled, fence)));
        worker.obey();
        answer
    };
    burst.store(3, Ordering::Relaxed);
    assert!(give(&mut worker, true).try_recv().is_ok(), "the burst goes on behind this one");
    let (mut disabled, mut enabled) = (give(&mut worker, false), give(&mut worker, true));
    for _ in 0..3 {
        worker.turn_hot();
        assert!(disabled.try_recv().is_err() && enabled.try_recv().is_err());
    }
    worker.turn_hot();
    assert!(disabled.try_recv().is_ok() && enabled.try_recv().is_ok());
    assert!(give(&mut worker, false).try_recv().is_ok(), "no burst");
    // One that leaves takes the orders with it that it did not obey.
    burst.store(9, Ordering::Relaxed);
    let mut late = give(&mut worker, false);
    let slot = worker.by_id[&QueueId(1)];
    worker.end(slot, DrainAction::Stop(tokio::sync::oneshot::channel().0));
    worker.finish_drained();
    worker.turn_hot();
    assert_eq!(late.try_recv(), Err(tokio::sync::oneshot::error::TryRecvError::Closed));
}

#[test]
fn an_order_that_was_put_off_is_obeyed_although_its_queue_has_settled() {
    let mut worker = new_worker();
    let queue = Still { is_hot: false, ..Still::default() };
    let burst = queue.burst.clone();
    worker.start(QueueId(1), Box::new(queue), None);
    burst.store(1, Ordering::Relaxed);
    let (reply, mut base) = tokio::sync::oneshot::channel();
    worker.mailbox.send(Command::Order(QueueId(1), Order::Stop(reply)));
    worker.obey();
    assert!(!worker.put_off.is_empty(), "it would end the burst");
    // The port takes nothing more: the queue gives the burst up, and waits for the port alone.
    worker.turn_hot();
    let slot = worker.by_id[&QueueId(1)];
    worker.hot.retain(|hot| *hot != slot);
    worker.slots[slot].is_listed = false;
    for _ in 0..2 {
        worker.turn_hot();
        worker.finish_drained();
    }
    assert!(base.try_recv().is_ok());
    assert!(worker.put_off.is_empty());
}

#[test]
fn an_order_is_charged_to_its_queue_and_its_guest_waits_for_it() {
    let mut worker = new_worker();
    let (long, took_ns) = (Duration::from_millis(5), 5_000_000);
    let queue = Still { works: true, heeds_for: long, ..Still::default() };
    let (burst, stats, guest) = (queue.burst.clone(), queue.stats.clone(), queue.guest.clone());
    worker.start(QueueId(1), Box::new(queue), None);
    worker.start(QueueId(2), Box::new(Still { works: true, ..Still::default() }), None);
    let order = |id, order| {
        worker.mailbox.send(Command::Order(QueueId(id), order));
    };
    order(1, Order::Fence(tokio::sync::oneshot::channel().0));
    // A turn of the first queue counts one off.
    burst.store(1, Ordering::Relaxed);
    worker.now_ns = worker.wait.now_ns();
    worker.obey();
    assert!(stats.busy_ns.value() >= took_ns);
    worker.turn_hot();
    assert_eq!(burst.load(Ordering::Relaxed), 1, "the other guest is behind");
    // It stops its only queue, and starts another one: it has not waited long enough.
    let slot = worker.by_id[&QueueId(1)];
    worker.end(slot, DrainAction::Stop(tokio::sync::oneshot::channel().0));
    worker.finish_drained();
    let next = |guest| Still { works: true, guest, ..Still::default() };
    let (stranger, again) = (next(Still::default().guest), next(guest));
    let turns = [&stranger, &again].map(|queue| queue.burst.clone());
    turns.iter().for_each(|turns| turns.store(1, Ordering::Relaxed));
    worker.start(QueueId(3), Box::new(stranger), None);
    worker.start(QueueId(4), Box::new(again), None);
    let left = |worker: &mut Worker| {
        worker.turn_hot();
        turns.each_ref().map(|turns| turns.load(Ordering::Relaxed))
    };
    assert_eq!(left(&mut worker), [0, 1], "a lead is its guest's, not that of its number");
    // The guest is away until no lead can be left.
    let slot = worker.by_id[&QueueId(4)];
    worker.hot.retain(|hot| *hot != slot);
    worker.slots[slot].is_listed = false;
    worker.turn_hot();
    worker.now_ns += crate::policy::share::LEAD_NS_MAX;
    worker.make_listed(slot);
    assert_eq!(left(&mut worker), [0, 0]);
}

#[test]
fn a_guest_whose_queue_leaves_slowly_waits_for_that_with_its_other_queue() {
    for (leaves_for, left) in [(Duration::from_millis(5), [1, 0]), (Duration::ZERO, [0, 0])] {
        let mut worker = new_worker();
        let queue = Still { leaves_for, ..Still::default() };
        let works = |guest| Still { works: true, guest, ..Still::default() };
        let (other, stranger) = (works(queue.guest.clone()), works(Still::default().guest));
        let turns = [&other, &stranger].map(|queue| queue.burst.clone());
        worker.start(QueueId(1), Box::new(queue), None);
        worker.start(QueueId(2), Box::new(other), None);
        worker.start(QueueId(3), Box::new(stranger), None);
        let slot = worker.by_id[&QueueId(1)];
        worker.end(slot, DrainAction::Stop(tokio::sync::oneshot::channel().0));
        worker.finish_drained();
        turns.iter().for_each(|turns| turns.store(1, Ordering::Relaxed));
        worker.now_ns = worker.wait.now_ns();
        worker.turn_hot();
        assert_eq!(turns.map(|turns| turns.load(Ordering::Relaxed)), left, "{leaves_for:?}");
    }
}

#[test]
fn orders_of_a_guest_that_is_ahead_wait_while_another_guest_has_work() {
    let mut worker = new_worker();
    let queue = Still { works: true, heeds_for: Duration::from_millis(1), ..Still::default() };
    worker.start(QueueId(1), Box::new(queue), None);
    let give = |worker: &mut Worker| {
        let (fence, answer) = tokio::sync::oneshot::channel();
        worker.mailbox.send(Command::Order(QueueId(1), Order::Enable(true, fence)));
        worker.obey();
        answer
    };
    let rounds = |worker: &mut Worker, count: usize| {
        for _ in 0..count {
            worker.now_ns = worker.wait.now_ns();
            worker.turn_hot();
        }
    };
    rounds(&mut worker, 1);
    assert!((0..3).all(|_| give(&mut worker).try_recv().is_ok()), "nobody else is there");
    worker.start(QueueId(2), Box::new(Still { works: true, ..Still::default() }), None);
    rounds(&mut worker, 1);
    let (mut first, mut second) = (give(&mut worker), give(&mut worker));
    rounds(&mut worker, 9);
    assert!(first.try_recv().is_err() && second.try_recv().is_err(), "the other is behind");
    // The other one has nothing more to do: nobody waits for it.
    let slot = worker.by_id[&QueueId(2)];
    worker.hot.retain(|hot| *hot != slot);
    worker.slots[slot].is_listed = false;
    rounds(&mut worker, 1);
    assert!(first.try_recv().is_ok() && second.try_recv().is_ok());
    assert!(worker.put_off.is_empty());
}

#[test]
fn an_order_of_a_guest_that_always_has_work_is_obeyed_before_its_next_turn() {
    let mut worker = new_worker();
    let busy = || Still { works: true, turns_for: Duration::from_millis(1), ..Still::default() };
    let (one, other) = (busy(), busy());
    let guest = one.guest.clone();
    worker.start(QueueId(1), Box::new(one), None);
    worker.start(QueueId(2), Box::new(other), None);
    worker.start(QueueId(3), Box::new(Still { guest, ..busy() }), None);
    let round = |worker: &mut Worker| {
        worker.now_ns = worker.wait.now_ns();
        worker.obey();
        worker.turn_hot();
    };
    // Its turns put the guest ahead in each round in which it has any.
    round(&mut worker);
    let (fence, mut answer) = tokio::sync::oneshot::channel();
    worker.mailbox.send(Command::Order(QueueId(1), Order::Enable(true, fence)));
    for _ in 0..8 {
        round(&mut worker);
    }
    assert!(answer.try_recv().is_ok());
}
