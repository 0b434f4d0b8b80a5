//! A worker with a queue, without its thread.

use super::*;
use crate::life::Event;
use crate::policy::polling::Polling;
use crate::run::Turned;
use crate::stats::QueueStats;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// A queue that does nothing but hold a call back until a time.
#[derive(Debug)]
struct Holding {
    due_ns: Option<u64>,
    is_sent: Arc<AtomicBool>,
    is_hot: bool,
    guest: mpsc::Sender<Event>,
    stats: Arc<QueueStats>,
}

impl Run for Holding {
    fn attach(&mut self, _io: &mut QueueIo<'_>) {}

    fn detach(&mut self, _io: &mut QueueIo<'_>) {}

    fn turn(&mut self, _io: &mut QueueIo<'_>) -> Turned {
        Turned { worked: false, taken: 0, is_overdue: false }
    }

    fn settle(&mut self, _how: (Decision, bool), _io: &mut QueueIo<'_>) -> bool {
        self.is_hot = false;
        true
    }

    fn on_event(&mut self, _happened: Happened, _event: Woken, _io: &mut QueueIo<'_>) {}

    fn heed(&mut self, _order: Order, _io: &mut QueueIo<'_>) {}

    fn wake(&mut self, _now_ns: u64) {
        self.is_hot = true;
    }

    fn prepare_sleep(&mut self) {
        self.due_ns = None;
        self.is_sent.store(true, Ordering::Relaxed);
    }

    fn check_memory(&mut self) {}

    fn drain(&mut self) {}

    fn pause(&mut self) {}

    fn pauses_without_loss(&self) -> bool {
        true
    }

    fn resume(&mut self, _now_ns: u64) {}

    fn is_hot(&self) -> bool {
        self.is_hot
    }

    fn is_overdue(&self, _now_ns: u64) -> bool {
        false
    }

    fn looks_at_ring(&self, _decision: Decision, _now_ns: u64) -> bool {
        false
    }

    fn awaits_disk(&self) -> bool {
        false
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.due_ns
    }

    fn is_drained(&self) -> bool {
        false
    }

    fn base(&self) -> Base {
        Base::default()
    }

    fn guest(&self) -> &mpsc::Sender<Event> {
        &self.guest
    }

    fn is_of_guest(&self, guest: &mpsc::Sender<Event>) -> bool {
        self.guest.same_channel(guest)
    }

    fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }
}

#[test]
fn a_call_that_is_held_back_goes_before_a_sleep_that_would_end_too_late() {
    for (delay_ns, goes) in [(39_000, true), (1_000_000_000, false)] {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let lot = Lot { told: Arc::default(), stays: true };
        let law = Law::new(Polling::NEVER, 0, 0);
        let mut worker = Worker::new(false, law, mailbox.clone(), Arc::default(), lot).unwrap();
        worker.now_ns = worker.wait.now_ns();
        let is_sent = Arc::new(AtomicBool::new(false));
        let (guest, stats) = (mpsc::channel(1).0, Arc::default());
        let due_ns = Some(worker.now_ns + delay_ns);
        let queue = Holding { due_ns, is_sent: is_sent.clone(), is_hot: true, guest, stats };
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
