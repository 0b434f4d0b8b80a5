//! `MemoryFiles`: the file systems whose files may hold guest memory. `MemoryRules`: the operator's
//! limits on the files and the size of guest memory.

use crate::bounds::BYTES_MAX;
use crate::error::MemoryError;
use rustix::fd::AsFd;

/// Which files may be mapped. The question is whom a page fault can wait for, because the thread
/// that touches the page waits too: a worker that copies into one guest's memory sleeps in the
/// fault, and with it every other guest of that worker.
///
/// No kind of file bounds how long the front-end itself can make a fault, or the mapping, take. A
/// fault in a hole that is being punched waits for the end of the punch, in a memfd as well, and
/// `mmap` waits for the lock of the file's mappings (`i_mmap_rwsem`) with the `mmap_lock` of the
/// whole process held. The bound for that is a process for each trust domain (SECURITY.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryFiles {
    /// Files on tmpfs (memfd, /dev/shm), hugetlbfs and ramfs: a fault takes a page of this host's
    /// memory and waits for no device, except that tmpfs reads a page back that was swapped out. It
    /// waits for the front-end that punches a hole there, or holds a lock of the file.
    #[default]
    InMemory,
    /// Also files on file systems of local disks. The first write to each page, and again the first
    /// one after each writeback, asks the file system (`page_mkwrite`): it waits for the journal,
    /// for writeback, until the file system is thawed, or for a device that hangs.
    LocalDisk,
}

/// The rules by which an operator limits the memory of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRules {
    /// The file systems on which the files of the memory may lie.
    pub files: MemoryFiles,
    /// The most bytes of all regions together; never more than 8 TiB.
    pub bytes_max: u64,
}

impl Default for MemoryRules {
    fn default() -> Self {
        MemoryFiles::default().into()
    }
}

impl From<MemoryFiles> for MemoryRules {
    /// Makes rules with the largest limit that a session may have: 8 TiB.
    fn from(files: MemoryFiles) -> Self {
        Self { files, bytes_max: BYTES_MAX }
    }
}

/// `f_type` of tmpfs, hugetlbfs and ramfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x9584_58f6, 0x8584_58f6];

/// `f_type` of ext4, XFS, btrfs, F2FS, bcachefs, ZFS and overlayfs.
const LOCAL_DISKS: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x2fc1_2fc1, 0x794c_7630];

impl MemoryFiles {
    /// Checks where `file` lies. FUSE and network file systems are always refused: their server
    /// decides how long a page fault takes.
    ///
    /// # Errors
    /// [`MemoryError::OnDisk`] if [`Self::LocalDisk`] would allow the file,
    /// [`MemoryError::FileSystem`] if nothing does, [`MemoryError::Map`] if its file system does
    /// not say what it is.
    pub fn check(self, file: impl AsFd) -> Result<(), MemoryError> {
        let system = rustix::fs::fstatfs(file).map_err(MemoryError::Map)?;
        // Use 32 bits of the field, which is signed on some machines: a magic number has no more.
        let kind = u64::try_from(system.f_type & 0xffff_ffff).unwrap_or(0);
        match self {
            _ if IN_MEMORY.contains(&kind) => Ok(()),
            Self::LocalDisk if LOCAL_DISKS.contains(&kind) => Ok(()),
            Self::InMemory if LOCAL_DISKS.contains(&kind) => Err(MemoryError::OnDisk { kind }),
            _ => Err(MemoryError::FileSystem { kind }),
        }
    }
}
