//! `StateDir`: the folder in which it is written down how far the rings of Xen disks are served.
//!
//! ```text
//! KIND.lock                        the pid of who serves the disks of this kind, and holds it
//! KIND-DOMAIN-DEVICE.qN.journal    the journal of queue N of a disk
//! ```
//! What a journal holds: `manyring_queue::blkif`, docs/design/0012. Processes that serve other
//! kinds have their files in the same folder. Two that serve the same disks would take each other's
//! rings over, so a process that cannot have the locks of its kinds ends at once.

use manyring_transport::xenbus::DeviceId;
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, ftruncate, open};
use rustix::io::{Errno, pwrite};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the locks are waited for of a process that is just ending.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Pause before they are tried again.
const LOCK_RETRY: Duration = Duration::from_millis(50);
/// What the name of a journal ends with.
const SUFFIX: &str = ".journal";

/// Why the folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub(crate) enum StateDirError {
    #[error("cannot use the folder {}: {errno}", path.display())]
    Folder { path: PathBuf, errno: Errno },
    #[error("cannot write {}: {errno}", path.display())]
    File { path: PathBuf, errno: Errno },
    #[error(
        "another process serves the disks of kind \"{kind}\", or was killed and waits for a disk \
         that hangs: pid {holder} has {}",
        path.display()
    )]
    InUse { kind: String, path: PathBuf, holder: String },
}

impl StateDirError {
    /// The system's word.
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Folder { errno, .. } | Self::File { errno, .. } => *errno,
            Self::InUse { .. } => Errno::WOULDBLOCK,
        }
    }
}

/// The folder.
#[derive(Debug)]
pub(super) struct StateDir {
    path: PathBuf,
    /// Whose files are ours.
    kinds: Vec<String>,
    /// Held as long as this process serves.
    _locks: Vec<OwnedFd>,
}

impl StateDir {
    /// Takes the folder, which is made if it is not there, and the locks of these kinds. May wait
    /// for a process that is just ending.
    ///
    /// # Errors
    /// [`StateDirError`]
    pub(super) fn open(path: &Path, kinds: &[String]) -> Result<Self, StateDirError> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            StateDirError::Folder { path: path.to_owned(), errno }
        })?;
        let locks = kinds.iter().map(|kind| lock(path, kind)).collect::<Result<_, _>>()?;
        Ok(Self { path: path.to_owned(), kinds: kinds.to_vec(), _locks: locks })
    }

    /// The journal of a disk's queue: as it was left if the ring is `taken_over`, else a new one.
    ///
    /// # Errors
    /// [`StateDirError::File`].
    pub(super) fn journal(
        &self,
        disk: &DeviceId,
        queue: usize,
        taken_over: bool,
    ) -> Result<OwnedFd, StateDirError> {
        let path = self.path.join(journal_name(disk, queue));
        if !taken_over {
            let _ = std::fs::remove_file(&path);
        }
        create(&path).map_err(|errno| StateDirError::File { path, errno })
    }

    /// Removes the journals of a disk, whose rings nobody will go on with.
    pub(super) fn forget(&self, disk: &DeviceId) {
        self.remove(|of| of == disk);
    }

    /// Removes the journals of disks of these kinds that are not there.
    pub(super) fn keep(&self, is_there: impl Fn(&DeviceId) -> bool) {
        self.remove(|disk| self.kinds.contains(&disk.kind) && !is_there(disk));
    }

    fn remove(&self, is_over: impl Fn(&DeviceId) -> bool) {
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let disk = entry.file_name().to_str().and_then(disk_of);
            if disk.is_some_and(|disk| is_over(&disk)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn journal_name(DeviceId { kind, domain, device }: &DeviceId, queue: usize) -> String {
    format!("{kind}-{domain}-{device}.q{queue}{SUFFIX}")
}

/// The disk whose journal has this name. `None`: it is no journal's name.
fn disk_of(name: &str) -> Option<DeviceId> {
    let (disk, _) = name.strip_suffix(SUFFIX)?.rsplit_once(".q")?;
    let (rest, device) = disk.rsplit_once('-')?;
    let (kind, domain) = rest.rsplit_once('-')?;
    let (domain, device) = (domain.parse().ok()?, device.parse().ok()?);
    Some(DeviceId { kind: kind.to_owned(), domain, device })
}

/// A file of ours alone: nobody else writes into the folder.
fn create(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    open(path, flags, Mode::RUSR | Mode::WUSR)
}

fn lock(folder: &Path, kind: &str) -> Result<OwnedFd, StateDirError> {
    let path = folder.join(format!("{kind}.lock"));
    let failed = |errno| StateDirError::File { path: path.clone(), errno };
    let file = create(&path).map_err(failed)?;
    let mut left = LOCK_PATIENCE;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                // Only for whoever is refused.
                let _ = ftruncate(&file, 0);
                let _ = pwrite(&file, std::process::id().to_string().as_bytes(), 0);
                return Ok(file);
            }
            Err(Errno::WOULDBLOCK) if left.is_zero() => {
                let holder = std::fs::read_to_string(&path).unwrap_or_default();
                return Err(StateDirError::InUse { kind: kind.to_owned(), path, holder });
            }
            Err(Errno::WOULDBLOCK) => {
                std::thread::sleep(LOCK_RETRY);
                left = left.saturating_sub(LOCK_RETRY);
            }
            Err(errno) => return Err(failed(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(kind: &str, domain: u16, device: u32) -> DeviceId {
        DeviceId { kind: kind.to_owned(), domain, device }
    }

    #[test]
    fn journals_of_disks_that_are_gone_are_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path(), &["vbd".to_owned()]).unwrap();
        let (stays, goes) = (disk("vbd", 1, 51712), disk("vbd", 2, 1));
        for (disk, queue) in [(&stays, 0), (&stays, 1), (&goes, 0)] {
            state.journal(disk, queue, false).unwrap();
        }
        // Another process serves the disks of this kind.
        state.journal(&disk("vbd-2", 2, 1), 0, false).unwrap();
        std::fs::write(folder.path().join("vbd-notes"), "").unwrap();
        let names = || {
            let entries = std::fs::read_dir(folder.path()).unwrap().flatten();
            let mut names: Vec<_> =
                entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        state.keep(|disk| *disk == stays);
        let of_disk = ["vbd-1-51712.q0.journal", "vbd-1-51712.q1.journal"];
        let kept = ["vbd-2-2-1.q0.journal", "vbd-notes", "vbd.lock"];
        assert_eq!(names(), [&of_disk[..], &kept].concat());
        state.forget(&stays);
        assert_eq!(names(), kept);
    }

    #[test]
    fn journal_is_new_for_a_new_connection_and_kept_for_a_takeover() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path(), &[]).unwrap();
        let write = |file: &OwnedFd| rustix::io::write(file, b"left").unwrap();
        let (one, other) = (disk("vbd", 1, 51712), disk("vbd", 1, 51728));
        write(&state.journal(&one, 0, false).unwrap());
        let size = |file: OwnedFd| rustix::fs::fstat(file).unwrap().st_size;
        assert_eq!(size(state.journal(&one, 0, true).unwrap()), 4);
        assert_eq!(size(state.journal(&one, 0, false).unwrap()), 0);
        assert_eq!(size(state.journal(&other, 0, true).unwrap()), 0);
    }
}
