//! `Inbox`: carries results of a disk's thread to the worker that sent the task.

use super::Event;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// A list of results to which any thread adds. One worker takes them, woken by an eventfd.
#[derive(Debug)]
pub struct Inbox {
    done: Mutex<Vec<Event>>,
    /// True if a result was put in since the worker last took all. Workers check this flag in every
    /// round, so that an empty inbox costs one load.
    has_some: AtomicBool,
    event: OwnedFd,
}

impl Inbox {
    /// Makes an empty inbox.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: no eventfd can be made.
    pub fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { done: Mutex::default(), has_some: AtomicBool::new(false), event })
    }

    /// Adds the result of `user_data`: 0, or a negative errno.
    pub fn put(&self, user_data: u64, result: i32) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.push(Event { user_data, result, more: false });
        drop(done);
        // Write only if the flag was clear. The worker clears it before it takes results: so while
        // the flag is set, the worker will take this result, too, and was woken for that.
        if !self.has_some.swap(true, Ordering::AcqRel) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Moves all results to `out`.
    #[inline]
    pub fn take(&self, out: &mut Vec<Event>) {
        if self.has_some.load(Ordering::Relaxed) && self.has_some.swap(false, Ordering::AcqRel) {
            out.append(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Returns the eventfd that is written when the inbox is no longer empty. The worker watches it
    /// edge-triggered, and never reads it.
    #[must_use]
    pub fn readiness(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(inbox: &Inbox) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(inbox.readiness(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn the_worker_is_woken_once_for_all_that_it_has_not_taken() {
        let (inbox, mut taken) = (Inbox::new().unwrap(), Vec::new());
        inbox.take(&mut taken);
        assert!(taken.is_empty());
        for round in 0..2 {
            (0..3).for_each(|n| inbox.put(n, -round));
            assert_eq!(written(&inbox), 1);
            inbox.take(&mut taken);
            let found: Vec<_> = taken.drain(..).map(|e| (e.user_data, e.result)).collect();
            assert_eq!(found, [(0, -round), (1, -round), (2, -round)]);
        }
        assert_eq!(written(&inbox), 0, "nothing was put in");
    }
}
