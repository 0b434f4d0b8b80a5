//! `Handler` of receiveqs and transmitqs: how the engine runs them.

use super::{NetRx, NetTurn as Passed, NetTx};
use manyring_backend::net::Readiness;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Awaited, Done, Fence, Handler, QueueIo, Turn, TurnMode, Waits};
use manyring_memory::GuestMemory;
use manyring_queue::Chains;
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

impl From<Passed> for Done {
    #[inline]
    fn from(passed: Passed) -> Self {
        let Passed { packets, used, frames, memory_lost, has_more } = passed;
        Self { popped: packets, used, told: frames, memory_lost, has_more }
    }
}

/// Returns the descriptor by which a port reports finished frames. The worker watches it
/// edge-triggered, for as long as it runs the queue, and never reads it.
fn always_watched(done: Readiness<'_>) -> Option<BorrowedFd<'_>> {
    match done {
        Readiness::Fd(fd) => Some(fd),
        Readiness::Doorbell(doorbell) => Some(doorbell.as_fd()),
        Readiness::Always | Readiness::Never => None,
    }
}

impl<R: Chains> Handler<R> for NetTx {
    const DROPS_WHEN_DISABLED: bool = true;

    fn attach(&mut self, _io: &mut QueueIo<'_>) {
        self.take_limit();
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        if let Some(fd) = always_watched(self.done()) {
            io.unwatch_offload(fd);
        }
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        if let Some(fd) = always_watched(self.done()) {
            io.watch_offload(fd);
        }
    }

    fn arm(&self) -> bool {
        self.may_sleep()
    }

    #[inline]
    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        match turn.mode {
            TurnMode::Rest => {
                let mut passed = Passed::default();
                self.reap(queue, turn.stats, turn.io.now_ns(), &mut passed);
                passed.into()
            }
            mode => {
                let io = &*turn.io;
                self.burst.set_alone(io.is_alone());
                let time = (io.now_ns(), || io.read_clock_ns());
                self.turn(queue, turn.stats, mode == TurnMode::Serve, time).into()
            }
        }
    }

    #[inline]
    fn published(&mut self) {
        self.acknowledge();
    }

    fn waits(&self, _queue: &R) -> Waits {
        let limited_ns = self.limited_until_ns();
        let times = [self.retry_at_ns(), self.late_due_ns(), self.kept_due_ns(), limited_ns];
        Waits {
            driver: !self.waits_for_port() && limited_ns.is_none(),
            port: self.is_blocked().then_some(Awaited::Output),
            at_ns: times.into_iter().flatten().min(),
            looks: false,
            is_gone: false,
        }
    }

    fn waits_at_rest(&self) -> Waits {
        Waits { at_ns: self.late_due_ns(), ..Waits::default() }
    }

    fn readiness(&self) -> Readiness<'_> {
        self.readiness()
    }

    fn is_stuck(&self) -> bool {
        self.waits_for_port() || self.limited_until_ns().is_some()
    }

    fn holds_frames(&self) -> bool {
        self.holds_frames()
    }

    fn is_in_burst(&self) -> bool {
        self.holds_frames() && !self.waits_for_port()
    }

    fn on_port(&mut self, _is_broken: bool) {
        self.on_port();
    }

    fn refresh(&mut self) {
        self.refresh_rules();
    }

    fn let_go(&mut self, queue: &mut R, stats: &QueueStats) -> bool {
        self.let_go(queue, stats);
        true
    }

    fn recall(&mut self, queue: &mut R, stats: &QueueStats) -> bool {
        self.recall(queue, stats)
    }

    fn retire_memory(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.retire(memory, fence);
    }

    fn fence(&mut self, fence: Fence) {
        self.barrier(fence);
    }

    fn abandon(&mut self, queue: &mut R) {
        self.abandon(queue);
    }
}

impl<R: Chains> Handler<R> for NetRx {
    const WAITS_FOR_INPUT: bool = true;

    fn attach(&mut self, _io: &mut QueueIo<'_>) {
        self.take_limit();
    }

    fn detach(&mut self, io: &mut QueueIo<'_>) {
        if let Some(doorbell) = self.readiness().doorbell() {
            io.unwatch_offload(doorbell.as_fd());
        }
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        if let Some(doorbell) = self.readiness().doorbell() {
            io.watch_offload(doorbell.as_fd());
        }
    }

    #[inline]
    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        match turn.mode {
            TurnMode::Serve if self.is_limited() => {
                self.turn_limited(queue, turn.stats, turn.io.now_ns()).into()
            }
            TurnMode::Serve => self.turn(queue, turn.stats).into(),
            TurnMode::Drop | TurnMode::Rest => Done::default(),
        }
    }

    fn waits(&self, _queue: &R) -> Waits {
        let (is_gone, has_room) = (self.is_broken(), self.has_room());
        let limited_ns = self.limited_until_ns().filter(|_| !is_gone);
        let is_open = limited_ns.is_none();
        let awaits_port = !is_gone && has_room && is_open && !self.is_held();
        Waits {
            driver: !is_gone && !has_room && is_open,
            // Without buffers do not watch the port: it would report the same frame again at once.
            port: awaits_port.then_some(Awaited::Input),
            at_ns: limited_ns,
            looks: awaits_port && self.readiness().doorbell().is_some(),
            is_gone,
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        self.readiness()
    }

    fn is_stuck(&self) -> bool {
        self.limited_until_ns().is_some()
    }

    fn holds_frames(&self) -> bool {
        self.holds_frame()
    }

    fn on_port(&mut self, is_broken: bool) {
        if is_broken {
            self.on_broken();
        }
    }

    fn revive(&mut self) {
        self.revive();
    }

    fn refresh(&mut self) {
        self.refresh_rules();
    }

    fn let_go(&mut self, queue: &mut R, stats: &QueueStats) -> bool {
        self.let_go(queue, stats);
        false
    }

    /// Nothing is in flight here: the engine calls [`Self::let_go`] before.
    fn abandon(&mut self, _queue: &mut R) {}
}
