//! `State`: how far a device process is, from its start to its end.

/// How far a device process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    Serving,
    Ending,
    /// It is killed, and the kernel does not end it.
    Stuck,
    Ended,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Ending => "ending",
            Self::Stuck => "held",
            Self::Ended => "ended",
        }
    }
}
