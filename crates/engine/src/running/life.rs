//! `Life`: whether a running queue serves its ring, drops the chains in the ring, or does not use
//! the ring; and the events for its session.

use crate::fds::doorbell::Call;
use crate::running::handler::TurnMode;
use crate::stats::QueueStats;
use manyring_queue::{QueueError, Ring};
use std::sync::Arc;
use tokio::sync::mpsc;

/// An event that a running queue reports to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of the virtqueue in its device.
    pub index: usize,
    /// The kind of event.
    pub kind: EventKind,
}

/// The kinds of event that a running queue reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The driver broke the ring's rules: the queue has stopped, the session continues.
    Fault(QueueError),
    /// Guest memory was truncated: the session must end.
    MemoryLost,
    /// The port is down or deleted: nothing is received until the driver enables the queue again.
    PortGone,
}

/// The use of its ring by a disabled queue, if [`Handler::DROPS_WHEN_DISABLED`] is set. The driver
/// may use the memory for something else by now, so the queue reads the ring only after a kick, and
/// writes it only if chains were found after that kick.
///
/// [`Handler::DROPS_WHEN_DISABLED`]: crate::running::handler::Handler::DROPS_WHEN_DISABLED
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discard {
    /// Neither reads nor writes the ring.
    No,
    /// The driver kicked: pops the chains in the ring and drops them.
    Kicked,
    /// Chains were found after the kick, and dropped: the ring may be written.
    Found,
}

/// The state of a running queue, and the channel of its events.
#[derive(Debug)]
pub(crate) struct Life {
    /// What a turn may do with the ring: computed from the fields below at each of their changes.
    mode: TurnMode,
    /// True if the handler drops the chains of a disabled queue.
    drops: bool,
    /// Index of the virtqueue in its device.
    index: usize,
    is_enabled: bool,
    discard: Discard,
    /// True if the queue pops nothing more: it stops or moves when nothing is in flight.
    is_draining: bool,
    /// True if the queue stops or was disabled, but still pops the chains that a former process has
    /// taken.
    serves_owed: bool,
    is_memory_lost: bool,
    is_fault_told: bool,
    is_port_told: bool,
    err: Option<Arc<Call>>,
    events: mpsc::Sender<Event>,
}

impl Life {
    pub(crate) fn new(
        index: usize,
        is_enabled: bool,
        drops: bool,
        err: Option<Arc<Call>>,
        events: mpsc::Sender<Event>,
    ) -> Self {
        Self {
            mode: if is_enabled { TurnMode::Serve } else { TurnMode::Rest },
            drops,
            index,
            is_enabled,
            discard: Discard::No,
            is_draining: false,
            serves_owed: false,
            is_memory_lost: false,
            is_fault_told: false,
            is_port_told: false,
            err,
            events,
        }
    }

    /// Returns what a turn may do with the ring.
    #[inline]
    pub(crate) fn mode(&self) -> TurnMode {
        self.mode
    }

    fn work_out_mode(&mut self) {
        self.mode = if self.is_memory_lost || self.is_fault_told {
            TurnMode::Rest
        } else if self.serves_owed {
            TurnMode::Serve
        } else if self.is_draining {
            TurnMode::Rest
        } else if self.is_enabled {
            TurnMode::Serve
        } else if self.drops && self.discard != Discard::No {
            TurnMode::Drop
        } else {
            TurnMode::Rest
        };
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// True if the ring may be written. The driver may use the memory of a disabled ring for
    /// something else, unless the queue has just seen the driver fill the ring.
    pub(crate) fn may_write(&self) -> bool {
        self.is_enabled || self.serves_owed || self.discard == Discard::Found
    }

    /// Disables the queue. Returns true if it was enabled.
    pub(crate) fn disable(&mut self) -> bool {
        let was_enabled = std::mem::replace(&mut self.is_enabled, false);
        self.work_out_mode();
        was_enabled
    }

    pub(crate) fn enable(&mut self) {
        self.is_enabled = true;
        self.serves_owed = false;
        self.discard = Discard::No;
        self.is_port_told = false;
        self.work_out_mode();
    }

    /// Stops popping if `is_draining`; otherwise pops again.
    pub(crate) fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
        self.work_out_mode();
    }

    /// Sets whether the queue pops the chains that a former process has taken and not returned,
    /// although it stops or is disabled. No base says which chains these are.
    pub(crate) fn set_serves_owed(&mut self, serves_owed: bool) {
        self.serves_owed = serves_owed;
        self.work_out_mode();
    }

    /// True while the queue pops chains that a former process has taken, although it stops or is
    /// disabled.
    pub(crate) fn serves_owed(&self) -> bool {
        self.serves_owed && self.mode == TurnMode::Serve
    }

    /// Call when the driver has kicked.
    pub(crate) fn kicked(&mut self) {
        if !self.is_enabled && self.discard == Discard::No {
            self.discard = Discard::Kicked;
            self.work_out_mode();
        }
    }

    /// Call when chains of a disabled queue have been dropped.
    #[cold]
    pub(crate) fn dropped_some(&mut self) {
        debug_assert!(!self.is_enabled, "the queue is served");
        self.discard = Discard::Found;
    }

    /// Stops the use of a disabled queue's ring until the driver kicks.
    pub(crate) fn leave_alone(&mut self) {
        if std::mem::replace(&mut self.discard, Discard::No) != Discard::No {
            self.work_out_mode();
        }
    }

    pub(crate) fn set_err(&mut self, err: Option<Arc<Call>>) {
        self.err = err;
    }

    /// Reports the ring's fault once: counts it, sends the session an event, and signals the err
    /// fd. If guest memory was truncated, reports only that.
    #[cold]
    pub(crate) fn tell_fault(&mut self, ring: &impl Ring, stats: &QueueStats) {
        if std::mem::replace(&mut self.is_fault_told, true) {
            return;
        }
        self.work_out_mode();
        // Truncated memory reads as zeroes, which no driver has written: the fault that was found
        // in the ring is not the driver's.
        if ring.is_broken() {
            self.lose_memory(stats);
            return;
        }
        stats.faults.add(1);
        if let Some(fault) = ring.fault() {
            // A full mailbox loses this event; the counter and the err fd still report the fault.
            self.tell(EventKind::Fault(fault));
        }
        // Last: a front-end that is woken by the err fd may end the session at once.
        if let Some(err) = &self.err {
            err.ring();
        }
    }

    /// Records that guest memory was truncated: the queue pops nothing more, and the session ends.
    #[cold]
    pub(crate) fn lose_memory(&mut self, stats: &QueueStats) {
        if !std::mem::replace(&mut self.is_memory_lost, true) {
            self.work_out_mode();
            stats.faults.add(1);
            self.tell(EventKind::MemoryLost);
        }
    }

    /// Sends the session one event, while the queue is enabled, that the port is down or deleted.
    pub(crate) fn tell_port(&mut self) {
        if self.is_enabled && !std::mem::replace(&mut self.is_port_told, true) {
            self.tell(EventKind::PortGone);
        }
    }

    fn tell(&self, kind: EventKind) {
        let _ = self.events.try_send(Event { index: self.index, kind });
    }

    /// True if both queues belong to one session, and so to one guest.
    pub(crate) fn is_of_same_guest(&self, other: &mpsc::Sender<Event>) -> bool {
        self.events.same_channel(other)
    }

    /// Returns the session's mailbox, which tells queues of one guest from those of another.
    pub(crate) fn guest(&self) -> &mpsc::Sender<Event> {
        &self.events
    }
}
