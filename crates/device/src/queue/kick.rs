//! The kick of a running queue: watched by its worker, and replaced while the queue runs.

use super::{Discard, Look, RunningQueue};
use crate::doorbell::Kick;
use crate::wait::{Source, Wait, Woken};
use rustix::fd::AsFd;
use rustix::io::Errno;

impl RunningQueue {
    /// The kick has an event, seen under the number `watch`. One of a kick that was replaced is
    /// not a kick any more, and ECANCELED is only the end of a watch.
    pub(crate) fn on_kick(
        &mut self,
        (slot, watch): (u32, u32),
        event: Woken,
        wait: &mut Wait,
        now_ns: u64,
    ) {
        if watch != self.kick_watch || event.result == -Errno::CANCELED.raw_os_error() {
            return;
        }
        if !std::mem::take(&mut self.is_kick_stale) {
            self.kicked(now_ns);
        }
        if event.ended {
            self.watch_kick(wait, slot);
        }
    }

    fn kicked(&mut self, now_ns: u64) {
        self.stats.kicks.add(1);
        self.kicked = true;
        if !self.enabled && self.discard == Discard::No {
            self.discard = Discard::Kicked;
        }
        if self.look == Look::Armed {
            self.looked_at_ns = now_ns;
        }
        self.make_hot(now_ns);
    }

    /// Watches the kick, here or after the kernel ended the watch. An eventfd, which is never
    /// read, reports at once what it had at any time: that is no reason to look at a ring that is
    /// disabled, whose memory may be the driver's again.
    pub(super) fn watch_kick(&mut self, wait: &mut Wait, slot: u32) {
        if let Some(kick) = &self.kick {
            self.is_kick_stale = !self.enabled && kick.keeps();
            self.kick_watch = wait.next_kick_watch();
            wait.watch(kick.as_fd(), Source::Kick { slot, watch: self.kick_watch });
        }
    }

    pub(super) fn unwatch_kick(&self, wait: &mut Wait, slot: u32) {
        if let Some(kick) = &self.kick {
            wait.unwatch(kick.as_fd(), Source::Kick { slot, watch: self.kick_watch });
        }
    }

    /// Goes by another kick from now on. The driver may have written to the former one just before:
    /// the ring is looked at.
    pub(crate) fn set_kick(&mut self, kick: Option<Kick>, wait: &mut Wait, slot: u32, now_ns: u64) {
        self.unwatch_kick(wait, slot);
        self.kick = kick;
        self.watch_kick(wait, slot);
        self.make_hot(now_ns);
    }
}
