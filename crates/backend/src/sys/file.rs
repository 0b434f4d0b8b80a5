//! File system calls without a safe wrapper elsewhere: vectored I/O on guest memory, locks, ioctls.
#![allow(unsafe_code, reason = "allow-listed: system calls on guest memory and raw fds")]

use manyring_memory::{GuestSlice, as_iovecs};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

/// The upper half of the offset in vectored calls: on 64-bit machines one register has all of it,
/// and this one is 0.
const HIGH: i64 = 0;
/// Most slices of one call (`UIO_MAXIOV`).
const IOV_MAX: usize = 1024;

/// `RWF_NOWAIT`: fail with `EAGAIN` where the call would have to wait.
pub const RWF_NOWAIT: i32 = libc::RWF_NOWAIT;
/// `RWF_DSYNC`: the data is durable when the write returns.
pub const RWF_DSYNC: i32 = libc::RWF_DSYNC;

// Call by `syscall`: the C library's functions for these calls are cancellation points of threads,
// which costs each of them two atomic operations: 3 % of a read through the page cache. No thread
// is cancelled here. All arguments are as wide as registers.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("where registers have 32 bits an offset takes two of them");

fn done(result: i64) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn file_offset(offset: u64) -> Result<i64, Errno> {
    i64::try_from(offset).map_err(|_| Errno::INVAL)
}

fn iov_count(slices: &[GuestSlice]) -> usize {
    slices.len().min(IOV_MAX)
}

/// Reads into guest memory; may be short. One slice without flags is read by the plain call, so
/// that the kernel need not copy and check an array of slices.
///
/// # Errors
/// `EFAULT`: the memory was truncated. Any other: the error of the host's call.
pub fn read(
    file: BorrowedFd<'_>,
    slices: &[GuestSlice],
    offset: u64,
    flags: i32,
) -> Result<usize, Errno> {
    let (fd, offset) = (i64::from(file.as_raw_fd()), file_offset(offset)?);
    if let (&[one], 0) = (as_iovecs(slices), flags) {
        // SAFETY: as below.
        return done(unsafe {
            libc::syscall(libc::SYS_pread64, fd, one.iov_base, one.iov_len, offset)
        });
    }
    let (iovecs, count) = (as_iovecs(slices).as_ptr(), iov_count(slices));
    // SAFETY: `count` iovecs are readable; they name guest memory that the caller keeps mapped
    // (memory's contract), and which the kernel checks byte by byte.
    done(unsafe {
        libc::syscall(libc::SYS_preadv2, fd, iovecs, count, offset, HIGH, i64::from(flags))
    })
}

/// Writes from guest memory; may be short. One slice without flags is written by the plain call.
///
/// # Errors
/// `EFAULT`: the memory was truncated. Any other: the error of the host's call.
pub fn write(
    file: BorrowedFd<'_>,
    slices: &[GuestSlice],
    offset: u64,
    flags: i32,
) -> Result<usize, Errno> {
    let (fd, offset) = (i64::from(file.as_raw_fd()), file_offset(offset)?);
    if let (&[one], 0) = (as_iovecs(slices), flags) {
        // SAFETY: as in `read`.
        return done(unsafe {
            libc::syscall(libc::SYS_pwrite64, fd, one.iov_base, one.iov_len, offset)
        });
    }
    let (iovecs, count) = (as_iovecs(slices).as_ptr(), iov_count(slices));
    // SAFETY: as in `read`.
    done(unsafe {
        libc::syscall(libc::SYS_pwritev2, fd, iovecs, count, offset, HIGH, i64::from(flags))
    })
}

/// `cachestat`, with `struct cachestat_range` and `struct cachestat` of `linux/mman.h`.
const SYS_CACHESTAT: libc::c_long = 451;
#[repr(C)]
#[derive(Default)]
struct CacheRange {
    offset: u64,
    len: u64,
}
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// True if the page cache holds all of a range of at least one byte. `None`: the kernel cannot
/// tell, because it is older than Linux 6.5, the file has no page cache, or seccomp denies the
/// call. Costs 0.4 microseconds.
pub fn is_cached(file: BorrowedFd<'_>, offset: u64, len: u64) -> Option<bool> {
    static CANNOT_TELL: AtomicBool = AtomicBool::new(false);
    let last = offset.checked_add(len.checked_sub(1)?)?;
    if CANNOT_TELL.load(Ordering::Relaxed) {
        return None;
    }
    let (range, mut stat) = (CacheRange { offset, len }, CacheStat::default());
    let (fd, no_flags) = (file.as_raw_fd(), 0u32);
    // SAFETY: the call reads one range and writes one stat; both outlive it.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut stat, no_flags) };
    if result != 0 {
        let is_unknown = matches!(last_errno(), Errno::NOSYS | Errno::PERM);
        CANNOT_TELL.fetch_or(is_unknown, Ordering::Relaxed);
        return None;
    }
    let page = rustix::param::page_size() as u64;
    Some(stat.cached > last / page - offset / page)
}

/// The lock types, in the integer type of `flock::l_type`.
#[allow(clippy::cast_possible_truncation, reason = "0, 1 and 2")]
const F_RDLCK: libc::c_short = libc::F_RDLCK as libc::c_short;
#[allow(clippy::cast_possible_truncation, reason = "0, 1 and 2")]
const F_WRLCK: libc::c_short = libc::F_WRLCK as libc::c_short;
#[allow(clippy::cast_possible_truncation, reason = "0, 1 and 2")]
const F_UNLCK: libc::c_short = libc::F_UNLCK as libc::c_short;
#[allow(clippy::cast_possible_truncation, reason = "0, 1 and 2")]
const SEEK_SET: libc::c_short = libc::SEEK_SET as libc::c_short;

/// The byte that QEMU locks (shared) while it writes an image.
const QEMU_WRITES: i64 = 101;

/// True if a QEMU process writes the image. QEMU's shared locks on single bytes conflict with this
/// daemon's exclusive lock, but not with its shared lock: in that case the caller must ask here.
pub fn has_qemu_writer(file: impl AsFd) -> bool {
    // SAFETY: all-zero is a valid flock; the fields that matter are set below.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = QEMU_WRITES;
    lock.l_len = 1;
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fd is open, and `lock` outlives the call, which writes the lock it finds there.
    let result = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) };
    // A lock that begins with the first byte belongs to another reader like this one.
    result == 0 && lock.l_type != F_UNLCK && lock.l_start != 0
}

/// A byte that a process keeps locked (shared) while it may still write to an image. Its offset is
/// behind the data of any image.
#[derive(Clone, Copy, Debug)]
pub struct Mark(i64);

impl Mark {
    /// The common mark of processes to which the image was passed: while one of them has the image,
    /// no other daemon may open it.
    pub const GIVEN: Self = Self(1 << 62);

    /// Makes the mark at this offset.
    #[must_use]
    pub fn at(byte: i64) -> Self {
        Self(byte)
    }

    /// Returns the offset of the byte.
    #[must_use]
    pub fn byte(self) -> i64 {
        self.0
    }

    /// Returns a mark on a random byte behind [`Self::GIVEN`], so that no other process has the
    /// same one.
    #[must_use]
    pub fn chosen() -> Self {
        let number = RandomState::new().hash_one(0) >> 3;
        // The number is below 2^61, so the offset is valid for a lock.
        Self(Self::GIVEN.0 + 1 + number.cast_signed())
    }
}

/// Locks the whole file for this open file description, shared or exclusive, without waiting.
/// QEMU's image locks conflict with an exclusive lock; for a shared one, see [`has_qemu_writer`]. A
/// shared lock leaves out the marks behind [`Mark::GIVEN`], because [`is_marked`] would see the
/// reader's lock instead of a mark.
///
/// # Errors
/// `EAGAIN` or `EACCES`: another process holds a lock.
pub fn lock(file: &OwnedFd, exclusive: bool) -> Result<(), Errno> {
    // From byte 0, length 0: to the end of any file.
    if exclusive { set_lock(file, F_WRLCK, 0, 0) } else { lock_up_to_given(file, false) }
}

/// [`lock`], but always leaves out the marks behind [`Mark::GIVEN`].
///
/// # Errors
/// As [`lock`].
pub fn lock_up_to_given(file: &OwnedFd, exclusive: bool) -> Result<(), Errno> {
    set_lock(file, if exclusive { F_WRLCK } else { F_RDLCK }, 0, Mark::GIVEN.0 + 1)
}

/// Marks an open file description: locks the byte (shared).
///
/// # Errors
/// `EAGAIN` or `EACCES`: another description has locked this byte exclusively.
pub fn mark(file: impl AsFd, mark: Mark) -> Result<(), Errno> {
    set_lock(file, F_RDLCK, mark.0, 1)
}

/// Removes the mark of a description, because no request is under way by it, or because it belongs
/// to the owner, whose lock of the whole file includes the byte.
///
/// # Errors
/// `ENOLCK`: the host has no more locks.
pub fn unmark(file: impl AsFd, mark: Mark) -> Result<(), Errno> {
    set_lock(file, F_UNLCK, mark.0, 1)
}

/// True while another open file description has this mark. A lock of the whole file belongs to a
/// process that serves the image, and is no mark.
///
/// # Errors
/// The file system cannot tell.
pub fn is_marked(file: impl AsFd, mark: Mark) -> Result<bool, Errno> {
    // SAFETY: all-zero is a valid flock; the fields that matter are set below.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    (lock.l_start, lock.l_len) = (mark.0, 1);
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fd is open, and `lock` outlives the call, which writes the lock it finds there.
    let result = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) };
    let is_mark = lock.l_type != F_UNLCK && lock.l_start == mark.0;
    if result == 0 { Ok(is_mark) } else { Err(last_errno()) }
}

fn set_lock(file: impl AsFd, kind: libc::c_short, start: i64, len: i64) -> Result<(), Errno> {
    // SAFETY: all-zero is a valid flock; the fields that matter are set below.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    (lock.l_start, lock.l_len) = (start, len);
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: fd is open, and `lock` outlives the call.
    let result = unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Releases the lock of [`lock`].
///
/// # Errors
/// The error of the file system.
pub fn unlock(file: impl AsFd) -> Result<(), Errno> {
    // SAFETY: as in `lock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = F_UNLCK;
    lock.l_whence = SEEK_SET;
    // SAFETY: as in `lock`.
    let result =
        unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// `BLKSECDISCARD`: _IO(0x12, 125).
const BLKSECDISCARD: libc::Ioctl = 0x127d;

/// Erases a range of a block device so that it cannot be recovered. Blocks.
///
/// # Errors
/// `EOPNOTSUPP`: the device has no secure erase. Any other: the error of the device.
pub fn secure_erase(file: impl AsFd, offset: u64, len: u64) -> Result<(), Errno> {
    let range = [offset, len];
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: BLKSECDISCARD reads two u64 from the pointer.
    let result = unsafe { libc::ioctl(fd, BLKSECDISCARD, range.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}
