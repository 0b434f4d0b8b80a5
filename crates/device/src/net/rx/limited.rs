//! A receiveq with a limit: takes one frame at a time from its port, when the limit admits it.

use super::NetRx;
use crate::net::NetTurn;
use manyring_backend::net::{FRAMES_MAX, GROUP_FRAMES};
use manyring_engine::stats::QueueStats;
use manyring_engine::{Limit, Way};
use manyring_queue::Chains;
use std::sync::Arc;

/// The present turn: its time, and how much of it was charged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Passing {
    now_ns: u64,
    /// Packets and bytes of the turn that the limit was charged for.
    charged: (u64, u64),
}

impl NetRx {
    /// Sets where to load the limit from, at each [`Self::refresh_rules`] and when the queue starts
    /// on a worker.
    pub(crate) fn limited(mut self, limit: Arc<Limit>) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Loads the present limit.
    pub(crate) fn take_limit(&mut self) {
        self.gate = self.limit.as_ref().and_then(Limit::gate);
        let is_limited = self.gate.is_some();
        self.group_max = if is_limited { 1 } else { GROUP_FRAMES };
        self.to.lent_max = if is_limited { 1 } else { FRAMES_MAX };
    }

    /// True if the queue has a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.gate.is_some()
    }

    /// Returns when the limit may admit a frame again; `None`: it refused none.
    pub(crate) fn limited_until_ns(&self) -> Option<u64> {
        self.gate.as_ref().and_then(|gate| gate.due_ns())
    }

    /// [`Self::turn`] for a queue with a limit. Frames that the limit does not admit wait in the
    /// port, and the host drops those for which the port has no space.
    #[cold]
    #[inline(never)]
    pub(crate) fn turn_limited(
        &mut self,
        queue: &mut impl Chains,
        stats: &QueueStats,
        now_ns: u64,
    ) -> NetTurn {
        if let Some(gate) = &mut self.gate {
            if gate.is_closed(now_ns) {
                return NetTurn::default();
            }
            gate.open();
        }
        self.passing = Passing { now_ns, charged: (0, 0) };
        self.turn(queue, stats)
    }

    /// Charges the frames that were delivered since the last call. Returns true if the limit admits
    /// another frame.
    #[cold]
    #[inline(never)]
    pub(super) fn admits(&mut self, stats: &QueueStats) -> bool {
        self.charge_delivered();
        let now_ns = self.passing.now_ns;
        self.gate.as_mut().is_none_or(|gate| gate.passes(Way::Write, now_ns, stats))
    }

    /// Charges the frames that were delivered since the last call.
    #[cold]
    #[inline(never)]
    pub(super) fn charge_delivered(&mut self) {
        let Some(gate) = &mut self.gate else { return };
        let (packets, mut bytes) = (self.to.tally.packets, self.to.tally.bytes);
        let former = std::mem::replace(&mut self.passing.charged, (packets, bytes));
        bytes -= former.1;
        for _ in former.0..packets {
            gate.charge(Way::Write, std::mem::take(&mut bytes), self.passing.now_ns);
        }
    }
}
