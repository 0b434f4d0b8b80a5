//! Raw configuration -> plan: what the user wrote, and what will be done.

pub(crate) mod diff;
mod explain;
mod limit_keys;
pub(crate) mod numbers;
mod place;
pub(crate) mod plan;
pub(crate) mod raw;

pub use plan::Plan;

use crate::output::Failure;
use plan::{Source, Wanted};
use raw::RawConfig;
use serde_json::{Map, Value};
use std::path::Path;

/// Longest configuration that is read, in bytes; some thousands of devices have room in it.
/// Reading takes many times its length for a while, and leaves the process some of that.
pub(crate) const SIZE_MAX: usize = 2 << 20;

/// Reads a configuration file's text: syntax, names and values are checked, nothing is opened.
///
/// # Errors
/// One line for people, which names the key.
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
/// One line, which names the file: [`Failure::Refused`] if it cannot be read, [`Failure::Wrong`] if
/// it cannot be served.
pub(crate) fn read(path: &Path) -> Result<Plan, Failure> {
    use std::io::Read;
    let at = path.display();
    if let Some(problem) = plan::unexpanded(path) {
        return Err(Failure::Wrong(format!("--config: {problem}")));
    }
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(SIZE_MAX as u64 + 1).read_to_string(&mut text));
    read.map_err(|error| Failure::Refused(format!("--config: cannot read {at}: {error}")))?;
    let wrong = |error: String| Failure::Wrong(format!("{at}: {error}"));
    if text.len() > SIZE_MAX {
        let problem = format!("is longer than {SIZE_MAX} bytes, the most that is read");
        return Err(wrong(problem));
    }
    let plan = parse(&text).map_err(wrong)?;
    plan.check_found().map_err(|error| wrong(error.to_string()))?;
    Ok(plan)
}

/// The plan of the process alone, made from its options.
///
/// # Errors
/// One line, which names the option.
pub(crate) fn of_daemon(daemon: raw::RawDaemon) -> Result<plan::DaemonPlan, String> {
    Plan::of_daemon(&daemon).map_err(|error| error.to_string())
}

/// The device of a request of the control API: a JSON object with the keys of its table, and with
/// `kind`.
///
/// # Errors
/// One line, which names the key.
pub(crate) fn device(name: &str, text: &str) -> Result<Wanted, String> {
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

/// Plans what the options of a command say.
///
/// # Errors
/// [`Failure::Wrong`], one line, which names the option.
pub(crate) fn planned(options: RawConfig) -> Result<Plan, Failure> {
    let plan = Plan::new(options, Source::CommandLine);
    let found = plan.and_then(|plan| plan.check_found().map(|()| plan));
    found.map_err(|error| Failure::Wrong(error.to_string()))
}
