//! The configuration: the keys that a user wrote, the plan that is made of them, and the steps from
//! one plan to the next.
//!
//! ```text
//! in    a file (`read`, `parse`), the options of a command (`planned`), a device of the
//!       control API (`device`)
//! out   Plan; DeviceSpec, the description of a device for its device process; the steps from one
//!       plan to the next (`diff.rs`)
//!
//! tables.rs, tables/   the keys of a file, of a request of the control API and of the command
//!                      line: one struct for each table, which serde, clap and the JSON schema read
//! plan.rs, plan/       resolves and checks every value, opens nothing; makes the description for
//!                      a device process (`manyring_protocol::spec`)
//! diff.rs              the steps that a change of the plan takes for each device
//! explain.rs           rewords errors of the TOML parser for users
//! ```
//! To add a key: define it in `tables.rs`, with its class (what a change of the key costs a guest)
//! and the numbers that it accepts; then resolve its value in `plan/`, into a field of the device's
//! options if the device itself uses the key.
//!
//! ```
//! let plan = manyring_config::parse(
//!     "[[blk]]\nname = \"disk\"\nsocket_path = \"/run/disk\"\nnull = \"1G\"\n",
//! );
//! assert_eq!(plan?.blk[0].options.num_queues, 8);
//! let wrong = manyring_config::parse("[[blk]]\nname = \"disk\"\nsize = 3\n");
//! assert!(wrong.is_err_and(|error| error.contains("size")));
//! # Ok::<(), String>(())
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod diff;
mod explain;
mod key_class;
mod limit_keys;
pub mod numbers;
mod place;
pub mod plan;
pub mod tables;

pub use plan::Plan;

use plan::{Source, Wanted};
use serde_json::{Map, Value};
use std::path::Path;
use tables::RawConfig;

/// The longest configuration that is read, in bytes: enough for some thousands of devices. Parsing
/// needs many times this much memory, part of which the process keeps afterwards.
pub const SIZE_MAX: usize = 2 << 20;

/// Why no plan was made, in one line for people.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A key, a value or an option is wrong; the line names it.
    #[error("{0}")]
    Wrong(String),
    /// The configuration file cannot be read.
    #[error("{0}")]
    Unreadable(String),
}

/// Parses the text of a configuration file into a plan: syntax, names and values are checked,
/// nothing is opened.
///
/// # Errors
/// One line for people, which names the wrong key.
pub fn parse(text: &str) -> Result<Plan, String> {
    let raw = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let number = before.matches('\n').count();
        let line = text.lines().nth(number).unwrap_or_default().trim();
        let key = explain::key_of(text.lines().take(number + 1));
        let problem = explain::explained(line, key, &error.message().replace('\n', ": "));
        format!("line {}: `{line}`: {problem}", number + 1)
    })?;
    Plan::new(raw, Source::File).map_err(|error| error.to_string())
}

/// Reads a configuration file, and checks what the host finds under its paths.
///
/// # Errors
/// One line, which names the file: [`ConfigError::Unreadable`] if it cannot be read,
/// [`ConfigError::Wrong`] if it cannot be served.
pub fn read(path: &Path) -> Result<Plan, ConfigError> {
    use std::io::Read;
    let at = path.display();
    if let Some(problem) = plan::unexpanded(path) {
        return Err(ConfigError::Wrong(format!("--config: {problem}")));
    }
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(SIZE_MAX as u64 + 1).read_to_string(&mut text));
    // `take` allowed one byte more than SIZE_MAX, so that a longer file is refused, and not
    // truncated.
    read.map_err(|error| ConfigError::Unreadable(format!("--config: cannot read {at}: {error}")))?;
    let wrong = |error: String| ConfigError::Wrong(format!("{at}: {error}"));
    if text.len() > SIZE_MAX {
        let problem = format!("is longer than {SIZE_MAX} bytes, the most that is read");
        return Err(wrong(problem));
    }
    let plan = parse(&text).map_err(wrong)?;
    plan.check_found().map_err(|error| wrong(error.to_string()))?;
    Ok(plan)
}

/// Plans the keys of `[daemon]` alone, from the options of a command.
///
/// # Errors
/// One line, which names the option.
pub fn of_daemon(daemon: tables::RawDaemon) -> Result<plan::DaemonPlan, String> {
    Plan::of_daemon(&daemon).map_err(|error| error.to_string())
}

/// Plans the device that a request of the control API describes: `text` is a JSON object with
/// `kind` and the keys of that kind's table.
///
/// # Errors
/// One line, which names the wrong key.
pub fn device(name: &str, text: &str) -> Result<Wanted, String> {
    let body = |error: serde_json::Error| format!("body: {error}");
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(body)?;
    let kind = keys.remove("kind");
    if keys.insert("name".to_owned(), name.into()).is_some_and(|other| other != name) {
        return Err(format!("name: differs from the path, which names {name:?}"));
    }
    for key in ["fd", "tap_fds"] {
        if keys.contains_key(key) {
            return Err(format!(
                "{key}: a file descriptor is passed when the daemon starts, not over its API"
            ));
        }
    }
    let planned = match kind.as_ref().and_then(Value::as_str) {
        Some("blk") => {
            let raw = serde_json::from_value(keys.into()).map_err(body)?;
            plan::BlkPlan::new(raw, 0, Source::Api).map(|blk| Wanted::Blk(blk.into()))
        }
        Some("net") => {
            let raw = serde_json::from_value(keys.into()).map_err(body)?;
            plan::NetPlan::new(raw, 0, Source::Api).map(|net| Wanted::Net(net.into()))
        }
        _ => return Err("kind: must be \"blk\" or \"net\"".to_owned()),
    };
    planned.map_err(|error| error.to_string())
}

/// Makes the plan of a command from its options, and checks what the host finds under its paths.
///
/// # Errors
/// [`ConfigError::Wrong`]: one line, which names the wrong option.
pub fn planned(options: RawConfig) -> Result<Plan, ConfigError> {
    let plan = Plan::new(options, Source::CommandLine);
    let found = plan.and_then(|plan| plan.check_found().map(|()| plan));
    found.map_err(|error| ConfigError::Wrong(error.to_string()))
}
