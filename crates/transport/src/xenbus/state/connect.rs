//! Connects to the rings that a front-end names, or that a former process has left connected; and
//! checks that the front-end's nodes still name the running rings.

use super::super::negotiate::{self, Reason, state_of};
use super::{Action, Back, Negotiated, Phase, Running};
use manyring_wire::xen::state::XenbusState;

impl Back {
    /// Connects to the rings that the front-end names. `takeover`: a former process served them.
    pub(super) fn connect(&mut self, takeover: bool, actions: &mut Vec<Action>) {
        let Some(opened) = &self.opened else { return };
        let folder = &opened.assignment.frontend;
        let inherited = self.inherited;
        let offer = match inherited {
            true => negotiate::offer_left(&self.seen.back, opened.offer),
            false => opened.offer,
        };
        match negotiate::connection(folder, &self.seen.front, &offer) {
            Ok(connection) => {
                let persistent = connection.persistent && offer.persistent;
                let assignment = opened.assignment.clone();
                self.number = self.number.wrapping_add(1);
                let number = self.number;
                let config = Negotiated {
                    number,
                    assignment,
                    connection,
                    persistent,
                    offer,
                    takeover,
                    inherited,
                };
                actions.push(Action::Connect(config.clone()));
                let front = self.seen.front.clone();
                self.phase = Phase::Starting(Box::new(Running { config, front }));
            }
            Err(reason) => self.fail(reason, actions),
        }
    }

    /// Checks that the front-end's nodes still name the running connection.
    ///
    /// # Errors
    /// [`Reason::Changed`]: the nodes name another connection. [`Reason::Node`]: one is wrong.
    pub(super) fn is_as_negotiated(&self) -> Result<(), Reason> {
        let Phase::Connected(running) = &self.phase else { return Ok(()) };
        let folder = self.front_folder();
        let offer = running.config.offer;
        let now = negotiate::connection(folder, &self.seen.front, &offer)?;
        if now == running.config.connection {
            return Ok(());
        }
        let path = negotiate::first_change(folder, &running.front, &self.seen.front);
        Err(Reason::Changed { path })
    }

    /// True if a former process has left the front-end connected.
    pub(super) fn is_left_connected(&self) -> bool {
        use XenbusState::{Closing, Connected, Initialised};
        matches!(self.told, Connected | Initialised | Closing)
            && matches!(state_of(&self.seen.front), Some(Initialised | Connected))
    }

    /// True if a former process was killed after the front-end had answered its offer, and before
    /// the process had written `Connected`.
    pub(super) fn is_left_connecting(&self) -> bool {
        use XenbusState::{Connected, InitWait, Initialised};
        self.inherited
            && self.told == InitWait
            && matches!(state_of(&self.seen.front), Some(Initialised | Connected))
    }
}
