//! `Still`: a queue that does nothing, for tests of workers and the pool.

use super::{Happened, Run, Turned};
use crate::io::QueueIo;
use crate::policy::polling::Decision;
use crate::running::life::Event;
use crate::running::orders::Order;
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Base;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// A queue without a ring, which has nothing to do.
#[derive(Debug)]
pub(crate) struct Still {
    /// While this is set, the request in flight does not end.
    pub(crate) hangs: Arc<AtomicBool>,
    /// Until this time the queue holds a call back.
    pub(crate) due_ns: Option<u64>,
    /// Set when the queue has sent that call.
    pub(crate) is_sent: Arc<AtomicBool>,
    pub(crate) is_hot: bool,
    /// True if the queue has work in every turn.
    pub(crate) works: bool,
    /// Whether the queue's guest had the worker for itself in the last turn.
    pub(crate) is_alone: Arc<AtomicBool>,
    /// The number of turns in which the queue will send the rest of a burst.
    pub(crate) burst: Arc<AtomicUsize>,
    /// How long each turn takes.
    pub(crate) turns_for: Duration,
    /// The number of entries that each turn places for the kernel, on a worker with an io_uring.
    pub(crate) places: usize,
    /// How long the queue takes to follow an order.
    pub(crate) heeds_for: Duration,
    /// How long the queue takes to leave its worker.
    pub(crate) leaves_for: Duration,
    pub(crate) guest: mpsc::Sender<Event>,
    pub(crate) stats: Arc<QueueStats>,
}

impl Default for Still {
    /// Makes a queue that takes turns, of a guest of its own.
    fn default() -> Self {
        let (hangs, is_sent, is_alone) = (Arc::default(), Arc::default(), Arc::default());
        Self {
            hangs,
            due_ns: None,
            is_sent,
            is_hot: true,
            works: false,
            is_alone,
            burst: Arc::default(),
            turns_for: Duration::ZERO,
            places: 0,
            heeds_for: Duration::ZERO,
            leaves_for: Duration::ZERO,
            guest: mpsc::channel(1).0,
            stats: Arc::default(),
        }
    }
}

impl Run for Still {
    fn attach(&mut self, _io: &mut QueueIo<'_>) {}

    fn detach(&mut self, _io: &mut QueueIo<'_>) {
        std::thread::sleep(self.leaves_for);
    }

    fn turn(&mut self, io: &mut QueueIo<'_>) -> Turned {
        self.is_alone.store(io.is_alone(), Ordering::Relaxed);
        if !self.turns_for.is_zero() {
            std::thread::sleep(self.turns_for);
        }
        let tag = io.disk_tag();
        if let Some(ring) = io.ring() {
            // Each entry completes at once, and causes no event for the queue.
            (0..self.places).for_each(|_| ring.poll_remove(u64::MAX - 2, tag));
        }
        let _ = self
            .burst
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        Turned { worked: self.works, taken: usize::from(self.works), is_overdue: !self.is_hot }
    }

    fn settle(&mut self, _: Decision, _: bool, _io: &mut QueueIo<'_>) -> bool {
        self.is_hot = false;
        true
    }

    fn on_event(&mut self, _happened: Happened, _event: Woken, _io: &mut QueueIo<'_>) {}

    fn is_in_burst(&self) -> bool {
        self.burst.load(Ordering::Relaxed) > 0
    }

    fn heed(&mut self, order: Order, _io: &mut QueueIo<'_>) {
        std::thread::sleep(self.heeds_for);
        if let Order::Enable(_, fence) = order {
            let _ = fence.send(Ok(()));
        }
    }

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
        !self.hangs.load(Ordering::Relaxed)
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
