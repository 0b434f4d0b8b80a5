//! What the front-end has not sent of a device that it has begun to set up.
//!
//! ```text
//! a ring has all that it needs, and there is no memory:           the memory is not shared
//! no ring is served, and the front-end has begun one of them:     its messages that are missing
//! ```
//! A ring that is served shows that the front-end is through: what it leaves out of others is none
//! of our business. Firmware uses one queue of several, a guest fewer pairs than it has, and rings
//! that are disabled by a message were disabled on purpose. `GET_VRING_BASE` ends what was begun of
//! a ring: the front-end begins the ring again with the next message that sets it up.

use super::{F_PROTOCOL_FEATURES, Session, Vring};

/// What a front-end has not sent, and without which no ring is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The guest's memory: its rings are set up.
    Memory,
    /// Messages of this vring, the first that was begun: their names.
    OfVring(usize, Vec<&'static str>),
}

impl Session {
    /// What the front-end has not sent, if no ring is served for want of it.
    #[must_use]
    pub fn unsent(&self) -> Option<Unsent> {
        if self.regions.is_empty() {
            return self.vrings.iter().any(Vring::is_complete).then_some(Unsent::Memory);
        }
        let is_served = |(index, vring): (usize, &Vring)| vring.running && self.is_enabled(index);
        if self.features.is_none() || self.vrings.iter().enumerate().any(is_served) {
            return None;
        }
        let begun = self.vrings.iter().enumerate().filter(|(_, vring)| vring.is_begun);
        let mut missing = begun.map(|(index, vring)| (index, self.missing(vring)));
        let (index, missing) = missing.find(|(_, missing)| !missing.is_empty())?;
        Some(Unsent::OfVring(index, missing))
    }

    /// The messages that a vring lacks for being served. None of one that waits for the host.
    fn missing(&self, vring: &Vring) -> Vec<&'static str> {
        let is_to_be_enabled = self.features() & F_PROTOCOL_FEATURES != 0;
        let lacks = [
            (vring.size.is_none(), "SET_VRING_NUM"),
            (vring.addresses.is_none(), "SET_VRING_ADDR"),
            (!vring.has_kick(), "SET_VRING_KICK"),
            (is_to_be_enabled && vring.enabled.is_none(), "SET_VRING_ENABLE"),
            (self.awaits_log(), "SET_LOG_BASE"),
        ];
        lacks.into_iter().filter_map(|(is_lacking, name)| is_lacking.then_some(name)).collect()
    }
}
