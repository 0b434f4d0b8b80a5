//! Probes which features the host has for an image, such as `RWF_NOWAIT` and holes, when the image
//! is opened.

use crate::sys::file as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;

/// Returns the alignments of memory and of offsets that `O_DIRECT` requires, from `statx` (Linux
/// 6.1). If `statx` does not tell: the block size of a block device, and 4096 for a file.
pub(super) fn direct_alignment(file: &OwnedFd, block_device: bool) -> (usize, u64) {
    /// `STATX_DIOALIGN`, of Linux 6.1.
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

/// True if the file system supports `RWF_NOWAIT`. Reads one byte, since a read of no bytes succeeds
/// everywhere.
pub(super) fn can_nowait(file: &OwnedFd) -> bool {
    let Ok(memory) = manyring_memory::Mapping::anonymous(1) else { return false };
    let byte = memory.slice(0, 1);
    let read = || sys::read(file.as_fd(), byte.as_slice(), 0, sys::RWF_NOWAIT);
    manyring_memory::in_own_memory(read) != Err(Errno::OPNOTSUPP)
}

/// True if the file lies in tmpfs or ramfs (`TMPFS_MAGIC`, `RAMFS_MAGIC`).
pub(super) fn is_in_memory(file: &OwnedFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|s| matches!(s.f_type, 0x0102_1994 | 0x8584_58f6))
}

/// True if several kernel threads can write to the file by direct I/O at the same time. ext4 and
/// XFS (`EXT4_SUPER_MAGIC`, `XFS_SUPER_MAGIC`) announce that with `FOP_DIO_PARALLEL_WRITE` since
/// Linux 6.5; for other file systems it cannot be found out.
pub(super) fn writes_in_parallel(file: &OwnedFd) -> bool {
    let is_known = |release: &str| {
        let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(5))
    };
    rustix::system::uname().release().to_str().is_ok_and(is_known)
        && rustix::fs::fstatfs(file).is_ok_and(|s| matches!(s.f_type, 0xef53 | 0x5846_5342))
}

/// True if holes can be punched. For a file, tries it behind the end, where a hole changes nothing.
pub(super) fn can_punch(file: &OwnedFd, block_device: bool, size: u64) -> bool {
    if block_device {
        return discard_max_bytes(file).is_some_and(|max| max > 0);
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, size.next_multiple_of(4096), 4096).is_ok()
}

/// The units in which the host stores an image, in bytes. They depend on the device or file system,
/// and not on the file: cloning a file can change the alignment that `O_DIRECT` requires, and the
/// guest's blocks must not change with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    /// The logical block size: 4096 if the block device has no smaller one, else 512.
    pub(super) logical: u32,
    /// The physical block size: a power of two, and at least `logical`.
    pub(super) physical: u32,
    /// The smallest write that the host suggests: a multiple of `physical`.
    pub(super) minimum: u32,
    /// The largest request that the host suggests: a multiple of `physical`; 0: none.
    pub(super) optimal: u32,
}

impl Units {
    pub(super) fn of(file: &OwnedFd, block_device: bool) -> Self {
        if block_device {
            let logical = rustix::fs::ioctl_blksszget(file).unwrap_or(512);
            let physical = rustix::fs::ioctl_blkpbszget(file).unwrap_or(4096);
            let limit = |name| queue_limit(file, name).unwrap_or(0);
            return Self::new(
                logical,
                physical,
                limit("minimum_io_size"),
                limit("optimal_io_size"),
            );
        }
        // The page cache writes whole pages, so a smaller write costs as much as a page.
        let block = rustix::fs::fstatfs(file).ok().and_then(|s| u32::try_from(s.f_bsize).ok());
        let physical = block.filter(|size| (4096..=FILE_BLOCK_MAX).contains(size));
        let preferred = rustix::fs::fstat(file).ok().and_then(|s| u64::try_from(s.st_blksize).ok());
        Self::new(512, physical.unwrap_or(4096), 0, preferred.unwrap_or(0))
    }

    fn new(logical: u32, physical: u32, minimum: u64, optimal: u64) -> Self {
        let logical = if logical >= 4096 { 4096 } else { 512 };
        let physical = if physical.is_power_of_two() { physical.max(logical) } else { logical };
        let whole = |size: u64| {
            let size = u32::try_from(size).ok()?;
            (size > physical && size.is_multiple_of(physical)).then_some(size)
        };
        let minimum = whole(minimum).unwrap_or(physical);
        Self { logical, physical, minimum, optimal: whole(optimal).unwrap_or(0) }
    }
}

/// A larger block size of a file system is ignored: NFS, for example, reports a preference.
const FILE_BLOCK_MAX: u32 = 64 << 10;

/// Returns the unit in which `fallocate` zeroes or discards. A block device refuses a part of a
/// unit (`EINVAL`). A file system zeroes a part of a unit in the page cache, which a direct disk
/// bypasses.
pub(super) fn range_unit(file: &OwnedFd, block_device: bool, direct: bool, units: &Units) -> u64 {
    match (block_device, direct) {
        (true, _) => rustix::fs::ioctl_blksszget(file).map_or(512, u64::from),
        (false, true) => units.physical.into(),
        (false, false) => 1,
    }
}

/// Returns the bytes of the longest discard of a block device (`queue/discard_max_bytes` in sysfs).
fn discard_max_bytes(file: &OwnedFd) -> Option<u64> {
    queue_limit(file, "discard_max_bytes")
}

/// Reads a limit of a block device's queue from sysfs.
fn queue_limit(file: &OwnedFd, name: &str) -> Option<u64> {
    let rdev = rustix::fs::fstat(file).ok()?.st_rdev;
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition has no queue folder; its disk's folder is one level up.
    ["queue", "../queue"].iter().find_map(|queue| {
        let text = std::fs::read_to_string(format!("{device}/{queue}/{name}")).ok()?;
        text.trim().parse().ok()
    })
}

/// Sets `O_NOATIME`, if this process may (it owns the file, or has `CAP_FOWNER`). Without it, a
/// read updates the access time, and waits while the file system commits its journal, even with
/// `RWF_NOWAIT`.
pub(super) fn leave_atime(file: &OwnedFd) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(file) {
        let _ = rustix::fs::fcntl_setfl(file, flags | OFlags::NOATIME);
    }
}

/// Returns the size in bytes of a file, or of a block device, whose size `stat` does not report.
pub(super) fn size_of_file(file: &OwnedFd) -> Result<u64, Errno> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_those_that_a_guest_can_be_told() {
        for (told, (logical, physical, minimum, optimal)) in [
            ((512, 512, 0, 0), (512, 512, 512, 0)),
            ((512, 4096, 4096, 0), (512, 4096, 4096, 0)),
            ((4096, 4096, 65536, 1 << 20), (4096, 4096, 65536, 1 << 20)),
            ((2048, 2048, 2048, 0), (512, 2048, 2048, 0)),
            ((16384, 16384, 16384, 0), (4096, 16384, 16384, 0)),
            ((4096, 512, 0, 0), (4096, 4096, 4096, 0)),
            ((512, 4096, 6144, 33_553_920), (512, 4096, 4096, 0)),
            ((512, 4096, 0, u64::MAX), (512, 4096, 4096, 0)),
        ] {
            let units = Units::new(told.0, told.1, told.2, told.3);
            assert_eq!(units, Units { logical, physical, minimum, optimal }, "{told:?}");
        }
    }
}
