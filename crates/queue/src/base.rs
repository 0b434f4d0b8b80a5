//! `Base`: where a ring goes on, as `SET_VRING_BASE` and `GET_VRING_BASE` carry it.

use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::place::Place;

/// The place at which a ring goes on: a front-end sets it before a queue starts, and asks for it
/// when the queue stops.
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

    /// Checks that a ring of `size` entries with these features can go on here.
    ///
    /// # Errors
    /// [`QueueError::Base`], [`QueueError::PackedBase`].
    pub fn check(self, size: u16, features: RingFeatures) -> Result<(), QueueError> {
        if features.packed { self.packed(size).map(drop) } else { self.split().map(drop) }
    }

    /// The places at which a packed ring of `size` descriptors goes on: the next descriptor to use,
    /// and the next one to pop. Chains between the two were taken and not answered, and are taken
    /// again. DPDK hands on the lower half alone, for a ring of which nothing is in flight.
    ///
    /// # Errors
    /// [`QueueError::PackedBase`] if a place is not in the ring, or one is more than the ring's
    /// size ahead of the other.
    #[allow(clippy::cast_possible_truncation, reason = "the two halves")]
    pub(crate) fn packed(self, size: u16) -> Result<Place, QueueError> {
        let avail = Place::from_bits(self.0 as u16);
        let used = if self.0 >> 16 == 0 { avail } else { Place::from_bits((self.0 >> 16) as u16) };
        let is_in_ring = avail.at < size && used.at < size;
        if is_in_ring && avail.since(used, size).is_some() {
            Ok(used)
        } else {
            Err(QueueError::PackedBase { bits: self.0, size })
        }
    }

    /// The base of a packed ring.
    pub(crate) fn of_packed(avail: Place, used: Place) -> Self {
        Self(u32::from(avail.bits()) | u32::from(used.bits()) << 16)
    }

    /// Where a packed ring begins: at its first descriptor, on an odd lap.
    #[must_use]
    pub const fn packed_start() -> Self {
        Self(0x8000_8000)
    }

    /// True if a new ring begins here, and not one that goes on. A front-end that does not know
    /// that packed rings begin on an odd lap names the even one.
    #[must_use]
    pub fn is_start(self, features: RingFeatures) -> bool {
        let is_packed_start = features.packed && matches!(self.0, 0x8000 | 0x8000_8000);
        self.0 == 0 || is_packed_start
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
