//! Writes a command's output and error, and returns the exit status.

use crate::log;
use manyring_config::ConfigError;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

/// Why a command failed.
#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// The command line or the configuration is wrong: status 2.
    Wrong(String),
    /// The host or the daemon refused the command: status 1.
    Refused(String),
    /// The reader of standard output has closed it, as `head` does. This is no error: status 0.
    Unread,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(message) | Self::Refused(message) => f.write_str(message),
            Self::Unread => f.write_str("standard output is closed"),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        match error {
            ConfigError::Wrong(message) => Self::Wrong(message),
            ConfigError::Unreadable(message) => Self::Refused(message),
        }
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self::Refused(message)
    }
}

/// Prints to standard output.
///
/// # Errors
/// [`Failure::Unread`]: the reader has closed it. [`Failure::Refused`]: the write failed.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::Unread),
        Err(error) => Err(Failure::Refused(format!("cannot write to standard output: {error}"))),
    }
}

/// Writes the error of a command, if any, to standard error, and returns the exit status.
pub fn end(ended: Result<(), Failure>) -> ExitCode {
    match ended {
        Ok(()) | Err(Failure::Unread) => ExitCode::SUCCESS,
        Err(Failure::Refused(message)) => {
            log::say(said(&message));
            ExitCode::FAILURE
        }
        Err(Failure::Wrong(message)) => {
            log::say(said(&message));
            ExitCode::from(2)
        }
    }
}

/// Formats an error for a terminal, and escapes it: the text may come from a daemon, and may
/// contain names that other users chose.
fn said(message: &str) -> String {
    let lines: Vec<_> = message.split('\n').map(log::shown).collect();
    format!("manyring: {}\n", lines.join("\n"))
}

/// Ends a program whose command line was wrong, or asked for help or the version. `message`: a text
/// of one line that replaces clap's error.
pub fn explain(error: &clap::Error, message: Option<String>) -> ExitCode {
    let styled = |is_terminal: bool| {
        let text = error.render();
        if is_terminal { text.ansi().to_string() } else { text.to_string() }
    };
    if let Some(message) = message {
        return end(Err(Failure::Wrong(message)));
    }
    if error.use_stderr() {
        log::say(styled(io::stderr().is_terminal()));
        return ExitCode::from(2);
    }
    end(print(&styled(io::stdout().is_terminal())))
}
