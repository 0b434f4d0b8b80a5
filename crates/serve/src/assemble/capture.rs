//! `CaptureFile`: the capture file of a device that a device process serves. The supervisor writes
//! it.
//!
//! ```text
//! device process                            supervisor
//! Pcap, its buffer -> thread -> a socket -> thread "capture" of this device -> the file
//! ```
//! Each device process gets the end of a new stream (`byte_stream.rs`). The thread writes whole
//! records to the file, and drops a partial record when a process has died: the file stays
//! readable, and the next process goes on behind the last record. Bytes that are no record, and
//! file descriptors, end the capture of that process. A slow file blocks only this thread: the
//! stream fills, and then the buffer of the process, which counts the frames that it does not
//! capture. No other device waits for that thread.

use crate::byte_stream::{self, ByteStream};
use crate::pcap::{self, RECORD_SIZE_MAX};
use crate::times::CAPTURE_SETTLE;
use manyring_engine::Janitor;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes that a stream buffers, if the host's limits allow it.
const STREAM_SIZE: usize = 1 << 20;
/// Most streams of former device processes that wait to be read. If there are more, the oldest one
/// is closed unread.
const STREAMS_MAX: usize = 4;
/// Bytes of one read: the longest record fits.
const BUFFER_SIZE: usize = RECORD_SIZE_MAX.next_power_of_two();

/// Which process writes the capture file of a port.
#[derive(Debug)]
pub enum Capture {
    /// This process: the port is decorated with a `Pcap`.
    Port,
    /// The supervisor, which has not opened the file yet. The descriptor is the capture file that
    /// an earlier supervisor handed over.
    Supervisor(Option<OwnedFd>),
    /// The supervisor, which has opened the file.
    Begun(Arc<CaptureFile>),
}

/// The capture file of a device, with the thread that writes it. Dropping it ends the capture.
#[derive(Debug)]
pub struct CaptureFile {
    shared: Arc<Shared>,
    file: File,
    /// Closes the streams, and the descriptors that device processes have sent.
    janitor: Arc<Janitor>,
}

#[derive(Debug)]
struct Shared {
    path: String,
    orders: Mutex<Orders>,
    changed: Condvar,
    /// Wakes the thread from its wait for a stream.
    wakes: OwnedFd,
}

#[derive(Debug, Default)]
struct Orders {
    /// The streams that the thread has not begun to read. The last one belongs to the device
    /// process that serves the device now.
    next: VecDeque<ByteStream>,
    /// True when a takeover is due: the thread reads the bytes that its stream holds now, and then
    /// closes the stream.
    leaves: bool,
    /// True while the thread reads a stream.
    is_busy: bool,
    ends: bool,
    /// True once the thread has ended by itself, because writing the file failed.
    has_ended: bool,
}

impl CaptureFile {
    /// Begins the capture of `device` in the file at `path`, and truncates the file. `left` is the
    /// file of an earlier supervisor, and locked already: if it is the same file, the capture is
    /// appended behind its last record. May block.
    ///
    /// # Errors
    /// `ResourceBusy`: another process captures into the file. Any other: the file, the thread or
    /// an eventfd cannot be made.
    pub(crate) fn begin(device: &str, path: &Path, left: Option<OwnedFd>) -> io::Result<Self> {
        let left = left.map(File::from).filter(|left| is_at(left, path));
        let file = left.map_or_else(|| pcap::create(path), Ok)?;
        let wakes = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (orders, changed) = Default::default();
        let shared = Shared { path: path.display().to_string(), orders, changed, wakes };
        let shared = Arc::new(shared);
        let (works, mut written) = (shared.clone(), file.try_clone()?);
        let thread = std::thread::Builder::new().name("capture".to_owned());
        thread.spawn(move || works.work(&mut written))?;
        Ok(Self { shared, file, janitor: Arc::new(Janitor::of(device)) })
    }

    /// Returns the write end of a new stream, for the next device process. The thread closes the
    /// stream of the former device process after it has read the bytes in it. May block.
    ///
    /// # Errors
    /// The socket pair cannot be made.
    pub fn lend(&self) -> io::Result<OwnedFd> {
        let (reads, writes) = byte_stream::pair(STREAM_SIZE)?;
        let reads = ByteStream::new(reads, self.janitor.clone());
        let mut orders = self.shared.lock();
        // If the thread has ended, nobody will read this stream: `reads` is dropped, and the first
        // write of the device process fails.
        if !orders.has_ended {
            orders.leaves = false;
            orders.next.push_back(reads);
            let beyond = orders.next.len() > STREAMS_MAX;
            let oldest = if beyond { orders.next.pop_front() } else { None };
            drop(orders);
            self.shared.wake();
            drop(oldest);
        }
        Ok(writes)
    }

    /// Returns the file's descriptor for the supervisor that takes over, after the thread has
    /// written the records that were captured so far. May block.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`: no descriptor is free.
    pub fn left(&self) -> io::Result<OwnedFd> {
        self.shared.lock().leaves = true;
        self.shared.wake();
        self.shared.settle(|orders| orders.is_busy || !orders.next.is_empty());
        Ok(self.file.try_clone()?.into())
    }

    /// Ends the capture, and waits until everything is written. May block.
    pub fn finish(&self) {
        self.shared.end();
        if !self.shared.settle(|_| true) {
            let path = &self.shared.path;
            tracing::warn!(path, "the capture file is blocked; the end of the capture is lost");
        }
    }
}

impl Drop for CaptureFile {
    fn drop(&mut self) {
        self.shared.end();
    }
}

/// True if `file` is the same file (device and inode) as the one at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    let found = std::fs::metadata(path).and_then(|found| Ok((found, file.metadata()?)));
    found.is_ok_and(|(at, of)| (at.dev(), at.ino()) == (of.dev(), of.ino()))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.notify_all();
        let _ = rustix::io::write(&self.wakes, &1u64.to_ne_bytes());
    }

    fn end(&self) {
        let mut orders = self.lock();
        orders.ends = true;
        drop(orders);
        self.wake();
    }

    /// Waits until the thread has ended or `is_busy` returns false. Returns false if
    /// [`CAPTURE_SETTLE`] passes before.
    fn settle(&self, is_busy: impl Fn(&Orders) -> bool) -> bool {
        let goes_on = |orders: &mut Orders| !orders.has_ended && is_busy(orders);
        let waited = self.changed.wait_timeout_while(self.lock(), CAPTURE_SETTLE, goes_on);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn work(&self, file: &mut File) {
        let path = &self.path;
        while let Some(stream) = self.next() {
            match self.copy(&stream, file) {
                Ok(()) => {}
                Err(Failure::Records) => tracing::error!(
                    path,
                    "the device process sends what is no frame; its capture stopped"
                ),
                Err(Failure::File(error)) => {
                    let problem = "writing the capture file failed; capture stopped";
                    tracing::error!(path, %error, "{problem}");
                    break;
                }
            }
        }
        let mut orders = self.lock();
        orders.has_ended = true;
        let next = std::mem::take(&mut orders.next);
        drop(orders);
        self.changed.notify_all();
        drop(next);
    }

    /// Waits for the next stream; `None`: the capture ends.
    fn next(&self) -> Option<ByteStream> {
        let mut orders = self.lock();
        orders.is_busy = false;
        self.changed.notify_all();
        loop {
            if let Some(stream) = orders.next.pop_front() {
                orders.is_busy = true;
                return Some(stream);
            }
            if orders.ends {
                return None;
            }
            orders = self.changed.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Copies whole records from a stream to the file, until the device process closes its end, or
    /// until it no longer serves the device ([`Orders::must_leave`]).
    fn copy(&self, stream: &ByteStream, file: &mut File) -> Result<(), Failure> {
        let mut buffer = vec![0; BUFFER_SIZE];
        let (mut len, mut last) = (0, None);
        loop {
            // Bound the bytes that are still read: a process that no longer serves the device may
            // write for ever.
            if last.is_none() && self.lock().must_leave() {
                last = Some(STREAM_SIZE);
            }
            match stream.read(&mut buffer[len..]) {
                Ok(0) => return Ok(()),
                Ok(read) => {
                    len += read;
                    let whole = pcap::whole(&buffer[..len]);
                    let records = whole.unwrap_or_else(|bad| bad.after);
                    write(file, &buffer[..records])?;
                    whole.map_err(|_| Failure::Records)?;
                    buffer.copy_within(records..len, 0);
                    len -= records;
                    last = match last.map(|last| last.checked_sub(read)) {
                        Some(None) => return Ok(()),
                        Some(left) => left,
                        None => None,
                    };
                }
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return Err(Failure::Records);
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Ok(()),
                Err(_) if last.is_some() => return Ok(()),
                Err(_) => {
                    let fds = [stream.as_fd(), self.wakes.as_fd()];
                    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                    let _ = poll(&mut polled, None);
                    let _ = rustix::io::read(&self.wakes, &mut [0; 8]);
                }
            }
        }
    }
}

impl Orders {
    /// True if the device process that writes the present stream no longer serves the device.
    fn must_leave(&self) -> bool {
        self.leaves || self.ends || !self.next.is_empty()
    }
}

/// Why the capture of a device process ends before that process does.
enum Failure {
    /// The device process wrote bytes that are no pcap records.
    Records,
    /// Writing the file failed.
    File(io::Error),
}

/// Writes records to the file. After a write that failed half-way, the file is truncated to the
/// records before.
fn write(file: &mut File, records: &[u8]) -> Result<(), Failure> {
    // A pipe has no position, and is not truncated.
    let before = file.stream_position().ok();
    file.write_all(records).map_err(|error| {
        before.iter().for_each(|before| _ = file.set_len(*before));
        Failure::File(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_driver::hostile::HeldLock;
    use std::time::Duration;

    const HEADER: usize = 24;

    fn record(number: u32, len: u32) -> Vec<u8> {
        let words = [number, 0, len, len];
        let header = words.iter().flat_map(|word| word.to_le_bytes());
        header.chain(std::iter::repeat_n(number.to_le_bytes()[0], len as usize)).collect()
    }

    fn holds(path: &Path, records: &[Vec<u8>]) {
        let want = records.concat();
        let read = || std::fs::read(path).unwrap();
        for _ in 0..10_000 {
            if read().len() >= HEADER + want.len() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let bytes = read();
        assert_eq!(bytes[..4], 0xa1b2_3c4du32.to_le_bytes());
        assert!(bytes[HEADER..] == want, "{} of {}", bytes.len(), HEADER + want.len());
    }

    #[test]
    fn a_process_that_dies_inside_a_record_leaves_whole_ones_and_the_next_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lan.pcap");
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        let mut records = Vec::new();
        for process in 0..4u32 {
            let mut stream = File::from(capture.lend().unwrap());
            for number in 0..50 {
                records.push(record(number, process * 60_000));
                stream.write_all(records.last().unwrap()).unwrap();
            }
            stream.write_all(&record(99, 1000)[..500]).unwrap();
        }
        holds(&path, &records);
        capture.finish();
        holds(&path, &records);
    }

    #[test]
    fn a_process_that_keeps_its_stream_keeps_the_next_one_from_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lan.pcap");
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        let mut first = File::from(capture.lend().unwrap());
        first.write_all(&record(1, 100)).unwrap();
        let mut second = File::from(capture.lend().unwrap());
        second.write_all(&record(2, 100)).unwrap();
        holds(&path, &[record(1, 100), record(2, 100)]);
        // The stream that was left has no reader any more.
        let error = first.write_all(&record(3, 100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        capture.finish();
    }

    #[test]
    fn a_process_whose_memory_never_comes_holds_no_thread_of_this_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lan.pcap");
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        let mut first = File::from(capture.lend().unwrap());
        first.write_all(&record(1, 100)).unwrap();
        holds(&path, &[record(1, 100)]);
        // `held` writes from a page whose contents never come.
        let held = match HeldLock::pipe(first.into()) {
            Ok(held) => held,
            Err(error) => return println!("not tested: {error}"),
        };
        let mut second = File::from(capture.lend().unwrap());
        second.write_all(&record(2, 100)).unwrap();
        holds(&path, &[record(1, 100), record(2, 100)]);
        capture.finish();
        drop(held);
    }

    #[test]
    fn bytes_that_are_no_record_end_that_capture_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lan.pcap");
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        let mut bad = File::from(capture.lend().unwrap());
        bad.write_all(&record(1, 100)).unwrap();
        let mut garbage = record(2, 100);
        garbage[8] ^= 1;
        // The reader may close the stream before all of it is written.
        while bad.write_all(&garbage).is_ok() {}
        let mut good = File::from(capture.lend().unwrap());
        good.write_all(&record(3, 100)).unwrap();
        holds(&path, &[record(1, 100), record(3, 100)]);
        capture.finish();
    }

    #[test]
    fn the_next_supervisor_goes_on_with_the_same_file_and_begins_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("lan.pcap"), folder.path().join("other.pcap"));
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        File::from(capture.lend().unwrap()).write_all(&record(1, 100)).unwrap();
        let left = capture.left().unwrap();
        let next = CaptureFile::begin("lan", &path, Some(left)).unwrap();
        // A takeover that failed: this one goes on, and hands the file over again.
        File::from(capture.lend().unwrap()).write_all(&record(2, 100)).unwrap();
        holds(&path, &[record(1, 100), record(2, 100)]);
        let left = capture.left().unwrap();
        drop((capture, next));
        let next = CaptureFile::begin("lan", &path, Some(left)).unwrap();
        File::from(next.lend().unwrap()).write_all(&record(3, 100)).unwrap();
        let all = [record(1, 100), record(2, 100), record(3, 100)];
        holds(&path, &all);
        let another = CaptureFile::begin("lan", &other, Some(next.left().unwrap())).unwrap();
        File::from(another.lend().unwrap()).write_all(&record(4, 100)).unwrap();
        holds(&other, &[record(4, 100)]);
        holds(&path, &all);
    }

    #[test]
    fn a_file_of_another_capture_is_refused_and_unchanged_until_that_one_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lan.pcap");
        let capture = CaptureFile::begin("lan", &path, None).unwrap();
        File::from(capture.lend().unwrap()).write_all(&record(1, 100)).unwrap();
        holds(&path, &[record(1, 100)]);
        let refused = || CaptureFile::begin("other", &path, None).unwrap_err();
        assert_eq!(refused().kind(), ErrorKind::ResourceBusy);
        // A supervisor that takes over has the same lock.
        let left = capture.left().unwrap();
        let next = CaptureFile::begin("lan", &path, Some(left)).unwrap();
        drop(capture);
        assert_eq!(refused().kind(), ErrorKind::ResourceBusy);
        holds(&path, &[record(1, 100)]);
        next.finish();
        drop(next);
        let another = CaptureFile::begin("other", &path, None).unwrap();
        File::from(another.lend().unwrap()).write_all(&record(2, 100)).unwrap();
        holds(&path, &[record(2, 100)]);
        // A device is no file of one process.
        let both = ["a", "b"].map(|name| CaptureFile::begin(name, Path::new("/dev/null"), None));
        assert!(both.iter().all(Result::is_ok));
    }

    #[test]
    fn a_file_that_takes_nothing_ends_the_capture_and_is_told_to_each_process() {
        let capture = CaptureFile::begin("lan", Path::new("/dev/null"), None).unwrap();
        let shared = Shared {
            path: "full".to_owned(),
            orders: Mutex::default(),
            changed: Condvar::new(),
            wakes: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        };
        let (reads, writes) = byte_stream::pair(STREAM_SIZE).unwrap();
        File::from(writes).write_all(&record(1, 100)).unwrap();
        shared.lock().next.push_back(ByteStream::new(reads, Arc::new(Janitor::of("lan"))));
        shared.work(&mut File::options().write(true).open("/dev/full").unwrap());
        assert!(shared.lock().has_ended);
        capture.shared.lock().has_ended = true;
        let mut stream = File::from(capture.lend().unwrap());
        let error = stream.write_all(&record(1, 100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }
}
