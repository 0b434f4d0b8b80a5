//! Moves queues between workers: measures the load, lets the policy decide, and moves.
//!
//! Runs on the control thread, which never reads /proc itself, and only after a worker has reported
//! that it is saturated or mostly sleeps: an idle daemon has no timer.
//! ```text
//! loop:  wait until a worker reports that it is saturated, or that it mostly sleeps
//!        measure for a window: 50 ms if a worker is saturated, else a second
//!        the policy decides; its moves are made all at once, so that a queue that cannot move
//!        delays no other queue
//!        pause
//! ```

#[cfg(test)]
mod tests;

use crate::accounts::{ThreadTimes, idle_ns};
use crate::blocking::aside;
use crate::policy::placement::{Move, Placement, PlacementWindow, QueueLoad, WorkerLoad};
use crate::pool::handle::Route;
use crate::pool::{Home, Pool};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// The window of measurement before queues of a saturated worker are moved.
const WINDOW: Duration = Duration::from_millis(50);
/// The window of measurement before queues are gathered on fewer workers: rare work must be seen
/// too.
const LONG_WINDOW: Duration = Duration::from_secs(1);
/// Pause after a decision.
const PAUSE: Duration = Duration::from_millis(100);

/// A sample of counters that only grow; two samples make a window.
struct LoadSample {
    at: Instant,
    workers: Vec<WorkerSample>,
    /// The nanoseconds that each queue has worked, with its worker.
    queues: Vec<(Option<usize>, u64)>,
    idle_ns: BTreeMap<usize, u64>,
}

struct WorkerSample {
    /// `None`: the worker's thread does not run.
    thread_id: Option<i32>,
    times: ThreadTimes,
    looked_ns: u64,
    cpus: Option<Vec<usize>>,
    is_open: bool,
}

impl Pool {
    /// Balances for ever.
    pub async fn balance(self: Arc<Self>) {
        let began = Instant::now();
        let mut placement = Placement::default();
        loop {
            let mut is_saturated = self.reports.hear().await;
            let routes: Arc<[_]> = self.routes().into();
            let Some(mut before) = self.sampled(&routes).await else { continue };
            if !is_saturated {
                is_saturated = timeout(LONG_WINDOW, self.reports.hear_saturated()).await.is_ok();
                if is_saturated {
                    before = self.sampled(&routes).await.unwrap_or(before);
                }
            }
            if is_saturated {
                sleep(WINDOW).await;
            }
            let Some(after) = self.sampled(&routes).await else { continue };
            let now_ns = nanoseconds(after.at.duration_since(began));
            let moves = placement.decide(&window(now_ns, &routes, &before, &after));
            let mut under_way = JoinSet::new();
            for Move { queue, to } in moves {
                let route = routes[queue].clone();
                under_way.spawn(async move {
                    let moved = route.move_to(to).await;
                    tracing::debug!(worker = to, moved, "queue moves to another worker");
                    moved
                });
            }
            // A queue whose disk does not complete its requests pauses for each attempt to move it,
            // and stays.
            let has_moved = under_way.join_all().await.contains(&true);
            if !has_moved {
                placement.forget_last();
            }
            self.reports.note_outcome(is_saturated || has_moved);
            sleep(PAUSE).await;
        }
    }

    /// Takes a sample on another thread than the control thread: reading /proc may take long.
    async fn sampled(self: &Arc<Self>, routes: &Arc<[Arc<Route>]>) -> Option<LoadSample> {
        let (pool, routes) = (self.clone(), routes.clone());
        aside(move || pool.sample(&routes)).await
    }

    fn sample(&self, routes: &[Arc<Route>]) -> LoadSample {
        let workers = self.views().into_iter().map(|view| WorkerSample {
            thread_id: view.thread_id,
            times: view.times,
            looked_ns: view.stats.looked_ns.value(),
            cpus: view.cpus,
            is_open: view.is_open,
        });
        LoadSample {
            at: Instant::now(),
            workers: workers.collect(),
            queues: routes.iter().map(|r| (r.worker(), r.stats().busy_ns.value())).collect(),
            idle_ns: idle_ns(),
        }
    }
}

fn window(
    now_ns: u64,
    routes: &[Arc<Route>],
    before: &LoadSample,
    after: &LoadSample,
) -> PlacementWindow {
    let workers = after.workers.iter().enumerate().map(|(index, after)| {
        let before = before.workers.get(index).filter(|b| b.thread_id == after.thread_id);
        let since = |of: fn(&WorkerSample) -> u64| {
            before.map_or(0, |before| of(after).saturating_sub(of(before)))
        };
        let ran_ns = since(|worker| worker.times.ran_ns);
        WorkerLoad {
            worked_ns: ran_ns.saturating_sub(since(|worker| worker.looked_ns)),
            ran_ns,
            delayed_ns: since(|worker| worker.times.delayed_ns),
            cpus: after.cpus.clone(),
            is_open: after.is_open,
        }
    });
    let mut units: HashMap<&Home, usize> = HashMap::new();
    let mut queues = Vec::new();
    for (key, route) in routes.iter().enumerate() {
        let next = units.len();
        let unit = *units.entry(route.home()).or_insert(next);
        let (before, after) = (before.queues[key], after.queues[key]);
        // A queue that is moving now, or was moved in the window, has no load on a single worker.
        if let (Some(worker), true) = (after.0, after.0 == before.0) {
            let busy_ns = after.1.saturating_sub(before.1);
            queues.push(QueueLoad { key, worker, unit, busy_ns, is_pinned: route.is_pinned() });
        }
    }
    let idle = after.idle_ns.iter().map(|(cpu, ns)| {
        let before = before.idle_ns.get(cpu).unwrap_or(ns);
        (*cpu, ns.saturating_sub(*before))
    });
    PlacementWindow {
        now_ns,
        len_ns: nanoseconds(after.at.duration_since(before.at)),
        workers: workers.collect(),
        queues,
        idle_ns: idle.collect(),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
