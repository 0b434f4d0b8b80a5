//! Clocks, latencies, random offsets, CPUs: what every measurement needs.

pub(crate) mod cgroup;

use hdrhistogram::Histogram;
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, Pid};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The only place of this program that reads the wall clock.
#[allow(clippy::disallowed_methods, reason = "a benchmark measures time; read here only")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// CPU time of this process so far, in seconds.
pub(crate) fn own_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default().as_secs_f64()
}

/// CPU seconds that all CPUs have been busy so far, with any program; includes stolen time.
#[allow(clippy::cast_precision_loss, reason = "ticks since the system began")]
pub(crate) fn busy_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    busy_ticks(&text) as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// Clock ticks in the first line of `/proc/stat`, without idle and I/O wait. The line counts guests
/// twice.
fn busy_ticks(stat: &str) -> u64 {
    let fields = stat.lines().next().into_iter().flat_map(|line| line.split_whitespace().skip(1));
    let ticks = fields.take(8).map(|field| field.parse::<u64>().unwrap_or(0));
    ticks.enumerate().filter(|(index, _)| !matches!(index, 3 | 4)).map(|(_, ticks)| ticks).sum()
}

/// Seconds that a task (`thread-self`, or a folder of its own below `/proc`) was ready to run and
/// had to wait, since it began; 0 if the kernel does not say.
#[allow(clippy::cast_precision_loss, reason = "nanoseconds of one run")]
pub(crate) fn waited_seconds(task: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{task}/schedstat")).unwrap_or_default();
    run_delay_ns(&text) as f64 / 1e9
}

/// The time, and how long a client and the worker that serves it had waited for a CPU by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasureTime {
    at: Instant,
    own: Duration,
    worker: Duration,
}

impl MeasureTime {
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.at.saturating_duration_since(earlier.at)
    }

    /// How long the client waited for a CPU between `earlier` and this moment.
    pub(crate) fn own_delay_since(self, earlier: Self) -> Duration {
        self.own.saturating_sub(earlier.own)
    }

    /// The time since `earlier` in which neither the client nor the worker waited for a CPU.
    pub(crate) fn since_without_delay(self, earlier: Self) -> Duration {
        let worker = self.worker.saturating_sub(earlier.worker);
        self.since(earlier).saturating_sub(self.own_delay_since(earlier)).saturating_sub(worker)
    }
}

/// How long two threads were ready to run and had to wait so far. The files stay open, so that it
/// can be read often.
#[derive(Debug)]
pub(crate) struct RunDelay {
    own: Option<File>,
    worker: Option<File>,
}

impl RunDelay {
    /// The run delay of the calling thread; always 0 if the kernel does not report it.
    pub(crate) fn of_this_thread() -> Self {
        Self { own: File::open("/proc/thread-self/schedstat").ok(), worker: None }
    }

    /// Adds the run delay of the daemon's worker from now on.
    pub(crate) fn add_worker(&mut self, daemon: u32) {
        let threads = std::fs::read_dir(format!("/proc/{daemon}/task")).into_iter().flatten();
        let worker = threads.flatten().map(|thread| thread.path()).find(|thread| {
            let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
            name.starts_with("worker-")
        });
        self.worker = worker.and_then(|thread| File::open(thread.join("schedstat")).ok());
    }

    /// The time, and both run delays, at this moment.
    pub(crate) fn now(&self) -> MeasureTime {
        MeasureTime {
            at: now(),
            own: delay(self.own.as_ref()),
            worker: delay(self.worker.as_ref()),
        }
    }
}

fn delay(schedstat: Option<&File>) -> Duration {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 64];
    let len = schedstat.and_then(|file| file.read_at(&mut bytes, 0).ok()).unwrap_or(0);
    Duration::from_nanos(run_delay_ns(std::str::from_utf8(&bytes[..len]).unwrap_or_default()))
}

/// The second number of a `schedstat` file: nanoseconds of run delay.
fn run_delay_ns(schedstat: &str) -> u64 {
    let field = schedstat.split_whitespace().nth(1);
    field.and_then(|field| field.parse().ok()).unwrap_or(0)
}

/// Restricts the calling thread, and threads that it starts later, to one CPU.
pub(crate) fn pin(cpu: usize) -> Result<(), rustix::io::Errno> {
    rustix::thread::sched_setaffinity(None, &Affinity::one(cpu).0)
}

/// A set of CPUs for a thread and all threads that it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Affinity(CpuSet);

impl Affinity {
    /// The CPUs of the calling thread.
    pub(crate) fn current() -> Self {
        Self(rustix::thread::sched_getaffinity(None).unwrap_or_default())
    }

    /// The CPUs of another program's first thread; empty if there is no such program.
    #[cfg(test)]
    pub(crate) fn of(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(rustix::thread::sched_getaffinity(pid).unwrap_or_default())
    }

    /// A set of one CPU.
    pub(crate) fn one(cpu: usize) -> Self {
        let mut set = CpuSet::new();
        set.set(cpu);
        Self(set)
    }

    /// The CPU at index `number` of the set, modulo its size.
    pub(crate) fn nth(&self, number: usize) -> Self {
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| self.0.is_set(cpu)).collect();
        if cpus.is_empty() { self.clone() } else { Self::one(cpus[number % cpus.len()]) }
    }

    /// Moves a thread of another program to these CPUs, if that is possible.
    pub(crate) fn apply_to(&self, thread: Pid) {
        let _ = rustix::thread::sched_setaffinity(Some(thread), &self.0);
    }

    /// Moves the calling thread to these CPUs. If that fails, the thread stays where it is: the
    /// ratios of one run are still fair, and a machine with one CPU can run every scenario.
    pub(crate) fn apply(&self) {
        let _ = rustix::thread::sched_setaffinity(None, &self.0);
    }
}

/// The machine, for people: its processor, its CPUs, its kernel.
pub(crate) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("an unnamed processor", |(_, name)| name.trim());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = rustix::system::uname();
    let kernel = kernel.release().to_string_lossy().into_owned();
    format!("{model}, {cpus} CPUs, Linux {kernel}")
}

/// Medians of the machine's basic costs during this run, in nanoseconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Calibration {
    /// From a write to an eventfd to the sleeper on the other CPU running.
    pub(crate) wake_ns: u64,
    /// The write to the eventfd that wakes the sleeper.
    pub(crate) wake_write_ns: u64,
    /// The cheapest system call.
    pub(crate) syscall_ns: u64,
    /// Copying 4 KiB that lie in the cache.
    pub(crate) memcpy_4k_ns: u64,
}

/// Number of wakes that are measured.
const WAKES: usize = 200;

impl Calibration {
    pub(crate) fn measure(waker_cpu: usize, sleeper_cpu: usize) -> Self {
        let (wake_ns, wake_write_ns) = wake(waker_cpu, sleeper_cpu).unwrap_or_default();
        let (source, mut target) = ([1u8; 4096], [0u8; 4096]);
        Self {
            wake_ns,
            wake_write_ns,
            syscall_ns: step(|| _ = black_box(rustix::process::getppid())),
            memcpy_4k_ns: step(|| black_box(&mut target).copy_from_slice(black_box(&source))),
        }
    }
}

impl std::fmt::Display for Calibration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "this machine now: wake of the other CPU {:.1} us (writer pays {:.1} us), system call \
             {} ns, copy of 4 KiB {} ns",
            Duration::from_nanos(self.wake_ns).as_secs_f64() * 1e6,
            Duration::from_nanos(self.wake_write_ns).as_secs_f64() * 1e6,
            self.syscall_ns,
            self.memcpy_4k_ns
        )
    }
}

/// Median nanoseconds of a short step, over batches of it.
fn step(mut act: impl FnMut()) -> u64 {
    const BATCH: u32 = 1000;
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            let start = now();
            (0..BATCH).for_each(|_| act());
            start.elapsed() / BATCH
        })
        .collect();
    median_ns(&mut times)
}

pub(crate) fn median_ns(times: &mut [Duration]) -> u64 {
    times.sort();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    u64::try_from(median.as_nanos()).unwrap_or(u64::MAX)
}

/// Wakes a sleeper many times. Returns the median of the wake and of the write, in nanoseconds.
fn wake(waker_cpu: usize, sleeper_cpu: usize) -> Result<(u64, u64), rustix::io::Errno> {
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    let (sender, woken) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let event = &event;
        scope.spawn(move || {
            Affinity::one(sleeper_cpu).apply();
            for _ in 0..WAKES {
                let _ = rustix::io::read(event, &mut [0; 8]);
                let _ = sender.send(now());
            }
        });
        scope
            .spawn(move || {
                Affinity::one(waker_cpu).apply();
                let (mut wakes, mut writes) = (Vec::new(), Vec::new());
                for _ in 0..WAKES {
                    // Long enough for the other CPU to fall asleep.
                    std::thread::sleep(Duration::from_micros(200));
                    let start = now();
                    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                    writes.push(start.elapsed());
                    if let Ok(at) = woken.recv() {
                        wakes.push(at.saturating_duration_since(start));
                    }
                }
                (median_ns(&mut wakes), median_ns(&mut writes))
            })
            .join()
            .map_err(|_| rustix::io::Errno::CANCELED)
    })
}

/// Latencies of requests.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

/// Upper bound of the first step of a histogram, in nanoseconds.
const LATENCY_NS_FIRST: u64 = 100;
/// Ratio of the bounds of neighbouring steps: the fourth root of 2.
const STEP: f64 = 1.189_207_115;
/// Longest latency that is told apart from longer ones, in nanoseconds: one minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

impl Latencies {
    pub(crate) fn new() -> Self {
        // Two digits; the bounds are constants that the library accepts.
        let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 2);
        Self(histogram.unwrap_or_else(|_| unreachable!("constant bounds")))
    }

    /// Records the latency of one request.
    #[inline]
    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn add(&mut self, other: &Self) {
        let _ = self.0.add(&other.0);
    }

    /// Number of recorded requests.
    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The histogram: upper bound of each step in microseconds, and number of requests. A doubling
    /// has four steps.
    pub(crate) fn histogram_us(&self) -> Vec<(f64, u64)> {
        let steps = self.0.iter_log(LATENCY_NS_FIRST, STEP);
        let counted =
            steps.map(|step| (step.value_iterated_to(), step.count_since_last_iteration()));
        #[allow(clippy::cast_precision_loss, reason = "two digits are kept")]
        let in_us = |(ns, count): (u64, u64)| (ns as f64 / 1000.0, count);
        counted.filter(|(_, count)| *count > 0).map(in_us).collect()
    }

    /// The latency in microseconds that this share of the requests (0 to 1) did not exceed.
    #[allow(clippy::cast_precision_loss, reason = "two digits are kept")]
    pub(crate) fn quantile_us(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64 / 1000.0
    }
}

/// Random numbers with a seed: xorshift64*.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give neighbouring streams, and the state is never 0.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`, which is not 0.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let random = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // Multiply and take the high half instead of a division: this runs once per request.
        u64::try_from((u128::from(random) * u128::from(bound)) >> 64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_counted_round_and_round() {
        let mut set = CpuSet::new();
        [3, 5].into_iter().for_each(|cpu| set.set(cpu));
        let two = Affinity(set);
        assert_eq!([0, 1, 2].map(|n| two.nth(n)), [3, 5, 3].map(Affinity::one));
        let none = Affinity(CpuSet::new());
        assert_eq!(none.nth(1), none);
    }

    #[test]
    fn random_numbers_reach_the_whole_range_and_never_leave_it() {
        for seed in 0..32 {
            let mut random = Random::new(seed);
            let mut seen = [false; 7];
            for _ in 0..1000 {
                seen[usize::try_from(random.below(7)).unwrap()] = true;
            }
            assert_eq!(seen, [true; 7], "seed {seed}");
        }
    }

    #[test]
    fn a_time_without_delay_is_what_neither_client_nor_worker_waited() {
        let us = Duration::from_micros;
        let sent = MeasureTime { at: now(), own: us(7), worker: us(1) };
        let back = MeasureTime { at: sent.at + us(100), own: us(37), worker: us(11) };
        assert_eq!((back.since(sent), back.own_delay_since(sent)), (us(100), us(30)));
        assert_eq!(back.since_without_delay(sent), us(60));
        assert_eq!(sent.since_without_delay(back), Duration::ZERO);
        assert_eq!((run_delay_ns("123 456 7\n"), run_delay_ns("")), (456, 0));
    }

    #[test]
    fn the_worker_of_a_daemon_is_found_by_its_name() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("worker-0".into());
        let thread = thread.spawn(move || stopped.recv()).unwrap();
        let mut delay = RunDelay::of_this_thread();
        // A thread takes its name when it first runs.
        while delay.worker.is_none() {
            delay.add_worker(std::process::id());
        }
        drop(stop);
        assert!(thread.join().unwrap().is_err());
    }

    #[test]
    fn busy_is_what_is_neither_idle_nor_waiting() {
        assert_eq!(busy_ticks("cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 7 7 7 7"), 63);
        assert!(busy_seconds() > 0.0);
    }

    #[test]
    fn a_histogram_has_every_request_once_in_steps_that_grow() {
        let mut latencies = Latencies::new();
        (1..=1000).for_each(|us| latencies.record(Duration::from_micros(us)));
        let steps = latencies.histogram_us();
        assert_eq!(steps.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        assert!(steps.is_sorted_by(|a, b| a.0 < b.0), "{steps:?}");
        assert!((20..50).contains(&steps.len()), "{steps:?}");
        assert!(Latencies::new().histogram_us().is_empty());
    }

    #[test]
    fn quantiles_are_those_of_what_was_recorded() {
        let mut latencies = Latencies::new();
        (1..=100).for_each(|us| latencies.record(Duration::from_micros(us)));
        assert_eq!(latencies.count(), 100);
        assert!((latencies.quantile_us(0.5) - 50.0).abs() < 1.0);
        assert!((latencies.quantile_us(0.99) - 99.0).abs() < 1.5);
    }
}
