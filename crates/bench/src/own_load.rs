//! Loads of our own, each as a process: its command line, and the result that it prints.

use crate::measure::Affinity;
use crate::netns::Netns;
use crate::peer::{apart, output};
use serde::de::DeserializeOwned;
use std::process::Command;

/// This program again, as `load ..` with these arguments.
pub(crate) fn own_load(space: Option<&Netns>, arguments: &[&str]) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = match space {
        Some(space) => space.inside(&program),
        None => apart(&program),
    };
    command.arg("load").args(arguments);
    Ok(command)
}

/// Runs a load to its end and reads its result.
pub(crate) fn result_of<R: DeserializeOwned>(
    command: &mut Command,
    affinity: &Affinity,
) -> Result<R, String> {
    let text = output(command, affinity)?;
    serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
}
