//! Output for the process that started the program, and the exit status.

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
    /// The host or the daemon refuses: status 1.
    Refused(String),
    /// The reader of standard output has closed it, as `head` does: nothing has failed, status 0.
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
/// [`Failure::Unread`] if nobody reads it, [`Failure::Refused`] if it cannot be written.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::Unread),
        Err(error) => Err(Failure::Refused(format!("cannot write to standard output: {error}"))),
    }
}

/// Writes why a command ends to standard error, and returns the exit status.
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

/// Why a command ends, escaped for a terminal: the text may come from a daemon, and may hold names
/// that other users have chosen.
fn said(message: &str) -> String {
    let lines: Vec<_> = message.split('\n').map(log::shown).collect();
    format!("manyring: {}\n", lines.join("\n"))
}

/// Ends a program whose command line was wrong, or asked for help or the version. `message`: one
/// line that says more than the error does, where there is one.
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
