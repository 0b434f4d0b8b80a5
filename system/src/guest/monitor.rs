//! QEMU's monitor (QMP): commands as JSON, a line each.

use crate::command::wait_for;
use crate::{Context, Outcome, check};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest wait for an answer or an event.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connection to a monitor.
#[derive(Debug)]
pub(crate) struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects.
    pub(crate) fn connect(path: &Path) -> Outcome<Self> {
        let stream = wait_for("QEMU's monitor", TIMEOUT, || Ok(UnixStream::connect(path).ok()))?;
        stream.set_read_timeout(Some(TIMEOUT)).context("QEMU's monitor")?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.until("QMP")?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Carries a command out.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Outcome {
        self.ask(command, arguments).map(drop)
    }

    /// Carries a command out, and gives what it returns.
    pub(crate) fn ask(&mut self, command: &str, arguments: &Value) -> Outcome<Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        let sent = writeln!(self.stream.get_mut(), "{text}");
        sent.context("QEMU's monitor")?;
        self.until("return").map(|mut said| said["return"].take())
    }

    /// Waits for an event that names this device.
    pub(crate) fn heard(&mut self, event: &str, device: &str) -> Outcome {
        loop {
            let said = self.until("event")?;
            if said["event"] == event && said["data"]["device"] == device {
                return Ok(());
            }
        }
    }

    /// The next line that has this key.
    fn until(&mut self, key: &str) -> Outcome<Value> {
        loop {
            let mut line = String::new();
            let read = self.stream.read_line(&mut line).context("QEMU's monitor")?;
            check(read > 0, || "QEMU's monitor has closed".into())?;
            let said: Value = serde_json::from_str(&line).context("QEMU's monitor")?;
            check(said.get("error").is_none(), || format!("QEMU's monitor: {line}"))?;
            if said.get(key).is_some() {
                return Ok(said);
            }
        }
    }
}
