//! Workers, threads and histograms as the API shows them. A device process writes them for the
//! supervisor in this form, too.

#![allow(unused_qualifications, reason = "utoipa's macros write types by longer paths than needed")]

use manyring_config::plan::in_words;
use manyring_engine::stats::Histogram;
use manyring_engine::{Held, Pool, WorkerView};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A histogram: its percentiles, and its filled buckets as pairs of largest value and count.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ToSchema)]
pub struct Summary {
    /// The number of values.
    pub count: u64,
    /// The sum of all values.
    pub sum: u64,
    /// The median: half of the values are at most this.
    pub p50: u64,
    /// 90 % of the values are at most this.
    pub p90: u64,
    /// 99 % of the values are at most this.
    pub p99: u64,
    /// The largest value.
    pub max: u64,
    /// The buckets that have values: the largest value that fits each, and the number of its
    /// values.
    pub buckets: Vec<(u64, u64)>,
}

/// The workers and the stuck threads, as `GET /v1/workers` returns them.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
pub struct Workers {
    /// The workers of the daemon and of its device processes.
    pub workers: Vec<WorkerInfo>,
    /// Workers and janitors that a system call has blocked for long.
    #[serde(default)]
    pub stuck: Vec<StuckInfo>,
}

/// A thread that a system call has blocked for long.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct StuckInfo {
    /// The device process of the thread; empty: the thread belongs to the daemon itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Name of the thread.
    pub thread: String,
    /// The device that the thread served when it blocked; empty if it served several.
    pub device: String,
    /// The thread's state in `/proc`: `D` (uninterruptible sleep) or `S` (sleep).
    pub state: String,
    /// The kernel function in which the thread waits.
    pub waits_in: String,
    /// Nanoseconds since the thread began the blocking call.
    pub stuck_ns: u64,
}

impl StuckInfo {
    fn of(held: Held) -> Self {
        Self {
            process: String::new(),
            thread: held.thread,
            device: held.device,
            state: held.state.to_string(),
            waits_in: held.waits_in,
            stuck_ns: u64::try_from(held.since.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

/// A worker, as `GET /v1/workers` shows it.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub struct WorkerInfo {
    /// The device process of the worker; empty: the worker belongs to the daemon itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Index of the worker in its process.
    pub index: usize,
    /// True while the worker has a thread: without queues it ends, and starts again on demand.
    #[serde(default)]
    pub running: bool,
    /// The CPUs to which the worker is bound.
    #[serde(default)]
    pub cpus: Option<Vec<usize>>,
    /// The NUMA node of these CPUs, if the worker follows its guests' memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<usize>,
    /// On a host with several NUMA nodes: of a sample of the guests' memory in this process, how
    /// many pages lie on each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guest_pages: Vec<u64>,
    /// Number of queues that the worker serves now.
    pub queues: u64,
    /// How often the worker slept.
    pub sleeps: u64,
    /// Nanoseconds for which the worker slept.
    pub slept_ns: u64,
    /// CPU time of the worker's thread in nanoseconds, as the kernel counts it.
    #[serde(default)]
    pub ran_ns: u64,
    /// Nanoseconds in which the worker ran, or wanted to run, and found no work.
    #[serde(default)]
    pub looked_ns: u64,
    /// How often the worker waited for a device of the host.
    #[serde(default)]
    pub device_waits: u64,
    /// For queues that moved here from another worker: nanoseconds for which each paused.
    #[serde(default)]
    pub pause_ns: Summary,
    /// The numbers of the worker's polling policy, under their names in [`manyring_engine::stats`].
    #[serde(default)]
    pub polling: BTreeMap<String, u64>,
}

impl Summary {
    /// Summarizes a histogram.
    pub fn of(histogram: &Histogram) -> Self {
        Self::new(histogram.filled().collect(), histogram.sum())
    }

    /// Summarizes buckets, pairs of a largest value and a count in ascending order. `sum`: the sum
    /// of all values.
    pub fn new(buckets: Vec<(u64, u64)>, sum: u64) -> Self {
        let count = buckets.iter().map(|b| b.1).sum();
        let percentile = |percent: u64| {
            let rank = (u128::from(count) * u128::from(percent)).div_ceil(100);
            let mut seen = 0;
            let found = buckets.iter().find(|b| {
                seen += u128::from(b.1);
                seen >= rank
            });
            found.map_or(0, |b| b.0)
        };
        let (p50, p90, p99) = (percentile(50), percentile(90), percentile(99));
        let max = buckets.last().map_or(0, |b| b.0);
        Self { count, sum, p50, p90, p99, max, buckets }
    }

    /// Returns the values that were added after `before`, an earlier summary of the same histogram.
    pub fn since(&self, before: &Self) -> Self {
        let old: BTreeMap<_, _> = before.buckets.iter().copied().collect();
        let buckets = self.buckets.iter().filter_map(|&(max, count)| {
            let new = count.saturating_sub(old.get(&max).copied().unwrap_or(0));
            (new > 0).then_some((max, new))
        });
        Self::new(buckets.collect(), self.sum.wrapping_sub(before.sum))
    }
}

impl Workers {
    /// Returns the workers and the stuck threads of this process.
    pub fn of(pool: &Pool) -> Self {
        let views = pool.views().into_iter().enumerate();
        let nodes = pool.guest_nodes();
        // Workers that have never run are not shown.
        let has_run = |view: &WorkerView| view.thread_id.is_some() || view.ran_ns() > 0;
        let workers = views.filter(|(_, view)| has_run(view)).map(|(index, view)| WorkerInfo {
            process: String::new(),
            index,
            running: view.thread_id.is_some(),
            ran_ns: view.ran_ns(),
            queues: view.stats.queues.value(),
            sleeps: view.stats.sleeps.value(),
            slept_ns: view.stats.slept_ns.value(),
            looked_ns: view.stats.looked_ns.value(),
            device_waits: view.stats.device_waits.value(),
            pause_ns: Summary::of(&view.stats.pause_ns),
            polling: {
                let numbers = view.stats.policy.counters().into_iter();
                numbers.map(|number| (number.name.to_owned(), number.value)).collect()
            },
            node: nodes.node.filter(|_| view.follows_memory),
            guest_pages: nodes.pages.clone(),
            cpus: view.cpus,
        });
        let stuck = manyring_engine::held().into_iter().map(StuckInfo::of);
        Self { workers: workers.collect(), stuck: stuck.collect() }
    }
}

impl WorkerInfo {
    /// Returns the CPUs that the worker may run on, in words: `any`, `0-3`, `4-7 of node 1`.
    pub fn place(&self) -> String {
        let cpus = self.cpus.as_deref().map_or_else(|| "any".to_owned(), in_words);
        self.node.map_or(cpus.clone(), |node| format!("{cpus} of node {node}"))
    }

    /// Returns the same for a narrow column: `any`, `0-3`, `n1 4-7`.
    pub fn short_place(&self) -> String {
        let cpus = self.cpus.as_deref().map_or_else(|| "any".to_owned(), in_words);
        self.node.map_or(cpus.clone(), |node| format!("n{node} {cpus}"))
    }

    /// Returns the worker's number; in a device process with the process's name before it.
    pub fn name(&self) -> String {
        named(&self.process, self.index)
    }
}

impl StuckInfo {
    /// Returns the thread's name; in a device process with the process's name before it.
    pub fn name(&self) -> String {
        named(&self.process, &self.thread)
    }
}

fn named(process: &str, what: impl std::fmt::Display) -> String {
    if process.is_empty() { what.to_string() } else { format!("{process}/{what}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_histograms_own_percentiles() {
        let histogram = Histogram::default();
        for value in [1, 1, 5, 100, 7000, 1 << 40] {
            histogram.record(value, value % 7 + 1);
        }
        let summary = Summary::of(&histogram);
        assert_eq!((summary.count, summary.sum), (histogram.count(), histogram.sum()));
        let percentiles = [50, 90, 99, 100].map(|p| histogram.percentile(p));
        assert_eq!([summary.p50, summary.p90, summary.p99, summary.max], percentiles);
    }

    #[test]
    fn an_interval_counts_only_what_is_new() {
        let histogram = Histogram::default();
        histogram.record(10, 1000);
        let before = Summary::of(&histogram);
        histogram.record(5000, 4);
        let interval = Summary::of(&histogram).since(&before);
        assert_eq!((interval.count, interval.sum), (4, 20_000));
        assert!(interval.p50 >= 5000, "{interval:?}");
        assert_eq!(before.since(&before), Summary::default());
    }
}
