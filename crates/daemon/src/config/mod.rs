//! Raw configuration -> plan: what the user wrote, and what will be done.

pub(crate) mod plan;
pub(crate) mod raw;

pub use plan::Plan;

use std::path::Path;

/// Reads a configuration file's text: syntax, names and values are checked, nothing is opened.
///
/// # Errors
/// One line for people, which names the key.
pub fn parse(text: &str) -> Result<Plan, String> {
    let raw = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let number = before.matches('\n').count();
        let line = text.lines().nth(number).unwrap_or_default().trim();
        let problem = error.message().replace('\n', ": ");
        format!("line {}: `{line}`: {problem}", number + 1)
    })?;
    Plan::new(raw).map_err(|error| error.to_string())
}

/// Reads a configuration file.
///
/// # Errors
/// As [`parse`]; also names the file.
pub(crate) fn read(path: &Path) -> Result<Plan, String> {
    let at = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("--config: cannot read {at}: {error}"))?;
    parse(&text).map_err(|error| format!("{at}: {error}"))
}
