//! Ends a thread before one of its stores to shared memory, as if the process were killed there.
//!
//! When a process is killed, its shared memory holds the stores that it had reached. A test counts
//! the stores of a call, and then runs the call once for each of them, ending before it. A release
//! build contains nothing of this.

#[cfg(debug_assertions)]
use std::cell::Cell;

#[cfg(debug_assertions)]
thread_local! {
    /// How many stores the thread may still make; `None`: no limit.
    static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The payload of the panic that ends a thread which has made all of its stores.
#[cfg(debug_assertions)]
const KILLED: &str = "killed before a store";

/// Lets this thread make this many more stores through [`Words`](crate::Words), and panic before
/// the next one ("killed before a store"). `None`: no limit. Returns how many stores were left of
/// the former limit.
#[cfg(debug_assertions)]
#[allow(clippy::must_use_candidate, reason = "whoever begins to count has nothing to take")]
pub fn stores_before_the_end(left: Option<u64>) -> Option<u64> {
    LEFT.replace(left)
}

/// Does nothing: only debug builds limit stores.
#[cfg(not(debug_assertions))]
pub fn stores_before_the_end(_: Option<u64>) -> Option<u64> {
    None
}

/// Counts the store that this thread is about to make.
#[inline]
#[cfg_attr(loom, allow(dead_code, reason = "the model has no stores that are counted"))]
pub(crate) fn before_store() {
    #[cfg(debug_assertions)]
    if let Some(left) = LEFT.get() {
        if left == 0 {
            // `resume_unwind` skips the panic hook: no message is printed, since nothing is wrong.
            std::panic::resume_unwind(Box::new(KILLED));
        }
        LEFT.set(Some(left - 1));
    }
}
