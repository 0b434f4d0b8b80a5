//! The house passes each room's standard error on to its own, at a bounded rate, so that a room
//! that was taken over cannot fill a disk with its lines. Each line names the room (`log.rs`).
//!
//! The house reads no faster than the rate allows, so a room that writes more waits for its pipe as
//! for any slow log. An honest room bounds its lines by itself (`log.rs`) and never waits.

use manyring_engine::Rate;
use std::process::ChildStderr;
use std::time::Duration;
use tokio::net::unix::pipe::Receiver;
use tokio::time::{Instant, sleep_until};

/// Bytes that may come at once.
const BURST: usize = 256 << 10;
/// Bytes a second after that.
const PER_SECOND: u32 = 32 << 10;
/// A longer line is cut.
const LINE_MAX: usize = 4096;
/// Bytes that the house adds to a line at most, besides the room's name.
const NAMED: usize = 64;

/// Passes on what the process of a room writes, until it has ended.
pub(super) async fn pass_on(stderr: ChildStderr, room: String) {
    let Ok(pipe) = Receiver::from_owned_fd(stderr.into()) else { return };
    let mut rate = Rate::new(cost(BURST), Instant::now());
    let (mut line, mut bytes) = (Vec::new(), [0; LINE_MAX]);
    while pipe.readable().await.is_ok() {
        match pipe.try_read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => {
                let mut written = count;
                for byte in &bytes[..count] {
                    line.push(shown(*byte));
                    if *byte == b'\n' || line.len() == LINE_MAX {
                        end(&room, &mut line);
                        written += NAMED + room.len();
                    }
                }
                rate.charge(cost(written), Instant::now());
                sleep_until(rate.due()).await;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    end(&room, &mut line);
}

/// Passes a line on, if it is not empty.
fn end(room: &str, line: &mut Vec<u8>) {
    let line = std::mem::take(line);
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    if !line.is_empty() {
        crate::log::pass_on(room, &String::from_utf8_lossy(line));
    }
}

/// A byte as an operator's terminal may get it: a room's line gives no orders to it.
fn shown(byte: u8) -> u8 {
    let is_control = byte.is_ascii_control() && !matches!(byte, b'\n' | b'\t');
    if is_control { b'?' } else { byte }
}

/// The time after which a room may write this number of bytes once more.
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
        let line: Vec<u8> = b"a\x1b[2Jb\tc\r\n".iter().map(|byte| shown(*byte)).collect();
        assert_eq!(line, b"a?[2Jb\tc?\n");
    }
}
