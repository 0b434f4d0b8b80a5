//! `Base`: the position at which a ring goes on, as `SET_VRING_BASE` and `GET_VRING_BASE` carry it.

use crate::error::QueueError;
use crate::features::RingFeatures;
use crate::place::Place;

/// The position at which a ring goes on. A front-end sets it before a queue starts, and asks for it
/// when the queue stops.
///
/// The ring's format says what the 32 bits mean. Split ring: the next available index to pop, in 16
/// bits. Packed ring: two positions of 15 bits, each with its wrap counter; the low half is the
/// next descriptor to pop, the high half the next one to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base(u32);

impl Base {
    /// The base from the 32 bits of a message.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The 32 bits for a message.
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

    /// The two positions of a packed ring of `size` descriptors: the next descriptor to use, and
    /// the next one to pop. Chains between the two were popped and not returned, and are popped
    /// again. DPDK sends the low half alone, for a ring without chains in flight.
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

    /// The base of a packed ring whose next descriptor to pop is `avail` and to use `used`.
    pub(crate) fn of_packed(avail: Place, used: Place) -> Self {
        Self(u32::from(avail.bits()) | u32::from(used.bits()) << 16)
    }

    /// The start of a packed ring: its first descriptor, with the wrap counter 1 (an odd lap).
    #[must_use]
    pub const fn packed_start() -> Self {
        Self(0x8000_8000)
    }

    /// True if this is the base of a new ring, not of one that goes on. For a packed ring the wrap
    /// counter 0 counts too: some front-ends do not know that packed rings begin with 1.
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
