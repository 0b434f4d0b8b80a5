//! `State`: the state of a device process, from its start to its end.

/// The state of a device process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Starting,
    Serving,
    Ending,
    /// The process was killed, and the kernel does not end it.
    Stuck,
    Ended,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Ending => "ending",
            Self::Stuck => "stuck",
            Self::Ended => "ended",
        }
    }
}
