//! Logs: structured, to stderr.

use crate::cli::LogFormat;
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// Starts logging. A level that is not known is one error.
pub(crate) fn start(level: &str, format: LogFormat) -> Result<(), String> {
    let known = ["error", "warn", "info", "debug", "trace"];
    if !known.contains(&level) {
        return Err(format!("--log-level: {level:?} is none of {}", known.join(", ")));
    }
    let filter = EnvFilter::new(format!(
        "warn,manyring_daemon={level},manyring_device={level},manyring_transport={level},manyring_backend={level}"
    ));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
