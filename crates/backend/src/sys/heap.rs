//! Settings of the C library's allocator: how much free memory the process keeps, and how much is
//! in use.
#![allow(unsafe_code, reason = "allow-listed: settings of the C library's allocator")]

/// A block of at least so many bytes gets pages of its own, which are returned to the host when it
/// is freed; and at most so many free bytes are kept at the end of the heap. These are the C
/// library's first values. Without a call, it doubles them with each longer block, up to 32 and 64
/// MiB.
#[cfg(target_env = "gnu")]
const BOUND: libc::c_int = 128 << 10;

/// Limits the free memory behind the last block in use. Free memory between blocks is kept for
/// later ones. Must be called while the process has one thread.
///
/// All threads allocate from one arena, where the C library would make up to eight for each CPU. It
/// returns the free end of the first arena to the host when told to, but not of the others. To
/// return memory of another arena, a thread first opens a file below /proc, which the seccomp
/// filter of a worker does not allow. The arena has one lock, also during the system calls by which
/// the arena grows and shrinks. A worker takes the lock at the first values of a queue's
/// histograms, and when flushes are joined; no other request or frame allocates once its queue has
/// grown.
pub fn bound() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in
        [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, BOUND), (libc::M_TRIM_THRESHOLD, BOUND)]
    {
        // SAFETY: a setting of the allocator, which no other thread uses at this time.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Returns free memory to the host. The C library keeps free pages that lie between blocks in use.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches no memory that is in use; the C library locks what other threads use.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Returns the bytes of memory in use; `None` if the C library does not count them.
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
