//! `LogFormat`: the form of a line of the log (`--log-format`).

use clap::ValueEnum;

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line of text.
    Text,
    /// A line of JSON.
    Json,
}

impl LogFormat {
    /// Returns the value of `--log-format` that chooses this format.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}
