//! The bare model of queues whose clients sleep: threads, counters and eventfds, and nothing else.
//!
//! It tells what the number of queues costs on this machine whatever serves them.
//! ```text
//! client:  what is done?  it works on each item, and hands it in again
//!          nothing is done?  it asks to be called, looks once more, sleeps on its eventfd
//! server:  takes in turn from every ring all that was handed in, works on it, says that it is
//!          done; the client has asked?  calls it.  It never sleeps.
//! ```
//! An item is a line of memory that both sides write to, and some nanoseconds of work for each.

use super::{LoadError, LoadResult, measure_rate};
use crate::measure::{now, own_cpu_seconds};
use clap::Args;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

/// Work of a client on an item: about what libblkio takes for a request.
const CLIENT_NS: u64 = 70;
/// Work of the server on an item: about what our worker takes for a request of a null disk.
const SERVER_NS: u64 = 50;
/// Looks that find nothing before a server looks again.
const LOOK_PAUSES: u32 = 4;

/// `manyring-bench load bare ..`
#[derive(Args, Clone, Debug)]
pub(crate) struct BareArgs {
    /// Rings, each with a client of its own.
    #[arg(long, default_value_t = 1)]
    rings: usize,
    /// Items of each ring.
    #[arg(long, default_value_t = 64)]
    depth: usize,
    /// How long, in seconds; fractions are fine.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// A number that two threads read and one writes to, on lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Shared<T>(T);

/// A ring: items are numbered as they are handed in, and done in that order.
struct BareRing {
    handed_in: Shared<AtomicU64>,
    done: Shared<AtomicU64>,
    is_asked: Shared<AtomicBool>,
    items: Vec<Shared<AtomicU64>>,
    call: OwnedFd,
}

impl BareRing {
    fn new(depth: usize) -> Result<Self, LoadError> {
        let failed = |errno: rustix::io::Errno| LoadError::Client {
            step: "eventfd",
            problem: errno.to_string(),
        };
        Ok(Self {
            handed_in: Shared::default(),
            done: Shared::default(),
            is_asked: Shared::default(),
            items: (0..depth).map(|_| Shared::default()).collect(),
            call: eventfd(0, EventfdFlags::CLOEXEC).map_err(failed)?,
        })
    }

    fn touch(&self, number: u64) {
        let at = usize::try_from(number).unwrap_or(0) % self.items.len();
        let item = &self.items[at].0;
        item.store(item.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    /// The client, until it is told to stop. How many items it has had back.
    fn drive(&self, work: &Work, is_over: &AtomicBool) -> u64 {
        let mut seen = 0;
        let mut given = self.items.len() as u64;
        self.handed_in.0.store(given, Ordering::Release);
        let mut has_asked = false;
        while !is_over.load(Ordering::Relaxed) {
            let done = self.done.0.load(Ordering::Acquire);
            if done == seen {
                if has_asked {
                    let _ = rustix::io::read(&self.call, &mut [0u8; 8]);
                }
                has_asked = !has_asked;
                self.is_asked.0.store(has_asked, Ordering::Relaxed);
                // The server says what is done and then looks whether it is asked to call.
                fence(Ordering::SeqCst);
                continue;
            }
            if std::mem::take(&mut has_asked) {
                self.is_asked.0.store(false, Ordering::Relaxed);
            }
            while seen != done {
                self.touch(seen);
                work.spend(CLIENT_NS);
                (seen, given) = (seen + 1, given + 1);
                self.handed_in.0.store(given, Ordering::Release);
            }
        }
        seen
    }

    /// A turn of the server, which has served `served` so far. False: nothing was there.
    fn serve(&self, served: &mut u64, work: &Work) -> bool {
        let handed_in = self.handed_in.0.load(Ordering::Acquire);
        if handed_in == *served {
            return false;
        }
        while *served != handed_in {
            self.touch(*served);
            work.spend(SERVER_NS);
            *served += 1;
        }
        self.done.0.store(handed_in, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.is_asked.0.load(Ordering::Relaxed) {
            self.is_asked.0.store(false, Ordering::Relaxed);
            self.ring();
        }
        true
    }
}

/// How long a step of useless work takes.
struct Work {
    steps_per_us: u64,
}

impl Work {
    const STEPS: u64 = 1_000_000;

    fn measure() -> Self {
        let start = now();
        spin(Self::STEPS);
        let us = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
        Self { steps_per_us: (Self::STEPS / us.max(1)).max(1) }
    }

    fn spend(&self, ns: u64) {
        spin(ns * self.steps_per_us / 1000);
    }
}

fn spin(steps: u64) {
    (0..steps).for_each(|step| {
        black_box(step);
    });
}

/// Runs the model.
///
/// # Errors
/// [`LoadError`] if the options make no sense, or if there is no eventfd to be had.
pub(crate) fn run(args: &BareArgs) -> Result<LoadResult, LoadError> {
    if args.rings == 0 || args.depth == 0 {
        return Err(LoadError::Options("rings and depth must not be 0"));
    }
    let bells: Vec<_> =
        (0..args.rings).map(|_| BareRing::new(args.depth)).collect::<Result<_, _>>()?;
    let (work, is_over) = (&Work::measure(), &AtomicBool::new(false));
    let (cpu, start) = (own_cpu_seconds(), now());
    let items = std::thread::scope(|scope| {
        let clients: Vec<_> =
            bells.iter().map(|bell| scope.spawn(move || bell.drive(work, is_over))).collect();
        let bells = &bells;
        scope.spawn(move || {
            let mut served = vec![0; bells.len()];
            while !is_over.load(Ordering::Relaxed) {
                let mut has_worked = false;
                for (bell, served) in bells.iter().zip(&mut served) {
                    has_worked |= bell.serve(served, work);
                }
                if !has_worked {
                    (0..LOOK_PAUSES).for_each(|_| std::hint::spin_loop());
                }
            }
        });
        std::thread::sleep(Duration::try_from_secs_f64(args.seconds).unwrap_or_default());
        is_over.store(true, Ordering::Relaxed);
        bells.iter().for_each(BareRing::ring);
        clients.into_iter().map(|client| client.join().unwrap_or(0)).sum()
    });
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), own_cpu_seconds() - cpu);
    Ok(LoadResult {
        requests: items,
        seconds,
        iops: measure_rate(items, seconds),
        client_cpu_seconds: cpu,
        ..LoadResult::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_sleeps_is_called_and_gets_back_what_was_served() {
        let (bell, is_over) = (BareRing::new(16).unwrap(), AtomicBool::new(false));
        let work = Work { steps_per_us: 1 };
        let mut served = 0;
        let seen = std::thread::scope(|scope| {
            let client = scope.spawn(|| bell.drive(&work, &is_over));
            while served < 10_000 {
                if !bell.serve(&mut served, &work) {
                    std::thread::yield_now();
                }
            }
            is_over.store(true, Ordering::Relaxed);
            bell.ring();
            client.join().unwrap()
        });
        assert!((served - 16..=served).contains(&seen), "{seen} of {served}");
    }

    #[test]
    fn a_model_without_rings_or_items_is_refused() {
        for (rings, depth) in [(0, 1), (1, 0)] {
            assert!(run(&BareArgs { rings, depth, seconds: 0.0 }).is_err());
        }
    }
}
