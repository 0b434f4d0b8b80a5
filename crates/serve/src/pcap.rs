//! `pcap`: a decorator that writes every frame of another port, in both directions, to a capture
//! file.
//!
//! Frames are copied into a bounded buffer, which a thread writes to the file, so that no worker
//! waits for a disk: if the buffer is full, the frame passes without being captured. Frames are
//! captured as they cross the port: a guest's checksums may be partial, its segments large.
//!
//! A process that must not write files sends its records through a socket instead. The process at
//! the other end creates the file ([`create`]), and writes only whole records to it ([`whole`]).

use crate::times::{CAPTURE_END, CAPTURE_LOCK, CAPTURE_LOCK_RETRY};
use manyring_backend::net::decorator::{Decorated, Decorator};
use manyring_backend::net::{Frames, HEADER_SIZE, Port, PortRx, PortTx, Readiness, Returned, Sent};
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_memory::{GuestSlice, copy_from_slices};
use rustix::fd::OwnedFd;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most bytes that wait to be written.
const BUFFER_SIZE_MAX: usize = 16 << 20;
/// The classic pcap format with nanoseconds.
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
/// Bytes that are captured of a frame: more than any frame has.
const SNAPLEN: u32 = 262_144;
const LINKTYPE_ETHERNET: u32 = 1;
const RECORD_HEADER_SIZE: usize = 16;
/// Bytes of the longest record.
pub const RECORD_SIZE_MAX: usize = RECORD_HEADER_SIZE + SNAPLEN as usize;

/// The error for bytes that are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a record of a capture, after {after} bytes of records")]
pub struct BadRecord {
    /// Length of the whole records before these bytes.
    pub after: usize,
}

/// Creates the capture file at `path`, or truncates it, locks it, and writes its header. May block;
/// for half a second if the file is locked.
///
/// # Errors
/// `ResourceBusy`: another process captures into the file, which is unchanged. Any other: the file
/// cannot be created or written.
pub fn create(path: &Path) -> io::Result<File> {
    // Not truncated before it is locked: it may be the capture of another process.
    let mut file = File::options().write(true).create(true).truncate(false).open(path)?;
    if file.metadata()?.is_file() {
        lock(&file)?;
        file.set_len(0)?;
    }
    let mut header = MAGIC.to_le_bytes().to_vec();
    header.extend(VERSION.iter().flat_map(|word| word.to_le_bytes()));
    // Two fields that are always 0: time zone and accuracy.
    header.extend([0, 0, SNAPLEN, LINKTYPE_ETHERNET].iter().flat_map(|w| w.to_le_bytes()));
    file.write_all(&header)?;
    Ok(file)
}

/// Locks a capture file for its open file description (`flock`): until the last process that was
/// handed the file has closed it.
fn lock(file: &File) -> io::Result<()> {
    // A capture of the same file that has just ended may still be closing it.
    let mut waited = Duration::ZERO;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::AGAIN) if waited < CAPTURE_LOCK => {
                waited += CAPTURE_LOCK_RETRY;
                std::thread::sleep(CAPTURE_LOCK_RETRY);
            }
            Err(Errno::AGAIN) => {
                let problem = "another capture writes this file; name another file for each daemon";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, problem));
            }
            Err(Errno::INTR) => {}
            // A file system without locks: captures go on as without them.
            Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
            locked => return Ok(locked?),
        }
    }
}

/// Returns the length of the whole records at the beginning of `bytes`.
///
/// # Errors
/// [`BadRecord`]: a record is longer than [`RECORD_SIZE_MAX`], its two lengths differ, or its
/// nanoseconds are a second or more.
pub fn whole(bytes: &[u8]) -> Result<usize, BadRecord> {
    let mut at = 0;
    while let Some((header, rest)) = bytes[at..].split_first_chunk::<RECORD_HEADER_SIZE>() {
        let [_, nanoseconds, len, full] = [0, 4, 8, 12]
            .map(|n| u32::from_le_bytes([header[n], header[n + 1], header[n + 2], header[n + 3]]));
        if len > SNAPLEN || len != full || nanoseconds >= 1_000_000_000 {
            return Err(BadRecord { after: at });
        }
        let len = len as usize;
        if rest.len() < len {
            break;
        }
        at += RECORD_HEADER_SIZE + len;
    }
    Ok(at)
}

/// The state that the port's send and receive halves and the writing thread share.
#[derive(Debug, Default)]
struct Capture {
    /// The file's path in messages; in a process without the file, a text with the device's name.
    path: String,
    buffer: Mutex<PcapBuffer>,
    changed: Condvar,
    missed: AtomicU64,
}

#[derive(Debug, Default)]
struct PcapBuffer {
    /// Records in the file's format, not written yet.
    bytes: Vec<u8>,
    /// True when the port was dropped: no frame is captured any more.
    is_closed: bool,
    /// True when the writing thread has ended, after the last record or an error of the file.
    is_done: bool,
}

impl Capture {
    fn lock(&self) -> MutexGuard<'_, PcapBuffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Captures frames, each given by its length and a function that copies its bytes.
    fn add<F: FnOnce(&mut [u8])>(&self, frames: impl Iterator<Item = (usize, F)>) {
        let now = clock_gettime(ClockId::Realtime);
        let mut buffer = self.lock();
        if buffer.is_closed {
            return;
        }
        let was_empty = buffer.bytes.is_empty();
        for (len, copy) in frames {
            if buffer.bytes.len() + RECORD_HEADER_SIZE + len > BUFFER_SIZE_MAX {
                self.miss(1);
                continue;
            }
            let size = u32::try_from(len).unwrap_or(u32::MAX);
            let seconds = u32::try_from(now.tv_sec).unwrap_or(u32::MAX);
            let nanoseconds = u32::try_from(now.tv_nsec).unwrap_or(0);
            for word in [seconds, nanoseconds, size, size] {
                buffer.bytes.extend_from_slice(&word.to_le_bytes());
            }
            let start = buffer.bytes.len();
            buffer.bytes.resize(start + len, 0);
            copy(&mut buffer.bytes[start..]);
        }
        if was_empty && !buffer.bytes.is_empty() {
            self.changed.notify_one();
        }
    }

    /// Waits until everything is written; returns false if that takes longer than `max_wait`.
    fn is_done_within(&self, max_wait: Duration) -> bool {
        let writes = |buffer: &mut PcapBuffer| !buffer.is_done;
        let waited = self.changed.wait_timeout_while(self.lock(), max_wait, writes);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_done
    }

    fn miss(&self, frames: u64) {
        if self.missed.fetch_add(frames, Ordering::Relaxed) == 0 {
            let path = &self.path;
            tracing::warn!(path, "the capture file is too slow; frames are missing from it");
        }
    }

    /// Writes captured frames until the capture is closed and all of them are written.
    fn write_to(&self, mut file: File) {
        let mut taken = Vec::new();
        loop {
            let mut buffer = self.lock();
            while buffer.bytes.is_empty() && !buffer.is_closed {
                buffer = self.changed.wait(buffer).unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::swap(&mut taken, &mut buffer.bytes);
            drop(buffer);
            if taken.is_empty() {
                break;
            }
            if let Err(error) = file.write_all(&taken) {
                let path = &self.path;
                tracing::error!(path, %error, "writing the capture file failed; capture stopped");
                self.lock().is_closed = true;
                return;
            }
            taken.clear();
        }
        if let Err(error) = file.flush() {
            tracing::error!(path = self.path, %error, "writing the end of the capture failed");
        }
    }
}

/// Copies a frame without the virtio-net header with which `slices` begin.
fn copy_frame(slices: &[GuestSlice], bytes: &mut [u8]) {
    let (mut skip, mut done) = (HEADER_SIZE, 0);
    for slice in slices {
        let part = slice.split_at(skip).1;
        skip = skip.saturating_sub(slice.len());
        done += copy_from_slices(&[part], &mut bytes[done..]);
    }
}

/// The decorator of a port whose frames are captured. Dropping it ends the capture.
#[derive(Debug)]
pub struct Pcap {
    capture: Arc<Capture>,
}

impl Pcap {
    /// Decorates `port`, and truncates the file at `path`. When the port is dropped, the frames in
    /// the buffer are written to the file, for two seconds at most. May block.
    ///
    /// # Errors
    /// The file cannot be created, or the thread cannot be started.
    pub fn around(port: Arc<dyn Port>, path: &Path) -> io::Result<Decorated<Self>> {
        Self::writing(port, create(path)?, path.display().to_string())
    }

    /// Decorates `port`. Sends the records into `stream`; the process at its other end has created
    /// the file. `device` names the capture in messages.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn streamed(
        port: Arc<dyn Port>,
        stream: OwnedFd,
        device: &str,
    ) -> io::Result<Decorated<Self>> {
        Self::writing(port, File::from(stream), format!("handed for {device}"))
    }

    fn writing(port: Arc<dyn Port>, file: File, path: String) -> io::Result<Decorated<Self>> {
        let capture = Arc::new(Capture { path, ..Capture::default() });
        let shared = capture.clone();
        // Do not take this thread from the pool: it serves no queue, and only waits for a file.
        let thread = std::thread::Builder::new().name("capture".into());
        starter::spawn(ThreadRole::Log, thread, move || {
            shared.write_to(file);
            shared.lock().is_done = true;
            shared.changed.notify_all();
        })?;
        Ok(Decorated::around(port, Self { capture }))
    }

    /// Returns the number of frames that passed without being captured, because the buffer was
    /// full.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.capture.missed.load(Ordering::Relaxed)
    }
}

impl Drop for Pcap {
    fn drop(&mut self) {
        self.capture.lock().is_closed = true;
        self.capture.changed.notify_all();
        let path = &self.capture.path;
        if !self.capture.is_done_within(CAPTURE_END) {
            tracing::warn!(path, "the capture file is blocked; the end of the capture is lost");
        }
        let missed = self.capture.missed.load(Ordering::Relaxed);
        if missed > 0 {
            tracing::warn!(path, missed, "frames are missing from the capture");
        }
    }
}

impl Decorator for Pcap {
    fn around_tx(&self, inner: Box<dyn PortTx>) -> Result<Box<dyn PortTx>, Errno> {
        Ok(Box::new(PcapTx { inner, capture: self.capture.clone() }))
    }

    fn around_rx(&self, inner: Box<dyn PortRx>) -> Result<Box<dyn PortRx>, Errno> {
        Ok(Box::new(PcapRx { inner, capture: self.capture.clone() }))
    }

    fn transmitted(&self, frame: &[u8]) {
        let copy = |bytes: &mut [u8]| bytes.copy_from_slice(frame);
        self.capture.add(std::iter::once((frame.len(), copy)));
    }
}

#[derive(Debug)]
struct PcapTx {
    inner: Box<dyn PortTx>,
    capture: Arc<Capture>,
}

impl PortTx for PcapTx {
    fn checks_place(&self) -> bool {
        self.inner.checks_place()
    }

    fn forget(&mut self) {
        self.inner.forget();
    }

    fn send(&mut self, frames: &Frames, first: usize) -> Sent {
        let sent = self.inner.send(frames, first);
        // Also capture frames that the port took and then refused: they are of most interest.
        let taken = first..first + sent.taken;
        if !taken.is_empty() {
            let copy = |at| move |bytes: &mut [u8]| copy_frame(frames.slices(at), bytes);
            self.capture.add(taken.map(|at| (frames.len(at), copy(at))));
        }
        sent
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }

    fn reap(&mut self, done: &mut Vec<Returned>) {
        self.inner.reap(done);
    }

    fn recall(&mut self, done: &mut Vec<Returned>) -> usize {
        self.inner.recall(done)
    }

    fn done(&self) -> Readiness<'_> {
        self.inner.done()
    }
}

#[derive(Debug)]
struct PcapRx {
    inner: Box<dyn PortRx>,
    capture: Arc<Capture>,
}

impl PortRx for PcapRx {
    fn recv(&mut self, buffers: &[GuestSlice]) -> Result<usize, Errno> {
        let len = self.inner.recv(buffers)?;
        if let Some(len) = len.checked_sub(HEADER_SIZE) {
            let copy = |bytes: &mut [u8]| copy_frame(buffers, bytes);
            self.capture.add(std::iter::once((len, copy)));
        }
        Ok(len)
    }

    fn readiness(&self) -> Readiness<'_> {
        self.inner.readiness()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_backend::net::null::NullPort;
    use manyring_memory::{Mapping, SliceList};
    use manyring_wire::net::RawNetHeader;

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn frames_of_both_ways_are_written_without_their_headers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let port = Pcap::around(Arc::new(NullPort::new(1, 64)), file.path()).unwrap();
        let memory = Arc::new(Mapping::anonymous(8192).unwrap());
        memory.slice(0, 4096).unwrap().write_from(b"................the frame that is sent");
        let slices = SliceList::of_mapping(&memory, &[(4, 18), (22, 16)]).unwrap();
        let mut frames = Frames::new().unwrap();
        for _ in 0..3 {
            frames.push(&RawNetHeader::default(), slices.all(), HEADER_SIZE, 22);
        }
        let mut tx = port.open_tx(0).unwrap();
        assert_eq!(tx.send(&frames, 1).taken, 2);
        // A header that ends inside the second buffer.
        let buffers = [memory.slice(4096, 5).unwrap(), memory.slice(4101, 1000).unwrap()];
        assert_eq!(port.open_rx(0).unwrap().recv(&buffers), Ok(HEADER_SIZE + 64));
        assert_eq!(port.decorator.missed(), 0);
        drop(port);
        // The capture has ended; the port still works.
        assert_eq!(tx.send(&frames, 0).taken, 3);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len(), 24 + 3 * RECORD_HEADER_SIZE + 22 + 22 + 64);
        assert_eq!((word(&bytes, 0), word(&bytes, 16), word(&bytes, 20)), (MAGIC, SNAPLEN, 1));
        for at in [24, 62] {
            assert_eq!((word(&bytes, at + 8), word(&bytes, at + 12)), (22, 22));
            assert_eq!(&bytes[at + 16..at + 38], b"the frame that is sent");
        }
        assert_eq!((word(&bytes, 108), &bytes[116..122]), (64, &[0xff; 6][..]));
        assert_eq!(bytes[130..134], [0, 1, 2, 3]);
    }

    #[test]
    fn frames_that_find_the_buffer_full_are_counted_and_the_others_kept() {
        // Without a writing thread nothing leaves the buffer.
        let capture = Capture::default();
        let fit = BUFFER_SIZE_MAX / (RECORD_HEADER_SIZE + 65_553);
        capture.add((0..fit + 2).map(|_| (65_553, |bytes: &mut [u8]| bytes.fill(1))));
        assert_eq!(capture.missed.load(Ordering::Relaxed), 2);
        assert_eq!(capture.lock().bytes.len(), fit * (RECORD_HEADER_SIZE + 65_553));
    }

    fn record(seconds: u32, nanoseconds: u32, lens: [u32; 2]) -> Vec<u8> {
        let words = [seconds, nanoseconds, lens[0], lens[1]];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len() + (lens[0] as usize).min(SNAPLEN as usize), 7);
        bytes
    }

    #[test]
    fn only_whole_records_pass_whatever_their_bytes_are_split_into() {
        let (first, second) = (record(1, 999_999_999, [60; 2]), record(u32::MAX, 0, [0; 2]));
        let longest = record(2, 1, [SNAPLEN; 2]);
        assert_eq!(longest.len(), RECORD_SIZE_MAX);
        let all = [&first[..], &second, &longest].concat();
        let ends = [0, 76, 92, 92 + RECORD_SIZE_MAX];
        for len in (0..200).chain(all.len() - 20..=all.len()) {
            let is_before = |end: &&usize| **end <= len;
            let end = ends.iter().rfind(is_before).unwrap();
            assert_eq!(whole(&all[..len]), Ok(*end), "{len}");
        }
        for bad in [
            record(1, 1_000_000_000, [60; 2]),
            record(1, 1, [60, 61]),
            record(1, 1, [SNAPLEN + 1; 2]),
            record(1, 1, [u32::MAX; 2]),
        ] {
            assert_eq!(whole(&bad[..RECORD_HEADER_SIZE]), Err(BadRecord { after: 0 }));
            assert_eq!(whole(&[&first[..], &bad].concat()), Err(BadRecord { after: 76 }));
        }
    }

    #[test]
    fn frames_go_through_a_pipe_as_into_a_file_and_without_its_header() {
        // CLOEXEC: a child of another test that inherited `writes` would keep the pipe open, and
        // the read below would never end.
        let (reads, writes) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let port = Pcap::streamed(Arc::new(NullPort::new(1, 64)), writes, "lan").unwrap();
        let memory = Arc::new(Mapping::anonymous(4096).unwrap());
        let buffers = [memory.slice(0, 1000).unwrap()];
        for _ in 0..3 {
            assert_eq!(port.open_rx(0).unwrap().recv(&buffers), Ok(HEADER_SIZE + 64));
        }
        drop(port);
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut File::from(reads), &mut bytes).unwrap();
        assert_eq!(bytes.len(), 3 * (RECORD_HEADER_SIZE + 64));
        assert_eq!(whole(&bytes), Ok(bytes.len()));
    }

    #[test]
    fn a_file_that_cannot_be_created_or_written_is_no_harm() {
        let port: Arc<dyn Port> = Arc::new(NullPort::new(1, 64));
        let folder = tempfile::tempdir().unwrap();
        assert!(Pcap::around(port.clone(), folder.path()).is_err());
        assert!(Pcap::around(port, Path::new("/dev/full")).is_err());
        let capture = Arc::new(Capture::default());
        capture.add(std::iter::once((64, |_: &mut [u8]| ())));
        capture.write_to(File::create("/dev/full").unwrap());
        assert!(capture.lock().is_closed);
    }
}
