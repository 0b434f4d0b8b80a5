//! `PollingNumbers`: what a polling policy has measured, decided and counted.

/// How a worker waits between two requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arm {
    /// The worker polls, up to the longest spin.
    #[default]
    Spin,
    /// The worker sleeps at once.
    Sleep,
}

impl Arm {
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Spin => Self::Sleep,
            Self::Sleep => Self::Spin,
        }
    }
}

/// What a polling policy has measured, decided and counted. Counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollingNumbers {
    /// The arm in use; during an epoch of the tried arm, that arm.
    pub arm: Arm,
    /// The time of a request when sleeping, in thousandths of its time when spinning.
    pub gain: u64,
    /// The CPU time of a request when spinning, in thousandths of that when sleeping.
    pub effort: u64,
    /// The average time between two turns with work, in nanoseconds.
    pub gap_ns: u64,
    /// The number of trials begun.
    pub trials: u64,
    /// The number of trials after which the other arm is in use.
    pub flips: u64,
    /// The number of polls so long that another thread must have had the CPU.
    pub stolen_looks: u64,
    /// Nanoseconds of polls that found nothing while the worker spun.
    pub looked_spinning_ns: u64,
    /// Nanoseconds of polls that found nothing just before the worker slept.
    pub looked_sleeping_ns: u64,
    /// The number of spins that ended with work.
    pub spins_hit: u64,
    /// The number of spins that ended with sleep.
    pub spins_missed: u64,
}
