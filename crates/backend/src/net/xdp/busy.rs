//! `while_busy`, `while_long_busy`: wait for a queue that the kernel has not freed yet.

use rustix::io::Errno;
use std::time::Duration;

/// The kernel frees a queue, or an interface's attachment of a program, a little after its former
/// owner has closed it. These are the number of tries, and the pause between two.
const BUSY_TRIES: u32 = 50;
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(10);
/// How often half a second is waited for the sockets of a dead process, which the kernel may still
/// be closing.
const LONG_TRIES: u32 = 10;

/// Repeats `call` while it fails with `EBUSY`, for half a second.
///
/// # Errors
/// Those of `call`.
pub(super) fn while_busy<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..BUSY_TRIES {
        match call() {
            Err(Errno::BUSY) => std::thread::sleep(BUSY_RETRY_DELAY),
            result => return result,
        }
    }
    Err(Errno::BUSY)
}

/// Repeats `call` while it fails with `EBUSY`, for five seconds.
///
/// # Errors
/// Those of `call`.
pub(super) fn while_long_busy<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 1..LONG_TRIES {
        match while_busy(&mut call) {
            Err(Errno::BUSY) => {}
            result => return result,
        }
    }
    while_busy(call)
}
