//! How long requests took, and how much of it nobody was to blame for.
//!
//! A request is late by the clock also when a thread that serves it was ready and the host ran
//! something else. The kernel counts that time for each thread (`schedstat`, run delay). Between a
//! request's start and end we add the run delays of the guest's process and those of the daemon
//! thread that had the largest one, a worker and a thread of io_uring, the same of the kernel's
//! threads that pass packets on (`ksoftirqd`), the time that the machine's own host gave a CPU to
//! others (steal), and for a disk the time that the host's own disk was late ([`Probe`]); what is
//! left of the request is the daemon's own.

use super::probe::Probe;
use crate::{Context, Outcome};
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The promise: no well-behaved guest waits longer, whatever its neighbours do.
pub(in crate::soak) const PROMISE: Duration = Duration::from_millis(50);
/// The slowest request that is told from slower ones: five minutes.
const SLOWEST_US: u64 = 300_000_000;
/// Shorter requests are not worth a question to the kernel.
const SUSPECT: Duration = Duration::from_millis(10);

/// Run delays of a moment: the sum of our threads, and each thread of the daemon.
#[derive(Clone, Debug, Default)]
pub(super) struct Mark {
    own: u64,
    daemon: HashMap<u32, u64>,
    kernel: HashMap<u32, u64>,
    /// Threads that pass packets on, by process id.
    packets: HashMap<u32, u64>,
    /// Time that each CPU was not ours, by its number.
    stolen: HashMap<u32, u64>,
}

/// Latencies of a guest's requests.
#[derive(Debug)]
pub(super) struct Latencies {
    daemon: u32,
    /// Process ids of the kernel's threads that pass packets on.
    packets: Vec<u32>,
    disk: Option<Arc<Probe>>,
    histogram: Histogram<u64>,
    worst: Worst,
    /// Requests slower than the promise by the clock.
    late: u64,
    /// Those that run delays do not explain.
    broken: u64,
}

#[derive(Clone, Debug, Default)]
struct Worst {
    left: Duration,
    took: Duration,
    what: String,
}

impl Latencies {
    /// Of requests to the daemon of this process id, which goes to the disk that `disk` probes.
    pub(super) fn new(daemon: u32, disk: Option<Arc<Probe>>) -> Outcome<Self> {
        let histogram = Histogram::new_with_max(SLOWEST_US, 3).context("a histogram")?;
        let (packets, worst) = (packet_threads(), Worst::default());
        Ok(Self { daemon, packets, disk, histogram, worst, late: 0, broken: 0 })
    }

    /// Run delays at this moment, for requests that start now.
    pub(super) fn mark(&self) -> Mark {
        let mut mark =
            Mark { own: run_delays("self").map(|(_, delay, _)| delay).sum(), ..Mark::default() };
        for (thread, delay, is_kernel) in run_delays(&self.daemon.to_string()) {
            let threads = if is_kernel { &mut mark.kernel } else { &mut mark.daemon };
            threads.insert(thread, delay);
        }
        for process in &self.packets {
            mark.packets.extend(run_delay(&format!("/proc/{process}")).map(|d| (*process, d)));
        }
        mark.stolen = stolen();
        mark
    }

    /// Counts a request that was sent at `sent`, soon after `mark`, and took so long.
    pub(super) fn add(
        &mut self,
        sent: Instant,
        took: Duration,
        mark: &Mark,
        what: impl FnOnce() -> String,
    ) {
        self.histogram.saturating_record(micros(took));
        if took < SUSPECT {
            return;
        }
        let disk = self.disk.as_ref();
        let disk = disk.map_or(Duration::ZERO, |disk| disk.overlap(sent, sent + took));
        let left = took.saturating_sub(mark.until(&self.mark())).saturating_sub(disk);
        self.late += u64::from(took > PROMISE);
        self.broken += u64::from(left > PROMISE);
        if left > self.worst.left {
            self.worst = Worst { left, took, what: what() };
        }
    }

    /// What there is to say.
    pub(super) fn report(&self) -> Value {
        json!({
            "p50_us": self.histogram.value_at_quantile(0.5),
            "p99_us": self.histogram.value_at_quantile(0.99),
            "max_us": self.histogram.max(),
            "late": self.late,
            "broken": self.broken,
            "worst_us": micros(self.worst.left),
            "worst_took_us": micros(self.worst.took),
            "worst": self.worst.what,
            "run_delay_ms": self.mark().own / 1_000_000,
        })
    }
}

impl Mark {
    /// Time up to `end` in which the host did not run who had to work.
    fn until(&self, end: &Self) -> Duration {
        let largest = |before: &HashMap<u32, u64>, after: &HashMap<u32, u64>| {
            let grown = after.iter().map(|(thread, delay)| {
                delay.saturating_sub(before.get(thread).copied().unwrap_or(0))
            });
            grown.max().unwrap_or(0)
        };
        let own = end.own.saturating_sub(self.own);
        let daemon = largest(&self.daemon, &end.daemon) + largest(&self.kernel, &end.kernel);
        let host = largest(&self.packets, &end.packets) + largest(&self.stolen, &end.stolen);
        Duration::from_nanos(own + daemon + host)
    }
}

/// Each thread of a process: its id, its run delay in nanoseconds, whether it is io_uring's.
fn run_delays(process: &str) -> impl Iterator<Item = (u32, u64, bool)> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten();
    threads.filter_map(|thread| {
        let path = thread.ok()?.path();
        let id = path.file_name()?.to_str()?.parse().ok()?;
        let delay = run_delay(path.to_str()?)?;
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        Some((id, delay, name.starts_with("iou-")))
    })
}

/// The run delay of a thread, in nanoseconds.
fn run_delay(folder: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("{folder}/schedstat")).ok()?;
    text.split_whitespace().nth(1)?.parse().ok()
}

/// The kernel's threads that pass packets on when a CPU has too many: one for each CPU.
fn packet_threads() -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_one = |id: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        name.starts_with("ksoftirqd/")
    };
    ids.filter(is_one).collect()
}

/// Nanoseconds that the machine's own host gave each CPU to others, as far as it tells.
fn stolen() -> HashMap<u32, u64> {
    const TICK_NS: u64 = 10_000_000;
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let of_cpu = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_whitespace();
        let cpu = words.next()?.parse().ok()?;
        Some((cpu, words.nth(7)?.parse::<u64>().ok()? * TICK_NS))
    };
    // The sum over all CPUs has no number.
    text.lines().filter_map(of_cpu).collect()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_of_the_host_are_taken_off_one_of_each_kind() {
        let daemon = |delays: &[(u32, u64)]| delays.iter().copied().collect::<HashMap<_, _>>();
        let start = Mark { own: 5, daemon: daemon(&[(1, 10), (2, 10)]), ..Mark::default() };
        let end = Mark {
            own: 7,
            daemon: daemon(&[(1, 40), (2, 110)]),
            kernel: daemon(&[(9, 1000)]),
            packets: daemon(&[(7, 20_000)]),
            stolen: daemon(&[(0, 300_000)]),
        };
        assert_eq!(start.until(&end), Duration::from_nanos(2 + 100 + 1000 + 20_000 + 300_000));
        assert_eq!(end.until(&end), Duration::ZERO);
    }

    #[test]
    fn a_request_that_was_late_for_no_reason_is_broken() {
        let mut latencies = Latencies::new(std::process::id(), None).unwrap();
        let mark = latencies.mark();
        let now = Instant::now();
        latencies.add(now, Duration::from_millis(1), &mark, String::new);
        latencies.add(now, Duration::from_secs(3600), &mark, || "a read".into());
        let report = latencies.report();
        assert_eq!((&report["late"], &report["broken"]), (&json!(1), &json!(1)));
        assert_eq!(report["worst"], "a read");
    }
}
