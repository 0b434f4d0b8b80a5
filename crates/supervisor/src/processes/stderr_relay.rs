//! Relays the standard error of each device process to the supervisor's own, at a bounded rate, so
//! that a compromised process cannot fill a disk. Each line names the process (`log.rs`).
//!
//! The supervisor reads no faster than the rate allows, so a device process that writes more blocks
//! on its socket, as on any slow log. An honest process bounds its lines by itself (`log.rs`) and
//! never blocks. All processes of a domain share one rate: a process that is started again has only
//! what its predecessor has left of it. The supervisor closes its end of the socket when the
//! process ends, since the process may have handed its own end to another process
//! (`byte_stream.rs`).

use manyring_engine::Rate;
use manyring_serve::byte_stream::ByteStream;
use manyring_serve::channel::watched;
use manyring_serve::times::LAST_LINES;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

/// The most bytes that the device processes of a domain may log at once.
const BURST: usize = 256 << 10;
/// The rate at which they may log after that, in bytes a second.
const PER_SECOND: u32 = 32 << 10;
/// The most bytes of a line that are relayed; a longer line is cut.
const LINE_MAX: usize = 4096;
/// Most bytes that the supervisor adds to a line, besides the process's name.
const NAMED: usize = 64;

/// The rate at which the device processes of a domain may log, over all their starts.
#[derive(Debug)]
pub(super) struct StderrRelay(Mutex<Rate>);

impl StderrRelay {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Rate::new(cost(BURST), Instant::now()))))
    }

    /// Charges bytes that were read; returns when the next ones may be read.
    fn charge(&self, count: usize) -> Instant {
        let mut rate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        rate.charge(cost(count), Instant::now());
        rate.due()
    }

    /// Relays lines of the device process, until [`Following::end`].
    pub(super) fn follow(self: &Arc<Self>, stderr: ByteStream, process: String) -> Following {
        Following(tokio::spawn(self.clone().pass_on(stderr, process)))
    }

    async fn pass_on(self: Arc<Self>, stderr: ByteStream, process: String) {
        let Ok(stream) = watched(stderr, Interest::READABLE) else { return };
        let (mut line, mut bytes) = (Vec::new(), [0; LINE_MAX]);
        loop {
            let read = stream.async_io(Interest::READABLE, |stream| stream.read(&mut bytes));
            match read.await {
                Ok(0) => break,
                Ok(count) => {
                    let mut written = count;
                    for byte in &bytes[..count] {
                        line.push(*byte);
                        if *byte == b'\n' || line.len() == LINE_MAX {
                            end(&process, &mut line);
                            written += NAMED + process.len();
                        }
                    }
                    sleep_until(self.charge(written)).await;
                }
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    let problem = "the device process sends file descriptors with its log; its \
                                   log stopped";
                    tracing::error!(process, "{problem}");
                    break;
                }
                Err(_) => break,
            }
        }
        end(&process, &mut line);
    }
}

/// The task that relays the lines of one running process.
#[derive(Debug)]
pub(super) struct Following(JoinHandle<()>);

impl Following {
    /// Relays the last lines of a process that has ended, and closes the socket, even if another
    /// process still has its other end.
    pub(super) async fn end(mut self) {
        if timeout(LAST_LINES, &mut self.0).await.is_err() {
            self.0.abort();
            let _ = self.0.await;
        }
    }
}

/// Relays a line, if it is not empty.
fn end(process: &str, line: &mut Vec<u8>) {
    let line = std::mem::take(line);
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    if !line.is_empty() {
        manyring_serve::log::pass_on(process, &shown(line));
    }
}

/// Makes a line safe for a terminal: without control sequences in any encoding, and no longer than
/// before.
fn shown(line: &[u8]) -> String {
    let is_order = |c: &char| c.is_control() && *c != '\t';
    let mut text = String::with_capacity(line.len());
    for chunk in line.utf8_chunks() {
        text.extend(chunk.valid().chars().map(|c| if is_order(&c) { '?' } else { c }));
        if !chunk.invalid().is_empty() {
            text.push('?');
        }
    }
    text
}

/// Returns the time in which the rate allows this number of bytes.
fn cost(bytes: usize) -> Duration {
    Duration::from_secs(bytes as u64) / PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_at_once_and_a_flood_at_the_rate() {
        let began = Instant::now();
        let (mut now, mut rate, mut passed) = (began, Rate::new(cost(BURST), began), 0);
        while now < began + Duration::from_secs(60) {
            if rate.due() > began && now == began {
                assert!((BURST..=BURST + LINE_MAX).contains(&passed), "{passed} at once");
            }
            now = now.max(rate.due());
            rate.charge(cost(LINE_MAX), now);
            passed += LINE_MAX;
        }
        let most = BURST + 60 * (32 << 10) + 2 * LINE_MAX;
        assert!((most - 4 * LINE_MAX..=most).contains(&passed), "{passed}");
    }

    #[test]
    fn a_line_gives_no_orders_to_a_terminal() {
        for (line, expected) in [
            (&b"a\x1b[2Jb\tc\r"[..], "a?[2Jb\tc?"),
            // The 8-bit form of ESC [, as UTF-8 and as one byte.
            (b"a\xc2\x9b2Jb", "a?2Jb"),
            (b"a\x9b2Jb\xff", "a?2Jb?"),
            ("\u{fc}ber".as_bytes(), "\u{fc}ber"),
        ] {
            let text = shown(line);
            assert_eq!(text, expected);
            assert!(text.len() <= line.len());
        }
    }
}
