//! Saving and loading the device's state (vhost-user, "Migrating back-end state").
//!
//! ```text
//! GET_VRING_BASE of each ring                    the device is suspended
//! SET_DEVICE_STATE_FD save | .. | CHECK          at the source
//! SET_DEVICE_STATE_FD load | .. | CHECK          at the destination, before a ring starts
//! ```
//! At the destination, SET_FEATURES may come before or after the load: the device waits for it.

use super::{Answer, Effect, Outcome, Session};
use manyring_wire::vhost_user::{
    Reply, STATE_FAILED, STATE_LOAD, STATE_NO_FD, STATE_SAVE, STATE_STOPPED, StateTransfer,
};

impl Session {
    /// Begins a transfer. Refuses an unknown kind of transfer, and any while a ring runs.
    pub(super) fn begin_transfer<F>(&self, transfer: StateTransfer, fd: Option<F>) -> Outcome<F> {
        let is_stopped = transfer.phase == STATE_STOPPED && !self.has_running();
        let effect = match transfer.direction {
            STATE_SAVE => fd.map(Effect::SaveState),
            STATE_LOAD => fd.map(Effect::LoadState),
            _ => None,
        };
        match effect.filter(|_| is_stopped) {
            Some(effect) => Outcome { effects: vec![effect], answer: Answer::StateFd },
            None => Outcome::of(Answer::Reply(Reply::U64(STATE_NO_FD | STATE_FAILED))),
        }
    }

    /// Ends a transfer of the device's state, because the front-end asks for its result.
    pub(super) fn end_transfer<F>(&self) -> Outcome<F> {
        Outcome::of(Answer::CheckState { is_suspended: !self.has_running() })
    }
}
