//! Where a ring stands, as `GET_VRING_BASE` answers it.
//!
//! ```text
//! the queue runs                 it stops, and says where
//! it has stopped before          the place at which it stopped
//! it has all that it needs, and does not run (the host lacks something, its ring is wrong):
//!                                the ring and its in-flight region are asked, since a process
//!                                before this one may have run it
//! it never had all               the front-end's base
//! ```

use super::{Answer, Effect, KickState, Outcome, Session, SessionError};
use manyring_queue::Base;
use manyring_wire::vhost_user::VringState;

impl Session {
    /// Notes that the queue has stopped at `base`; it needs a new kick to start again. A vring that
    /// counts as stopped already (its base was set anew) is left as it is.
    pub fn stopped(&mut self, index: usize, base: Base) {
        if let Some(vring) = self.vrings.get_mut(index).filter(|v| v.running) {
            vring.running = false;
            vring.base = base;
            vring.kick = KickState::Unset;
        }
    }

    /// Notes that a vring which does not run stands at `base`.
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
        // Whether it ran or not, the vring needs a new kick to start.
        (vring.kick, vring.is_begun) = (KickState::Unset, false);
        Ok(Outcome { effects, answer: Answer::Base(index) })
    }
}
