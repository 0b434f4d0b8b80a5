//! `RunningQueue`: a queue on its worker, generic over its ring and its device.
//!
//! ```text
//! turn:    mode = serve, drop or rest                       what may be done with the ring
//!          done = handler.turn(ring, mode)                  takes chains, serves, returns them
//!          something was returned? publish it; the driver wants to know? notify it now, or hold
//!          the call back                                    (notifier.rs)
//!          a call was held back, and is due? ring it
//!          the ring has a fault? latch it, signal err, send the session one event (life.rs)
//! settle:  there is more to do, or the driver cannot kick? keep polling
//!          policy/polling.rs says that the next request is near? keep polling
//!          waits for the driver: ask for a kick, and read the ring once more
//!          waits for its port: watch it          waits for a time: name it
//!          nothing found? take no turn until one of these reports
//! order:   new memory:    give back chains that the device has not begun, resolve the ring again;
//!                         answer when nothing in flight uses the former memory
//!          disable:       the same; a transmitq, whose driver may continue, is emptied as well
//!          stop, move:    take no more; leave when nothing is in flight
//! ```
//! 1. A hot queue takes a turn in every round of its worker, and asks the driver for no kicks. A
//!    queue that has settled takes no turn until its kick, its port, its disk, an order or the
//!    clock wakes it.
//! 2. A queue that settles asks for a kick first and reads the ring afterwards, with a full fence
//!    between the two. If the driver adds a chain at that moment, either the queue sees the chain,
//!    or the driver sees that it must kick.
//! 3. A disk's completion counts as work, as a request does: a driver that is notified of it sends
//!    its next request at once in most cases, so the worker keeps polling for that request.
//! 4. The driver may use the ring of a disabled queue for something else. The queue reads the ring
//!    only after a kick, and writes it only if chains were found after that kick.
//! 5. Chains that were popped and not begun (receive buffers that were popped ahead, frames that a
//!    port did not take) go back before memory changes. A request that a disk has begun carries its
//!    epoch and keeps its snapshot mapped; the order's fence is answered when the last such request
//!    is done.
//!
//! The queue is generic over its ring and its handler, so that a turn is compiled as one piece for
//! each pair of them. The worker holds it as `dyn Run`: one indirect call for each turn.

mod emptying;
pub(crate) mod epoch;
pub(crate) mod format;
mod giving_up;
pub(crate) mod handler;
pub(crate) mod life;
mod notifier;
pub(crate) mod orders;
pub(crate) mod run;
pub(crate) mod table;

use crate::Activation;
use crate::io::QueueIo;
use crate::policy::moderation::Moderation;
use crate::policy::polling::Decision;
use crate::running::handler::{Awaited, Done, Handler, Turn, TurnMode, Waits};
use crate::running::life::{Event, Life};
use crate::running::notifier::{Moment, Notifier};
use crate::running::orders::Order;
use crate::running::run::{Happened, Run, Turned};
use crate::stats::QueueStats;
use crate::wait::Woken;
use emptying::Emptying;
use giving_up::GivingUp;
use manyring_backend::net::Readiness;
use manyring_queue::{Base, Ring};
use rustix::io::Errno;
use std::fmt::Debug;
use std::sync::Arc;
use tokio::sync::mpsc;

/// When the worker reads the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RingLook {
    /// In every round.
    Hot,
    /// Only after an event: the driver was asked for a kick, or the port is watched.
    Armed,
}

/// How long a queue without work still takes turns while its worker is busy with other queues. This
/// is longer than an idle worker polls before it sleeps: a further turn adds little to the round of
/// a busy worker, whereas a queue that has settled costs its guest a kick.
const BUSY_REST_NS: u64 = 1_000_000;
/// Poll results after which there is nothing to wait for: `POLLERR | POLLHUP | POLLNVAL`.
const POLL_BROKEN: i32 = 0x8 | 0x10 | 0x20;
/// The result of a watch that was ended; another watch may have begun since.
const CANCELLED: i32 = -Errno::CANCELED.raw_os_error();
/// `POLLIN | POLLOUT`
const POLL_READY: i32 = 0x1 | 0x4;

/// A queue: its ring, the handler that serves it, its doorbells and its state.
#[derive(Debug)]
pub struct RunningQueue<R: Ring, H: Handler<R>> {
    ring: R,
    handler: H,
    notifier: Notifier,
    life: Life,
    stats: Arc<QueueStats>,
    look: RingLook,
    worked_at_ns: u64,
    looked_at_ns: u64,
    /// True if the port is watched, and has not signalled yet.
    watches_port: bool,
    /// True if the handler has more to do in the next turn.
    has_more: bool,
    /// Set while the queue drops the chains in its ring, before it answers the order to disable it.
    emptying: Option<Emptying>,
    giving_up: GivingUp,
}

impl<R: Ring, H: Handler<R>> RunningQueue<R, H> {
    /// Makes a queue that serves the ring of `activation` with `handler`.
    pub fn new(activation: Activation<R>, handler: H, stats: Arc<QueueStats>) -> Self {
        let Activation { index, queue: ring, kick, call, err, enabled, events, .. } = activation;
        stats.running.set(1);
        Self {
            ring,
            handler,
            notifier: Notifier::new(kick, call),
            life: Life::new(index, enabled, H::DROPS_WHEN_DISABLED, err, events),
            stats,
            look: RingLook::Hot,
            worked_at_ns: 0,
            looked_at_ns: 0,
            watches_port: false,
            has_more: false,
            emptying: None,
            giving_up: GivingUp::default(),
        }
    }

    /// Sets how notifications are held back, as the operator has configured.
    pub fn moderated(mut self, moderation: Moderation) -> Self {
        self.notifier.set_moderation(moderation);
        self
    }

    fn make_hot(&mut self, now_ns: u64) {
        if self.look != RingLook::Hot {
            self.look = RingLook::Hot;
            // A disabled ring is not written: its driver may use the memory for something else.
            if self.life.is_enabled() {
                self.ring.disable_notifications();
            }
        }
        self.worked_at_ns = now_ns;
    }

    /// Returns the events and times for which the queue waits, in its present mode.
    fn waits(&self) -> Waits {
        match self.life.mode() {
            TurnMode::Rest => self.handler.waits_at_rest(),
            TurnMode::Serve | TurnMode::Drop => self.handler.waits(&self.ring),
        }
    }

    #[inline]
    fn count_batch(&mut self, popped: usize, now_ns: u64) {
        let popped = popped as u64;
        self.stats.record_batch(popped, now_ns.saturating_sub(self.looked_at_ns));
        self.stats.ring_occupancy.set(popped + u64::from(self.ring.available_count()));
        if !self.notifier.take_kicked() {
            self.stats.kicks_suppressed.add(1);
        }
    }

    #[inline]
    fn note_in_flight(&self) {
        let Self { ring, .. } = self;
        self.stats.in_flight.set((ring.in_flight() + ring.waiting() + ring.aside()).into());
    }

    /// Publishes the chains that a turn returned, notifies the driver, and counts.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a part of each turn")]
    fn finish(&mut self, done: Done, mode: TurnMode, now_ns: u64) {
        if done.memory_lost {
            self.life.lose_memory(&self.stats);
        }
        if done.popped > 0 {
            self.count_batch(done.popped, now_ns);
        }
        if mode != TurnMode::Rest {
            self.looked_at_ns = now_ns;
        }
        let moment = Moment { now_ns, is_served: mode == TurnMode::Serve };
        if done.used > 0 {
            // Chains that this turn popped show that the driver still fills the ring, so the ring
            // may be written. Chains of earlier turns that a port returns now do not show this.
            if mode == TurnMode::Drop && done.popped > 0 {
                self.life.dropped_some();
            }
            self.notifier.publish(&mut self.ring, done.told, moment, &self.stats);
        }
        if done.popped > 0 || done.used > 0 {
            self.note_in_flight();
        }
        self.notifier.ring_if_due(moment, &self.stats);
        if self.ring.is_faulted() {
            self.life.tell_fault(&self.ring, &self.stats);
        }
        // Last: the handler now answers fences, and then the front-end may reuse the ring's memory.
        self.handler.published();
    }

    /// Watches the port, if the handler waits for it. Returns false if the port is always ready,
    /// and so cannot be watched: then the queue must keep polling it.
    fn watch_port(&mut self, io: &mut QueueIo<'_>) -> bool {
        let Some(awaited) = self.waits().port else { return true };
        match self.handler.readiness() {
            Readiness::Always => return false,
            Readiness::Doorbell(bell) => return bell.alarm().arm(),
            Readiness::Fd(fd) if !self.watches_port => {
                io.watch_port(fd, awaited == Awaited::Output);
                self.watches_port = true;
            }
            Readiness::Fd(_) | Readiness::Never => {}
        }
        true
    }

    fn unwatch_port(&mut self, io: &mut QueueIo<'_>) {
        if std::mem::take(&mut self.watches_port)
            && let Readiness::Fd(fd) = self.handler.readiness()
        {
            io.unwatch_port(fd);
        }
    }
}

impl<R: Ring, H: Handler<R>> Run for RunningQueue<R, H> {
    fn attach(&mut self, io: &mut QueueIo<'_>) {
        self.notifier.begin(&mut self.ring);
        self.handler.attach(io);
        self.handler.watch(io);
        self.notifier.watch(io, self.life.is_enabled());
        self.looked_at_ns = io.now_ns();
        self.make_hot(io.now_ns());
        self.life.set_draining(false);
        // Guest memory may have been truncated before the queue came to this worker.
        self.check_memory();
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        self.handler.detach(io);
        self.unwatch_port(io);
        self.notifier.unwatch(io);
    }

    #[inline]
    fn turn(&mut self, io: &mut QueueIo<'_>) -> Turned {
        let (mode, now_ns) = (self.life.mode(), io.now_ns());
        let mut turn = Turn { io, stats: &self.stats, mode };
        let mut done = self.handler.turn(&mut self.ring, &mut turn);
        // The queue was disabled or ends, so its driver must get all chains back.
        let gives_back = self.giving_up.is_on || self.emptying.is_some();
        if gives_back {
            done = self.give_up_after(done);
        }
        self.finish(done, mode, now_ns);
        if gives_back {
            self.end_giving_up();
            self.go_on_emptying(done.popped, mode, now_ns);
        }
        self.has_more = done.has_more;
        let worked = done.popped > 0 || done.used > 0 || done.has_more;
        if worked {
            self.worked_at_ns = now_ns;
        }
        if done.has_more && self.look != RingLook::Hot {
            // No kick and no event will announce the rest of the work.
            self.make_hot(now_ns);
        }
        let is_overdue = !worked && self.is_overdue(now_ns);
        Turned { worked, taken: done.popped, is_overdue }
    }

    fn settle(&mut self, decision: Decision, looks_on: bool, io: &mut QueueIo<'_>) -> bool {
        let waits = self.waits();
        let (asks_driver, is_gone) = (waits.driver, waits.is_gone);
        if is_gone {
            self.life.tell_port();
        }
        // No event would announce the rest of the work, or chains of a driver that cannot kick.
        if self.has_more || self.emptying.is_some() || (asks_driver && !self.notifier.has_kick()) {
            return false;
        }
        if (asks_driver || looks_on) && decision.looks(io.now_ns(), self.worked_at_ns) {
            return false;
        }
        if asks_driver && self.life.may_write() {
            // If this read of the ring finds a fault, the queue stays hot and reports it in its
            // next turn.
            let has_work = self.ring.enable_notifications();
            if has_work || self.ring.is_faulted() {
                return false;
            }
        }
        // A disabled queue reads its ring again only after a kick.
        self.life.leave_alone();
        // The port may have become ready since the turn; then there is no event for that.
        if !self.watch_port(io) || !self.handler.arm() {
            return false;
        }
        self.look = RingLook::Armed;
        self.notifier.rest(io.now_ns());
        // A turn may have popped buffers ahead and received no frame: `finish` has not counted it.
        self.note_in_flight();
        true
    }

    fn on_event(&mut self, happened: Happened, event: Woken, io: &mut QueueIo<'_>) {
        let now_ns = io.now_ns();
        match happened {
            Happened::Kick(watch) => {
                let is_enabled = self.life.is_enabled();
                if self.notifier.on_kick(watch, event, is_enabled, io, &self.stats) {
                    self.life.kicked();
                    if self.look == RingLook::Armed {
                        self.looked_at_ns = now_ns;
                    }
                    self.make_hot(now_ns);
                }
            }
            // Point 3 above: the driver's next request comes soon, so the queue is hot.
            Happened::Disk(token) => {
                self.handler.on_event(token, event.result, io);
                self.make_hot(now_ns);
            }
            Happened::Port if event.result == CANCELLED => {}
            Happened::Port => {
                self.watches_port = false;
                let result = event.result;
                let has_error = result & POLL_BROKEN != 0 && result & POLL_READY == 0;
                self.handler.on_port(result < 0 || has_error);
                self.looked_at_ns = now_ns;
                self.make_hot(now_ns);
            }
            // The next turn takes the requests or frames that the disk or port has finished.
            Happened::Offload => {
                if event.ended {
                    self.handler.watch(io);
                }
                self.make_hot(now_ns);
            }
        }
    }

    fn is_in_burst(&self) -> bool {
        self.life.mode() == TurnMode::Serve && self.handler.is_in_burst()
    }

    fn heed(&mut self, order: Order, io: &mut QueueIo<'_>) {
        let now_ns = io.now_ns();
        match order {
            Order::Memory(memory, addresses, fence) => {
                // First: chains that were popped and not begun point into the former memory.
                self.give_back();
                if let Err(error) = self.ring.relocate(addresses, memory.clone()) {
                    let _ = fence.send(Err(error));
                    return;
                }
                self.handler.retire_memory(memory, fence);
                self.check_memory();
                self.make_hot(now_ns);
            }
            Order::Fence(fence) => self.handler.fence(fence),
            Order::Enable(is_enabled, fence) => self.set_enabled(is_enabled, fence, io),
            Order::Refresh(reply) => {
                self.handler.refresh();
                self.make_hot(now_ns);
                let _ = reply.send(());
            }
            Order::Moderate(limits, reply) => {
                self.notifier.set_limits(limits, &self.stats);
                self.make_hot(now_ns);
                let _ = reply.send(());
            }
            Order::Kick(kick, reply) => {
                // The driver may have kicked the former fd a moment ago: read the ring.
                self.notifier.set_kick(kick, io, self.life.is_enabled());
                self.make_hot(now_ns);
                let _ = reply.send(());
            }
            Order::Call(call, reply) => {
                self.notifier.set_call(call);
                let _ = reply.send(());
            }
            Order::Err(err, reply) => {
                self.life.set_err(err);
                let _ = reply.send(());
            }
            Order::LeaveAside(reply) => self.leave_aside(reply),
            // The worker itself follows these orders (`worker/orders.rs`).
            Order::Stop(_) => {}
        }
    }

    fn wake(&mut self, now_ns: u64) {
        self.notifier.repeat_if_due(now_ns, &self.stats);
        self.make_hot(now_ns);
    }

    fn check_memory(&mut self) {
        if self.ring.is_broken() || self.handler.is_broken() {
            self.life.lose_memory(&self.stats);
        }
    }

    fn drain(&mut self) {
        self.life.set_draining(true);
        // Before `settle_owed`, which requires that the queue has given up its own unbegun chains.
        self.give_back();
        self.settle_owed();
        self.give_up_aside();
        self.end_emptying();
        // Last: only now is it known whether chains of a former process are still to be served.
        self.stop_handler();
    }

    fn pause(&mut self) {
        self.life.set_draining(true);
        self.let_go();
    }

    fn pauses_without_loss(&self) -> bool {
        !self.life.is_draining() && self.emptying.is_none() && !self.handler.holds_frames()
    }

    fn resume(&mut self, now_ns: u64) {
        self.life.set_draining(false);
        self.make_hot(now_ns);
    }

    #[inline]
    fn is_hot(&self) -> bool {
        self.look == RingLook::Hot
    }

    #[inline]
    fn is_overdue(&self, now_ns: u64) -> bool {
        let idle_ns = now_ns.saturating_sub(self.worked_at_ns);
        self.look == RingLook::Armed || idle_ns >= BUSY_REST_NS || self.handler.is_stuck()
    }

    fn looks_at_ring(&self, decision: Decision, now_ns: u64) -> bool {
        self.waits().can_be_looked_for() && decision.looks(now_ns, self.worked_at_ns)
    }

    fn awaits_disk(&self) -> bool {
        H::HAS_DISK && self.ring.in_flight() > 0
    }

    fn deadline_ns(&self) -> Option<u64> {
        // The handler's time, or the time at which a call that is held back, or repeated, must be
        // sent.
        [self.waits().at_ns, self.notifier.due_ns()].into_iter().flatten().min()
    }

    fn prepare_sleep(&mut self) {
        self.notifier.send_before_sleep(&self.stats);
    }

    fn is_drained(&self) -> bool {
        self.life.is_draining() && !self.gives_up_more()
    }

    fn base(&self) -> Base {
        self.ring.base()
    }

    fn guest(&self) -> &mpsc::Sender<Event> {
        self.life.guest()
    }

    fn is_of_guest(&self, guest: &mpsc::Sender<Event>) -> bool {
        self.life.is_of_same_guest(guest)
    }

    fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }
}

impl<R: Ring, H: Handler<R>> Drop for RunningQueue<R, H> {
    fn drop(&mut self) {
        self.stats.running.set(0);
        self.let_go();
        self.handler.abandon(&mut self.ring);
        self.stats.in_flight.set(0);
        self.stats.waiting_for_space.set(0);
    }
}
