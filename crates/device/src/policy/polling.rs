//! How long a worker looks before it sleeps: a fixed spin after the last work.

/// Longest spin, in nanoseconds.
pub const SPIN_NS_MAX: u64 = 32_000;

/// Looks for `spin_ns` after the last work, then sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    spin_ns: u64,
}

/// What to do with a queue that has nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Look again.
    Look,
    /// Ask for notifications and let it sleep.
    Sleep,
}

impl Polling {
    /// Spins for `spin_us` microseconds, at most 32; 0 = never.
    #[must_use]
    pub fn new(spin_us: u32) -> Self {
        Self { spin_ns: (u64::from(spin_us) * 1000).min(SPIN_NS_MAX) }
    }

    /// Decides for a queue whose last work was at `worked_at_ns`.
    #[must_use]
    #[inline]
    pub fn decide(self, now_ns: u64, worked_at_ns: u64) -> Decision {
        if now_ns.saturating_sub(worked_at_ns) < self.spin_ns {
            Decision::Look
        } else {
            Decision::Sleep
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_until_the_spin_is_over() {
        let polling = Polling::new(20);
        assert_eq!(polling.decide(1_019_999, 1_000_000), Decision::Look);
        assert_eq!(polling.decide(1_020_000, 1_000_000), Decision::Sleep);
    }

    #[test]
    fn never_looks_when_switched_off_and_never_longer_than_the_bound() {
        assert_eq!(Polling::new(0).decide(5, 5), Decision::Sleep);
        assert_eq!(Polling::new(1000).decide(SPIN_NS_MAX, 0), Decision::Sleep);
    }
}
