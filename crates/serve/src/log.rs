//! Logs structured lines to standard error, with a limit of lines for each second.
//!
//! Most lines report what a guest or front-end did, and one that misbehaves without end must not
//! fill the host's disk. Lines above the limit are counted, and their number is logged. Warnings
//! and information have a limit each, so that neither displaces the other; debug and trace have
//! none. Lines go through a queue to a thread of their own (`lines.rs`): a standard error that
//! fails or blocks neither ends nor delays the thread that logs. A process that ends before it has
//! served a guest delays nobody: the thread that ends it writes the last lines itself.

mod fields;
mod format;
mod lines;
mod rate;

pub use fields::shown;
pub use format::LogFormat;

use crate::service::is_journal;
use crate::times::{LOG_FINISH, LOG_REFUSAL};
use lines::{Lines, Stderr};
use manyring_backend::sys::starter::{self, ThreadRole};
use rate::{BURST, INFO_BURST, Limit, Verdict};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::time::Instant;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// True once guests may be served: from then on no thread may wait for standard error.
static SERVES: AtomicBool = AtomicBool::new(false);

/// True if standard error is a stream of systemd's journal: then lines begin with their priority.
static JOURNAL: OnceLock<bool> = OnceLock::new();

/// The queue of lines for standard error.
static LINES: Lines = Lines::new();

/// Starts the thread that writes to standard error, for the log and for all other text. Also has
/// the message of a panic go through this thread.
pub fn open() -> io::Result<()> {
    let _ = JOURNAL.set(is_journal());
    let thread = std::thread::Builder::new().name("log".to_owned());
    starter::spawn(ThreadRole::Log, thread, || LINES.write_to(&mut Stderr::default()))?;
    std::panic::set_hook(Box::new(|info| {
        let mut text = format!("{info}\n");
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            text = format!("{text}{backtrace}\n");
        }
        say(text);
        end();
    }));
    Ok(())
}

/// Writes text that is no line of the log to standard error, such as the reason why the program
/// ends.
pub fn say(text: String) {
    let text: String = match JOURNAL.get() {
        Some(true) => text.split_inclusive('\n').map(|line| format!("<3>{line}")).collect(),
        _ => text,
    };
    LINES.push(text.into_bytes());
}

/// Writes a line that a device process logged to standard error, with the name of the process. The
/// line may contain anything.
pub fn pass_on(process: &str, line: &str) {
    LINES.push(named(LINES.format(), process, line).into_bytes());
}

/// Adds the name of a device process to its line: in front of a line of text, and as the first key
/// of JSON. A line that is no JSON object, or that has a key `process` itself, becomes the message
/// of a new object.
fn named(format: LogFormat, process: &str, line: &str) -> String {
    if format == LogFormat::Text {
        return format!("process={process} {line}\n");
    }
    let object: Option<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_str(line).ok();
    let is_plain =
        object.is_some_and(|object| !object.is_empty() && !object.contains_key("process"));
    match line.trim_start().strip_prefix('{') {
        Some(rest) if is_plain => format!("{{\"process\":{},{rest}\n", serde_json::json!(process)),
        _ => {
            let fields = serde_json::json!({ "message": line });
            let line = serde_json::json!({ "process": process, "level": "WARN", "fields": fields });
            format!("{line}\n")
        }
    }
}

/// Returns the prefix of a line of this level: the syslog priority if systemd's journal reads
/// standard error (sd-daemon(3)), else nothing.
fn head(level: Level) -> &'static str {
    match (JOURNAL.get(), level) {
        (Some(true), Level::ERROR) => "<3>",
        (Some(true), Level::WARN) => "<4>",
        (Some(true), Level::INFO) => "<6>",
        (Some(true), _) => "<7>",
        _ => "",
    }
}

/// Records that guests are served from now on: no thread may wait for standard error any more.
pub fn now_serves() {
    SERVES.store(true, Ordering::Relaxed);
}

/// Waits until all lines are written, for [`LOG_FINISH`] at most.
pub fn finish() {
    LINES.finish(LOG_FINISH);
}

/// Writes the last lines at the end of the process. A process that has served nothing writes them
/// on this thread, and waits: they say why it ends, and the log's thread might not run any more.
pub fn end() {
    if SERVES.load(Ordering::Relaxed) {
        finish();
    } else {
        LINES.write_rest(&mut Stderr::patient(LOG_REFUSAL), LOG_REFUSAL);
    }
}

/// The log's level and format, as the command line gave them.
static ARGUMENTS: OnceLock<[String; 2]> = OnceLock::new();

/// Returns the command-line options with which another process logs as this one does.
pub fn arguments() -> Vec<String> {
    let [level, format] = ARGUMENTS.get().cloned().unwrap_or_default();
    vec!["--log-level".to_owned(), level, "--log-format".to_owned(), format]
}

/// Starts logging.
///
/// # Errors
/// A text of one line: the level is unknown.
pub fn start(level: &str, format: LogFormat) -> Result<(), String> {
    let _ = ARGUMENTS.set([level.to_owned(), format.name().to_owned()]);
    let known = ["error", "warn", "info", "debug", "trace"];
    if !known.contains(&level) {
        return Err(format!("--log-level: {level:?} is not one of {}", known.join(", ")));
    }
    // `manyring` stands for all our crates: a directive matches by prefix.
    let filter = EnvFilter::new(format!("warn,manyring={level}"));
    let limit = |burst| Mutex::new(Limit::new(burst));
    let limited = Limited { warnings: limit(BURST), infos: limit(INFO_BURST), format };
    LINES.set_format(format);
    let builder = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(limited);
    match format {
        // No time: the journal adds the time of each line.
        LogFormat::Text if JOURNAL.get() == Some(&true) => {
            builder.fmt_fields(fields::Fields).with_target(false).without_time().init();
        }
        LogFormat::Text => builder.fmt_fields(fields::Fields).with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Makes the writer of each line.
struct Limited {
    warnings: Mutex<Limit>,
    infos: Mutex<Limit>,
    format: LogFormat,
}

impl Limited {
    fn notice(&self, text: &str) {
        LINES.push(warning(self.format, text).into_bytes());
    }
}

/// Formats a warning about the log itself.
fn warning(format: LogFormat, text: &str) -> String {
    match format {
        LogFormat::Text => format!("{} WARN {text}\n", head(Level::WARN)),
        LogFormat::Json => {
            let fields = serde_json::json!({ "message": text });
            let line = serde_json::json!({ "level": "WARN", "fields": fields });
            format!("{}{line}\n", head(Level::WARN))
        }
    }
}

impl<'a> MakeWriter<'a> for Limited {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { shown: true, head: "" }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Line {
        let limit = match *meta.level() {
            Level::ERROR | Level::WARN => &self.warnings,
            Level::INFO => &self.infos,
            level => return Line { shown: true, head: head(level) },
        };
        let verdict = limit.lock().unwrap_or_else(PoisonError::into_inner).decide(Instant::now());
        match verdict {
            Verdict::Show { suppressed: 0 } => {}
            Verdict::Show { suppressed } => self.notice(&format!("{suppressed} lines suppressed")),
            Verdict::Suppress => self.notice("too many lines: some are suppressed"),
            Verdict::Drop => {}
        }
        Line { shown: matches!(verdict, Verdict::Show { .. }), head: head(*meta.level()) }
    }
}

/// The writer of one line; it discards a line that is not shown.
struct Line {
    shown: bool,
    /// The text before the line: its priority for systemd's journal, or nothing.
    head: &'static str,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.shown {
            LINES.push([self.head.as_bytes(), bytes].concat());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_device_process_names_the_device_process_whatever_the_device_process_has_written()
    {
        let named = |format, line| named(format, "a", line);
        assert_eq!(named(LogFormat::Text, "WARN process=b"), "process=a WARN process=b\n");
        let honest = r#"{"level":"INFO","fields":{"message":"m"}}"#;
        let line = named(LogFormat::Json, honest);
        assert_eq!(line, "{\"process\":\"a\",\"level\":\"INFO\",\"fields\":{\"message\":\"m\"}}\n");
        for lie in
            [r#"{"process":"b"}"#, r#"{"a":1,"process":"b"}"#, r#""} {"#, "{}", "{", "1", "text"]
        {
            let line: serde_json::Value =
                serde_json::from_str(&named(LogFormat::Json, lie)).unwrap();
            assert_eq!((&line["process"], &line["fields"]["message"]), (&"a".into(), &lie.into()));
        }
    }
}
