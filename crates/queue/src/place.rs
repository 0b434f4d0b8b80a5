//! `Place`: a position in a packed ring and its wrap counter (virtio 1.3 §2.8.1), and the words of
//! its event suppression areas (§2.8.10), which name such a position.

/// Descriptor flag `avail` of a packed ring (§2.8.1). With the wrap counter it tells the lap.
pub(crate) const F_AVAIL: u16 = 1 << 7;
/// Descriptor flag `used` of a packed ring (§2.8.1). With the wrap counter it tells the lap.
pub(crate) const F_USED: u16 = 1 << 15;
/// Both flags: they tell on which lap a descriptor is available or used.
pub(crate) const LAP: u16 = F_AVAIL | F_USED;

/// A descriptor of a packed ring, and its wrap counter: true on odd laps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) at: u16,
    pub(crate) wrap: bool,
}

impl Place {
    /// The place from the 16 bits of a base or an event: the highest bit is the wrap counter.
    pub(crate) fn from_bits(bits: u16) -> Self {
        Self { at: bits & 0x7fff, wrap: bits >> 15 != 0 }
    }

    #[inline]
    pub(crate) fn bits(self) -> u16 {
        self.at | u16::from(self.wrap) << 15
    }

    /// The place `count` descriptors further on; `count` is at most the ring's `size`.
    #[inline]
    #[must_use]
    pub(crate) fn add(self, count: u16, size: u16) -> Self {
        // At most 32768 + 32767: no overflow.
        let at = self.at + count;
        if at >= size { self.on_next_lap(at - size) } else { Self { at, ..self } }
    }

    /// Cold, so that a chain which does not cross the ring's end costs one comparison only.
    #[cold]
    fn on_next_lap(self, at: u16) -> Self {
        Self { at, wrap: !self.wrap }
    }

    /// The place `count` descriptors before this one.
    #[must_use]
    pub(crate) fn sub(self, count: u16, size: u16) -> Self {
        if count > self.at {
            Self { at: self.at + (size - count), wrap: !self.wrap }
        } else {
            Self { at: self.at - count, wrap: self.wrap }
        }
    }

    /// Number of descriptors from `from` to this place, at most the ring's size. `None` if this
    /// place is before `from`.
    pub(crate) fn since(self, from: Self, size: u16) -> Option<u16> {
        if self.wrap == from.wrap {
            self.at.checked_sub(from.at)
        } else {
            (self.at <= from.at).then(|| self.at + (size - from.at))
        }
    }

    /// The flags of a descriptor that is made available here.
    #[inline]
    pub(crate) fn avail_flags(self) -> u16 {
        if self.wrap { F_AVAIL } else { F_USED }
    }

    /// The flags of a descriptor that is used here.
    #[inline]
    pub(crate) fn used_flags(self) -> u16 {
        u16::from(self.wrap) * LAP
    }

    /// True if a descriptor with these flags is available here.
    #[inline]
    pub(crate) fn is_avail(self, flags: u16) -> bool {
        flags & LAP == self.avail_flags()
    }

    /// True if a descriptor with these flags was used on this lap. It may have been made available
    /// again for the next lap since.
    pub(crate) fn was_used(self, flags: u16) -> bool {
        (flags & F_USED != 0) == self.wrap
    }

    /// True if a descriptor with these flags is used here.
    #[inline]
    pub(crate) fn is_used(self, flags: u16) -> bool {
        flags & LAP == self.used_flags()
    }
}

/// Event flags: notify of every buffer (§2.8.10).
pub(crate) const EVENT_ENABLE: u16 = 0;
/// Event flags: notify of no buffer.
pub(crate) const EVENT_DISABLE: u16 = 1;
/// Event flags: notify when this descriptor is reached. Only with `VIRTIO_F_EVENT_IDX`.
pub(crate) const EVENT_DESC: u16 = 2;

/// The word of an event suppression area: a descriptor with its wrap counter, and flags.
pub(crate) fn event_word(place: u16, flags: u16) -> u32 {
    u32::from(place) | u32::from(flags) << 16
}

/// True if the other side, which has written the event word `word`, wants to be notified of the
/// `moved` descriptors before `now`. Reserved flags count as "always".
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "the fields are taken out by shifts")]
pub(crate) fn wants_event(word: u32, has_desc: bool, now: Place, moved: u16, size: u16) -> bool {
    match (word >> 16) as u16 & 3 {
        EVENT_DISABLE => false,
        EVENT_DESC if has_desc => {
            let event = Place::from_bits(word as u16);
            let at = if event.wrap == now.wrap { event.at } else { event.at.wrapping_sub(size) };
            moved >= size || now.at.wrapping_sub(at).wrapping_sub(1) < moved
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back_to_where_they_were() {
        for size in [1, 2, 3, 5, 32768] {
            let start = Place { at: size - 1, wrap: true };
            for count in [0, 1, 2, size].into_iter().filter(|count| *count <= size) {
                let there = start.add(count, size);
                assert!(there.at < size);
                assert_eq!(there.sub(count, size), start, "{size} {count}");
                assert_eq!(there.since(start, size), Some(count), "{size} {count}");
                assert_eq!(Place::from_bits(there.bits()), there);
            }
        }
    }

    #[test]
    fn an_event_is_wanted_when_its_descriptor_is_passed() {
        let (size, now) = (5, Place { at: 1, wrap: false });
        // The three descriptors 3 and 4 of the lap before, and 0 of this one, were just passed.
        let passed = |at, wrap| {
            let word = event_word(Place { at, wrap }.bits(), EVENT_DESC);
            wants_event(word, true, now, 3, size)
        };
        assert!(passed(3, true) && passed(4, true) && passed(0, false));
        assert!(!passed(2, true) && !passed(1, false));
        assert!(wants_event(event_word(9, EVENT_DESC), false, now, 1, size), "not negotiated");
        assert!(!wants_event(event_word(0, EVENT_DISABLE), true, now, 1, size));
    }
}
