//! Finds the messages that a front-end has not sent for a device that it has begun to set up.
//!
//! ```text
//! a ring is complete, and there is no memory:                     the memory is missing
//! no ring is served, and the front-end has begun one of them:     messages of that ring
//! ```
//! If a ring is served, the front-end has completed its setup, and rings that are incomplete are
//! meant to be so: firmware uses one queue of several, a guest fewer pairs than the device has, and
//! a ring that a message has disabled was disabled on purpose. After `GET_VRING_BASE` a ring counts
//! as not begun, until the next message that sets it up.

use super::{F_PROTOCOL_FEATURES, Session, Vring};

/// Messages that a front-end has not sent, and without which no ring is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The memory table, although rings are complete.
    Memory,
    /// These messages of this vring, which is the first that was begun.
    OfVring(usize, Vec<&'static str>),
}

impl Session {
    /// Returns the messages that the front-end has not sent, if no ring is served because of that.
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

    /// Returns the messages without which a vring is not served; none for a vring whose start is
    /// retried.
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
