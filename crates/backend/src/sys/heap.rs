//! The C library's memory of a process that has a list of calls for each thread.
#![allow(unsafe_code, reason = "allow-listed: a setting of the C library's allocator")]

/// Has all threads allocate from one arena, where the C library has several. A thread that gives
/// memory of another arena back opens a file below /proc before that, which the list of a worker
/// does not have; and each arena takes some pages for itself. The calling thread is the only one
/// of the process.
pub fn have_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a setting of the allocator, which no other thread uses at this time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
}
