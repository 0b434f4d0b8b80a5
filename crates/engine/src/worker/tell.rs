//! What a worker tells the balance of itself, and its end when it has no queues.

use super::Worker;

/// A worker that has not slept for this long, with several hot queues, says so.
const SATURATED_NS: u64 = 50_000_000;
/// A worker that slept so much of the time since it last looked back says so.
const RESTING_PERCENT: u64 = 75;
/// A worker that has had no queue for so long ends.
const LEAVE_NS: u64 = 60_000_000_000;

/// When a worker last looked back, and how long it had slept until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    since_ns: u64,
    slept_ns: u64,
    /// It has no queue: then its thread ends, unless it stays.
    leaves_at_ns: Option<u64>,
}

impl Rest {
    /// A worker that begins, without a queue. Threads that served as this worker before slept for
    /// `slept_ns`.
    pub(super) fn new(now_ns: u64, slept_ns: u64) -> Self {
        Self { since_ns: now_ns, slept_ns, leaves_at_ns: Some(now_ns + LEAVE_NS) }
    }
}

impl Worker {
    /// Tells the balance when there is more than this thread can do.
    #[inline]
    pub(super) fn tell_if_saturated(&mut self) {
        if self.now_ns.saturating_sub(self.awake_since_ns) > SATURATED_NS {
            self.awake_since_ns = self.now_ns;
            if self.hot.len() > 1 {
                self.lot.told.saturated();
            }
        }
    }

    /// Counts how often a device of the host has made this thread wait.
    pub(super) fn count_device_waits(&mut self) {
        let waits = self.wait.device_waits();
        self.stats.device_waits.add(waits - self.device_waits);
        self.device_waits = waits;
    }

    /// Tells the balance when this thread could as well be spared. Asked after each sleep; what is
    /// behind the compare happens once a second at most.
    #[inline]
    pub(super) fn tell_if_resting(&mut self) {
        if self.now_ns.saturating_sub(self.rest.since_ns) >= self.lot.told.rest_ns() {
            self.look_back();
        }
        if self.leaves_at_ns().is_some_and(|at_ns| at_ns <= self.now_ns) {
            self.leave();
        }
    }

    #[cold]
    fn look_back(&mut self) {
        let slept_ns = self.stats.slept_ns.value();
        let (all, slept) = (self.now_ns - self.rest.since_ns, slept_ns - self.rest.slept_ns);
        (self.rest.since_ns, self.rest.slept_ns) = (self.now_ns, slept_ns);
        if slept * 100 >= all * RESTING_PERCENT && !self.by_id.is_empty() {
            self.lot.told.resting();
        }
    }

    /// Its queues are more, or fewer, than before.
    pub(super) fn note_queues(&mut self) {
        let was_empty = self.rest.leaves_at_ns.is_some();
        self.stats.queues.set(self.by_id.len() as u64);
        let mut guests = self.slots.iter().filter(|s| s.entry.is_some()).map(|slot| slot.guest);
        let first = guests.next();
        self.wait.set_shared(guests.any(|guest| Some(guest) != first));
        if self.by_id.is_empty() && !was_empty {
            self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
            self.lot.told.end_to_serve();
        } else if !self.by_id.is_empty() && was_empty {
            self.rest.leaves_at_ns = None;
            self.lot.told.begin_to_serve();
        }
    }

    /// When the thread ends, if no queue comes: a sleep has one timer then, once.
    pub(super) fn leaves_at_ns(&self) -> Option<u64> {
        self.rest.leaves_at_ns.filter(|_| !self.lot.stays)
    }

    /// Ends, unless a queue is on its way: then the next one is waited for as long again.
    #[cold]
    fn leave(&mut self) {
        self.quit = self.mailbox.close();
        self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Lot;
    use super::*;
    use crate::orders::Mailbox;
    use crate::orders::QueueId;
    use crate::policy::polling::{Law, Polling};
    use crate::run::still::Still;
    use crate::seats::Seat;
    use crate::stats::WorkerStats;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    /// A worker without queues, whose time has come.
    fn empty(mailbox: &Arc<Mailbox>, stays: bool) -> Worker {
        let lot = Lot { told: Arc::default(), stays };
        let (law, stats) = (Law::new(Polling::NEVER, 0, 0), Arc::default());
        let mut worker = Worker::new(false, law, mailbox.clone(), stats, lot).unwrap();
        worker.rest.leaves_at_ns = Some(worker.now_ns);
        worker
    }

    /// Whether the balance has been told since it last asked that a worker is saturated.
    fn is_saturation_told(worker: &Worker) -> bool {
        let said = pin!(worker.lot.told.hear()).poll(&mut Context::from_waker(Waker::noop()));
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
        assert!(mailbox.is_closed() && Seat::take(&mailbox).is_none());
    }

    #[test]
    fn a_worker_that_begins_again_goes_on_with_its_counts_and_has_not_slept_yet() {
        let (mailbox, stats) = (Arc::new(Mailbox::new().unwrap()), Arc::<WorkerStats>::default());
        stats.slept_ns.set(1 << 40);
        stats.law.trials.set(7);
        stats.law.spins_hit.set(9);
        stats.law.gap_ns.set(11);
        let lot = Lot { told: Arc::default(), stays: true };
        let law = Law::new(Polling::NEVER, 0, 0);
        let worker = Worker::new(false, law, mailbox, stats.clone(), lot).unwrap();
        assert_eq!(worker.rest.slept_ns, 1 << 40, "it would seem to have slept all the time");
        stats.law.publish(&worker.law.numbers());
        assert_eq!((stats.law.trials.value(), stats.law.spins_hit.value()), (7, 9));
        assert_eq!(stats.law.gap_ns.value(), 0, "that was no count");
    }

    #[test]
    fn a_worker_to_which_a_queue_is_on_its_way_waits_for_as_long_again() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let _seat = Seat::take(&mailbox).unwrap();
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
}
