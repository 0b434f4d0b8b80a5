//! A worker's reports to the balance (`balance.rs`) about its load, and its end.
//!
//! The balance measures nothing until a worker reports. A worker reports in two cases only: it has
//! several queues and never sleeps, so that another worker might serve one of them better; or it
//! mostly sleeps, so that its queues might move to another worker. A worker that has had no queue
//! for a minute ends its thread, unless it is the one that always stays, or the process can make no
//! other io_uring for a thread in its place (a sandbox).

use super::Worker;
use crate::accounts::ring_threads;

/// A worker that has several hot queues and has not slept for this long is saturated.
const SATURATED_NS: u64 = 50_000_000;
/// A worker mostly sleeps if it slept for this percentage of the time since its last measurement.
const RESTING_PERCENT: u64 = 75;
/// A worker that has had no queue for this long ends its thread.
const LEAVE_NS: u64 = 60_000_000_000;
/// A worker that has had no queue for this long counts the threads that the kernel keeps for its
/// io_uring. Kernel threads that are not needed should end by themselves after five idle seconds.
const LOOK_NS: u64 = 10_000_000_000;
/// The number of threads that the kernel is designed to keep for a worker that has used its
/// io_uring: one for requests that take a bounded time, and one for the others.
const RING_THREADS_MAX: usize = 2;

/// The times of a worker's last measurement of its load, and of its end while it has no queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    /// When the worker last measured its load.
    since_ns: u64,
    /// How long the worker had slept by then, in all.
    slept_ns: u64,
    /// When its thread ends, unless it stays. `None` while the worker has a queue.
    leaves_at_ns: Option<u64>,
    /// When the worker counts the kernel's threads. `None` while it has a queue, and after the
    /// count.
    looks_at_ns: Option<u64>,
}

impl Rest {
    /// Makes the times of a worker that begins without a queue. `slept_ns`: the value of its
    /// counter so far, since the worker may have had earlier threads.
    pub(super) fn new(now_ns: u64, slept_ns: u64) -> Self {
        let leaves_at_ns = Some(now_ns + LEAVE_NS);
        Self { since_ns: now_ns, slept_ns, leaves_at_ns, looks_at_ns: None }
    }
}

impl Worker {
    /// Reports to the balance when there is more work than this thread can do.
    #[inline]
    pub(super) fn tell_if_saturated(&mut self) {
        if self.now_ns.saturating_sub(self.awake_since_ns) > SATURATED_NS {
            self.awake_since_ns = self.now_ns;
            if self.hot.len() > 1 {
                self.lot.reports.saturated();
            }
        }
    }

    /// Counts how often a device of the host has made this thread wait.
    pub(super) fn count_device_waits(&mut self) {
        let waits = self.wait.device_waits();
        self.stats.device_waits.add(waits - self.device_waits);
        self.device_waits = waits;
    }

    /// Reports to the balance when this thread mostly sleeps, and ends it when it has long had no
    /// queue. Called after each sleep; does either at most once a second.
    #[inline]
    pub(super) fn tell_if_resting(&mut self) {
        if self.now_ns.saturating_sub(self.rest.since_ns) >= self.lot.reports.rest_ns() {
            self.look_back();
        }
        if self.leaves_at_ns().is_some_and(|at_ns| at_ns <= self.now_ns) {
            self.leave();
        }
    }

    #[cold]
    fn look_back(&mut self) {
        let slept_ns = self.stats.slept_ns.value();
        let (all, slept) = (self.now_ns - self.rest.since_ns, slept_ns - self.rest.slept_ns);
        (self.rest.since_ns, self.rest.slept_ns) = (self.now_ns, slept_ns);
        if slept * 100 >= all * RESTING_PERCENT && !self.by_id.is_empty() {
            self.lot.reports.resting();
        }
    }

    /// Call when a queue has come or left.
    pub(super) fn note_queues(&mut self) {
        let was_empty = self.rest.leaves_at_ns.is_some();
        self.stats.queues.set(self.by_id.len() as u64);
        let mut guests = self.slots.iter().filter(|s| s.entry.is_some()).map(|slot| slot.guest);
        let first = guests.next();
        self.wait.set_shared(guests.any(|guest| Some(guest) != first));
        if self.by_id.is_empty() && !was_empty {
            self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
            self.rest.looks_at_ns = Some(self.now_ns + LOOK_NS).filter(|_| self.has_ring());
            self.lot.reports.end_to_serve();
        } else if !self.by_id.is_empty() && was_empty {
            (self.rest.leaves_at_ns, self.rest.looks_at_ns) = (None, None);
            self.lot.reports.begin_to_serve();
        }
    }

    /// Returns when the thread ends, or counts the kernel's threads, if no queue comes before. The
    /// worker's sleep has a timer for that: two such sleeps at most, since nothing else wakes a
    /// worker without queues.
    pub(super) fn leaves_at_ns(&self) -> Option<u64> {
        if self.lot.is_irreplaceable {
            return None;
        }
        let leaves_at_ns = self.rest.leaves_at_ns.filter(|_| !self.lot.stays);
        self.rest.looks_at_ns.into_iter().chain(leaves_at_ns).min()
    }

    /// Ends the thread if it has had no queue for long, or if the kernel keeps more threads for it
    /// than needed. If a queue is about to arrive, the thread stays, and waits that long again.
    ///
    /// The kernel's io_uring threads belong to the thread that submits, and so does the kernel's
    /// count of them: the last thread in that count stays. But Linux (seen in 6.18) subtracts a
    /// thread twice if it ends before its request for one more thread is granted. That happens to a
    /// thread whose idle time is over: it finds one more request, waits for the disk in it while
    /// others are queued, and ends right after it. From then on one more thread stays than is
    /// counted. All of them end with our thread. Another io_uring on this thread would not help:
    /// kernels that end the threads of a closed io_uring would then count below zero, which as an
    /// unsigned number is above every limit, and never start a thread again.
    #[cold]
    fn leave(&mut self) {
        let looks = self.rest.looks_at_ns.take().is_some();
        if looks {
            // Where many programs read /proc, this takes long. The watchdog does not wait for it.
            self.lot.post.at_rest();
            let count = ring_threads(own_id());
            self.lot.post.at_work();
            if count <= RING_THREADS_MAX {
                return;
            }
        }
        self.quit = self.mailbox.close();
        self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
        self.rest.looks_at_ns = Some(self.now_ns + LOOK_NS).filter(|_| looks);
    }
}

/// Returns the kernel's id of the calling thread.
fn own_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

#[cfg(test)]
mod tests;
