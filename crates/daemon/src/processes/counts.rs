//! `Counts`: the counters of a device in a device process, which the supervisor adds to its own.
//!
//! The counters lie in a sealed memfd of fixed size. The device process writes them when it is
//! asked to; the supervisor reads the file and maps nothing. Any number is a valid counter.

use crate::assemble::Part;
use manyring_engine::QueueStats;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};

/// The counters of one device.
#[derive(Debug)]
pub(crate) struct Counts {
    part: Part,
    queues: usize,
    file: Mutex<OwnedFd>,
    /// The counters of earlier device processes, by queue.
    before: Mutex<Vec<Vec<u64>>>,
}

impl Counts {
    /// For a device that the supervisor shows and that no device process has yet.
    pub(super) fn new(part: Part, queues: usize) -> Result<Self, Errno> {
        let before = (0..queues).map(|_| Vec::new()).collect();
        let file = Mutex::new(blank(queues)?);
        Ok(Self { part, queues, file, before: Mutex::new(before) })
    }

    /// A file for the next device process, whose counters begin at zero.
    pub(super) fn begin(&self) -> Result<OwnedFd, Errno> {
        let file = blank(self.queues)?;
        let given = rustix::io::fcntl_dupfd_cloexec(&file, 3)?;
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file;
        Ok(given)
    }

    /// Shows what the device process has written.
    pub(super) fn read(&self) {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, before) in before.iter().enumerate() {
            let Some(stats) = self.part.stats(index) else { continue };
            let mut bytes = vec![0; size()];
            let at = u64::try_from(index * size()).unwrap_or(u64::MAX);
            if rustix::io::pread(&*file, &mut bytes, at) == Ok(size()) {
                let words = bytes.as_chunks().0.iter();
                let now: Vec<_> = words.map(|word| u64::from_ne_bytes(*word)).collect();
                stats.show(before, &now);
            }
        }
    }

    /// The device process has ended: its counters are added to those of earlier processes.
    pub(super) fn end(&self) {
        self.read();
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, before) in before.iter_mut().enumerate() {
            let Some(stats) = self.part.stats(index) else { continue };
            *before = stats.numbers();
            before.shrink_to_fit();
            stats.show(before, &[]);
        }
    }
}

/// Size of the counters of one queue, in bytes.
fn size() -> usize {
    QueueStats::NUMBERS_MAX * size_of::<u64>()
}

fn blank(queues: usize) -> Result<OwnedFd, Errno> {
    sealed("counters", queues * size())
}

/// Makes a file in memory of `bytes` bytes, sealed so that nobody can change its length.
pub(super) fn sealed(name: &str, bytes: usize) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&file, u64::try_from(bytes).unwrap_or(u64::MAX))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Writes the counters of a device where the supervisor reads them.
pub(super) fn write(file: impl AsFd, part: &Part) {
    for index in 0..part.queue_count() {
        let Some(stats) = part.stats(index) else { continue };
        let bytes: Vec<_> = stats.numbers().iter().flat_map(|n| n.to_ne_bytes()).collect();
        let at = u64::try_from(index * size()).unwrap_or(u64::MAX);
        let _ = rustix::io::pwrite(&file, &bytes, at);
    }
}
