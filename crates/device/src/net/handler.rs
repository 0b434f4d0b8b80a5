//! Network queues as the engine runs them.

use super::{NetRx, NetTx, Turn as Passed};
use manyring_backend::net::Readiness;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Awaited, Done, Handler, Mode, Turn, Waits};
use manyring_queue::Chains;

impl From<Passed> for Done {
    #[inline]
    fn from(passed: Passed) -> Self {
        let Passed { packets, used, frames, memory_lost } = passed;
        Self { popped: packets, used, told: frames, memory_lost, has_more: false }
    }
}

impl<R: Chains> Handler<R> for NetTx {
    const DROPS_WHEN_DISABLED: bool = true;

    #[inline]
    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        match turn.mode {
            Mode::Rest => Done::default(),
            mode => self.turn(queue, turn.stats, mode == Mode::Serve, turn.io.now_ns()).into(),
        }
    }

    fn waits(&self, _queue: &R) -> Waits {
        Waits {
            driver: !self.waits_for_port(),
            port: self.is_blocked().then_some(Awaited::Output),
            at_ns: self.retry_at_ns(),
            is_gone: false,
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        self.readiness()
    }

    fn is_stuck(&self) -> bool {
        self.waits_for_port()
    }

    fn holds_frames(&self) -> bool {
        self.waits_for_port()
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

    /// It has let go of everything before.
    fn abandon(&mut self, _queue: &mut R) {}
}

impl<R: Chains> Handler<R> for NetRx {
    #[inline]
    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        match turn.mode {
            Mode::Serve => self.turn(queue, turn.stats).into(),
            Mode::Drop | Mode::Rest => Done::default(),
        }
    }

    fn waits(&self, _queue: &R) -> Waits {
        let (is_gone, has_room) = (self.is_broken(), self.has_room());
        Waits {
            driver: !is_gone && !has_room,
            // A port with a frame for which there is no room would report it again at once.
            port: (!is_gone && has_room).then_some(Awaited::Input),
            at_ns: None,
            is_gone,
        }
    }

    fn readiness(&self) -> Readiness<'_> {
        self.readiness()
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

    /// It has let go of everything before.
    fn abandon(&mut self, _queue: &mut R) {}
}
