//! `Notifier`: the doorbells of a running queue: when the driver is told, and what its kicks say.

use crate::doorbell::{Call, Kick};
use crate::io::QueueIo;
use crate::policy::moderation::{Decision, Moderation};
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Ring;
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::sync::Arc;

/// The doorbells of a queue.
#[derive(Debug)]
pub(crate) struct Notifier {
    kick: Option<Kick>,
    /// The number under which the worker watches the kick.
    watch: u32,
    /// An eventfd that is never read reports its old count when it is watched anew: the next
    /// event of the kick is that report, and not a kick.
    is_stale: bool,
    /// The driver has kicked since this was asked last.
    is_kicked: bool,
    call: Option<Arc<Call>>,
    moderation: Moderation,
    held: Option<Held>,
}

/// A used buffer notification that is held back.
#[derive(Clone, Copy, Debug)]
struct Held {
    since_ns: u64,
    /// Requests or frames that the driver has not been told of.
    count: u64,
    due_ns: u64,
}

impl Notifier {
    pub(crate) fn new(kick: Option<Kick>, call: Option<Arc<Call>>) -> Self {
        Self {
            kick,
            watch: 0,
            is_stale: false,
            is_kicked: false,
            call,
            moderation: Moderation::default(),
            held: None,
        }
    }

    /// False: nobody can kick, the ring is looked at for ever.
    pub(crate) fn has_kick(&self) -> bool {
        self.kick.is_some()
    }

    /// Watches the kick, here or after the kernel ended the watch. An eventfd, which is never
    /// read, reports at once what it had at any time: that is no reason to look at a ring that is
    /// disabled, whose memory may be the driver's again.
    pub(crate) fn watch(&mut self, io: &mut QueueIo<'_>, is_enabled: bool) {
        if let Some(kick) = &self.kick {
            self.is_stale = !is_enabled && kick.keeps();
            self.watch = io.watch_kick(kick.as_fd());
        }
    }

    pub(crate) fn unwatch(&self, io: &mut QueueIo<'_>) {
        if let Some(kick) = &self.kick {
            io.unwatch_kick(kick.as_fd(), self.watch);
        }
    }

    /// The kick has an event, seen under the number `watch`. True if it is a kick: one that was
    /// replaced does not count any more, and ECANCELED is only the end of a watch.
    pub(crate) fn on_kick(
        &mut self,
        watch: u32,
        event: Woken,
        is_enabled: bool,
        io: &mut QueueIo<'_>,
        stats: &QueueStats,
    ) -> bool {
        if watch != self.watch || event.result == -Errno::CANCELED.raw_os_error() {
            return false;
        }
        let is_kick = !std::mem::take(&mut self.is_stale);
        if is_kick {
            stats.kicks.add(1);
            self.is_kicked = true;
        }
        if event.ended {
            self.watch(io, is_enabled);
        }
        is_kick
    }

    /// The ring is served from now on: every event of the kick counts.
    pub(crate) fn trust_kick(&mut self) {
        self.is_stale = false;
    }

    /// Goes by another kick from now on.
    pub(crate) fn set_kick(&mut self, kick: Option<Kick>, io: &mut QueueIo<'_>, is_enabled: bool) {
        self.unwatch(io);
        self.kick = kick;
        self.watch(io, is_enabled);
    }

    /// True if the driver has kicked since this was asked last.
    #[inline]
    pub(crate) fn take_kicked(&mut self) -> bool {
        std::mem::take(&mut self.is_kicked)
    }

    /// Rings another call from now on, and at once: the driver may wait for one that went to the
    /// former fd. One too many is harmless.
    pub(crate) fn set_call(&mut self, call: Option<Arc<Call>>) {
        self.call = call;
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    /// Holds notifications back like this from now on.
    pub(crate) fn set_moderation(&mut self, moderation: Moderation) {
        self.moderation = moderation;
    }

    /// Makes what was returned visible, and tells the driver of `count` requests or frames if it
    /// wants to know, now or later.
    #[inline]
    pub(crate) fn publish(
        &mut self,
        ring: &mut impl Ring,
        count: usize,
        now_ns: u64,
        stats: &QueueStats,
    ) {
        ring.publish();
        let is_wanted = ring.needs_notification();
        if is_wanted && self.moderation.is_off() && self.held.is_none() {
            self.ring(stats);
        } else if is_wanted {
            let fresh = Held { since_ns: now_ns, count: 0, due_ns: 0 };
            self.held.get_or_insert(fresh).count += count as u64;
        } else {
            stats.calls_suppressed.add(1);
            if let Some(held) = &mut self.held {
                held.count += count as u64;
            }
        }
    }

    /// Rings if a notification waits whose time has come.
    #[inline]
    pub(crate) fn ring_if_due(&mut self, now_ns: u64, stats: &QueueStats) {
        let Some(held) = &mut self.held else { return };
        match self.moderation.decide(now_ns, held.since_ns, held.count) {
            Decision::Send => {
                self.held = None;
                self.ring(stats);
            }
            Decision::Hold(due_ns) => held.due_ns = due_ns,
        }
    }

    /// Makes what was returned visible, and holds nothing back any more.
    pub(crate) fn flush(&mut self, ring: &mut impl Ring, returned: bool, stats: &QueueStats) {
        let was_held = self.held.take().is_some();
        let wants = returned && {
            ring.publish();
            ring.needs_notification()
        };
        if was_held || wants {
            self.ring(stats);
        }
    }

    /// When a notification that is held back must go.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.held.map(|held| held.due_ns)
    }

    #[inline]
    fn ring(&self, stats: &QueueStats) {
        stats.calls.add(1);
        if let Some(call) = &self.call {
            call.ring();
        }
    }
}
