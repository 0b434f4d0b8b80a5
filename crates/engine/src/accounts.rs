//! Reads the kernel's accounts: how long our threads ran and waited for a CPU, how long CPUs idled,
//! and how many threads the kernel keeps for an io_uring.

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Returns the CPU time that the calling thread has used since it began.
#[must_use]
pub fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// The sum of the CPU time of calls since the last [`Self::take`].
#[derive(Debug, Default)]
pub(crate) struct Cost {
    ns: AtomicU64,
}

impl Cost {
    /// Makes `call`, and adds the CPU time of the call to the sum, but at most `most`.
    pub(crate) fn add<T>(&self, most: Duration, call: impl FnOnce() -> T) -> T {
        let before = cpu_time();
        let result = call();
        let took = cpu_time().saturating_sub(before).min(most);
        self.ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        result
    }

    /// Returns the sum, and sets it to zero.
    pub(crate) fn take(&self) -> Duration {
        Duration::from_nanos(self.ns.swap(0, Ordering::Relaxed))
    }
}

/// CPU times of a thread since the thread began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ThreadTimes {
    /// Nanoseconds in which the thread ran.
    pub(crate) ran_ns: u64,
    /// Nanoseconds in which the thread was runnable, but waited for a CPU.
    pub(crate) delayed_ns: u64,
}

/// Returns the times of a thread of this process; zero if they cannot be read.
pub(crate) fn thread_times(thread_id: i32) -> ThreadTimes {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread_id}/schedstat"));
    text.ok().and_then(|text| parse_schedstat(&text)).unwrap_or_default()
}

/// Parses "run time, run delay, time slices" (the kernel's `Documentation/scheduler/sched-stats`).
fn parse_schedstat(text: &str) -> Option<ThreadTimes> {
    let mut numbers = text.split_whitespace().map(str::parse);
    let (ran, delayed) = (numbers.next()?, numbers.next()?);
    Some(ThreadTimes { ran_ns: ran.ok()?, delayed_ns: delayed.ok()? })
}

/// Returns the number of kernel threads for the io_uring of this process's thread `thread_id`.
pub(crate) fn ring_threads(thread_id: i32) -> usize {
    let folder = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let thread = |entry: std::fs::DirEntry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, name))
    };
    count_ring_threads(&folder.filter_map(thread).collect(), thread_id)
}

/// Counts the kernel threads of an io_uring. The kernel names such a thread "iou-wrk-" and the id
/// of the thread that has the io_uring. In a PID namespace the kernel uses that thread's id on the
/// host, which we cannot know. So if no kernel thread is named after `thread_id`, the function
/// takes, of the ids that are no thread of this process, the id with most kernel threads.
fn count_ring_threads(names: &BTreeMap<i32, String>, thread_id: i32) -> usize {
    let mut by_id = BTreeMap::new();
    for name in names.values() {
        if let Some(Ok(id)) = name.trim().strip_prefix("iou-wrk-").map(str::parse::<i32>) {
            *by_id.entry(id).or_default() += 1;
        }
    }
    let own = by_id.get(&thread_id).copied();
    let unknown = by_id.iter().filter(|(id, _)| !names.contains_key(id)).map(|(_, count)| *count);
    own.or(unknown.max()).unwrap_or(0)
}

/// Returns the CPUs that the calling thread may use.
#[must_use]
pub fn allowed_cpus() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Binds the calling thread to these CPUs.
///
/// # Errors
/// `EINVAL`: the process may use none of them.
pub(crate) fn bind(cpus: &[usize]) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
    sched_setaffinity(None, &set)
}

/// Returns the nanoseconds that each CPU has idled since the host started. Leaves out CPUs that the
/// calling thread may not use, and CPUs whose time cannot be read.
pub(crate) fn idle_ns() -> BTreeMap<usize, u64> {
    let allowed = allowed_cpus();
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let tick_ns = 1_000_000_000 / rustix::param::clock_ticks_per_second().max(1);
    let mut idle = parse_idle(&text, tick_ns);
    idle.retain(|cpu, _| allowed.contains(cpu));
    idle
}

/// Reads lines of `/proc/stat`: "cpuN user nice system idle iowait ..". A CPU whose tasks wait for
/// a disk (iowait) is free too, so its time counts as idle.
fn parse_idle(text: &str, tick_ns: u64) -> BTreeMap<usize, u64> {
    let of_line = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_ascii_whitespace();
        let cpu = words.next()?.parse().ok()?;
        let ticks: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        Some((cpu, ticks.get(3..5)?.iter().sum::<u64>().saturating_mul(tick_ns)))
    };
    // The line with the sum of all CPUs begins with "cpu " and no number.
    let of_one = |line: &&str| !line.starts_with("cpu ");
    text.lines().filter(of_one).filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_each_cpu() {
        let text = "cpu  9 9 9 900 90 9 9 9 9 9\ncpu0 1 2 3 400 50 6 7 8 9 0\n\
                    cpu12 1 2 3 500 0 6 7 8 9 0\nintr 5 cpu\nctxt 1\n";
        assert_eq!(parse_idle(text, 10), BTreeMap::from([(0, 4500), (12, 5000)]));
        assert_eq!(parse_idle("cpu1 1 2\ncpux 1 2 3 4 5\n", 10), BTreeMap::new());
    }

    #[test]
    fn a_thread_has_its_run_time_and_its_delay() {
        let times = ThreadTimes { ran_ns: 5, delayed_ns: 7 };
        assert_eq!(parse_schedstat("5 7 9\n"), Some(times));
        assert_eq!(parse_schedstat("5\n"), None);
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        // The account of a thread is brought up to date when it gives its CPU away.
        while thread_times(own).ran_ns == 0 {
            std::thread::yield_now();
        }
        assert_eq!(thread_times(0), ThreadTimes::default());
    }

    #[test]
    fn the_kernels_threads_are_those_of_one_ring_whatever_its_thread_is_called_outside() {
        let names = ["worker-0", "worker-1", "iou-wrk-1", "iou-wrk-0", "iou-wrk-1", "iou-sqp-1"];
        let names: BTreeMap<_, _> = (0..).zip(names.map(|name| format!("{name}\n"))).collect();
        let count = |id| count_ring_threads(&names, id);
        assert_eq!((count(0), count(1), count(2)), (1, 2, 0));
        // The host numbers threads differently.
        let moved = names.iter().map(|(id, name)| (id + 100, name.clone())).collect();
        assert_eq!(count_ring_threads(&moved, 100), 2);
    }

    #[test]
    fn our_cpus_are_those_that_idle_is_told_of() {
        let idle: Vec<_> = idle_ns().into_keys().collect();
        assert!(!idle.is_empty());
        assert_eq!(idle, allowed_cpus());
    }
}
