//! The thread that writes to standard error, and the queue of lines before it.
//!
//! Standard error belongs to the host: a full disk or a dead pipe fails a write, a pipe that nobody
//! reads blocks it for ever. One log is shared by the workers of every guest and by the control
//! thread, so none of them writes to it: they put their lines into a queue, which has a bound, and
//! one thread writes. A line that the queue has no room for, or that standard error refuses, is
//! lost; lost lines are counted, and the next line that can be written is preceded by the count.

use super::LogFormat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most bytes of lines that wait to be written: more than the burst of a start with 1000 devices.
const BYTES_MAX: usize = 1 << 20;

/// Lines on their way to one thread that writes them.
#[derive(Debug)]
pub(super) struct Lines {
    state: Mutex<State>,
    /// A line has come.
    filled: Condvar,
    /// Every line has been written or lost.
    drained: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes of `waiting`.
    bytes: usize,
    /// The thread is writing a line that it has taken out of `waiting`.
    writing: bool,
    /// Another thread writes all lines that wait: the log's thread takes none.
    ending: bool,
    /// Lines lost since the last one that was written.
    lost: u64,
    format: LogFormat,
}

impl Lines {
    pub(super) const fn new() -> Self {
        let waiting = VecDeque::new();
        let format = LogFormat::Text;
        let (writing, ending) = (false, false);
        let state = State { waiting, bytes: 0, writing, ending, lost: 0, format };
        Self { state: Mutex::new(state), filled: Condvar::new(), drained: Condvar::new() }
    }

    /// Sets the format in which the count of lost lines is written.
    pub(super) fn set_format(&self, format: LogFormat) {
        self.state().format = format;
    }

    pub(super) fn format(&self) -> LogFormat {
        self.state().format
    }

    /// Puts a line, with its end, into the queue. Never waits for standard error.
    pub(super) fn push(&self, line: Vec<u8>) {
        let mut state = self.state();
        if state.bytes.saturating_add(line.len()) > BYTES_MAX {
            state.lost += 1;
            return;
        }
        state.bytes += line.len();
        state.waiting.push_back(line);
        drop(state);
        self.filled.notify_one();
    }

    /// Waits until every line has been written or lost, at most for this long.
    pub(super) fn finish(&self, at_most: Duration) {
        let busy = |state: &mut State| state.writing || !state.waiting.is_empty();
        let _ = self.drained.wait_timeout_while(self.state(), at_most, busy);
    }

    /// Writes every line that waits, on this thread, behind the one that the log's thread is
    /// writing. Waits for that one at most for this long.
    pub(super) fn write_rest(&self, out: &mut impl Write, at_most: Duration) {
        let mut state = self.state();
        state.ending = true;
        let writing = |state: &mut State| state.writing;
        let waited = self.drained.wait_timeout_while(state, at_most, writing);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        // After a timeout the log's thread still writes a line: two writers would mix their bytes.
        if !waited.timed_out() {
            state.bytes = 0;
            let lines = std::mem::take(&mut state.waiting);
            let mut text = lost_lines(std::mem::take(&mut state.lost), state.format);
            drop(state);
            lines.into_iter().for_each(|line| text.extend(line));
            write_whole(out, &text);
            state = self.state();
        }
        state.ending = false;
        drop(state);
        self.filled.notify_one();
    }

    /// Writes every line that comes, for ever.
    pub(super) fn write_to(&self, out: &mut impl Write) -> ! {
        // A write that failed half-way has left a line without its end.
        let mut torn = false;
        loop {
            let (line, lost, format) = self.take();
            let mut text = Vec::with_capacity(line.len());
            if torn {
                text.push(b'\n');
            }
            text.extend(lost_lines(lost, format));
            text.extend(line);
            let taken = write_whole(out, &text);
            torn = if taken == 0 { torn } else { taken < text.len() };
            self.end(if taken == text.len() { 0 } else { lost + 1 });
        }
    }

    /// Waits for a line and takes it, with the count of those lost before it.
    fn take(&self) -> (Vec<u8>, u64, LogFormat) {
        let mut state = self.state();
        loop {
            let line = if state.ending { None } else { state.waiting.pop_front() };
            if let Some(line) = line {
                state.bytes -= line.len();
                state.writing = true;
                return (line, std::mem::take(&mut state.lost), state.format);
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The line that was taken has been written, or this many are lost with it.
    fn end(&self, lost: u64) {
        let mut state = self.state();
        state.writing = false;
        state.lost += lost;
        if state.waiting.is_empty() || state.ending {
            self.drained.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The line that says how many were lost, if any was.
fn lost_lines(lost: u64, format: LogFormat) -> Vec<u8> {
    if lost == 0 {
        return Vec::new();
    }
    let told = format!("{lost} lines lost: standard error is blocked");
    super::warning(format, &told).into_bytes()
}

/// Writes until nothing is left or a write fails; returns how many bytes were written.
fn write_whole(out: &mut impl Write, text: &[u8]) -> usize {
    let mut taken = 0;
    while taken < text.len() {
        match out.write(&text[taken..]) {
            Ok(0) => break,
            Ok(count) => taken += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    taken
}

/// Standard error, also where its open file description has `O_NONBLOCK`.
#[derive(Debug, Default)]
pub(super) struct Stderr {
    /// Waits no longer than this for standard error to take more.
    at_most: Option<Timespec>,
}

impl Stderr {
    /// Fails with `TimedOut` if standard error takes nothing for this long.
    pub(super) fn patient(at_most: Duration) -> Self {
        Self { at_most: Timespec::try_from(at_most).ok() }
    }

    /// Waits until standard error takes something.
    fn wait(&self) -> io::Result<()> {
        let stderr = rustix::stdio::stderr();
        match poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], self.at_most.as_ref()) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            // If `poll` fails, the write that follows reports the error.
            _ => Ok(()),
        }
    }
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Bytes that a writable pipe takes without blocking.
        const PIECE: usize = 4096;
        let mut piece = bytes;
        if self.at_most.is_some() {
            piece = &bytes[..bytes.len().min(PIECE)];
            self.wait()?;
        }
        loop {
            match rustix::io::write(rustix::stdio::stderr(), piece) {
                Err(Errno::AGAIN) => self.wait()?,
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A writer that says when a write has begun, waits for the test's order, and does that.
    struct Told {
        begun: Sender<()>,
        orders: Receiver<Result<usize, io::ErrorKind>>,
        written: Sender<String>,
    }

    impl Write for Told {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.begun.send(());
            // Once the test has dropped its orders, every write is taken whole.
            let order = self.orders.recv().unwrap_or(Ok(usize::MAX));
            let count = order?.min(bytes.len());
            let _ = self.written.send(String::from_utf8_lossy(&bytes[..count]).into_owned());
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The test's ends of a `Told`.
    struct Writer {
        begun: Receiver<()>,
        orders: Sender<Result<usize, io::ErrorKind>>,
        written: Receiver<String>,
    }

    fn started() -> (Arc<Lines>, Writer) {
        let lines = Arc::new(Lines::new());
        let ((told, begun), (orders, obeyed), (sender, written)) =
            (channel(), channel(), channel());
        let mut out = Told { begun: told, orders: obeyed, written: sender };
        let writer = lines.clone();
        let _ = std::thread::Builder::new().spawn(move || writer.write_to(&mut out)).unwrap();
        (lines, Writer { begun, orders, written })
    }

    #[test]
    fn lines_that_find_no_room_are_counted_and_told_when_writing_goes_on() {
        let (lines, Writer { begun, orders, written }) = started();
        let line = format!("{}\n", "x".repeat(1023));
        // The writer has taken one line, and its write does not return: the queue fills up behind
        // it, and no push waits.
        lines.push(line.clone().into_bytes());
        begun.recv_timeout(TIMEOUT).unwrap();
        for _ in 1..2000 {
            lines.push(line.clone().into_bytes());
        }
        drop(orders);
        lines.finish(TIMEOUT);
        lines.push(b"last\n".to_vec());
        lines.finish(TIMEOUT);
        let text: String = written.try_iter().collect();
        let whole = 1 + BYTES_MAX / line.len();
        assert_eq!(text.matches(&line).count(), whole);
        let told = format!(" {} lines lost", 2000 - whole);
        assert_eq!(text.matches(&told).count(), 1, "{told}");
        assert_eq!(text.matches(" lines lost").count(), 1);
        assert!(text.ends_with("last\n"));
    }

    #[test]
    fn lines_that_are_refused_are_counted_and_a_torn_one_is_ended() {
        let (lines, Writer { orders, written, .. }) = started();
        for order in [Ok(3), Err(io::ErrorKind::StorageFull), Err(io::ErrorKind::BrokenPipe)] {
            orders.send(order).unwrap();
        }
        lines.push(b"first\n".to_vec());
        lines.push(b"second\n".to_vec());
        lines.finish(TIMEOUT);
        orders.send(Ok(usize::MAX)).unwrap();
        lines.push(b"third\n".to_vec());
        lines.finish(TIMEOUT);
        let text: String = written.try_iter().collect();
        let told = "fir\n WARN 2 lines lost: standard error is blocked\nthird\n";
        assert_eq!(text, told);
    }

    #[test]
    fn lines_are_written_by_whoever_ends_if_the_logs_thread_does_not_come() {
        let lines = Lines::new();
        lines.push(b"first\n".to_vec());
        lines.push(b"why it ends\n".to_vec());
        let mut out = Vec::new();
        lines.write_rest(&mut out, TIMEOUT);
        assert_eq!(out, b"first\nwhy it ends\n");
    }

    #[test]
    fn the_last_lines_come_behind_the_one_that_is_being_written() {
        let (lines, Writer { begun, orders, written }) = started();
        lines.push(b"first\n".to_vec());
        begun.recv_timeout(TIMEOUT).unwrap();
        lines.push(b"second\n".to_vec());
        let mut out = Vec::new();
        lines.write_rest(&mut out, Duration::from_millis(1));
        assert!(out.is_empty(), "the first one is not written yet");
        drop(orders);
        lines.finish(TIMEOUT);
        lines.write_rest(&mut out, TIMEOUT);
        assert!(out.is_empty(), "all is written");
        assert_eq!(written.try_iter().collect::<String>(), "first\nsecond\n");
    }
}
