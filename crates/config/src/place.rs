//! `Place`: whether a key was written in a file, in a request or as an option. Errors name the key
//! as it is written there.

use std::fmt::Display;

/// The origin of a configuration, which decides how its errors name a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The options of `manyring blk` or `manyring net`.
    CommandLine,
    /// A file.
    File,
    /// A request of the control API, which describes one device.
    Api,
}

impl Source {
    /// Returns the place of the keys of `[daemon]`.
    pub(super) fn daemon(self) -> Place {
        match self {
            Self::CommandLine => Place::CommandLine,
            Self::File | Self::Api => Place::Table("[daemon]".to_owned()),
        }
    }

    /// Returns the place of the keys of a device in a table like `[[blk]]`.
    pub(super) fn device(self, table: &str, name: impl Display) -> Place {
        match self {
            Self::CommandLine => Place::CommandLine,
            Self::File => Place::Table(format!("{table} {name}")),
            Self::Api => Place::Api(name.to_string()),
        }
    }
}

/// The place of a key: a table of the file, a request of the control API, or the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The command line: the keys are options of a command.
    CommandLine,
    /// A table of the file: `[daemon]`, or that of a device like `[[blk]] web`.
    Table(String),
    /// A request of the control API for the device of this name.
    Api(String),
}

impl Place {
    /// Returns a key as it is written in this place: `socket_path` or `--socket-path`.
    pub fn key(&self, key: &str) -> String {
        match (self, key) {
            (Self::Table(_) | Self::Api(_), key) => key.to_owned(),
            (Self::CommandLine, "file") => "--blk-file".to_owned(),
            (Self::CommandLine, "tap_fds") => "--tap-fd".to_owned(),
            (Self::CommandLine, "kinds") => "--kind".to_owned(),
            (Self::CommandLine, "io_uring") => "--no-io-uring".to_owned(),
            (Self::CommandLine, key) if key.starts_with("limit.") => {
                format!("--limit {}", key.trim_start_matches("limit."))
            }
            (Self::CommandLine, key) => format!("--{}", key.replace('_', "-")),
        }
    }

    /// Returns several keys as a list, with `word` before the last one, like `file, null or
    /// memory`.
    pub(super) fn keys(&self, keys: &[&str], word: &str) -> String {
        let typed: Vec<_> = keys.iter().map(|key| self.key(key)).collect();
        match typed.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} {word} {last}", others.join(", ")),
            None => String::new(),
        }
    }

    /// Returns a key with a value, as it is written in this place: `format = "raw"` or `--format
    /// raw`.
    pub fn setting(&self, key: &str, value: &str) -> String {
        match self {
            Self::Table(_) => format!("{key} = \"{value}\""),
            Self::Api(_) => format!("\"{key}\": \"{value}\""),
            Self::CommandLine => format!("{} {value}", self.key(key)),
        }
    }

    /// Returns a key with its place: `[[blk]] web: socket_path`, or `--socket-path`.
    pub fn at(&self, key: &str) -> String {
        match self {
            Self::Table(table) => format!("{table}: {key}"),
            Self::Api(name) => format!("{name}: {key}"),
            Self::CommandLine => self.key(key),
        }
    }

    /// Returns the device's origin for the control API: `file`, `api` or `command-line`.
    pub fn origin(&self) -> &'static str {
        match self {
            Self::CommandLine => "command-line",
            Self::Table(_) => "file",
            Self::Api(_) => "api",
        }
    }

    /// Makes the error that says what is wrong with a key in this place.
    pub(super) fn error<T>(&self, key: &str, problem: impl Into<String>) -> Result<T, PlanError> {
        Err(PlanError { at: self.at(key), problem: problem.into() })
    }
}

/// An error in a configuration, which names the place and the key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct PlanError {
    pub(super) at: String,
    pub(super) problem: String,
}
