//! What the host can do with an image: found out once, when it is opened.

use crate::sys::file as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, StatxFlags};
use rustix::io::Errno;

/// The alignment that `O_DIRECT` asks of memory and offsets. `statx` tells since Linux 6.1; before,
/// it is the block size of a block device, and one page for a file.
pub(super) fn direct_alignment(file: &OwnedFd, block_device: bool) -> (usize, u64) {
    /// `STATX_DIOALIGN`
    const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);
    let told = rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, DIOALIGN)
        .ok()
        .filter(|s| s.stx_mask & DIOALIGN.bits() != 0 && s.stx_dio_offset_align != 0);
    if let Some(stat) = told {
        return (stat.stx_dio_mem_align as usize, u64::from(stat.stx_dio_offset_align));
    }
    let size = if block_device { rustix::fs::ioctl_blksszget(file).unwrap_or(4096) } else { 4096 };
    (size as usize, u64::from(size))
}

/// True if the file system knows `RWF_NOWAIT`. One byte is read, since a read of no bytes succeeds
/// everywhere.
pub(super) fn can_nowait(file: &OwnedFd) -> bool {
    let Ok(memory) = manyring_memory::Mapping::anonymous(1) else { return false };
    let byte = memory.slice(0, 1);
    sys::read(file.as_fd(), byte.as_slice(), 0, sys::RWF_NOWAIT) != Err(Errno::OPNOTSUPP)
}

/// True if the file lies in tmpfs or ramfs (`TMPFS_MAGIC`, `RAMFS_MAGIC`).
pub(super) fn is_in_memory(file: &OwnedFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| matches!(s.f_type, 0x0102_1994 | 0x8584_58f6))
}

/// The file system lets several threads write past the page cache at the same time, and tells the
/// kernel's threads so (`FOP_DIO_PARALLEL_WRITE`, known to Linux 6.5 and newer): ext4 and XFS
/// (`EXT4_SUPER_MAGIC`, `XFS_SUPER_MAGIC`). Nothing tells whether another file system does.
pub(super) fn writes_in_parallel(file: &OwnedFd) -> bool {
    let is_known = |release: &str| {
        let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(5))
    };
    rustix::system::uname().release().to_str().is_ok_and(is_known)
        && rustix::fs::fstatfs(file).is_ok_and(|s| matches!(s.f_type, 0xef53 | 0x5846_5342))
}

/// True if holes can be punched. A file is tried past its end, where a hole changes nothing.
pub(super) fn can_punch(file: &OwnedFd, block_device: bool, size: u64) -> bool {
    if block_device {
        return discard_max_bytes(file).is_some_and(|max| max > 0);
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, size.next_multiple_of(4096), 4096).is_ok()
}

/// The longest discard of a block device, from sysfs.
fn discard_max_bytes(file: &OwnedFd) -> Option<u64> {
    let rdev = rustix::fs::fstat(file).ok()?.st_rdev;
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition has no queue folder of its own: its disk's is one level up.
    ["queue", "../queue"].iter().find_map(|queue| {
        let text = std::fs::read_to_string(format!("{device}/{queue}/discard_max_bytes")).ok()?;
        text.trim().parse().ok()
    })
}
