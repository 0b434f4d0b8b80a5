//! A worker's reports to the balance, and its end, without its thread.

use super::super::WorkerContext;
use super::*;
use crate::policy::polling::{Policy, Polling};
use crate::running::orders::QueueId;
use crate::running::run::still::Still;
use crate::stats::WorkerStats;
use crate::worker::mailbox::Lease;
use crate::worker::mailbox::Mailbox;
use std::pin::pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

fn post() -> Arc<crate::watch::Post> {
    crate::watch::Post::new(crate::watch::Serves::Device(String::new()))
}

/// A worker without queues, whose time has come.
fn empty(mailbox: &Arc<Mailbox>, stays: bool) -> Worker {
    let lot =
        WorkerContext { reports: Arc::default(), stays, is_irreplaceable: false, post: post() };
    let (policy, stats) = (Policy::new(Polling::NEVER, 0, 0), Arc::default());
    let mut worker = Worker::new(false, policy, mailbox.clone(), stats, lot).unwrap();
    worker.rest.leaves_at_ns = Some(worker.now_ns);
    worker
}

/// Whether the balance has been told since it last asked that a worker is saturated.
fn is_saturation_told(worker: &Worker) -> bool {
    let said = pin!(worker.lot.reports.hear()).poll(&mut Context::from_waker(Waker::noop()));
    said == Poll::Ready(true)
}

#[test]
fn a_worker_is_saturated_if_it_serves_several_busy_queues_for_long_without_a_sleep() {
    for (queues, awake_ns, is_told) in [
        (1, SATURATED_NS * 100, false),
        (2, SATURATED_NS, false),
        (2, SATURATED_NS + 1, true),
        (3, SATURATED_NS * 100, true),
    ] {
        let mut worker = empty(&Arc::new(Mailbox::new().unwrap()), true);
        (0..queues).for_each(|id| worker.start(QueueId(id), Box::<Still>::default(), None));
        worker.now_ns = worker.awake_since_ns + awake_ns;
        worker.tell_if_saturated();
        assert_eq!(is_saturation_told(&worker), is_told, "{queues} queues, {awake_ns} ns");
    }
}

#[test]
fn a_worker_that_stays_saturated_says_so_once_in_each_such_time() {
    let mut worker = empty(&Arc::new(Mailbox::new().unwrap()), true);
    (0..2).for_each(|id| worker.start(QueueId(id), Box::<Still>::default(), None));
    let began_ns = worker.awake_since_ns;
    let told = [1, 2, 52, 53, 103, 105].map(|ms| {
        worker.now_ns = began_ns + SATURATED_NS + ms * 1_000_000;
        worker.tell_if_saturated();
        is_saturation_told(&worker)
    });
    assert_eq!(told, [true, false, true, false, true, false]);
}

#[test]
fn a_worker_without_queues_ends_when_its_time_has_come() {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    empty(&mailbox, false).run();
    assert!(mailbox.is_closed() && Lease::take(&mailbox).is_none());
}

#[test]
fn a_worker_that_begins_again_goes_on_with_its_counts_and_has_not_slept_yet() {
    let (mailbox, stats) = (Arc::new(Mailbox::new().unwrap()), Arc::<WorkerStats>::default());
    stats.slept_ns.set(1 << 40);
    stats.policy.trials.set(7);
    stats.policy.spins_hit.set(9);
    stats.policy.gap_ns.set(11);
    let lot = WorkerContext {
        reports: Arc::default(),
        stays: true,
        is_irreplaceable: false,
        post: post(),
    };
    let policy = Policy::new(Polling::NEVER, 0, 0);
    let worker = Worker::new(false, policy, mailbox, stats.clone(), lot).unwrap();
    assert_eq!(worker.rest.slept_ns, 1 << 40, "it would seem to have slept all the time");
    stats.policy.publish(&worker.policy.numbers());
    assert_eq!((stats.policy.trials.value(), stats.policy.spins_hit.value()), (7, 9));
    assert_eq!(stats.policy.gap_ns.value(), 0, "that was no count");
}

#[test]
fn a_worker_to_which_a_queue_is_on_its_way_waits_for_as_long_again() {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let _lease = Lease::take(&mailbox).unwrap();
    let mut worker = empty(&mailbox, false);
    worker.sleep();
    assert!(!worker.quit && !mailbox.is_closed());
    assert!(worker.leaves_at_ns().is_some_and(|at_ns| at_ns > worker.now_ns));
}

#[test]
fn the_first_worker_has_no_such_time() {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    assert_eq!(empty(&mailbox, true).leaves_at_ns(), None);
}

/// A worker that had a queue, and has it no more.
fn emptied(mailbox: &Arc<Mailbox>, stays: bool) -> Worker {
    let lot =
        WorkerContext { reports: Arc::default(), stays, is_irreplaceable: false, post: post() };
    let (policy, stats) = (Policy::new(Polling::NEVER, 0, 0), Arc::default());
    let mut worker = Worker::new(true, policy, mailbox.clone(), stats, lot).unwrap();
    assert_eq!(worker.rest.looks_at_ns, None, "it has submitted nothing yet");
    worker.start(QueueId(1), Box::<Still>::default(), None);
    worker.release(0);
    worker
}

/// Threads that are called as those of the kernel are, for the ring of the calling thread. They end
/// with what is returned.
fn kernel_threads(count: usize) -> Sender<()> {
    let (sender, receiver) = channel();
    let receiver = Arc::new(Mutex::new(receiver));
    for _ in 0..count {
        let receiver = receiver.clone();
        let wait = move || receiver.lock().unwrap().recv().unwrap_or_default();
        let name = format!("iou-wrk-{}", own_id());
        std::thread::Builder::new().name(name).spawn(wait).unwrap();
    }
    // A thread gives itself its name.
    while ring_threads(own_id()) < count {
        std::thread::yield_now();
    }
    sender
}

#[test]
fn a_first_worker_without_queues_ends_if_the_kernel_keeps_threads_that_it_does_not_need() {
    for (count, ends) in [(0, false), (2, false), (3, true)] {
        // Each on a thread of its own, after which the kernel's are named.
        let test = move || {
            let mailbox = Arc::new(Mailbox::new().unwrap());
            let mut worker = emptied(&mailbox, true);
            let _kept = kernel_threads(count);
            let at_ns = worker.leaves_at_ns().unwrap();
            assert!(at_ns <= worker.wait.now_ns() + LOOK_NS);
            worker.now_ns = at_ns;
            worker.tell_if_resting();
            assert_eq!((worker.quit, mailbox.is_closed()), (ends, ends), "{count}");
            assert!(ends || worker.leaves_at_ns().is_none(), "it looks once");
        };
        std::thread::Builder::new().spawn(test).unwrap().join().unwrap();
    }
}

#[test]
fn a_worker_to_which_a_queue_is_on_its_way_looks_again_later() {
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let mut worker = emptied(&mailbox, true);
    let _kept = kernel_threads(3);
    let lease = Lease::take(&mailbox).unwrap();
    worker.now_ns = worker.leaves_at_ns().unwrap();
    worker.tell_if_resting();
    assert!(!worker.quit && worker.leaves_at_ns() == Some(worker.now_ns + LOOK_NS));
    lease.start(QueueId(2), Box::<Still>::default(), None);
    worker.obey();
    assert_eq!(worker.leaves_at_ns(), None, "it serves");
}
