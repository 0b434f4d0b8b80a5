//! `Polling`, the operator's choice for the workers, and `Decision`, which a policy gives its
//! worker.

/// How workers look for work, as the operator has configured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// Which arm a worker uses.
    pub mode: Mode,
    /// Longest spin; `None`: what the measured wake suggests.
    pub cap_ns: Option<u64>,
}

/// Which arm a worker uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The one that serves faster at present.
    #[default]
    Auto,
    /// Spins up to the cap, whatever that brings.
    Always,
    /// Sleeps at once.
    Never,
}

impl Polling {
    /// Sleeps as soon as there is nothing to do.
    pub const NEVER: Self = Self { mode: Mode::Never, cap_ns: None };

    /// Spins for at most this many microseconds, where that pays; 0 = never.
    #[must_use]
    pub fn up_to_us(cap_us: u32) -> Self {
        match cap_us {
            0 => Self::NEVER,
            us => Self { mode: Mode::Auto, cap_ns: Some(u64::from(us) * 1000) },
        }
    }
}

/// The decision for a worker that has found nothing in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It looks again at those of its queues that had work within the last `reach_ns`.
    Look {
        /// Longest time since a queue's last work.
        reach_ns: u64,
    },
    /// It lets its queues ask for notifications, and sleeps.
    Sleep,
}

impl Decision {
    /// True if a queue whose last work was at `worked_at_ns` is looked at again.
    #[must_use]
    #[inline]
    pub fn looks(self, now_ns: u64, worked_at_ns: u64) -> bool {
        match self {
            Self::Look { reach_ns } => now_ns.saturating_sub(worked_at_ns) < reach_ns,
            Self::Sleep => false,
        }
    }
}
