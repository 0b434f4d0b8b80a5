//! `Notifier`: the doorbells of a running queue. It decides when the driver gets a call, and which
//! events of the kick fd are kicks.

use crate::fds::doorbell::{Call, Kick};
use crate::io::QueueIo;
use crate::policy::moderation::{Cause, Limits, Moderation, ModerationDecision, Moderator, Untold};
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Ring;
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::sync::Arc;

/// After this time without a further call, a call that the driver may have missed is repeated.
const REPEAT_NS: u64 = 20_000_000;

/// The doorbells of a queue.
///
/// User Mode Linux learns of its calls by signals, and now and then leaves a call unread in its
/// socket until the next one comes (seen with Linux 6.1, docs/design/0014). Then the driver waits
/// for a call, and the device for the driver. So the last call by a pipe or a socket is repeated
/// once when its queue has had no work for a while; a call without used buffers is harmless.
#[derive(Debug)]
pub(crate) struct Notifier {
    kick: Option<Kick>,
    /// The number under which the worker watches the kick.
    watch: u32,
    /// True if the next event of the kick is no kick: an eventfd that is never read reports its old
    /// count when it is watched anew.
    is_stale: bool,
    /// True if the driver has kicked since the last [`Self::take_kicked`].
    is_kicked: bool,
    call: Option<Arc<Call>>,
    /// True if the driver may miss a call.
    may_miss: bool,
    repeat: Repeat,
    moderator: Moderator,
    /// The notification that is held back; always `None` while the moderator is off.
    held: Option<Held>,
    /// Chains that were returned and that the driver cannot see yet ([`Ring::waiting`]).
    unseen: u64,
}

/// Whether and when the last call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeat {
    No,
    /// The call is repeated some time after the queue settles, but the queue has not settled yet.
    Owed,
    At(u64),
}

/// A used buffer notification that is held back.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    untold: Untold,
    due_ns: u64,
}

/// The time of a turn, and whether the queue is served in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    /// False while the queue drains, is disabled or has stopped. Then a call for chains that are
    /// still returned is sent at once, and the ring is not read for further chains.
    pub(crate) is_served: bool,
}

impl Notifier {
    pub(crate) fn new(kick: Option<Kick>, call: Option<Arc<Call>>) -> Self {
        let moderator = Moderator::new(Moderation::Off);
        let (is_stale, is_kicked, held, unseen) = (false, false, None, 0);
        let (may_miss, repeat) = (may_be_missed(call.as_ref()), Repeat::No);
        Self {
            kick,
            watch: 0,
            is_stale,
            is_kicked,
            call,
            may_miss,
            repeat,
            moderator,
            held,
            unseen,
        }
    }

    /// True if the driver can kick; otherwise the ring must be polled all the time.
    pub(crate) fn has_kick(&self) -> bool {
        self.kick.is_some()
    }

    /// Watches the kick: when the queue comes to a worker, when the kick is replaced, and when the
    /// kernel has ended the watch. The eventfd is never read, so it reports its old count at once
    /// when it is watched anew. While the queue is disabled this first event is ignored: it must
    /// not make the queue read a ring whose memory the driver may use for something else.
    pub(crate) fn watch(&mut self, io: &mut QueueIo<'_>, is_enabled: bool) {
        if let Some(kick) = &self.kick {
            self.is_stale = !is_enabled && kick.keeps();
            self.watch = kick.touched(io, |io| io.watch_kick(kick.as_fd()));
        }
    }

    pub(crate) fn unwatch(&self, io: &mut QueueIo<'_>) {
        if let Some(kick) = &self.kick {
            kick.touched(io, |io| io.unwatch_kick(kick.as_fd(), self.watch));
        }
    }

    /// Handles an event of the kick that is watched under the number `watch`. Returns true if the
    /// driver has kicked. An event of a kick that was replaced is no kick; ECANCELED is the end of
    /// a watch; the first event of a stale eventfd is its old count.
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
        if let Some(kick) = &self.kick {
            kick.hear();
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

    /// Call when the ring is served from now on: every event of the kick counts.
    pub(crate) fn trust_kick(&mut self) {
        self.is_stale = false;
    }

    /// Replaces the kick.
    pub(crate) fn set_kick(&mut self, kick: Option<Kick>, io: &mut QueueIo<'_>, is_enabled: bool) {
        self.unwatch(io);
        self.kick = kick;
        self.watch(io, is_enabled);
    }

    /// Returns true if the driver has kicked since the last call.
    #[inline]
    pub(crate) fn take_kicked(&mut self) -> bool {
        std::mem::take(&mut self.is_kicked)
    }

    /// Replaces the call, and rings the new one at once: the driver may still wait for a call that
    /// was sent to the former fd. A call without used buffers is harmless.
    pub(crate) fn set_call(&mut self, call: Option<Arc<Call>>) {
        (self.may_miss, self.repeat) = (may_be_missed(call.as_ref()), Repeat::No);
        self.call = call;
        self.ring_anew();
    }

    /// Reads the ring's positions, and sends the call that a former process may not have sent.
    pub(crate) fn begin(&self, ring: &mut impl Ring) {
        if ring.begin() {
            self.ring_anew();
        }
    }

    fn ring_anew(&self) {
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    /// Sets how notifications are held back, as the operator has configured, until the driver sets
    /// limits. For a queue that does not run yet.
    pub(crate) fn set_moderation(&mut self, moderation: Moderation) {
        self.moderator = Moderator::new(moderation);
    }

    /// Sets the limits of the driver within which notifications are held back; `None`: the driver
    /// has set none, and the operator's apply.
    pub(crate) fn set_limits(&mut self, limits: Option<Limits>, stats: &QueueStats) {
        self.moderator.set_driver(limits);
        // A held notification was held back by the former limits: send it.
        if self.held.is_some() {
            self.send(Cause::Unmoderated, stats);
        }
    }

    /// Makes the returned chains visible to the driver. If the driver wants a used buffer
    /// notification (virtio 1.3 §2.7.7.2), sends it now, or holds it back. `count`: the requests or
    /// frames that were returned.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a part of each turn that answers something")]
    pub(crate) fn publish(
        &mut self,
        ring: &mut impl Ring,
        count: usize,
        moment: Moment,
        stats: &QueueStats,
    ) {
        ring.publish();
        let is_wanted = ring.needs_notification();
        let mut count = count as u64;
        if ring.waiting() > 0 || self.unseen > 0 {
            count = self.seen_of(count, ring);
            if count == 0 && !is_wanted {
                return;
            }
        }
        if !self.moderator.is_off() {
            self.moderate(ring, count, is_wanted, moment, stats);
        } else if is_wanted {
            self.ring_at_once(stats);
        } else {
            stats.calls_suppressed.add(1);
        }
    }

    /// Returns how many chains became visible to a driver that wants them in order (virtio 1.3
    /// §2.7.9), in a turn that returned `count`: some of these still wait for earlier chains, while
    /// some that were returned in earlier turns wait no longer.
    #[cold]
    fn seen_of(&mut self, count: u64, ring: &impl Ring) -> u64 {
        let before = std::mem::replace(&mut self.unseen, ring.waiting().into());
        (count + before).saturating_sub(self.unseen)
    }

    /// Notifies the driver of `count` returned requests or frames, or holds the notification back.
    /// Chains that are returned while a notification is held back are added to it, even if the ring
    /// says that the driver wants none: with `VIRTIO_F_EVENT_IDX` the driver asks for one
    /// notification at a time (virtio 1.3 §2.7.7.2), and has not got the one that is held back.
    #[inline(never)]
    fn moderate(
        &mut self,
        ring: &mut impl Ring,
        count: u64,
        is_wanted: bool,
        moment: Moment,
        stats: &QueueStats,
    ) {
        let Moment { now_ns, is_served } = moment;
        if !is_wanted && self.held.is_none() {
            stats.calls_suppressed.add(1);
            return;
        }
        let untold = Untold { since_ns: now_ns, ..Untold::default() };
        let held = self.held.get_or_insert(Held { untold, due_ns: now_ns });
        held.untold.count += count;
        let decide = |left| self.moderator.decide(now_ns, &held.untold, left);
        let decision = match decide(left_in(ring)) {
            _ if !is_served => ModerationDecision::Send(Cause::Unmoderated),
            // Nothing was left at the last read of the ring. The driver may have made chains
            // available since: check again before the call is sent for that reason.
            ModerationDecision::Send(Cause::Dry) if ring.has_available() => decide(left_in(ring)),
            decision => decision,
        };
        match decision {
            ModerationDecision::Send(cause) => self.send(cause, stats),
            ModerationDecision::Hold(due_ns) => {
                held.due_ns = due_ns;
                stats.calls_held.add(1);
            }
        }
    }

    /// Sends a held notification if it is due, or if its queue is not served any more.
    #[inline]
    pub(crate) fn ring_if_due(&mut self, moment: Moment, stats: &QueueStats) {
        let Some(held) = &self.held else { return };
        if !moment.is_served {
            self.send(Cause::Unmoderated, stats);
        } else if moment.now_ns >= held.due_ns {
            self.send(Cause::Time, stats);
        }
    }

    /// Sends a held notification early. Its worker is about to sleep, and the time until the
    /// notification is due is so short that the worker would wake up after it.
    pub(crate) fn send_before_sleep(&mut self, stats: &QueueStats) {
        if self.held.is_some() {
            self.send(Cause::Time, stats);
        }
    }

    fn send(&mut self, cause: Cause, stats: &QueueStats) {
        self.held = None;
        match cause {
            Cause::Unmoderated => {}
            Cause::Count => stats.calls_by_count.add(1),
            Cause::Time => stats.calls_by_time.add(1),
            Cause::Dry => stats.calls_by_dry.add(1),
        }
        self.ring(stats);
    }

    /// Publishes the chains that were `returned`, if any, and calls the driver if it wants a
    /// notification or one was held back.
    pub(crate) fn flush(&mut self, ring: &mut impl Ring, returned: bool, stats: &QueueStats) {
        let was_held = self.held.take().is_some();
        let wants = returned && {
            ring.publish();
            self.unseen = ring.waiting().into();
            ring.needs_notification()
        };
        if was_held || wants {
            self.ring(stats);
        }
    }

    /// Returns when a notification that is held back must be sent, or the last one repeated.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        let repeat_ns = match self.repeat {
            Repeat::At(at_ns) => Some(at_ns),
            Repeat::No | Repeat::Owed => None,
        };
        [self.held.map(|held| held.due_ns), repeat_ns].into_iter().flatten().min()
    }

    /// Call when the queue settles: a call that the driver may have missed is repeated if no other
    /// follows.
    pub(crate) fn rest(&mut self, now_ns: u64) {
        if self.repeat == Repeat::Owed {
            self.repeat = Repeat::At(now_ns + REPEAT_NS);
        }
    }

    /// Repeats the last call, if that is due.
    pub(crate) fn repeat_if_due(&mut self, now_ns: u64, stats: &QueueStats) {
        if let Repeat::At(at_ns) = self.repeat
            && at_ns <= now_ns
        {
            self.ring_at_once(stats);
            self.repeat = Repeat::No;
        }
    }

    #[inline(never)]
    fn ring(&mut self, stats: &QueueStats) {
        self.ring_at_once(stats);
    }

    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a part of each turn that answers something")]
    fn ring_at_once(&mut self, stats: &QueueStats) {
        stats.calls.add(1);
        if self.may_miss {
            self.repeat = Repeat::Owed;
        }
        if let Some(call) = &self.call {
            call.ring();
        }
    }
}

fn may_be_missed(call: Option<&Arc<Call>>) -> bool {
    call.is_some_and(|call| call.may_be_missed())
}

/// Returns how many chains were available and not got back at the last read of the ring.
fn left_in(ring: &impl Ring) -> u64 {
    [ring.in_flight(), ring.waiting(), ring.available_count()].into_iter().map(u64::from).sum()
}
