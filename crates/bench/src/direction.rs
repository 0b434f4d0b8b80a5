//! `Direction`: which way the packets of a load go.

use clap::ValueEnum;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direction {
    /// The guest sends.
    Transmit,
    /// The guest receives.
    Receive,
}

impl Direction {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Transmit => "transmit",
            Self::Receive => "receive",
        }
    }
}
