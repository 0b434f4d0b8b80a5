//! `Base`: where a ring goes on, as `SET_VRING_BASE` and `GET_VRING_BASE` carry it.

use crate::config::RingFeatures;
use crate::error::QueueError;

/// Where a ring goes on: what a front-end sets before a queue starts, and asks for when it stops.
///
/// Its 32 bits mean what the ring's format says. Those of a split ring are the next available index
/// to pop, in 16 bits. Those of a packed ring are two positions of 15 bits, each with its wrap
/// counter: the next descriptor to pop, and above it the next one to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base(u32);

impl Base {
    /// The base that a message carries as `bits`.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The base as a message carries it.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Checks that a ring with these features can go on here. Every ring is split: packed rings are
    /// not offered.
    ///
    /// # Errors
    /// [`QueueError::Base`].
    pub fn check(self, _: RingFeatures) -> Result<(), QueueError> {
        self.split().map(drop)
    }

    /// The next available index of a split ring.
    ///
    /// # Errors
    /// [`QueueError::Base`] if there are more than its 16 bits.
    pub fn split(self) -> Result<u16, QueueError> {
        u16::try_from(self.0).map_err(|_| QueueError::Base { bits: self.0 })
    }
}

/// The base of a split ring whose next available index this is.
impl From<u16> for Base {
    fn from(next: u16) -> Self {
        Self(next.into())
    }
}
