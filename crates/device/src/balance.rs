//! Moves queues between workers when one is saturated: measures, lets the policy decide, moves.
//!
//! Runs on the control thread and only when a worker has said that it is saturated: an idle daemon
//! has no timer.

use crate::policy::placement::{WorkerLoad, decide};
use crate::pool::Pool;
use std::sync::Arc;
use std::time::Duration;

/// What is measured before a decision.
const WINDOW: Duration = Duration::from_millis(50);
/// Pause after a decision.
const PAUSE: Duration = Duration::from_millis(100);

/// Numbers that only grow; two samples make a load.
struct Sample {
    /// Nanoseconds each worker's thread ran and had work.
    worked_ns: Vec<u64>,
    /// Requests of each queue, with its worker.
    requests: Vec<(Option<usize>, u64)>,
    /// Hundredths of a second that all CPUs idled.
    idle_ticks: u64,
}

impl Pool {
    /// Balances for ever.
    pub async fn balance(self: Arc<Self>) {
        loop {
            self.saturated.notified().await;
            let routes = self.routes();
            let sample = || Sample {
                worked_ns: self
                    .thread_ids()
                    .into_iter()
                    .zip(self.worker_stats())
                    .map(|(id, stats)| ran_ns(id).saturating_sub(stats.looked_ns.value()))
                    .collect(),
                requests: routes.iter().map(|r| (r.worker(), r.stats().work())).collect(),
                idle_ticks: idle_ticks(),
            };
            let before = sample();
            tokio::time::sleep(WINDOW).await;
            let after = sample();
            let (workers, idle_percent) = loads(&before, &after);
            if let Some(chosen) = decide(&workers, self.workers_max(), idle_percent) {
                let moved = routes[chosen.queue].move_to(chosen.to).await;
                tracing::debug!(worker = chosen.to, moved, "queue moves to another worker");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn loads(before: &Sample, after: &Sample) -> (Vec<WorkerLoad>, u32) {
    let window_ns = u64::try_from(WINDOW.as_nanos()).unwrap_or(u64::MAX);
    let percent = |ns: u64| u32::try_from(ns * 100 / window_ns).unwrap_or(u32::MAX);
    let mut workers: Vec<_> = after
        .worked_ns
        .iter()
        .zip(&before.worked_ns)
        .map(|(a, b)| WorkerLoad { busy_percent: percent(a.saturating_sub(*b)), queues: vec![] })
        .collect();
    for (key, ((worker, a), (_, b))) in after.requests.iter().zip(&before.requests).enumerate() {
        if let Some(load) = worker.and_then(|w| workers.get_mut(w)) {
            load.queues.push((key, a.saturating_sub(*b)));
        }
    }
    let idle_ns = after.idle_ticks.saturating_sub(before.idle_ticks) * 10_000_000;
    (workers, percent(idle_ns))
}

/// Nanoseconds a thread of ours ran, from the kernel's accounts; 0 if they cannot be read.
fn ran_ns(thread_id: i32) -> u64 {
    std::fs::read_to_string(format!("/proc/self/task/{thread_id}/schedstat"))
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Hundredths of a second that all CPUs idled since the start; 0 if that cannot be read.
fn idle_ticks() -> u64 {
    std::fs::read_to_string("/proc/stat")
        .ok()
        .and_then(|text| text.lines().next()?.split_whitespace().nth(4)?.parse().ok())
        .unwrap_or(0)
}
