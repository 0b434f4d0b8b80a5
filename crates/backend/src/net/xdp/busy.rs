//! `while_busy`: waits for a queue or an interface that the kernel has not freed yet.

use rustix::io::Errno;
use std::time::Duration;

/// The kernel frees a queue, or an interface's place for a program, only a little after its former
/// owner has closed it: the number of tries, and the pause between two.
const BUSY_TRIES: u32 = 50;
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Repeats `call` while it fails with `EBUSY`, for half a second.
///
/// # Errors
/// Those of `call`.
pub(super) fn while_busy<T>(call: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..BUSY_TRIES {
        match call() {
            Err(Errno::BUSY) => std::thread::sleep(BUSY_RETRY_DELAY),
            result => return result,
        }
    }
    Err(Errno::BUSY)
}
