//! `Monitor`: the QMP monitor of a helper's child, by which its image is resized.
//!
//! ```text
//! block-export-del    QEMU resizes no image that it exports. This closes the NBD connections and
//!                     fails their requests; the NBD client reconnects until the export is back
//! block_resize
//! block-export-add    also after a resize that failed
//! ```
//! The monitor is one end of a socket pair whose other end is the child's standard output: no other
//! process can connect to it. If a child does not answer a command, or does not restore its export,
//! this module asks the child to end. The next child then serves the image with its size at that
//! time. No further command is sent to the child that did not answer: its late answer would be
//! taken for the answer to that command.

use crate::times::HELPER_MONITOR;
use rustix::io::Errno;
use serde_json::{Value, json};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tokio::time::Instant;

/// Most bytes of one message, and most messages (events, say) before an answer.
const MESSAGE_MAX: u64 = 64 << 10;
const MESSAGES_MAX: usize = 64;

/// Our end of the monitor of a child.
#[derive(Debug)]
pub(super) struct Monitor {
    stream: BufReader<Timed>,
    /// True once the child has accepted `qmp_capabilities`: the monitor takes commands.
    is_open: bool,
    /// True once the child was asked to end.
    is_lost: bool,
    /// True once a `BLOCK_EXPORT_DELETED` event has arrived.
    is_deleted: bool,
}

/// Why a command to the child failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum MonitorError {
    /// The child answered with this error.
    #[error("{0}")]
    Refused(String),
    /// The child has ended, or did not answer in time.
    #[error("no answer: {0}")]
    Silent(#[from] io::Error),
}

impl MonitorError {
    /// Converts the child's error to the errno that the disk returns for the resize.
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Refused(text) if text.contains("does not support resize") => Errno::OPNOTSUPP,
            Self::Refused(text) if text.contains("No space left") => Errno::NOSPC,
            _ => Errno::IO,
        }
    }
}

impl Monitor {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self::with_limit(stream, HELPER_MONITOR)
    }

    fn with_limit(stream: UnixStream, limit: Duration) -> Self {
        let stream = BufReader::new(Timed { stream, limit, until: Instant::now() });
        Self { stream, is_open: false, is_lost: false, is_deleted: false }
    }

    /// True once the child was asked to end: the next child has a monitor of its own.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Returns the socket of a monitor to which no command was sent yet.
    #[cfg(test)]
    pub(super) fn into_stream(self) -> UnixStream {
        self.stream.into_inner().stream
    }

    /// Resizes the image (block node `disk`) to `size` bytes. `export` is the argument of
    /// `block-export-add`, which restores the export. May block.
    ///
    /// # Errors
    /// [`MonitorError`]. After [`MonitorError::Silent`] the image may have the old or the new size.
    pub(super) fn resize(&mut self, export: &Value, size: u64) -> Result<(), MonitorError> {
        if self.is_lost {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        let resized = self.open().and_then(|()| self.resize_unexported(export, size));
        let is_silent = matches!(resized, Err(MonitorError::Silent(_)));
        if is_silent || self.ask("block-export-add", export).is_err() {
            // The child exports nothing now. Have it end: the next child exports the image again.
            self.is_lost = true;
            let _ = self.send("quit", &json!({}));
        }
        resized
    }

    fn open(&mut self) -> Result<(), MonitorError> {
        if !self.is_open {
            self.ask("qmp_capabilities", &json!({}))?;
            self.is_open = true;
        }
        Ok(())
    }

    /// Removes the export, and resizes the image.
    fn resize_unexported(&mut self, export: &Value, size: u64) -> Result<(), MonitorError> {
        self.is_deleted = false;
        self.ask("block-export-del", &json!({"id": export["id"], "mode": "hard"}))?;
        self.until_deleted()?;
        self.ask("block_resize", &json!({"node-name": export["node-name"], "size": size}))
    }

    fn send(&mut self, command: &str, arguments: &Value) -> io::Result<()> {
        let line = json!({"execute": command, "arguments": arguments});
        self.stream.get_mut().begin();
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes())
    }

    /// Sends a command, and waits for its answer.
    fn ask(&mut self, command: &str, arguments: &Value) -> Result<(), MonitorError> {
        self.send(command, arguments)?;
        for _ in 0..MESSAGES_MAX {
            let message = self.next()?;
            if let Some(error) = message.get("error") {
                let text = error["desc"].as_str().unwrap_or_default();
                return Err(MonitorError::Refused(format!("{command}: {text}")));
            }
            if message.get("return").is_some() {
                return Ok(());
            }
        }
        Err(wrong("too many messages").into())
    }

    fn until_deleted(&mut self) -> Result<(), MonitorError> {
        self.stream.get_mut().begin();
        for _ in 0..MESSAGES_MAX {
            if self.is_deleted {
                return Ok(());
            }
            self.next()?;
        }
        Err(wrong("too many messages").into())
    }

    /// Reads the next message: an answer, the greeting or an event.
    fn next(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        self.stream.by_ref().take(MESSAGE_MAX).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message: Value = serde_json::from_slice(&line).map_err(|_| wrong("not JSON"))?;
        self.is_deleted |= message["event"] == "BLOCK_EXPORT_DELETED";
        Ok(message)
    }
}

/// The monitor's socket. All reads and writes for one answer share a deadline.
#[derive(Debug)]
struct Timed {
    stream: UnixStream,
    limit: Duration,
    until: Instant,
}

impl Timed {
    /// Starts the time limit of the next answer.
    fn begin(&mut self) {
        self.until = Instant::now() + self.limit;
    }

    /// Returns the time until the deadline, as `set_read_timeout` takes it: never `None`.
    ///
    /// # Errors
    /// `TimedOut`: the deadline has passed.
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that answers each command with these bytes, and what it was asked once the monitor
    /// is closed.
    fn child(answers: &[&str]) -> (Monitor, impl FnOnce(Monitor) -> Vec<String> + use<>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answers: Vec<_> = answers.iter().map(|answer| answer.as_bytes().to_vec()).collect();
        let answer = move || {
            let mut stream = BufReader::new(theirs);
            stream.get_mut().write_all(GREETING.as_bytes()).unwrap();
            let mut asked = String::new();
            for answer in answers {
                stream.read_line(&mut asked).unwrap();
                stream.get_mut().write_all(&answer).unwrap();
            }
            let _ = stream.get_mut().shutdown(std::net::Shutdown::Write);
            while stream.read_line(&mut asked).is_ok_and(|count| count > 0) {}
            commands(&asked)
        };
        let thread = std::thread::Builder::new().spawn(answer).unwrap();
        let end = move |monitor: Monitor| {
            drop(monitor);
            thread.join().unwrap()
        };
        (Monitor::new(ours), end)
    }

    fn commands(asked: &str) -> Vec<String> {
        let command = |line: &str| serde_json::from_str::<Value>(line).unwrap()["execute"].clone();
        asked.lines().map(|line| command(line).as_str().unwrap().to_owned()).collect()
    }

    const GREETING: &str = "{\"QMP\": {}}\n";
    const DONE: &str = "{\"return\": {}}\n";
    const GONE: &str = "{\"event\": \"BLOCK_EXPORT_DELETED\", \"data\": {\"id\": \"export\"}}\n";
    const ALL: [&str; 4] =
        ["qmp_capabilities", "block-export-del", "block_resize", "block-export-add"];

    fn export() -> Value {
        json!({"type": "nbd", "id": "export", "node-name": "disk"})
    }

    #[test]
    fn an_image_is_resized_while_it_is_not_exported() {
        for gone in [[GONE, DONE].concat(), [DONE, GONE].concat()] {
            let (mut monitor, asked) = child(&[DONE, &gone, DONE, DONE]);
            monitor.resize(&export(), 4096).unwrap();
            assert_eq!(asked(monitor), ALL);
        }
    }

    #[test]
    fn a_refused_resize_puts_the_export_back_and_says_why() {
        let refused = "{\"error\": {\"desc\": \"Image format driver does not support resize\"}}\n";
        let (mut monitor, asked) = child(&[DONE, &[GONE, DONE].concat(), refused, DONE]);
        let error = monitor.resize(&export(), 4096).unwrap_err();
        assert_eq!(error.errno(), Errno::OPNOTSUPP, "{error}");
        assert_eq!(asked(monitor), ALL);
    }

    #[test]
    fn a_child_that_answers_what_is_no_answer_or_nothing_is_asked_to_end() {
        let long = format!("\"{}\"\n", "x".repeat(70_000));
        for answer in [&GONE.repeat(100), long.as_str(), "no JSON\n", "{\"retu", ""] {
            let (mut monitor, asked) = child(&[DONE, &[GONE, DONE].concat(), answer]);
            let error = monitor.resize(&export(), 4096).unwrap_err();
            assert_eq!(error.errno(), Errno::IO, "{error}");
            assert_eq!(asked(monitor)[2..], ["block_resize", "quit"]);
        }
    }

    #[test]
    fn a_child_that_does_not_say_that_the_export_is_gone_is_asked_to_end() {
        for answers in [&[DONE][..], &[DONE, DONE], &[]] {
            let (mut monitor, asked) = child(answers);
            let error = monitor.resize(&export(), 4096).unwrap_err();
            assert!(matches!(error, MonitorError::Silent(_)), "{error}");
            assert_eq!(asked(monitor).last().unwrap(), "quit", "{answers:?}");
        }
    }

    #[test]
    fn an_export_that_could_not_be_taken_away_is_there_afterwards() {
        let (mut monitor, asked) = child(&[DONE, "{\"error\": {\"desc\": \"not found\"}}\n", DONE]);
        let error = monitor.resize(&export(), 4096).unwrap_err();
        assert!(matches!(error, MonitorError::Refused(_)), "{error}");
        assert_eq!(asked(monitor)[1..], ["block-export-del", "block-export-add"]);
    }

    #[test]
    fn a_late_answer_is_not_taken_for_that_of_the_next_resize() {
        let late = ["no JSON\n", DONE, GONE, DONE, DONE, DONE].concat();
        let (mut monitor, asked) = child(&[DONE, &[GONE, DONE].concat(), &late]);
        monitor.resize(&export(), 4096).unwrap_err();
        assert!(monitor.resize(&export(), 8192).is_err(), "a late answer was taken");
        assert_eq!(asked(monitor)[2..], ["block_resize", "quit"]);
    }

    #[test]
    fn a_child_that_sends_its_answer_byte_by_byte_has_no_longer_for_it() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(100);
        let mut monitor = Monitor::with_limit(ours, limit);
        // White space between the messages: each byte comes early enough, and the answer does not.
        let answer = move || {
            for _ in 0..400 {
                std::thread::sleep(limit / 100);
                if theirs.write_all(b" ").is_err() {
                    return;
                }
            }
            let _ = theirs.write_all(DONE.repeat(4).as_bytes());
        };
        let thread = std::thread::Builder::new().spawn(answer).unwrap();
        let error = monitor.open().unwrap_err();
        assert!(matches!(error, MonitorError::Silent(_)), "{error}");
        drop(monitor);
        thread.join().unwrap();
    }
}
