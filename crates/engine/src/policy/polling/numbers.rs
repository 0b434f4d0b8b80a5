//! `PollingNumbers`: the measurements, decisions and counts of a policy of polling.

/// The ways in which a worker waits between two requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arm {
    /// Looks on, up to the cap.
    #[default]
    Spin,
    /// Sleeps at once.
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

/// The measurements, decisions and counts of the policy. Counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollingNumbers {
    /// The arm in use; during a trial the one that is tried.
    pub arm: Arm,
    /// Cost of a request when sleeping, in thousandths of its cost when spinning.
    pub gain: u64,
    /// CPU time of the worker for a request when spinning, in thousandths of that when sleeping.
    pub effort: u64,
    /// Time between two turns with work, averaged.
    pub gap_ns: u64,
    /// Trials begun.
    pub trials: u64,
    /// Trials that ended with the other arm in use.
    pub flips: u64,
    /// Looks of such a length that another thread must have had the CPU.
    pub stolen_looks: u64,
    /// Time spent on looks that found nothing, while spinning was the arm in use.
    pub looked_spinning_ns: u64,
    /// Time spent on looks that found nothing, while sleeping was the arm in use.
    pub looked_sleeping_ns: u64,
    /// Spins that ended with work.
    pub spins_hit: u64,
    /// Spins that ended with sleep.
    pub spins_missed: u64,
}
