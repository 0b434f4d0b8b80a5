//! The two files of a lease, by which a device process takes part in a group of limits
//! (`engine/limit/lease.rs`).
//!
//! ```text
//! grants   the supervisor writes whether it is awake, and how much time the process was granted;
//!          the process can only read this file, and the supervisor never reads it
//! usage    the process writes its usage; the supervisor reads the file, and trusts no value in it
//!          (`divide.rs`)
//! ```
//! A file holds all its words twice, one copy behind the other. A reader that finds two different
//! copies has read during a write: it then keeps the values that it read before. Neither side maps
//! a file or waits.

use crate::counts::sealed;
use crate::supervisor_client::Outgoing;
use manyring_engine::limit::lease::{LEVELS, Lease, Usage, Usages};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::sync::atomic::{Ordering, fence};
use tokio::sync::mpsc;

/// Number of token buckets in a group.
pub(super) const BUCKETS: usize = size_of::<Usages>() / size_of::<Usage>();
/// Numbers of 64-bit words in one copy: of the grants, and of the usage.
const GRANTS: usize = 1 + BUCKETS;
const USAGE: usize = BUCKETS * (2 + LEVELS);
/// Size in bytes of the longer file, with both copies.
const BYTES_MAX: usize = 2 * USAGE * size_of::<u64>();

/// The files of a lease, in the supervisor.
#[derive(Debug)]
pub struct LeaseFiles {
    grants: OwnedFd,
    usage: OwnedFd,
}

impl LeaseFiles {
    /// Makes the files. Returns them, and the descriptors for the device process. Opens a file in
    /// /proc.
    pub fn new() -> Result<(Self, Vec<OwnedFd>), Errno> {
        let grants = sealed("grants", 2 * GRANTS * size_of::<u64>())?;
        let usage = sealed("usage", 2 * USAGE * size_of::<u64>())?;
        // Make the file read-only: a device process, which has another user, then cannot open it
        // again for writing.
        rustix::fs::fchmod(&grants, Mode::RUSR)?;
        let path = format!("/proc/self/fd/{}", grants.as_raw_fd());
        let read = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let of_process = vec![read, rustix::io::fcntl_dupfd_cloexec(&usage, 3)?];
        Ok((Self { grants, usage }, of_process))
    }

    /// Writes for the process how much time it was granted in all, and whether the supervisor is
    /// awake. While it is not, a process that needs time must ring (`lease_ring.rs`).
    pub fn grant(&self, is_awake: bool, granted_ns: &[u64; BUCKETS]) {
        let mut words = [u64::from(is_awake); GRANTS];
        words[1..].copy_from_slice(granted_ns);
        write(&self.grants, &words);
        // Pairs with the fence in `tell`: either this process's next read sees the usage that the
        // device process has written, or the device process sees that the supervisor is not awake,
        // and rings.
        fence(Ordering::SeqCst);
    }

    /// Reads the usage that the process has written; `None`: the process is writing at this moment.
    pub fn usages(&self) -> Option<Usages> {
        let mut words = read::<USAGE>(&self.usage)?.into_iter();
        let mut next = || words.next().unwrap_or(0);
        Some(std::array::from_fn(|_| Usage {
            seen_ns: next(),
            held_ns: next(),
            needs_ns: std::array::from_fn(|_| next()),
        }))
    }
}

/// The files of a lease, in the device process.
#[derive(Debug)]
pub(super) struct ProcessLease {
    grants: OwnedFd,
    usage: OwnedFd,
    outgoing: mpsc::Sender<Outgoing>,
}

impl ProcessLease {
    /// Makes a lease of the supervisor's descriptors; `None`: these are not the two files of a
    /// lease.
    pub(super) fn new(fds: Vec<OwnedFd>, outgoing: mpsc::Sender<Outgoing>) -> Option<Self> {
        let [grants, usage] = fds.try_into().ok()?;
        Some(Self { grants, usage, outgoing })
    }
}

impl Lease for ProcessLease {
    fn granted_ns(&self) -> Option<[u64; BUCKETS]> {
        let words = read::<GRANTS>(&self.grants)?;
        Some(std::array::from_fn(|index| words[1 + index]))
    }

    fn tell(&self, usages: &Usages) {
        let mut words = [0; USAGE];
        let all = usages.iter().flat_map(|usage| {
            let Usage { seen_ns, held_ns, needs_ns } = usage;
            [*seen_ns, *held_ns].into_iter().chain(*needs_ns)
        });
        words.iter_mut().zip(all).for_each(|(word, value)| *word = value);
        write(&self.usage, &words);
        // Pairs with the fence in `grant`: a supervisor that is about to sleep first writes so, and
        // then reads the usage once more.
        fence(Ordering::SeqCst);
        let sleeps = || read::<GRANTS>(&self.grants).is_some_and(|words| words[0] == 0);
        if usages.iter().any(Usage::is_needy) && sleeps() {
            // If the queue is full, nothing is lost: the next call of `tell`, which comes soon,
            // rings.
            let _ = self.outgoing.try_send(Outgoing::Needs);
        }
    }
}

/// Writes the words twice, in one write.
fn write(file: impl AsFd, words: &[u64]) {
    let mut bytes = [0; BYTES_MAX];
    let mut len = 0;
    for word in words.iter().chain(words) {
        bytes[len..len + size_of::<u64>()].copy_from_slice(&word.to_ne_bytes());
        len += size_of::<u64>();
    }
    let _ = rustix::io::pwrite(file, &bytes[..len], 0);
}

/// Reads the words of a file. `None`: its two copies differ, so a write is in progress.
fn read<const WORDS: usize>(file: impl AsFd) -> Option<[u64; WORDS]> {
    let mut bytes = [0; BYTES_MAX];
    let len = 2 * WORDS * size_of::<u64>();
    if rustix::io::pread(file, &mut bytes[..len], 0) != Ok(len) {
        return None;
    }
    let (first, second) = bytes[..len].split_at(len / 2);
    let mut all = first.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    (first == second).then(|| std::array::from_fn(|_| all.next().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> (LeaseFiles, ProcessLease, mpsc::Receiver<Outgoing>) {
        let (files, fds) = LeaseFiles::new().unwrap();
        let (outgoing, queued) = mpsc::channel(1);
        (files, ProcessLease::new(fds, outgoing).unwrap(), queued)
    }

    /// Usages of which every number is another one.
    fn usages(from: u64) -> Usages {
        let mut number = from;
        let mut next = || {
            number += 1;
            number
        };
        std::array::from_fn(|_| Usage {
            seen_ns: next(),
            held_ns: next(),
            needs_ns: std::array::from_fn(|_| next()),
        })
    }

    #[test]
    fn each_side_reads_what_the_other_one_has_written() {
        let (files, process, _queued) = lease();
        assert_eq!(process.granted_ns(), Some([0; BUCKETS]));
        assert_eq!(files.usages(), Some(Usages::default()));
        let granted = std::array::from_fn(|index| u64::MAX - index as u64);
        files.grant(true, &granted);
        process.tell(&usages(7));
        assert_eq!(process.granted_ns(), Some(granted));
        assert_eq!(files.usages(), Some(usages(7)));
    }

    #[test]
    fn a_process_rings_when_its_members_need_something_and_the_supervisor_sleeps() {
        let (files, process, mut queued) = lease();
        files.grant(true, &[0; BUCKETS]);
        process.tell(&usages(0));
        assert!(queued.try_recv().is_err(), "it reads that anyway");
        files.grant(false, &[0; BUCKETS]);
        process.tell(&[Usage { seen_ns: 5, held_ns: 5, ..Usage::default() }; BUCKETS]);
        assert!(queued.try_recv().is_err(), "nobody needs anything");
        process.tell(&usages(0));
        assert!(matches!(queued.try_recv(), Ok(Outgoing::Needs)));
    }

    #[test]
    fn a_process_writes_neither_its_grants_nor_another_length() {
        let (files, process, _queued) = lease();
        files.grant(true, &[3; BUCKETS]);
        let wrote = rustix::io::pwrite(&process.grants, &[255; 64], 0);
        assert_eq!(wrote, Err(Errno::BADF));
        for file in [&process.grants, &process.usage] {
            assert!(rustix::fs::ftruncate(file, 0).is_err());
        }
        assert_eq!(process.granted_ns(), Some([3; BUCKETS]));
    }

    #[test]
    fn half_of_a_text_is_not_read() {
        let (files, process, _queued) = lease();
        process.tell(&usages(0));
        rustix::io::pwrite(&process.usage, &[9; 8], 0).unwrap();
        assert_eq!(files.usages(), None);
    }
}
