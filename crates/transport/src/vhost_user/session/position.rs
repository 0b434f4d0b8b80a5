//! The base of a ring, as `GET_VRING_BASE` answers it.
//!
//! ```text
//! the queue runs                 stop it: its base
//! it has stopped before          the base at which it stopped
//! it is complete, and does not run, because the host has a shortage, or the ring is faulty:
//!                                read the base from the ring and its in-flight region, since a
//!                                former process may have served the ring
//! it was never complete          the base that the front-end has set
//! ```

use super::{Answer, Effect, KickState, Outcome, Session, SessionError};
use manyring_queue::Base;
use manyring_wire::vhost_user::VringState;

impl Session {
    /// Called when the queue has stopped at `base`; it needs a new kick to start again. A vring
    /// that already counts as stopped, because its base was set while it ran, stays as it is.
    pub fn stopped(&mut self, index: usize, base: Base) {
        if let Some(vring) = self.vrings.get_mut(index).filter(|v| v.running) {
            vring.running = false;
            vring.base = base;
            vring.kick = KickState::Unset;
        }
    }

    /// Sets the base that was found for a vring which does not run.
    pub fn found(&mut self, index: usize, base: Base) {
        if let Some(vring) = self.vrings.get_mut(index).filter(|v| !v.running) {
            vring.base = base;
        }
    }

    pub(super) fn base_of<F>(
        &mut self,
        name: &'static str,
        state: VringState,
    ) -> Result<Outcome<F>, SessionError> {
        let index = state.index as usize;
        let is_set_up = self.features.is_some() && !self.regions.is_empty();
        let vring = self.vring_mut(name, index)?;
        let effects = match vring.running {
            true => vec![Effect::Stop(index)],
            false if is_set_up && vring.is_complete() => vec![Effect::FindBase(index)],
            false => Vec::new(),
        };
        // Whether the vring ran or not, it needs a new kick to start.
        (vring.kick, vring.is_begun) = (KickState::Unset, false);
        Ok(Outcome { effects, answer: Answer::Base(index) })
    }
}
