//! The thread that writes to standard error, and its queue of lines.
//!
//! Standard error belongs to the host: on a full disk or a dead pipe a write fails, and on a pipe
//! that nobody reads it blocks for ever. The workers of all guests and the control thread share one
//! log, so none of them writes to standard error: they put lines into a bounded queue, and one
//! thread writes. A line is lost if the queue is full or if the write fails. Lost lines are
//! counted, and the count is written before the next line.

use super::LogFormat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most bytes of lines that wait to be written: more than a start with 1000 devices logs.
const BYTES_MAX: usize = 1 << 20;

/// A queue of lines for the one thread that writes them.
#[derive(Debug)]
pub(super) struct Lines {
    state: Mutex<State>,
    /// Notified when a line was pushed.
    filled: Condvar,
    /// Notified when the queue is empty, and the last line was written or lost.
    drained: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// The number of bytes in `waiting`.
    bytes: usize,
    /// True while the thread writes a line that it has taken out of `waiting`.
    writing: bool,
    /// True while another thread writes all lines in `waiting`: the log's thread then takes none.
    ending: bool,
    /// Number of lines that were lost since the last one that was written.
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

    /// Sets the format of the line about lost lines.
    pub(super) fn set_format(&self, format: LogFormat) {
        self.state().format = format;
    }

    pub(super) fn format(&self) -> LogFormat {
        self.state().format
    }

    /// Puts a line, with its line end, into the queue. Never waits for standard error.
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

    /// Waits until every line was written or lost, `at_most` this long.
    pub(super) fn finish(&self, at_most: Duration) {
        let busy = |state: &mut State| state.writing || !state.waiting.is_empty();
        let _ = self.drained.wait_timeout_while(self.state(), at_most, busy);
    }

    /// Writes all lines of the queue, on this thread. First waits, `at_most` this long, until the
    /// log's thread has written its present line.
    pub(super) fn write_rest(&self, out: &mut impl Write, at_most: Duration) {
        let mut state = self.state();
        state.ending = true;
        let writing = |state: &mut State| state.writing;
        let waited = self.drained.wait_timeout_while(state, at_most, writing);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        // After a timeout the log's thread is still writing a line: two writers would mix their
        // bytes.
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

    /// Writes every line that is pushed, for ever.
    pub(super) fn write_to(&self, out: &mut impl Write) -> ! {
        // True if a write failed half-way, and standard error has a line without its end.
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

    /// Waits for a line and takes it. Returns it with the number of lines that were lost before it,
    /// and the format.
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

    /// Marks the taken line as written. `lost`: the number of lines that were lost with it.
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

/// Formats the line that says how many lines were lost; empty if none was.
fn lost_lines(lost: u64, format: LogFormat) -> Vec<u8> {
    if lost == 0 {
        return Vec::new();
    }
    let told = format!("{lost} lines lost: standard error is blocked");
    super::warning(format, &told).into_bytes()
}

/// Writes until all is written or a write fails; returns the number of bytes that were written.
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

/// Standard error. Works also if its open file description has `O_NONBLOCK`, which another process
/// may set.
#[derive(Debug, Default)]
pub(super) struct Stderr {
    /// The longest wait until standard error accepts more bytes; `None`: for ever.
    at_most: Option<Timespec>,
}

impl Stderr {
    /// Makes a writer that fails with `TimedOut` if standard error accepts nothing for this long.
    pub(super) fn patient(at_most: Duration) -> Self {
        Self { at_most: Timespec::try_from(at_most).ok() }
    }

    /// Waits until standard error is writable.
    fn wait(&self) -> io::Result<()> {
        let stderr = rustix::stdio::stderr();
        match poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], self.at_most.as_ref()) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            // An error of `poll` is ignored: the next write reports it.
            _ => Ok(()),
        }
    }
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // `PIPE_BUF`: a pipe that is writable accepts so many bytes without blocking.
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
