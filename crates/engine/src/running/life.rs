//! `Life`: whether a running queue serves its ring, drops what the ring holds, or rests; and the
//! events that its session gets.

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
    /// The driver broke the ring's rules: the queue has stopped, the session goes on.
    Fault(QueueError),
    /// Guest memory was cut away: the session must end.
    MemoryLost,
    /// The port is down or gone: nothing is received until the driver enables the queue again.
    PortGone,
}

/// The use of its ring by a disabled queue, if [`Handler::DROPS_WHEN_DISABLED`] is set. The driver
/// may use the memory for something else by now, so the ring is read only after a kick, and written
/// only if chains were found after that kick.
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

/// The state of a running queue, and where its events go.
#[derive(Debug)]
pub(crate) struct Life {
    /// A turn's permission to use the ring. Follows from the fields below, and is kept up to date.
    mode: TurnMode,
    /// The handler drops the chains of a disabled queue.
    drops: bool,
    /// Index of the virtqueue in its device.
    index: usize,
    is_enabled: bool,
    discard: Discard,
    /// No more pops: the queue stops or moves when nothing is in flight.
    is_draining: bool,
    /// The queue stops or was disabled; all the same it pops the chains that a former process has
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

    /// A turn's permission to use the ring.
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

    /// True if the ring may be written: the driver may use the memory of a disabled ring for
    /// something else, unless it has just been seen to fill the ring.
    pub(crate) fn may_write(&self) -> bool {
        self.is_enabled || self.serves_owed || self.discard == Discard::Found
    }

    /// Disables the queue. True if it was enabled.
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

    /// `is_draining`: pop no more from now on. False: pop again.
    pub(crate) fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
        self.work_out_mode();
    }

    /// `serves_owed`: pop the chains that a former process has taken and not returned, although the
    /// queue stops or is disabled. No base says which chains these are.
    pub(crate) fn set_serves_owed(&mut self, serves_owed: bool) {
        self.serves_owed = serves_owed;
        self.work_out_mode();
    }

    /// True while chains that a former process has taken are popped in spite of the queue's end.
    pub(crate) fn serves_owed(&self) -> bool {
        self.serves_owed && self.mode == TurnMode::Serve
    }

    /// The driver has kicked.
    pub(crate) fn kicked(&mut self) {
        if !self.is_enabled && self.discard == Discard::No {
            self.discard = Discard::Kicked;
            self.work_out_mode();
        }
    }

    /// Chains of a disabled queue have been dropped.
    #[cold]
    pub(crate) fn dropped_some(&mut self) {
        debug_assert!(!self.is_enabled, "the queue is served");
        self.discard = Discard::Found;
    }

    /// A disabled queue neither reads nor writes its ring until the driver kicks.
    pub(crate) fn leave_alone(&mut self) {
        if std::mem::replace(&mut self.discard, Discard::No) != Discard::No {
            self.work_out_mode();
        }
    }

    pub(crate) fn set_err(&mut self, err: Option<Arc<Call>>) {
        self.err = err;
    }

    /// Reports the ring's fault once: it is counted, the session gets an event, and the err fd is
    /// signalled. If guest memory was cut away, reports only that.
    #[cold]
    pub(crate) fn tell_fault(&mut self, ring: &impl Ring, stats: &QueueStats) {
        if std::mem::replace(&mut self.is_fault_told, true) {
            return;
        }
        self.work_out_mode();
        // Memory that was cut away reads as zeroes, which no driver has written: the fault that was
        // found in the ring is not the driver's.
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

    /// Guest memory was cut away: no more pops, and the session ends.
    #[cold]
    pub(crate) fn lose_memory(&mut self, stats: &QueueStats) {
        if !std::mem::replace(&mut self.is_memory_lost, true) {
            self.work_out_mode();
            stats.faults.add(1);
            self.tell(EventKind::MemoryLost);
        }
    }

    /// Tells the session once, while the queue is enabled, that the port is down or gone.
    pub(crate) fn tell_port(&mut self) {
        if self.is_enabled && !std::mem::replace(&mut self.is_port_told, true) {
            self.tell(EventKind::PortGone);
        }
    }

    fn tell(&self, kind: EventKind) {
        let _ = self.events.try_send(Event { index: self.index, kind });
    }

    /// True if both queues belong to one session, as far as a worker can tell guests apart.
    pub(crate) fn is_of_same_guest(&self, other: &mpsc::Sender<Event>) -> bool {
        self.events.same_channel(other)
    }

    /// The session's mailbox, by which a worker tells the queues of one guest from another's.
    pub(crate) fn guest(&self) -> &mpsc::Sender<Event> {
        &self.events
    }
}
