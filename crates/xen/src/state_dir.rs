//! `StateDir`: the folder with the journals of Xen rings, which say which requests are in flight.
//!
//! ```text
//! KIND.lock                        the pid of the process that has the journals, and its lock
//! KIND-DOMAIN-DEVICE.qN.journal    the journal of queue N of a disk
//! ```
//! A process that serves the disks of a kind also holds a lock at a path that does not depend on
//! `state_dir` (`Served`). `manyring_queue::blkif` and docs/design/0012 describe the contents of a
//! journal. Processes that serve different kinds can share the folder. Two processes that serve the
//! same disks would take over each other's rings, so a process that cannot get the locks of its
//! kinds ends at once.

use manyring_serve::times::{XEN_LOCKS, XEN_LOCKS_RETRY};
use manyring_transport::xenbus::DeviceId;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, inotify,
    open, openat, renameat, statat, unlinkat,
};
use rustix::io::{Errno, pread, pwrite};
use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Mode bits that the folder may not have: write permission for its group and for others.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// The sticky bit: in a parent folder that has it, only the owner of a file may rename it.
const STICKY: u32 = 0o1000;
/// Longest journal in bytes. The journal of the largest ring takes little more than half of it.
const JOURNAL_MAX: u64 = 128 << 10;
/// The most bytes that the file system may have allocated for a journal: tmpfs may allocate 2 MiB
/// at once.
const ALLOCATED_MAX: u64 = (2 << 20) + JOURNAL_MAX;
/// The unit of `st_blocks`, in bytes.
const STAT_BLOCK: u64 = 512;
/// The end of a journal's file name.
const SUFFIX: &str = ".journal";

/// Why the folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum StateDirError {
    #[error("cannot use the folder {}: {errno}", path.display())]
    Folder { path: PathBuf, errno: Errno },
    #[error("cannot write {}: {errno}", path.display())]
    File { path: PathBuf, errno: Errno },
    #[error(
        "the folder {} is {what}, so that others could change what the next process takes over; \
         name one of mode 0700 that belongs to this process's user or to root",
        path.display()
    )]
    Unsafe { path: PathBuf, what: &'static str },
    #[error(
        "the disks of kind \"{kind}\" are in use by pid {holder}, which has locked {}; if it was \
         killed, it waits for a blocked disk",
        path.display()
    )]
    InUse { kind: String, path: PathBuf, holder: String },
}

impl StateDirError {
    /// Returns the error number of the failed system call.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Folder { errno, .. } | Self::File { errno, .. } => *errno,
            Self::InUse { .. } => Errno::WOULDBLOCK,
            Self::Unsafe { .. } => Errno::PERM,
        }
    }
}

/// The Xen whose disks are served. It decides the path of the locks that keep a second process from
/// these disks, even if that process has another folder for its journals.
#[derive(Clone, Copy, Debug)]
pub enum Served<'a> {
    /// This machine's Xen: its locks are in this folder.
    Machine(&'a Path),
    /// A simulated Xen: its locks are beside this socket.
    Simulated(&'a Path),
}

/// The open folder, with the locks of this process's kinds.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// Files are opened relative to this descriptor, so that nobody can replace the folder.
    folder: OwnedFd,
    /// The kinds whose files belong to this process.
    kinds: Vec<String>,
    /// The lock of each kind, held as long as this process serves the kind.
    locks: Vec<OwnedFd>,
}

impl StateDir {
    /// Opens the folder, which is created if it is missing, and takes the locks of these kinds. May
    /// wait for another process that has the locks and is ending. `left`: the locks that another
    /// supervisor handed over.
    ///
    /// # Errors
    /// [`StateDirError`]
    pub fn open(
        path: &Path,
        kinds: &[String],
        served: Served<'_>,
        left: &mut Vec<OwnedFd>,
    ) -> Result<Self, StateDirError> {
        let folder = open_folder(path)?;
        let mut locks = Vec::new();
        for kind in kinds {
            match served {
                Served::Machine(of_machine) if of_machine == path => {}
                Served::Machine(of_machine) => {
                    let beside = open_folder(of_machine)?;
                    if !is_same(&beside, &folder) {
                        locks.push(lock(&beside, &of_machine.join(lock_name(kind)), kind, left)?);
                    }
                }
                Served::Simulated(socket) => locks.push(lock_beside(socket, kind, left)?),
            }
            locks.push(lock(&folder, &path.join(lock_name(kind)), kind, left)?);
        }
        Ok(Self { path: path.to_owned(), folder, kinds: kinds.to_vec(), locks })
    }

    /// Duplicates the descriptors of the locks for the next supervisor, which then shares the locks
    /// with this process.
    ///
    /// # Errors
    /// The process may open no more files.
    pub fn locks(&self) -> std::io::Result<Vec<OwnedFd>> {
        self.locks.iter().map(OwnedFd::try_clone).collect()
    }

    /// Writes the pid of this process into the lock files.
    pub fn sign(&self) {
        self.locks.iter().for_each(sign);
    }

    /// Opens the journal of a disk's queue: the existing one if the ring is `taken_over`, else a
    /// new one.
    ///
    /// # Errors
    /// [`StateDirError::File`].
    pub fn journal(
        &self,
        disk: &DeviceId,
        queue: usize,
        taken_over: bool,
    ) -> Result<OwnedFd, StateDirError> {
        let name = journal_name(disk, queue);
        if !taken_over {
            let _ = unlinkat(&self.folder, &name, AtFlags::empty());
        }
        let path = self.path.join(&name);
        create(&self.folder, Path::new(&name)).map_err(|errno| StateDirError::File { path, errno })
    }

    /// Duplicates the descriptor of a queue's journal, to watch the journal. `None`: the process
    /// may open no more files.
    pub fn held(&self, disk: &DeviceId, queue: usize, file: &OwnedFd) -> Option<Held> {
        let name = journal_name(disk, queue);
        Some(Held { name, file: file.try_clone().ok()?, size: 0, is_told: false })
    }

    /// Checks whether a journal whose ring is served still has its path and all its bytes.
    pub fn fate(&self, journal: &Held) -> Fate {
        let Ok(own) = fstat(&journal.file) else { return Fate::Kept };
        let [len, blocks] = [own.st_size, own.st_blocks].map(|count| count.unsigned_abs());
        if len > JOURNAL_MAX || blocks.saturating_mul(STAT_BLOCK) > ALLOCATED_MAX {
            return Fate::Grown;
        }
        if own.st_size < journal.size {
            return Fate::Cut;
        }
        match statat(&self.folder, &journal.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino) => Fate::Kept,
            Ok(_) | Err(Errno::NOENT) => Fate::Gone,
            Err(_) => Fate::Kept,
        }
    }

    /// Truncates a journal to its size when its ring began to be served. This also frees blocks
    /// that were allocated behind its end.
    pub fn cut(&self, journal: &Held) {
        let size = match journal.size {
            0 => JOURNAL_MAX,
            size => size.unsigned_abs().min(JOURNAL_MAX),
        };
        if let Err(errno) = ftruncate(&journal.file, size) {
            let path = self.path_of(journal).display().to_string();
            tracing::error!(path, %errno, "truncating a journal failed");
        }
    }

    /// Truncates a journal that is too long. The ring of the journal is not served.
    pub fn bound(&self, journal: &Held) {
        if self.fate(journal) == Fate::Grown {
            self.cut(journal);
        }
    }

    /// Opens a descriptor that becomes readable when a system call writes to a file of the folder
    /// or makes it longer. Stores to a mapped file cause no event. `None`: inotify is not
    /// available.
    pub fn writes(&self) -> Option<OwnedFd> {
        let fd = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK);
        let (fd, folder) = (fd.ok()?, format!("/proc/self/fd/{}", self.folder.as_raw_fd()));
        inotify::add_watch(&fd, folder, inotify::WatchFlags::MODIFY).ok()?;
        Some(fd)
    }

    /// Returns the path of a journal.
    pub fn path_of(&self, journal: &Held) -> PathBuf {
        self.path.join(&journal.name)
    }

    /// Writes a copy of the journal to find out whether the file system has room; true if it has.
    pub fn can_write(&self, journal: &Held) -> bool {
        self.copy(journal).is_ok()
    }

    /// Writes a journal that is gone into a new file under its name. The ring of the journal is
    /// not served.
    pub fn restore(&self, journal: &Held) -> Result<(), StateDirError> {
        if self.fate(journal) != Fate::Gone {
            return Ok(());
        }
        let new = self.copy(journal);
        let renamed = new.and_then(|new| renameat(&self.folder, &new, &self.folder, &journal.name));
        renamed.map_err(|errno| StateDirError::File { path: self.path_of(journal), errno })
    }

    /// Copies a journal into a file of another name beside it, which is returned.
    fn copy(&self, journal: &Held) -> Result<String, Errno> {
        let name = format!("{}.new", journal.name);
        let new = create(&self.folder, Path::new(&name))?;
        ftruncate(&new, 0)?;
        let (mut bytes, mut at) = ([0; 4096], 0);
        loop {
            let len = pread(&journal.file, &mut bytes, at)?;
            if len == 0 {
                return Ok(name);
            }
            let written = pwrite(&new, &bytes[..len], at)?;
            if written == 0 {
                return Err(Errno::NOSPC);
            }
            at += written as u64;
        }
    }

    /// Removes the journals of a disk whose rings no process will take over.
    pub fn forget(&self, disk: &DeviceId) {
        self.remove(|of| of == disk);
    }

    /// Removes the journals of disks of this process's kinds that xenstore no longer has.
    pub fn keep(&self, is_there: impl Fn(&DeviceId) -> bool) {
        self.remove(|disk| self.kinds.contains(&disk.kind) && !is_there(disk));
    }

    fn remove(&self, is_over: impl Fn(&DeviceId) -> bool) {
        for entry in Dir::read_from(&self.folder).into_iter().flatten().flatten() {
            let disk = entry.file_name().to_str().ok().and_then(disk_of);
            if disk.is_some_and(|disk| is_over(&disk)) {
                let _ = unlinkat(&self.folder, entry.file_name(), AtFlags::empty());
            }
        }
    }
}

/// The result of a check of a journal's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The file still has its path and all its bytes.
    Kept,
    /// The folder has no file, or another file, under the journal's name.
    Gone,
    /// The file is shorter than it was: entries are lost.
    Cut,
    /// The file takes more of the file system than a journal needs.
    Grown,
}

/// The journal of a ring that is served.
#[derive(Debug)]
pub struct Held {
    name: String,
    file: OwnedFd,
    /// The size in bytes when the ring began to be served; 0 before that.
    size: i64,
    /// True once a log line has told the operator what is wrong with the journal.
    pub is_told: bool,
}

impl Held {
    /// True if the ring is served, so that the size is known.
    pub fn is_measured(&self) -> bool {
        self.size > 0
    }

    /// Stores the size of the journal, when its ring has begun to be served.
    pub fn measure(&mut self) {
        self.size = fstat(&self.file).map_or(0, |found| found.st_size);
    }
}

fn journal_name(DeviceId { kind, domain, device }: &DeviceId, queue: usize) -> String {
    format!("{kind}-{domain}-{device}.q{queue}{SUFFIX}")
}

/// Returns the disk whose journal has this file name; `None`: no journal has such a name.
fn disk_of(name: &str) -> Option<DeviceId> {
    let name = name.strip_suffix(".new").unwrap_or(name);
    let (disk, _) = name.strip_suffix(SUFFIX)?.rsplit_once(".q")?;
    let (rest, device) = disk.rsplit_once('-')?;
    let (kind, domain) = rest.rsplit_once('-')?;
    let (domain, device) = (domain.parse().ok()?, device.parse().ok()?);
    Some(DeviceId { kind: kind.to_owned(), domain, device })
}

fn lock_name(kind: &str) -> String {
    format!("{kind}.lock")
}

/// Creates a file. Nobody else writes into the folder, so no other file can have its name.
fn create(folder: &OwnedFd, name: &Path) -> Result<OwnedFd, Errno> {
    openat(folder, name, CREATE, Mode::RUSR | Mode::WUSR)
}

/// Flags for opening files; a symlink is not followed.
const CREATE: OFlags =
    OFlags::RDWR.union(OFlags::CREATE).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Opens a folder, which is created if it is missing. Fails if other users may write to it.
fn open_folder(path: &Path) -> Result<OwnedFd, StateDirError> {
    let failed = |errno| StateDirError::Folder { path: path.to_owned(), errno };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let is_unsafe = |what| StateDirError::Unsafe { path: path.to_owned(), what };
    // With a slash at its end, the path of a symlink would be followed.
    let bare: PathBuf = path.components().collect();
    let found = statat(CWD, &bare, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Symlink {
        return Err(is_unsafe("a symlink"));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let folder = open(&bare, flags, Mode::empty()).map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    let found = fstat(&folder).map_err(failed)?;
    if ![own, 0].contains(&found.st_uid) {
        return Err(is_unsafe("another user's"));
    }
    if found.st_mode & WRITABLE_BY_OTHERS != 0 {
        return Err(is_unsafe("writable by others"));
    }
    let above = statat(&folder, "..", AtFlags::empty()).map_err(failed)?;
    if above.st_mode & WRITABLE_BY_OTHERS != 0 && above.st_mode & STICKY == 0 {
        return Err(is_unsafe("in a folder that others may write to"));
    }
    Ok(folder)
}

fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let identity = |of| fstat(of).map(|found| (found.st_dev, found.st_ino));
    identity(one).is_ok_and(|one| identity(other) == Ok(one))
}

/// Takes the lock beside a simulated Xen's socket, which is the same for every path to the socket.
fn lock_beside(
    socket: &Path,
    kind: &str,
    left: &mut Vec<OwnedFd>,
) -> Result<OwnedFd, StateDirError> {
    let mut path = OsString::from(std::fs::canonicalize(socket).unwrap_or(socket.to_owned()));
    path.push(format!(".{}", lock_name(kind)));
    let path = PathBuf::from(path);
    let file = open(&path, CREATE, Mode::RUSR | Mode::WUSR);
    let file = file.map_err(|errno| StateDirError::File { path: path.clone(), errno })?;
    hold(file, path, kind, left)
}

fn lock(
    folder: &OwnedFd,
    path: &Path,
    kind: &str,
    left: &mut Vec<OwnedFd>,
) -> Result<OwnedFd, StateDirError> {
    let file = create(folder, Path::new(&lock_name(kind)));
    let failed = |errno| StateDirError::File { path: path.to_owned(), errno };
    hold(file.map_err(failed)?, path.to_owned(), kind, left)
}

/// Writes this process's pid into a lock file, for the message of a process that is refused.
fn sign(lock: &OwnedFd) {
    let _ = ftruncate(lock, 0);
    let _ = pwrite(lock, std::process::id().to_string().as_bytes(), 0);
}

/// Locks a file, and writes this process's pid into it. If the lock was handed over (`left`), uses
/// that descriptor: the lock belongs to its open file description, which two processes then share.
fn hold(
    file: OwnedFd,
    path: PathBuf,
    kind: &str,
    left: &mut Vec<OwnedFd>,
) -> Result<OwnedFd, StateDirError> {
    if let Some(at) = left.iter().position(|lock| is_same(lock, &file)) {
        let lock = left.swap_remove(at);
        sign(&lock);
        return Ok(lock);
    }
    let mut max_wait = XEN_LOCKS;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                sign(&file);
                return Ok(file);
            }
            Err(Errno::WOULDBLOCK) if max_wait.is_zero() => {
                let mut pid = [0; 20];
                let len = pread(&file, &mut pid, 0).unwrap_or(0);
                let holder = String::from_utf8_lossy(&pid[..len]).into_owned();
                return Err(StateDirError::InUse { kind: kind.to_owned(), path, holder });
            }
            Err(Errno::WOULDBLOCK) => {
                std::thread::sleep(XEN_LOCKS_RETRY);
                max_wait = max_wait.saturating_sub(XEN_LOCKS_RETRY);
            }
            Err(errno) => return Err(StateDirError::File { path, errno }),
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
        let (kinds, mut none) = (["vbd".to_owned()], Vec::new());
        let state =
            StateDir::open(folder.path(), &kinds, Served::Machine(folder.path()), &mut none)
                .unwrap();
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
    fn locks_that_are_left_are_taken_as_long_as_another_process_has_them() {
        let folder = tempfile::tempdir().unwrap();
        let (kinds, served) = (["vbd".to_owned()], Served::Machine(folder.path()));
        let open = |left: &mut Vec<OwnedFd>| StateDir::open(folder.path(), &kinds, served, left);
        let first = open(&mut Vec::new()).unwrap();
        let mut left = first.locks().unwrap();
        let second = open(&mut left).unwrap();
        assert!(left.is_empty());
        drop(first);
        assert!(matches!(open(&mut Vec::new()), Err(StateDirError::InUse { .. })));
        drop(second);
        open(&mut Vec::new()).unwrap();
    }

    #[test]
    fn journal_that_has_grown_is_cut_to_its_size_also_behind_its_end() {
        use rustix::fs::{FallocateFlags, fallocate};
        let folder = tempfile::tempdir().unwrap();
        let state =
            StateDir::open(folder.path(), &[], Served::Machine(folder.path()), &mut Vec::new())
                .unwrap();
        let (disk, writes) = (disk("vbd", 1, 51712), state.writes().unwrap());
        let file = state.journal(&disk, 0, false).unwrap();
        let mut held = state.held(&disk, 0, &file).unwrap();
        let has = || {
            let found = fstat(&file).unwrap();
            (found.st_size, found.st_blocks.unsigned_abs() * STAT_BLOCK)
        };
        let is_told = || rustix::io::read(&writes, &mut [0; 4096]).is_ok();
        fallocate(&file, FallocateFlags::empty(), 0, 65_664).unwrap();
        assert!(is_told() && state.fate(&held) == Fate::Kept);
        held.measure();
        let more = ALLOCATED_MAX + 4096;
        let behind = FallocateFlags::KEEP_SIZE;
        for (how, len) in [(FallocateFlags::empty(), JOURNAL_MAX + 1), (behind, more)] {
            fallocate(&file, how, 0, len).unwrap();
            assert!(is_told() && state.fate(&held) == Fate::Grown, "{len}");
            state.cut(&held);
            assert_eq!((has().0, state.fate(&held)), (65_664, Fate::Kept));
            assert!(is_told() && has().1 <= JOURNAL_MAX, "{len}");
        }
        assert!(!is_told());
    }

    #[test]
    fn journal_is_new_for_a_new_connection_and_kept_for_a_takeover() {
        let folder = tempfile::tempdir().unwrap();
        let state =
            StateDir::open(folder.path(), &[], Served::Machine(folder.path()), &mut Vec::new())
                .unwrap();
        let write = |file: &OwnedFd| rustix::io::write(file, b"left").unwrap();
        let (one, other) = (disk("vbd", 1, 51712), disk("vbd", 1, 51728));
        write(&state.journal(&one, 0, false).unwrap());
        let size = |file: OwnedFd| fstat(file).unwrap().st_size;
        assert_eq!(size(state.journal(&one, 0, true).unwrap()), 4);
        assert_eq!(size(state.journal(&one, 0, false).unwrap()), 0);
        assert_eq!(size(state.journal(&other, 0, true).unwrap()), 0);
    }
}
