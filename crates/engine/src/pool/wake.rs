//! Measures the time to wake a thread that sleeps on another CPU: once, when the first worker
//! starts, for the polling policy.

use crate::accounts::allowed_cpus;
use crate::policy::wake::{Wake, settle};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The number of wakes that are measured: the median of this many is stable.
const WAKES: usize = 32;
/// Pause before each wake: the sleeper's CPU must have become idle.
const REST: Duration = Duration::from_micros(100);
/// A wake that takes longer was disturbed, or there is no second CPU.
const TIMEOUT: Duration = Duration::from_millis(1);
/// The maximum for all wakes: a disturbed machine must not delay the start.
const TIMEOUT_OF_ALL: Duration = Duration::from_millis(20);

/// Returns the nanoseconds from the write that wakes until a sleeper on another CPU runs.
pub(crate) fn wake() -> Wake {
    static WAKE: OnceLock<Wake> = OnceLock::new();
    *WAKE.get_or_init(|| settle(&mut measure()))
}

#[allow(clippy::disallowed_methods, reason = "measures time, before a worker runs")]
fn now() -> Instant {
    Instant::now()
}

/// Returns the durations of undisturbed wakes, in nanoseconds; none if they cannot be measured. A
/// daemon that is bound to one CPU cannot measure wakes by guests on other CPUs: a wake on the same
/// CPU costs a sixth of that, and would make a worker sleep where it should poll.
fn measure() -> Vec<u64> {
    let [first, second, ..] = allowed_cpus()[..] else { return Vec::new() };
    std::thread::scope(|scope| {
        let waker = std::thread::Builder::new().spawn_scoped(scope, || {
            bind(first).map(|()| wake_over_and_over(second)).unwrap_or_default()
        });
        waker.ok().and_then(|waker| waker.join().ok()).unwrap_or_default()
    })
}

/// Binds the calling thread to a CPU.
fn bind(cpu: usize) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
}

/// Wakes a thread on `cpu` again and again; returns how long each wake took, in nanoseconds.
fn wake_over_and_over(cpu: usize) -> Vec<u64> {
    let Ok(event) = eventfd(0, EventfdFlags::CLOEXEC) else { return Vec::new() };
    let (began, woken_ns, ends) = (now(), AtomicU64::new(0), AtomicBool::new(false));
    let mut wakes = Vec::with_capacity(WAKES);
    std::thread::scope(|scope| {
        let sleeper = || {
            if bind(cpu).is_ok() {
                sleep_over_and_over(event.as_fd(), began, &woken_ns, &ends);
            }
        };
        if std::thread::Builder::new().spawn_scoped(scope, sleeper).is_err() {
            return;
        }
        for _ in 0..WAKES {
            if began.elapsed() > TIMEOUT_OF_ALL {
                break;
            }
            await_until(REST, || false);
            woken_ns.store(0, Ordering::Release);
            let written_at = began.elapsed();
            write(&event);
            if await_until(TIMEOUT, || woken_ns.load(Ordering::Acquire) != 0) {
                let woken_at = Duration::from_nanos(woken_ns.load(Ordering::Acquire));
                wakes.push(nanoseconds(woken_at.saturating_sub(written_at)));
            }
        }
        ends.store(true, Ordering::Release);
        write(&event);
    });
    wakes
}

/// Records the time of each wake, and sleeps again.
fn sleep_over_and_over(
    event: BorrowedFd<'_>,
    began: Instant,
    woken_ns: &AtomicU64,
    ends: &AtomicBool,
) {
    let mut count = [0; 8];
    while rustix::io::read(event, &mut count).is_ok() && !ends.load(Ordering::Acquire) {
        woken_ns.store(nanoseconds(began.elapsed()), Ordering::Release);
    }
}

/// Spins until `is_done`, for `max_wait` at most. Returns true if `is_done` became true.
fn await_until(max_wait: Duration, is_done: impl Fn() -> bool) -> bool {
    let began = now();
    while !is_done() {
        if began.elapsed() >= max_wait {
            return false;
        }
        std::hint::spin_loop();
    }
    true
}

fn write(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_is_measured_once_and_within_its_bounds() {
        let began = now();
        let first = wake();
        // The start of a daemon waits for this measurement. The test allows it ten times its limit.
        assert!(began.elapsed() < 10 * TIMEOUT_OF_ALL, "{:?}", began.elapsed());
        assert!((1000..=200_000).contains(&first.ns), "{first:?}");
        assert_eq!(wake(), first);
    }

    #[test]
    fn a_process_that_is_bound_to_one_cpu_measures_no_wake() {
        let bound = std::thread::Builder::new().spawn(|| {
            bind(allowed_cpus()[0]).unwrap();
            measure()
        });
        assert_eq!(
            bound.unwrap().join().unwrap(),
            Vec::<u64>::new(),
            "it would be that of one CPU"
        );
    }
}
