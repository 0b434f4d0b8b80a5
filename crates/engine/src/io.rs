//! `QueueIo`: a queue's access to its worker for one call: io_uring and watches, the queue's slot,
//! and the time.

use crate::wait::{EventSource, Wait};
use manyring_backend::sys::uring::Ring;
use rustix::fd::BorrowedFd;

/// Lends one call of the queue in `slot` the worker's io_uring, watches and time.
#[derive(Debug)]
pub struct QueueIo<'a> {
    wait: &'a mut Wait,
    slot: u32,
    /// The number of queues that had this slot before: tells this queue's events from theirs.
    generation: u32,
    now_ns: u64,
    is_alone: bool,
}

impl<'a> QueueIo<'a> {
    /// Makes the access for the queue in `slot`, which is the slot's `generation`th. `now_ns`: the
    /// time that the worker read at the beginning of its round.
    pub fn new(wait: &'a mut Wait, slot: u32, generation: u32, now_ns: u64) -> Self {
        Self { wait, slot, generation, now_ns, is_alone: false }
    }

    /// Sets whether the queue's guest is the only one with work on this worker.
    #[must_use]
    #[inline]
    pub fn alone(self, is_alone: bool) -> Self {
        Self { is_alone, ..self }
    }

    /// True if no other guest has had work on this worker of late: then a turn may be longer than
    /// other guests would tolerate, about half a millisecond.
    #[inline]
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Returns the time at the beginning of the round, in nanoseconds.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Reads the clock in nanoseconds. To be called once per burst, never once per request.
    #[inline]
    pub fn read_clock_ns(&self) -> u64 {
        self.wait.now_ns()
    }

    /// Returns the worker's io_uring, if the worker has one.
    #[inline]
    pub fn ring(&mut self) -> Option<&mut Ring> {
        self.wait.ring()
    }

    /// Returns the upper bits that the `user_data` of an io_uring entry must carry above its token,
    /// so that the worker passes the completion to this queue.
    pub fn disk_tag(&self) -> u64 {
        EventSource::Disk { slot: self.slot, token: 0 }.pack()
    }

    /// Begins to watch the kick, and returns the number of the watch, which is unique.
    pub fn watch_kick(&mut self, kick: BorrowedFd<'_>) -> u32 {
        let watch = self.wait.next_kick_watch();
        self.wait.watch(kick, EventSource::Kick { slot: self.slot, watch });
        watch
    }

    /// Ends the watch of the kick with the number that [`Self::watch_kick`] returned.
    pub fn unwatch_kick(&mut self, kick: BorrowedFd<'_>, watch: u32) {
        self.wait.unwatch(kick, EventSource::Kick { slot: self.slot, watch });
    }

    /// Submits the entries that were placed so far to the kernel.
    pub(crate) fn submit(&mut self) {
        self.wait.submit();
    }

    /// Begins to watch `fd`, an eventfd or timer which signals that a disk or port has finished
    /// work outside the worker's io_uring.
    pub fn watch_offload(&mut self, fd: BorrowedFd<'_>) {
        let (slot, generation) = (self.slot, self.generation);
        self.wait.watch(fd, EventSource::Offload { slot, generation });
    }

    /// Ends the watch of [`Self::watch_offload`].
    pub fn unwatch_offload(&mut self, fd: BorrowedFd<'_>) {
        let (slot, generation) = (self.slot, self.generation);
        self.wait.unwatch(fd, EventSource::Offload { slot, generation });
    }

    /// Begins a watch that reports once, when a port is ready for `output`, or else for input.
    pub fn watch_port(&mut self, fd: BorrowedFd<'_>, output: bool) {
        let (slot, generation) = (self.slot, self.generation);
        self.wait.watch_once(fd, output, EventSource::Port { slot, generation });
    }

    /// Ends the watch of [`Self::watch_port`], if it has not reported yet.
    pub fn unwatch_port(&mut self, fd: BorrowedFd<'_>) {
        let (slot, generation) = (self.slot, self.generation);
        self.wait.unwatch(fd, EventSource::Port { slot, generation });
    }
}
