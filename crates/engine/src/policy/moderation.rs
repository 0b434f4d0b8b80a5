//! When the driver is told of used buffers: at once, or as its coalescing parameters allow.

/// Notifications that are held back, by the driver's own wish (virtio 1.3 §5.1.6.5.9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    packets_max: u32,
    delay_us_max: u32,
}

/// What to do with a notification that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send it.
    Send,
    /// Hold it back until this time, in nanoseconds, or until there is more to tell.
    Hold(u64),
}

impl Moderation {
    /// With the driver's parameters: packets and microseconds after which it is told.
    #[must_use]
    pub fn new(packets_max: u32, delay_us_max: u32) -> Self {
        Self { packets_max, delay_us_max }
    }

    /// Nothing is held back.
    #[must_use]
    #[inline]
    pub fn is_off(self) -> bool {
        self.delay_us_max == 0
    }

    /// Decides for `packets` that were not told of yet, the first of them at `since_ns`. Without a
    /// longest delay nothing is held back; without a largest count only time counts.
    #[must_use]
    #[inline]
    pub fn decide(self, now_ns: u64, since_ns: u64, packets: u64) -> Decision {
        let Self { packets_max, delay_us_max } = self;
        let due_ns = since_ns.saturating_add(u64::from(delay_us_max) * 1000);
        let is_full = packets_max != 0 && packets >= u64::from(packets_max);
        if is_full || now_ns >= due_ns { Decision::Send } else { Decision::Hold(due_ns) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_held_back_unless_the_driver_wants_it() {
        for packets_max in [0, 1, 64] {
            assert_eq!(Moderation::new(packets_max, 0).decide(5, 5, 1), Decision::Send);
        }
    }

    #[test]
    fn count_or_time_whichever_comes_first() {
        let five_or_two_ms = Moderation::new(5, 2000);
        assert_eq!(five_or_two_ms.decide(0, 0, 4), Decision::Hold(2_000_000));
        assert_eq!(five_or_two_ms.decide(0, 0, 5), Decision::Send);
        assert_eq!(five_or_two_ms.decide(1_999_999, 0, 4), Decision::Hold(2_000_000));
        assert_eq!(five_or_two_ms.decide(2_000_000, 0, 1), Decision::Send);
        assert_eq!(Moderation::new(0, 10).decide(9_999, 0, 1 << 40), Decision::Hold(10_000));
    }
}
