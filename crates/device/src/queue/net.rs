//! What a running network queue does beyond a block queue: it waits for its port too, and its
//! notifications may be held back.

use super::{Change, Discard, Event, EventKind, Handler, Held, Look, RunningQueue, Telling};
use crate::net::Turn;
use crate::policy::moderation::Moderation;
use crate::wait::{Source, Wait};
use manyring_backend::net::Readiness;
use manyring_wire::net::Coalescing;

/// Turns in which a ring of any size is emptied, unless its driver fills it further.
const DISCARD_TURNS: usize = 64;
/// Poll masks that say there is nothing to wait for: `POLLERR | POLLHUP | POLLNVAL`.
const POLL_BROKEN: i32 = 0x8 | 0x10 | 0x20;
/// `POLLIN | POLLOUT`
const POLL_READY: i32 = 0x1 | 0x4;

impl RunningQueue {
    /// True if chains may be taken, if only to drop them: a transmitq that is disabled is emptied
    /// (vhost-user, "Ring states").
    pub(super) fn may_take(&self) -> bool {
        let serves = self.enabled || self.discard != Discard::No;
        serves && !self.draining && !self.memory_lost && self.queue.fault().is_none()
    }

    /// Drops what a transmitq that was disabled holds, and asks for a kick.
    pub(super) fn discard_all(&mut self, wait: &mut Wait, now_ns: u64) {
        self.discard = Discard::Kicked;
        if !matches!(self.handler, Handler::Tx(_)) || !self.may_take() {
            self.discard = Discard::No;
            return;
        }
        for _ in 0..DISCARD_TURNS {
            if !self.turn(wait, now_ns) {
                break;
            }
        }
        // A driver that goes on meanwhile is there: it is looked at further on.
        let goes_on = self.may_take() && self.queue.enable_notifications();
        if !goes_on || self.kick.is_none() {
            self.discard = Discard::No;
            self.look = Look::Armed;
        }
    }

    /// One turn of a transmitq or receiveq. True if there was work.
    #[inline]
    pub(super) fn turn_net(&mut self, now_ns: u64) -> bool {
        let (may_take, may_pop) = (self.may_take(), self.may_pop());
        let done = match &mut self.handler {
            Handler::Tx(tx) if may_take => {
                tx.turn(&mut self.queue, &self.stats, self.enabled, now_ns)
            }
            Handler::Rx(rx) if may_pop => rx.turn(&mut self.queue, &self.stats),
            _ => Turn::default(),
        };
        if done.used > 0 && !self.enabled {
            self.discard = Discard::Found;
        }
        if done.memory_lost {
            self.lose_memory();
        }
        if done.packets > 0 {
            self.count_batch(done.packets, now_ns);
        }
        self.looked_at_ns = now_ns;
        if done.used > 0 {
            self.stats.in_flight.set(u64::from(self.queue.in_flight()));
            self.queue.publish();
            if self.queue.needs_notification() {
                self.hold_call(done.frames as u64, now_ns);
            } else {
                self.stats.calls_suppressed.add(1);
                if let Some(held) = &mut self.held {
                    held.packets += done.frames as u64;
                }
            }
        }
        if self.held.is_some() {
            self.ring_if_due(now_ns);
        }
        done.packets > 0 || done.used > 0
    }

    fn hold_call(&mut self, packets: u64, now_ns: u64) {
        let fresh = Held { since_ns: now_ns, packets: 0, due_ns: 0 };
        self.held.get_or_insert(fresh).packets += packets;
    }

    #[inline]
    fn ring_if_due(&mut self, now_ns: u64) {
        let Some(held) = &mut self.held else { return };
        match self.moderation.decide(now_ns, held.since_ns, held.packets) {
            Telling::Send => {
                self.held = None;
                self.ring_call();
            }
            Telling::Hold(due_ns) => held.due_ns = due_ns,
        }
    }

    /// True while frames wait that the port did not take.
    #[inline]
    pub(super) fn is_port_blocked(&self) -> bool {
        matches!(&self.handler, Handler::Tx(tx) if tx.waits_for_port())
    }

    /// When there is something to do without anybody asking.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        let retry_ns = match &self.handler {
            // A queue that takes no turn must not be woken for one.
            Handler::Tx(tx) if self.may_take() => tx.retry_at_ns(),
            Handler::Blk(_) | Handler::Tx(_) | Handler::Rx(_) => None,
        };
        let due_ns = self.held.map(|held| held.due_ns);
        [retry_ns, due_ns].into_iter().flatten().min()
    }

    /// The time has come.
    pub(crate) fn wake(&mut self, now_ns: u64) {
        self.make_hot(now_ns);
    }

    /// The port has reported.
    pub(crate) fn on_port(&mut self, result: i32, now_ns: u64) {
        self.watches_port = false;
        let is_broken = result < 0 || (result & POLL_BROKEN != 0 && result & POLL_READY == 0);
        match &mut self.handler {
            Handler::Tx(tx) => tx.on_port(),
            Handler::Rx(rx) if is_broken => rx.on_broken(),
            Handler::Rx(_) | Handler::Blk(_) => {}
        }
        self.looked_at_ns = now_ns;
        self.make_hot(now_ns);
    }

    /// Says once that there is nothing to receive from any more, while the driver wants to.
    pub(super) fn tell_port(&mut self) {
        let Handler::Rx(rx) = &self.handler else { return };
        if rx.is_broken() && self.enabled && !std::mem::replace(&mut self.is_port_told, true) {
            let _ = self.events.try_send(Event { index: self.index, kind: EventKind::PortGone });
        }
    }

    /// Asks the port for an event. False: it has something now.
    pub(super) fn watch_port(&mut self, wait: &mut Wait, slot: u32, generation: u32) -> bool {
        let (readiness, output) = match &self.handler {
            Handler::Tx(tx) if self.may_take() && tx.is_blocked() => (tx.readiness(), true),
            Handler::Rx(rx) if self.enabled && self.may_take() && !rx.is_broken() => {
                (rx.readiness(), false)
            }
            _ => return true,
        };
        match readiness {
            Readiness::Always => return false,
            Readiness::Never => {}
            Readiness::Fd(fd) if !self.watches_port => {
                wait.watch_once(fd, output, Source::Port { slot, generation });
                self.watches_port = true;
            }
            Readiness::Fd(_) => {}
        }
        true
    }

    pub(super) fn unwatch_port(&mut self, wait: &mut Wait, slot: u32, generation: u32) {
        let readiness = match &self.handler {
            Handler::Tx(tx) => tx.readiness(),
            Handler::Rx(rx) => rx.readiness(),
            Handler::Blk(_) => return,
        };
        if let (Readiness::Fd(fd), true) = (readiness, self.watches_port) {
            wait.unwatch(fd, Source::Port { slot, generation });
        }
        self.watches_port = false;
    }

    /// Gives back what a network queue holds of the ring: its chains point into guest memory that
    /// may be about to change. A call that is held back is sent.
    pub(super) fn let_go(&mut self) {
        match &mut self.handler {
            Handler::Blk(_) => return,
            Handler::Tx(tx) => tx.let_go(&mut self.queue, &self.stats),
            Handler::Rx(rx) => rx.let_go(&mut self.queue, &self.stats),
        }
        self.queue.publish();
        let was_held = self.held.take().is_some();
        if self.queue.needs_notification() || was_held {
            self.ring_call();
        }
    }

    /// Goes by something else from now on.
    pub(crate) fn change(&mut self, change: Change, now_ns: u64) {
        match (change, &mut self.handler) {
            (Change::Coalescing(Coalescing { packets_max, delay_us_max }), _) => {
                self.moderation = Moderation::new(packets_max, delay_us_max);
            }
            (Change::Rules(rules), Handler::Tx(tx)) => tx.set_rules(rules),
            (Change::Rules(rules), Handler::Rx(rx)) => rx.set_rules(rules),
            (Change::Rules(_), Handler::Blk(_)) => {}
        }
        self.make_hot(now_ns);
    }
}
