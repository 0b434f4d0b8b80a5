//! `Readiness`: the event that a half of a port waits for. `Doorbell`: how one thread wakes another
//! one in this process.
//!
//! A file descriptor of the host reports events of the kernel. Between two queues of this process
//! there is no such event: one thread leaves work in memory, and another thread, its owner, which
//! may be asleep, does it:
//! ```text
//! post (any thread)          leave the work; say so in `pending`; disarm: was it armed? write
//!                            to the eventfd
//! arm (the owner, before     arm; something pending? disarm, and do not sleep
//! it sleeps)
//! ```
//! 1. Both words are only changed by atomic read-modify-write operations that acquire and release.
//!    Each side changes its own word first, then the other's. If a post finds the owner unarmed,
//!    the arming comes after it and acquires what the post released, so the owner finds the bits
//!    pending. So if work is left while the owner falls asleep, the owner either sees it or is
//!    woken.
//! 2. An owner that is awake is not armed: a post then costs no system call. The first post after
//!    the arming disarms, so that a burst of posts writes once.
//! 3. The eventfd is never read: a thread that watches it edge-triggered gets an event for each
//!    write.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, write};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The event to wait for before a half is tried again.
#[derive(Debug)]
pub enum Readiness<'a> {
    /// Wait until this file descriptor is ready: for output if it belongs to a sending half, else
    /// for input.
    Fd(BorrowedFd<'a>),
    /// Arm the doorbell, and wait until it is rung. The worker watches its eventfd edge-triggered
    /// while it has the half, and never reads it.
    Doorbell(&'a Doorbell),
    /// Do not wait: the half is always ready.
    Always,
    /// Do not wait: the half will never be ready.
    Never,
}

impl<'a> Readiness<'a> {
    /// Returns the doorbell, if this is one. The worker watches its eventfd all the time, and never
    /// reads it.
    #[must_use]
    pub fn doorbell(&self) -> Option<&'a Doorbell> {
        match self {
            Self::Doorbell(doorbell) => Some(doorbell),
            _ => None,
        }
    }
}

/// The atomic words of a doorbell: a bit for each kind of work that is left, and whether the owner
/// must be woken.
#[derive(Debug)]
pub struct Alarm {
    armed: AtomicBool,
    pending: AtomicU64,
}

impl Alarm {
    /// Makes an alarm with no work pending, whose owner is awake.
    #[must_use]
    pub fn new() -> Self {
        Self { armed: AtomicBool::new(false), pending: AtomicU64::new(0) }
    }

    /// Records that the work of `bits` is left. Returns true if the owner must be woken.
    #[must_use]
    pub fn post(&self, bits: u64) -> bool {
        self.pending.fetch_or(bits, Ordering::AcqRel);
        self.armed.swap(false, Ordering::AcqRel)
    }

    /// Call before the owner sleeps. Returns false if it must not sleep, because work is pending.
    #[must_use]
    pub fn arm(&self) -> bool {
        self.armed.swap(true, Ordering::AcqRel);
        // Use an atomic operation: a plain load could be executed before the store above is visible
        // to other threads.
        if self.pending.fetch_or(0, Ordering::AcqRel) == 0 {
            return true;
        }
        self.armed.swap(false, Ordering::AcqRel);
        false
    }

    /// Call when the owner is awake, so that posts need not wake it.
    #[inline]
    pub fn disarm(&self) {
        if self.armed.load(Ordering::Relaxed) {
            self.armed.swap(false, Ordering::AcqRel);
        }
    }

    /// Returns the bits of the work that is left.
    #[must_use]
    #[inline]
    pub fn pending(&self) -> u64 {
        self.pending.load(Ordering::Acquire)
    }

    /// Clears the bits of work that the owner is about to do. Must be called before: a thread that
    /// leaves more work meanwhile sets them again.
    #[inline]
    pub fn take(&self, bits: u64) {
        self.pending.fetch_and(!bits, Ordering::AcqRel);
    }

    /// Sets the bits of work again that the owner has not finished.
    #[inline]
    pub fn put_off(&self, bits: u64) {
        self.pending.fetch_or(bits, Ordering::AcqRel);
    }
}

impl Default for Alarm {
    fn default() -> Self {
        Self::new()
    }
}

/// Wakes the owner of a half, whichever thread its worker runs on.
#[derive(Debug)]
pub struct Doorbell {
    alarm: Alarm,
    fd: OwnedFd,
}

impl Doorbell {
    /// Makes a doorbell that was not rung.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the host has no descriptor or memory for the eventfd.
    pub fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { alarm: Alarm::new(), fd })
    }

    /// Records that the work of `bits` is left, and wakes the owner if it sleeps.
    pub fn post(&self, bits: u64) {
        if self.alarm.post(bits) {
            // An error is impossible before 2^64 writes.
            let _ = write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Returns the atomic words, which the owner arms and clears.
    #[must_use]
    #[inline]
    pub fn alarm(&self) -> &Alarm {
        &self.alarm
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::io::read;

    /// Returns how often the doorbell was rung since the last call.
    fn rings(doorbell: &Doorbell) -> u64 {
        let mut count = [0; 8];
        read(doorbell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn only_an_owner_that_is_armed_is_woken_and_once_for_a_burst() {
        let doorbell = Doorbell::new().unwrap();
        doorbell.post(1);
        assert_eq!((rings(&doorbell), doorbell.alarm().pending()), (0, 1), "its owner is awake");
        assert!(!doorbell.alarm().arm(), "work is left");
        doorbell.alarm().take(1);
        assert!(doorbell.alarm().arm());
        for bit in [2, 4, 8] {
            doorbell.post(bit);
        }
        assert_eq!((rings(&doorbell), doorbell.alarm().pending()), (1, 14));
        doorbell.alarm().take(!0);
        assert!(doorbell.alarm().arm());
        doorbell.alarm().disarm();
        doorbell.post(1);
        assert_eq!(rings(&doorbell), 0);
    }
}
