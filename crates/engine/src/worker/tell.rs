//! What a worker tells the balance of itself, and its end when it has no queues.

use super::Worker;
use crate::accounts::ring_threads;

/// A worker that has not slept for this long, with several hot queues, says so.
const SATURATED_NS: u64 = 50_000_000;
/// A worker that slept so much of the time since it last looked back says so.
const RESTING_PERCENT: u64 = 75;
/// A worker that has had no queue for so long ends.
const LEAVE_NS: u64 = 60_000_000_000;
/// A worker that has had no queue for so long looks at what the kernel keeps for it. The kernel's
/// threads end when they have been idle for five seconds.
const LOOK_NS: u64 = 10_000_000_000;
/// Threads that the kernel means to keep for a worker that has used its io_uring: one for requests
/// that take a bounded time, and one for the others.
const RING_THREADS_MAX: usize = 2;

/// When a worker last looked back, and how long it had slept until then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    since_ns: u64,
    slept_ns: u64,
    /// It has no queue: then its thread ends, unless it stays.
    leaves_at_ns: Option<u64>,
    /// It has no queue any more: then it looks at what the kernel keeps for it.
    looks_at_ns: Option<u64>,
}

impl Rest {
    /// A worker that begins, without a queue. Threads that served as this worker before slept for
    /// `slept_ns`.
    pub(super) fn new(now_ns: u64, slept_ns: u64) -> Self {
        let leaves_at_ns = Some(now_ns + LEAVE_NS);
        Self { since_ns: now_ns, slept_ns, leaves_at_ns, looks_at_ns: None }
    }
}

impl Worker {
    /// Tells the balance when there is more than this thread can do.
    #[inline]
    pub(super) fn tell_if_saturated(&mut self) {
        if self.now_ns.saturating_sub(self.awake_since_ns) > SATURATED_NS {
            self.awake_since_ns = self.now_ns;
            if self.hot.len() > 1 {
                self.lot.told.saturated();
            }
        }
    }

    /// Counts how often a device of the host has made this thread wait.
    pub(super) fn count_device_waits(&mut self) {
        let waits = self.wait.device_waits();
        self.stats.device_waits.add(waits - self.device_waits);
        self.device_waits = waits;
    }

    /// Tells the balance when this thread could as well be spared. Asked after each sleep; what is
    /// behind the compare happens once a second at most.
    #[inline]
    pub(super) fn tell_if_resting(&mut self) {
        if self.now_ns.saturating_sub(self.rest.since_ns) >= self.lot.told.rest_ns() {
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
            self.lot.told.resting();
        }
    }

    /// Its queues are more, or fewer, than before.
    pub(super) fn note_queues(&mut self) {
        let was_empty = self.rest.leaves_at_ns.is_some();
        self.stats.queues.set(self.by_id.len() as u64);
        let mut guests = self.slots.iter().filter(|s| s.entry.is_some()).map(|slot| slot.guest);
        let first = guests.next();
        self.wait.set_shared(guests.any(|guest| Some(guest) != first));
        if self.by_id.is_empty() && !was_empty {
            self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
            self.rest.looks_at_ns = Some(self.now_ns + LOOK_NS).filter(|_| self.has_ring());
            self.lot.told.end_to_serve();
        } else if !self.by_id.is_empty() && was_empty {
            (self.rest.leaves_at_ns, self.rest.looks_at_ns) = (None, None);
            self.lot.told.begin_to_serve();
        }
    }

    /// When the thread ends, or looks whether it should, if no queue comes: a sleep has a timer
    /// then, twice at most.
    pub(super) fn leaves_at_ns(&self) -> Option<u64> {
        let leaves_at_ns = self.rest.leaves_at_ns.filter(|_| !self.lot.stays);
        self.rest.looks_at_ns.into_iter().chain(leaves_at_ns).min()
    }

    /// Ends if it has had no queue for long, or if the kernel keeps threads for it that nobody
    /// needs; unless a queue is on its way: then the next one is waited for as long again.
    ///
    /// The kernel's threads belong to the thread that submits, and so does their count: the last
    /// one that is counted stays. But Linux (seen in 6.18) counts a thread out twice if it ends
    /// before its request for one more thread is granted. That happens to a thread whose idle time
    /// is over: it finds one more request, waits for the disk in it while others are queued, and
    /// ends right after it. From then on one more thread stays than is counted. All of them end
    /// with our thread. Another ring on this thread would not do: kernels that end the threads of a
    /// closed ring would count below zero then, which is above every limit, and start none ever
    /// again.
    #[cold]
    fn leave(&mut self) {
        let looks = self.rest.looks_at_ns.take().is_some();
        if looks && ring_threads(own_id()) <= RING_THREADS_MAX {
            return;
        }
        self.quit = self.mailbox.close();
        self.rest.leaves_at_ns = Some(self.now_ns + LEAVE_NS);
        self.rest.looks_at_ns = Some(self.now_ns + LOOK_NS).filter(|_| looks);
    }
}

/// The kernel's number of the calling thread.
fn own_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

#[cfg(test)]
mod tests;
