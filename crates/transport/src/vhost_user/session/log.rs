//! The migration log of a session: when there is a log, and when rings must wait for it.
//!
//! ```text
//! SET_LOG_BASE               from the answer on, writes are marked in this log
//! SET_FEATURES | LOG_ALL     the guest migrates: rings start only when there is a log
//! SET_FEATURES               the guest does not migrate: the log is dropped
//! ```
//! To a running device, QEMU sends the log before it sets the bit. A device that starts while its
//! guest migrates gets the bit, memory and rings, and only then the log; a log from before the
//! device stopped is stale by then. The log address and flag in `SET_VRING_ADDR` are ignored: every
//! write to a ring is logged at the guest address that the memory table gives.

use super::{Answer, Effect, OF_TRANSPORT, Outcome, Session};
use manyring_wire::vhost_user::{F_LOG_ALL, LogArea, Reply};

/// What the session knows of its migration log.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LogState {
    is_there: bool,
}

impl Session {
    /// Sets the log, in place of a former one. The answer is sent in any case, since QEMU always
    /// waits for it.
    pub(super) fn set_log<F>(&mut self, area: LogArea, fd: Option<F>) -> Outcome<F> {
        self.log.is_there = true;
        self.forget_refusals();
        let effects = vec![Effect::Log(fd.map(|fd| (area, fd)))];
        Outcome { effects, answer: Answer::Reply(Reply::U64(0)) }
    }

    /// Drops the log, if there is one.
    pub(super) fn forget_log<F>(&mut self) -> Option<Effect<F>> {
        std::mem::take(&mut self.log.is_there).then_some(Effect::Log(None))
    }

    /// Handles the log bit in `SET_FEATURES`, by which a front-end says whether the guest migrates.
    /// Returns the effects of the new features.
    pub(super) fn follow_features<F>(&mut self, former: Option<u64>, bits: u64) -> Vec<Effect<F>> {
        let logged = |bits: u64| bits & F_LOG_ALL != 0;
        // The bit is set once more before the rings start: their log comes later, so this one is
        // stale.
        let is_stale = former.is_some_and(logged) && !self.has_running();
        let ends = !logged(bits) || is_stale;
        let mut effects: Vec<_> = ends.then(|| self.forget_log()).flatten().into_iter().collect();
        // If the features of a running device change by this bit alone, the device is not told.
        // Equal features without this bit come from a driver that starts its device again, like
        // UML's, and the device must be told.
        let is_of_log = former.is_some_and(|former| {
            (former ^ bits) & !F_LOG_ALL == 0 && (logged(former) || logged(bits))
        });
        if !is_of_log || !self.has_running() {
            effects.push(Effect::Features(bits & !OF_TRANSPORT));
        }
        effects
    }

    /// True while rings must not start, because there is no log to mark their writes in.
    pub(super) fn awaits_log(&self) -> bool {
        self.features.is_some_and(|bits| bits & F_LOG_ALL != 0) && !self.log.is_there
    }

    /// True if there is a log.
    #[must_use]
    pub fn has_log(&self) -> bool {
        self.log.is_there
    }

    /// True if a ring runs.
    #[must_use]
    pub fn has_running(&self) -> bool {
        self.vrings.iter().any(|vring| vring.running)
    }
}
