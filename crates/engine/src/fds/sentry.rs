//! The sentry: a thread that watches the threads that write to an eventfd or a unix socket of a
//! front-end.
//!
//! A write to an eventfd waits while the count is at its maximum, unless `O_NONBLOCK` is set. The
//! front-end can change both the count and the flag, and the kernel has no call that writes to an
//! eventfd without waiting. (A message to a socket can be sent without waiting; the sentry sees how
//! long that takes all the same.) So a thread counts its writes in its [`Place`], and one thread of
//! the process, the sentry, interrupts a write that it has seen under way twice, one tick apart:
//!
//! ```text
//! writer:  writes += 1 (odd: inside);  is the sentry asleep? wake it;  write;  writes += 1
//! sentry:  every tick: interrupt each writer whose count is odd and equal to that of the last tick
//!          no count has changed for a while: set "asleep", check once more, sleep
//! ```
//! 1. Only a write that waits is ended by a signal: `EINTR` means that the eventfd was full and
//!    blocking. The signal has no effect on a writer that was merely slow to be scheduled.
//! 2. The writer counts first, and then checks whether the sentry sleeps; the sentry first sets
//!    that it sleeps, and then checks the counts (`lookout.rs`): so no write that waits is missed.
//! 3. While no thread writes, the sentry sleeps without a timer: an idle daemon has no tick.
//! 4. The sentry is started before the first worker: later the system may have no thread to spare.

use crate::lookout::Lookout;
use manyring_backend::sys::interrupt::Interruptible;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Interval at which the sentry checks the writers. It interrupts a write after one to two ticks.
const TICK: Duration = Duration::from_millis(5);
/// The number of ticks without a write after which the sentry sleeps.
const QUIET_TICKS: u32 = 20;

/// The counter of a thread that writes to eventfds of front-ends.
#[derive(Debug)]
struct Place {
    thread: Interruptible,
    /// Writes begun plus writes ended: odd while the thread is inside a write.
    writes: AtomicU64,
    /// The value of `writes` at the sentry's last check.
    seen: AtomicU64,
    /// The value that `writes` will have at the end of the write in which the sentry last found the
    /// thread: the thread compares the two without further arithmetic.
    seen_until: AtomicU64,
    /// The CPU time of the thread, in nanoseconds, when the sentry first saw that write.
    cpu_ns: AtomicU64,
}

thread_local! {
    static PLACE: Arc<Place> = enter();
}

static PLACES: Mutex<Vec<Weak<Place>>> = Mutex::new(Vec::new());
static SENTRY: Lookout = Lookout::new("sentry", TICK, QUIET_TICKS, look);
static START: Mutex<()> = Mutex::new(());

/// How a write was not a normal one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Odd {
    /// The eventfd is full and blocking, and the sentry has interrupted the write.
    Blocked,
    /// The write was made, and the sentry saw it under way: the write may have been long, or its
    /// thread was not scheduled, or the sentry's tick fell into it by chance.
    Seen,
}

/// Writes to an eventfd of a front-end, from any thread. Takes two ticks at most. If the eventfd is
/// full and does not block, nothing is written: its reader has a notification to read already.
///
/// # Errors
/// [`Odd`].
#[inline]
pub(crate) fn write(fd: BorrowedFd<'_>, count: u64) -> Result<(), Odd> {
    watched(|| rustix::io::write(fd, &count.to_ne_bytes()))
}

/// Sends `count` to a unix socket of a front-end, from any thread, as [`write`] does. If the socket
/// is full, nothing is sent.
///
/// # Errors
/// [`Odd`].
pub(crate) fn send(fd: BorrowedFd<'_>, count: u64) -> Result<(), Odd> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    watched(|| rustix::net::send(fd, &count.to_ne_bytes(), flags))
}

#[inline(always)]
#[allow(clippy::inline_always, reason = "on the way of every turn that answers something")]
fn watched(write: impl FnOnce() -> Result<usize, Errno>) -> Result<(), Odd> {
    PLACE.with(|place| {
        let writes = place.writes.fetch_add(1, Ordering::SeqCst);
        SENTRY.rouse();
        let written = write();
        let writes = writes + 2;
        place.writes.store(writes, Ordering::Release);
        if written == Err(Errno::INTR) {
            return Err(Odd::Blocked);
        }
        if place.seen_until.load(Ordering::Acquire) == writes {
            return Err(Odd::Seen);
        }
        Ok(())
    })
}

/// Returns the CPU time that the calling thread has used since the sentry saw its last write, which
/// has just returned [`Odd::Seen`]. That write has taken at least so much.
#[cold]
pub(crate) fn seen_for() -> Duration {
    PLACE.with(|place| {
        let then = Duration::from_nanos(place.cpu_ns.load(Ordering::Relaxed));
        place.thread.cpu_time().saturating_sub(then)
    })
}

/// Starts the sentry, unless it runs already. Returns false if the system had no thread for it:
/// then no worker may start, since a write could wait for ever.
pub(crate) fn start() -> bool {
    let _one_at_a_time = START.lock().unwrap_or_else(PoisonError::into_inner);
    let started = SENTRY.start();
    if let Err(error) = &started {
        tracing::error!(%error, "starting the thread that interrupts blocked calls failed");
    }
    started.is_ok()
}

/// Adds a counter for the calling thread to the sentry's list.
fn enter() -> Arc<Place> {
    let place = Arc::new(Place {
        thread: Interruptible::this_thread(),
        writes: AtomicU64::new(0),
        seen: AtomicU64::new(0),
        seen_until: AtomicU64::new(0),
        cpu_ns: AtomicU64::new(0),
    });
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    places.retain(|place| place.strong_count() > 0);
    places.push(Arc::downgrade(&place));
    place
}

/// Interrupts every write that was under way at the last check and still is. Returns true if a
/// thread has written since, or is writing.
fn look() -> bool {
    let places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let mut any = false;
    for place in places.iter().filter_map(Weak::upgrade) {
        let writes = place.writes.load(Ordering::SeqCst);
        let before = place.seen.swap(writes, Ordering::Relaxed);
        let is_inside = writes % 2 == 1;
        if is_inside {
            if place.seen_until.load(Ordering::Relaxed) != writes + 1 {
                let cpu_ns = place.thread.cpu_time().as_nanos();
                place.cpu_ns.store(u64::try_from(cpu_ns).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
            place.seen_until.store(writes + 1, Ordering::Release);
            if before == writes {
                place.thread.interrupt();
            }
        }
        any |= is_inside || before != writes;
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::AsFd;

    #[test]
    fn a_write_to_a_full_blocking_eventfd_is_given_up() {
        assert!(start());
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(matches!(write(event.as_fd(), u64::MAX - 1), Ok(()) | Err(Odd::Seen)));
        for round in 0..3 {
            assert_eq!(write(event.as_fd(), 1), Err(Odd::Blocked));
            // It slept, which takes no CPU time.
            let (seen_for, all) = (seen_for(), PLACE.with(|place| place.thread.cpu_time()));
            assert!(seen_for < all, "{seen_for:?} of {all:?}");
            // The second time the sentry has gone to sleep, and is woken by the write.
            if round == 0 {
                while !SENTRY.is_asleep() {
                    std::thread::sleep(TICK);
                }
            }
        }
    }
}
