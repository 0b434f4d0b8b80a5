//! The self-calibration of a run: what this machine's own steps cost, so that a reader can tell a
//! slow machine from a slow program. Small on purpose: a second in all.

use crate::load::tap::{TAPS, TapCosts};
use crate::measure::{Affinity, Calibration, now};
use crate::netns::Netns;
use crate::own_load::{own_load, result_of};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Median costs in nanoseconds; `None` for a step that could not be measured on this machine.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Costs {
    /// Moving a cache line from one CPU to the other.
    pub(crate) line_ns: Option<u64>,
    /// From a write to an eventfd to the sleeper on the other CPU running.
    pub(crate) wake_ns: Option<u64>,
    /// The write to the eventfd that wakes the sleeper.
    pub(crate) wake_write_ns: Option<u64>,
    /// The cheapest system call.
    pub(crate) syscall_ns: Option<u64>,
    /// Copying 4 KiB that lie in the cache.
    pub(crate) memcpy_4k_ns: Option<u64>,
    /// Writing a small frame to a tap that is a port of a bridge: the kernel takes it to the other
    /// port within the call.
    pub(crate) tap_write_ns: Option<u64>,
    /// Reading that small frame from the other tap.
    pub(crate) tap_read_ns: Option<u64>,
}

impl Costs {
    /// Measures all steps on the CPUs `one` and `other`.
    pub(crate) fn measure(one: usize, other: usize) -> Self {
        let steps = Calibration::measure(one, other);
        let tap = tap_costs().ok();
        let known = |ns: u64| (ns > 0).then_some(ns);
        Self {
            line_ns: line(one, other, BATCHES).and_then(known),
            wake_ns: known(steps.wake_ns),
            wake_write_ns: known(steps.wake_write_ns),
            syscall_ns: known(steps.syscall_ns),
            memcpy_4k_ns: known(steps.memcpy_4k_ns),
            tap_write_ns: tap.map(|costs| costs.write_ns),
            tap_read_ns: tap.map(|costs| costs.read_ns),
        }
    }

    /// The name of each step, and its cost in nanoseconds.
    pub(crate) fn rows(&self) -> [(&'static str, Option<u64>); 7] {
        [
            ("a cache line from one CPU to the other, one way", self.line_ns),
            ("waking a sleeper on the other CPU: until it runs", self.wake_ns),
            ("waking a sleeper on the other CPU: what the writer pays", self.wake_write_ns),
            ("the cheapest system call", self.syscall_ns),
            ("copying 4 KiB that are in the cache", self.memcpy_4k_ns),
            ("writing a frame of 64 bytes to a tap on a bridge", self.tap_write_ns),
            ("reading it from the tap on the bridge's other side", self.tap_read_ns),
        ]
    }
}

/// Round trips of a batch, and batches.
const TRIPS: u64 = 1000;
const BATCHES: usize = 21;
/// Batches of [`line_now`].
const BATCHES_NOW: usize = 5;
/// Longest wait for a round trip: two threads that must share a CPU would take turns for minutes.
const TIMEOUT: Duration = Duration::from_millis(200);

/// Nanoseconds that a cache line needs now from one CPU to the other, as [`Costs::line_ns`]. The
/// measurement takes a few milliseconds.
pub(crate) fn line_now(one: usize, other: usize) -> Option<u64> {
    line(one, other, BATCHES_NOW)
}

/// Half of a counter's round trip between two CPUs, in nanoseconds. `None`: there is only one CPU,
/// or the other thread does not answer.
fn line(one: usize, other: usize, batches: usize) -> Option<u64> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if one == other || cpus < 2 {
        return None;
    }
    let (there, back, is_over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            Affinity::one(other).apply();
            while !is_over.load(Ordering::Relaxed) {
                back.store(there.load(Ordering::Acquire), Ordering::Release);
                std::hint::spin_loop();
            }
        });
        let trips = scope.spawn(|| {
            Affinity::one(one).apply();
            let (begin, mut number) = (now(), 0);
            let mut times = Vec::new();
            while times.len() < batches && begin.elapsed() < TIMEOUT {
                let start = now();
                let answered = (0..TRIPS).all(|_| {
                    number += 1;
                    there.store(number, Ordering::Release);
                    await_answer(&back, number)
                });
                if answered {
                    times.push(start.elapsed());
                }
            }
            is_over.store(true, Ordering::Relaxed);
            times
        });
        let times = trips.join().ok()?;
        // In most batches another program may have interrupted a thread: the shortest was not
        // interrupted.
        let least = times.iter().min()?;
        u64::try_from(least.as_nanos()).ok().map(|ns| ns / TRIPS / 2)
    })
}

/// Waits for the answer `number`. False: the other thread does not answer, so it does not run.
fn await_answer(back: &AtomicU64, number: u64) -> bool {
    for _ in 0..1_000_000 {
        if back.load(Ordering::Acquire) == number {
            return true;
        }
        std::hint::spin_loop();
    }
    false
}

fn tap_costs() -> Result<TapCosts, String> {
    let space = Netns::new()?;
    space.add_bridge("bridge")?;
    for tap in TAPS {
        space.add_tap(tap, 1, None)?;
        space.join_bridge(tap, "bridge")?;
    }
    result_of(&mut own_load(Some(&space), &["tap-costs"])?, &Affinity::current())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_line_needs_two_cpus_and_comes_back() {
        assert_eq!(line_now(0, 0), None);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // None where a loaded machine let the two threads never run at the same time.
        assert!(cpus < 2 || line_now(0, 1) != Some(0), "a line that moves takes time");
    }

    #[test]
    fn an_answer_that_does_not_come_is_not_waited_for_forever() {
        assert!(await_answer(&AtomicU64::new(7), 7));
        assert!(!await_answer(&AtomicU64::new(6), 7));
    }
}
