//! How long requests took, and how much of it nobody was to blame for.
//!
//! A request is late by the clock also when a thread that serves it was ready and the host ran
//! something else. The kernel counts that time for each thread (`schedstat`, run delay). Between a
//! request's start and end we add the run delays of the threads on its way ([`Route`]), and no
//! others: of the guest the thread that asks, and for a frame the far end; of the daemon the worker
//! that had the largest delay, and for a disk the largest of those that help it, a thread of
//! io_uring or the disk's own; for a frame the largest of the kernel's threads that pass packets on
//! (`ksoftirqd`). We add the time that the machine's own host gave a CPU to others (steal), and for
//! a disk the time that the host's own disk was late ([`Probe`]); what is left of the request is
//! the daemon's own. A control thread, janitor or log that waits for a CPU explains nothing. The
//! report names what the host took of the worst request ([`Reasons`]).

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
/// The name of the thread of a guest that sends frames back.
pub(super) const FAR_END: &str = "far end";
/// Shorter requests are not worth a question to the kernel.
const SUSPECT: Duration = Duration::from_millis(10);

/// The way of a request to its end and back, besides the guest and a worker.
#[derive(Clone, Debug)]
pub(super) enum Route {
    /// Through the host's disk, which is probed.
    Disk(Arc<Probe>),
    /// Through the host's network, to the far end and back.
    Net,
}

/// Run delays of a moment, in nanoseconds, of the threads that stand on the way of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct Mark {
    own: u64,
    workers: HashMap<u32, u64>,
    /// Threads that do for a worker what takes long.
    helpers: HashMap<u32, u64>,
    /// Threads that pass packets on, by process id.
    packets: HashMap<u32, u64>,
    /// Time that each CPU was not ours, by its number.
    stolen: HashMap<u32, u64>,
}

/// Latencies of a guest's requests.
#[derive(Debug)]
pub(super) struct Latencies {
    daemon: u32,
    route: Route,
    /// Process ids of the kernel's threads that pass packets on.
    packets: Vec<u32>,
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
    /// The part of this time that the host caused.
    why: Reasons,
}

/// The parts of a request's time that the host caused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reasons {
    /// Waits for a CPU: of the guest, ..
    own: Duration,
    /// .. of a worker, ..
    worker: Duration,
    /// .. of a thread that helps it, ..
    helper: Duration,
    /// .. and of a thread of the kernel that passes packets on.
    packets: Duration,
    /// The time that the machine's own host gave to other machines.
    stolen: Duration,
    /// The time that the host's own disk took too long.
    disk: Duration,
}

impl Reasons {
    fn total(&self) -> Duration {
        self.own + self.worker + self.helper + self.packets + self.stolen + self.disk
    }
}

impl std::fmt::Display for Reasons {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} ms the guest, {} ms a worker, {} ms a helper of it and {} ms a thread for packets \
             waited for a CPU, {} ms the machine's host had the CPU, {} ms the disk was late",
            self.own.as_millis(),
            self.worker.as_millis(),
            self.helper.as_millis(),
            self.packets.as_millis(),
            self.stolen.as_millis(),
            self.disk.as_millis()
        )
    }
}

impl Latencies {
    /// Of requests to the daemon of this process id, which go by this route.
    pub(super) fn new(daemon: u32, route: Route) -> Outcome<Self> {
        let histogram = Histogram::new_with_max(SLOWEST_US, 3).context("a histogram")?;
        let (packets, worst) = (packet_threads(), Worst::default());
        Ok(Self { daemon, route, packets, histogram, worst, late: 0, broken: 0 })
    }

    /// Run delays at this moment, for requests that start or end now.
    pub(super) fn mark(&self) -> Mark {
        let is_net = matches!(self.route, Route::Net);
        let asks = |thread: &Thread| thread.is_main || is_net && thread.name == FAR_END;
        let own = threads("self").filter(asks).map(|thread| thread.delay).sum();
        let mut mark = Mark { own, stolen: stolen(), ..Mark::default() };
        for Thread { id, name, delay, .. } in threads(&self.daemon.to_string()) {
            if name.starts_with("worker-") {
                mark.workers.insert(id, delay);
            } else if !is_net && (name.starts_with("iou-") || name == "disk-offload") {
                mark.helpers.insert(id, delay);
            }
        }
        for process in self.packets.iter().filter(|_| is_net) {
            mark.packets.extend(run_delay(&format!("/proc/{process}")).map(|d| (*process, d)));
        }
        mark
    }

    /// The mark for the end of a request that was sent at `sent` and is back now, if it is suspect.
    pub(super) fn end(&self, sent: Instant) -> Option<Mark> {
        (sent.elapsed() >= SUSPECT).then(|| self.mark())
    }

    /// Counts a request that was sent at `sent`, soon after the first mark, and took `took`. The
    /// second mark was made when it came back, if it is suspect.
    pub(super) fn add(
        &mut self,
        sent: Instant,
        took: Duration,
        (start, end): (&Mark, Option<&Mark>),
        what: impl FnOnce() -> String,
    ) {
        self.histogram.saturating_record(micros(took));
        let Some(end) = end.filter(|_| took >= SUSPECT) else { return };
        let disk = match &self.route {
            Route::Disk(probe) => probe.overlap(sent, sent + took),
            Route::Net => Duration::ZERO,
        };
        let why = Reasons { disk, ..start.until(end) };
        let left = took.saturating_sub(why.total());
        self.late += u64::from(took > PROMISE);
        self.broken += u64::from(left > PROMISE);
        if left > self.worst.left {
            self.worst = Worst { left, took, what: what(), why };
        }
    }

    /// The report: quantiles, late requests, broken promises, and the worst one.
    pub(super) fn report(&self) -> Value {
        let disk_late = match &self.route {
            Route::Disk(probe) => probe.late(),
            Route::Net => Duration::ZERO,
        };
        json!({
            "p50_us": self.histogram.value_at_quantile(0.5),
            "p99_us": self.histogram.value_at_quantile(0.99),
            "max_us": self.histogram.max(),
            "late": self.late,
            "broken": self.broken,
            "worst_us": micros(self.worst.left),
            "worst_took_us": micros(self.worst.took),
            "worst": self.worst.what,
            "worst_why": self.worst.why.to_string(),
            "disk_late_ms": micros(disk_late) / 1000,
            "run_delay_ms": self.mark().own / 1_000_000,
        })
    }
}

impl Mark {
    /// Time up to `end` in which the host did not run who had to work.
    fn until(&self, end: &Self) -> Reasons {
        let largest = |before: &HashMap<u32, u64>, after: &HashMap<u32, u64>| {
            let grown = after.iter().map(|(thread, delay)| {
                delay.saturating_sub(before.get(thread).copied().unwrap_or(0))
            });
            Duration::from_nanos(grown.max().unwrap_or(0))
        };
        Reasons {
            own: Duration::from_nanos(end.own.saturating_sub(self.own)),
            worker: largest(&self.workers, &end.workers),
            helper: largest(&self.helpers, &end.helpers),
            packets: largest(&self.packets, &end.packets),
            stolen: largest(&self.stolen, &end.stolen),
            disk: Duration::ZERO,
        }
    }
}

struct Thread {
    id: u32,
    is_main: bool,
    name: String,
    /// Its run delay in nanoseconds.
    delay: u64,
}

/// Each thread of a process.
fn threads(process: &str) -> impl Iterator<Item = Thread> {
    let folder = format!("/proc/{process}");
    // "self" is a link to the number.
    let main = std::fs::canonicalize(&folder).ok();
    let threads = std::fs::read_dir(format!("{folder}/task")).into_iter().flatten();
    threads.filter_map(move |thread| {
        let path = thread.ok()?.path();
        let is_main = path.file_name() == main.as_ref()?.file_name();
        let id = path.file_name()?.to_str()?.parse().ok()?;
        let delay = run_delay(path.to_str()?)?;
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        Some(Thread { id, is_main, name: name.trim_end().to_owned(), delay })
    })
}

/// The run delay of a thread, in nanoseconds.
pub(super) fn run_delay(folder: &str) -> Option<u64> {
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
    use super::super::probe;
    use super::*;

    #[test]
    fn delays_of_the_host_are_taken_off_one_of_each_kind() {
        let of = |delays: &[(u32, u64)]| delays.iter().copied().collect::<HashMap<_, _>>();
        let start = Mark { own: 5, workers: of(&[(1, 10), (2, 10)]), ..Mark::default() };
        let end = Mark {
            own: 7,
            workers: of(&[(1, 40), (2, 110)]),
            helpers: of(&[(9, 1000)]),
            packets: of(&[(7, 20_000)]),
            stolen: of(&[(0, 300_000)]),
        };
        let total = start.until(&end).total();
        assert_eq!(total, Duration::from_nanos(2 + 100 + 1000 + 20_000 + 300_000));
        assert_eq!(end.until(&end), Reasons::default());
    }

    #[test]
    fn only_threads_on_the_way_of_a_request_are_looked_at() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let stopped = Arc::new(std::sync::Mutex::new(stopped));
        for name in ["worker-0", "janitor", "log", "disk-offload", "iou-wrk-1", "sentry"] {
            let stopped = stopped.clone();
            let wait = move || drop(stopped.lock().map(|stopped| stopped.recv()));
            std::thread::Builder::new().name(name.to_owned()).spawn(wait).unwrap();
        }
        let us = std::process::id();
        let look = |route| {
            let mark = Latencies::new(us, route).unwrap().mark();
            (mark.workers.len(), mark.helpers.len(), mark.packets.is_empty())
        };
        let disk = Route::Disk(Arc::new(Probe::default()));
        // A thread takes its name when it first runs.
        while look(disk.clone()).1 < 2 || look(disk.clone()).0 < 1 {
            std::thread::yield_now();
        }
        assert_eq!(look(disk), (1, 2, true));
        let (workers, helpers, _) = look(Route::Net);
        assert_eq!((workers, helpers), (1, 0));
        drop(stop);
    }

    #[test]
    fn a_request_that_was_late_for_no_reason_is_broken() {
        let mut latencies = Latencies::new(std::process::id(), Route::Net).unwrap();
        let mark = latencies.mark();
        let now = Instant::now();
        assert!(latencies.end(now).is_none(), "it may be late yet");
        latencies.add(now, Duration::from_millis(1), (&mark, None), String::new);
        let marks = (&mark, Some(&mark));
        latencies.add(now, Duration::from_secs(3600), marks, || "a read".into());
        let report = latencies.report();
        assert_eq!((&report["late"], &report["broken"]), (&json!(1), &json!(1)));
        assert_eq!(report["worst"], "a read");
    }

    #[test]
    fn a_disk_of_the_daemon_that_sleeps_is_late_for_no_reason_of_the_hosts() {
        const SLEEP: Duration = Duration::from_millis(150);
        let folder = probe::tests::folder();
        for is_direct in [false, true] {
            let probe = Probe::start(&folder.path().join("image"), is_direct).unwrap();
            let route = Route::Disk(probe);
            let mut latencies = Latencies::new(std::process::id(), route).unwrap();
            // The host's own disk may be late as well, but not each time.
            let is_broken = (0..100).any(|_| {
                let (mark, sent) = (latencies.mark(), Instant::now());
                std::thread::sleep(SLEEP);
                let (took, end) = (sent.elapsed(), latencies.end(sent));
                latencies.add(sent, took, (&mark, end.as_ref()), || "a flush".into());
                latencies.report()["broken"] != json!(0)
            });
            assert!(is_broken, "{}", latencies.report());
        }
    }

    #[test]
    fn a_disk_of_the_host_that_is_late_explains_a_request_and_is_named() {
        let probe = Arc::new(Probe::default());
        let mut latencies = Latencies::new(std::process::id(), Route::Disk(probe.clone())).unwrap();
        let (mark, sent) = (latencies.mark(), Instant::now());
        let at = |ms| sent + Duration::from_millis(ms);
        probe.ended(at(10), at(270));
        let took = Duration::from_millis(300);
        latencies.add(sent, took, (&mark, Some(&mark)), || "a flush".into());
        let report = latencies.report();
        assert_eq!((&report["late"], &report["broken"]), (&json!(1), &json!(0)));
        assert_eq!(report["worst_us"], 40_000);
        let why = report["worst_why"].to_string();
        assert!(why.contains("260 ms the disk was late"), "{why}");
    }
}
