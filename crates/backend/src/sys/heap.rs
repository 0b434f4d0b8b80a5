//! The C library's memory: how much is in use, and how much is kept that the process has let go
//! of.
#![allow(unsafe_code, reason = "allow-listed: settings of the C library's allocator")]

/// Bytes from which on a piece of memory has pages of its own, which the host gets back when the
/// piece is let go of; and most free bytes that are kept at the end of all other pieces. The C
/// library begins with these numbers. Without a call it doubles them with each longer piece, up to
/// 32 and 64 MiB.
#[cfg(target_env = "gnu")]
const BOUND: libc::c_int = 128 << 10;

/// Bounds the free memory behind the last piece in use. Free memory before that stays, for later
/// pieces. The calling thread is the only one of the
/// process.
///
/// All threads allocate from one arena, where the C library has up to eight for each CPU. It gives
/// the free end of the first arena back when it is told to, and that of no other one. A thread that
/// gives memory of another arena back opens a file below /proc before that, which the list of calls
/// of a worker does not have. The arena has one lock, also during the system calls by which the
/// arena grows and shrinks. A worker takes the lock at the first values of a queue's histograms,
/// and where flushes join; no other request or frame allocates once its queue has grown.
pub fn bound() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in
        [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, BOUND), (libc::M_TRIM_THRESHOLD, BOUND)]
    {
        // SAFETY: a setting of the allocator, which no other thread uses at this time.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Gives the memory that is free back to the host. The C library keeps free pages that lie between
/// pieces in use.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches no memory that is in use; the C library locks what other threads use.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Bytes of the memory that is in use; `None` if the C library does not count them.
#[must_use]
pub fn in_use() -> Option<u64> {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: counts; the C library locks what other threads change.
        let counted = unsafe { libc::mallinfo2() };
        u64::try_from(counted.uordblks + counted.hblkhd).ok()
    }
    #[cfg(not(target_env = "gnu"))]
    None
}
