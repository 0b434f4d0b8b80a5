//! `Polling`: how workers poll, as the operator has configured. `Decision`: what a worker does
//! after a turn without work.

/// How workers poll for work, as the operator has configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// The arm that workers use, or that the policy chooses it.
    pub mode: Mode,
    /// The longest spin, in nanoseconds; `None`: derived from the measured wake.
    pub cap_ns: Option<u64>,
}

/// The arm that workers use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Each worker uses the arm that serves faster at present.
    #[default]
    Auto,
    /// Workers spin for up to the longest spin, whether that is faster or not.
    Always,
    /// Workers sleep at once.
    Never,
}

impl Polling {
    /// Workers sleep as soon as they have no work.
    pub const NEVER: Self = Self { mode: Mode::Never, cap_ns: None };

    /// Each worker spins for at most this many microseconds, if that is faster; 0: never.
    #[must_use]
    pub fn up_to_us(cap_us: u32) -> Self {
        match cap_us {
            0 => Self::NEVER,
            us => Self { mode: Mode::Auto, cap_ns: Some(u64::from(us) * 1000) },
        }
    }
}

/// What a worker does after a turn without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The worker polls its queues again that had work within the last `reach_ns`.
    Look {
        /// The longest time since a queue's last work, in nanoseconds.
        reach_ns: u64,
    },
    /// The worker asks for notifications on all its queues, and sleeps.
    Sleep,
}

impl Decision {
    /// True if the worker polls a queue again that last had work at `worked_at_ns`.
    #[must_use]
    #[inline]
    pub fn looks(self, now_ns: u64, worked_at_ns: u64) -> bool {
        match self {
            Self::Look { reach_ns } => now_ns.saturating_sub(worked_at_ns) < reach_ns,
            Self::Sleep => false,
        }
    }
}
