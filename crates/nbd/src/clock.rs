//! The clock of the reconnector thread. Workers do not read it: they time requests by the ticks
//! that this thread counts.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Time since the host started.
pub(super) fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock counts from the start of the machine: neither part is negative.
    let nanoseconds = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(now.tv_sec.cast_unsigned(), nanoseconds)
}
