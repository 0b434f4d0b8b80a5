//! The C library's memory: of a process that has a list of calls for each thread, and of one that
//! has read a long configuration.
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

/// Gives the memory that is free back to the host. The C library keeps as much as it has had at a
/// time, and more the larger the pieces were.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches no memory that is in use; the C library locks what other threads use.
    unsafe {
        libc::malloc_trim(0)
    };
}
