//! To how many pairs of the guest the host delivers frames: measures for the policy
//! (`engine/policy/receive_pairs.rs`), and moves flows between pairs in order.

use super::Inner;
use super::delivery::TURN_FRAMES;
use super::port::HasPort;
use manyring_backend::net::Port;
use manyring_backend::net::tap::Flows;
use manyring_engine::policy::receive_pairs::{self as policy, WINDOW_NS, Window};
use manyring_engine::{Order, Route, aside};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// To how many pairs the operator has the host deliver.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReceivePairs {
    /// To all that the guest uses.
    #[default]
    All,
    /// To as many as are worth it.
    Auto,
    /// To so many, 1 or more, of those that the guest uses.
    Number(usize),
}

impl ReceivePairs {
    /// The number at first; `None`: all.
    fn first(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Auto => Some(1),
            Self::Number(pairs) => Some(pairs),
        }
    }
}

/// The pairs to which the host delivers, as they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receives {
    /// Their number.
    pub pairs: usize,
    /// Who has chosen it: `all`, `auto`, `operator`; `rss`: the guest, for its hash needs all;
    /// `host`: the host delivers to all by its own table.
    pub source: &'static str,
    /// How often the number was changed.
    pub changes: u64,
}

/// Returns what is shown of a port of which the host uses `used` pairs.
pub(super) fn shown(port: &dyn Port, wanted: ReceivePairs, used: usize, rss: bool) -> Receives {
    let flows = port.flows();
    let limit = flows.and_then(Flows::receiving).unwrap_or(used);
    let source = match wanted {
        ReceivePairs::All => "all",
        _ if flows.is_none() => "host",
        _ if rss => "rss",
        ReceivePairs::Auto => "auto",
        ReceivePairs::Number(_) => "operator",
    };
    let [_, changes] = flows.map_or([0; 2], Flows::length_and_changes);
    Receives { pairs: limit.min(used), source, changes: changes.into() }
}

/// The time until the next sample, while little is to be done.
const QUIET: Duration = Duration::from_secs(1);
/// Below this share of a worker, in thousandths, little is to be done.
const QUIET_PERMILLE: u64 = 50;
/// Between two looks whether a queue was read.
const LOOK: Duration = Duration::from_millis(1);
/// The longest wait for the workers of the receiveqs, which other guests may keep busy: attaching
/// and detaching pairs waits as long.
const PASS_MAX: Duration = Duration::from_millis(100);
/// A turn that takes this many frames has left some behind, as a rule.
const FULL_TURN: u64 = TURN_FRAMES as u64;

/// Sets the number that a device begins with: the host uses no pair yet, so no flow moves.
pub(super) fn begin(port: &dyn Port, wanted: ReceivePairs, name: &str) {
    match port.flows() {
        Some(flows) => flows.deliver(&[], wanted.first()),
        None if wanted != ReceivePairs::All && port.queue_pairs() > 1 => {
            let device = name;
            tracing::info!(device, "receive_pairs: all (the host chooses the queues: see steer)");
        }
        None => {}
    }
}

/// Counters that only grow, of all receiveqs of a device; two samples make a window.
struct Sample {
    at: Instant,
    bytes: u64,
    /// The time that receiveqs worked.
    work_ns: u64,
    /// The turns, and those that have left frames behind.
    turns: u64,
    full: u64,
    /// For each worker that owns a receiveq, the time that all its queues worked.
    workers: HashMap<usize, u64>,
}

impl Sample {
    /// What was done since `before`. `used`: the pairs that the guest uses; `now_ns`: the time of
    /// this sample.
    fn since(&self, before: &Self, used: usize, now_ns: u64) -> Window {
        let len_ns = nanoseconds(self.at - before.at).max(1);
        let permille = |ns: u64| ns.saturating_mul(1000) / len_ns;
        let worked = self.workers.iter().filter_map(|(worker, ns)| {
            // A worker that has just got its queues has no load of this window.
            before.workers.get(worker).map(|before| ns.saturating_sub(*before))
        });
        let turns = self.turns.saturating_sub(before.turns);
        Window {
            now_ns,
            len_ns,
            pairs: used,
            bytes: self.bytes.saturating_sub(before.bytes),
            busiest_permille: permille(worked.max().unwrap_or(0)).min(1000),
            work_permille: permille(self.work_ns.saturating_sub(before.work_ns)),
            waiting_permille: self.full.saturating_sub(before.full) * 1000 / turns.max(1),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Inner {
    /// True if the number of pairs that the host delivers to can change while the device runs.
    pub(super) fn chooses_receivers(&self) -> bool {
        let can = self.host.port.flows().is_some() && self.options.queue_pairs > 1;
        can && self.options.receive_pairs != ReceivePairs::All
    }

    /// Has the host deliver to as many pairs as the operator or the policy says, for ever. Only
    /// where [`Self::chooses_receivers`].
    pub(super) async fn choose_receivers(self: &Arc<Self>) {
        let wanted = self.options.receive_pairs;
        let (mut policy, began) = (policy::ReceivePairs::default(), Instant::now());
        let (mut before, mut wait) = (None, QUIET);
        loop {
            let used = self.with(|state| state.attached_pairs());
            if wanted != ReceivePairs::Auto || used < 2 || self.is_hashed() {
                before = None;
                self.host.receivers.notified().await;
            } else {
                let _ = timeout(wait, self.host.receivers.notified()).await;
            }
            let mut next = wanted.first();
            if wanted == ReceivePairs::Auto {
                let sample = self.sample();
                if let Some(before) = &before {
                    let window = sample.since(before, used, nanoseconds(sample.at - began));
                    policy.decide(&window);
                    let is_quiet = window.work_permille < QUIET_PERMILLE && policy.pairs() == 1;
                    wait = if is_quiet { QUIET } else { Duration::from_nanos(WINDOW_NS) };
                }
                before = Some(sample);
                next = Some(policy.pairs());
            }
            self.deliver_to(next).await;
        }
    }

    /// True if the guest's hash chooses the pair of each frame.
    fn is_hashed(&self) -> bool {
        self.with(|state| state.rss.is_some() || state.host_rss.is_some())
    }

    fn sample(&self) -> Sample {
        let mut sample = Sample {
            at: Instant::now(),
            bytes: 0,
            work_ns: 0,
            turns: 0,
            full: 0,
            workers: HashMap::new(),
        };
        for stats in (0..self.options.queue_pairs).filter_map(|pair| self.stats.get(pair * 2)) {
            sample.bytes += stats.bytes_passed.value();
            sample.work_ns += stats.busy_ns.value();
            for (frames, turns) in stats.batch_size().filled() {
                sample.turns += turns;
                sample.full += if frames >= FULL_TURN { turns } else { 0 };
            }
        }
        for route in self.receivers() {
            sample.workers.extend(route.worker().map(|worker| (worker, 0)));
        }
        for route in self.pool.routes() {
            let worker = route.worker().and_then(|worker| sample.workers.get_mut(&worker));
            if let Some(worked_ns) = worker {
                *worked_ns += route.stats().busy_ns.value();
            }
        }
        sample
    }

    /// Returns the routes of the receiveqs that run.
    fn receivers(&self) -> Vec<Arc<Route>> {
        self.state().vqs.iter().step_by(2).filter_map(|vq| vq.route.upgrade()).collect()
    }

    /// Has the host deliver to so many pairs. No flow is reordered: see [`Receiving`].
    ///
    /// [`Receiving`]: super::Receiving
    async fn deliver_to(self: &Arc<Self>, pairs: Option<usize>) {
        let Some(now) = self.host.port.flows().map(Flows::receiving) else { return };
        // Between all and several, flows would move from any pair to any other.
        if now.is_none() != pairs.is_none() && now != Some(1) && pairs != Some(1) {
            self.move_flows(Some(1)).await;
        }
        self.move_flows(pairs).await;
    }

    async fn move_flows(self: &Arc<Self>, pairs: Option<usize>) {
        let held = {
            // No pair is attached or detached meanwhile, and no hash is set.
            let _calls = self.host.calls.lock().await;
            let Some(flows) = self.host.port.flows().filter(|_| !self.is_hashed()) else { return };
            let order = self.with(|state| state.order.clone());
            if flows.receiving() == pairs || !self.receiving.begin(flows, &order, pairs) {
                return;
            }
            let held = Held(self.clone());
            if !self.pass().await {
                // A queue may still take frames: change nothing while its worker does not answer.
                return;
            }
            let inner = self.clone();
            let turn = move || {
                let flows = inner.host.port.flows();
                flows.map(|flows| inner.receiving.turn(flows, &order, pairs))
            };
            let _ = aside(turn).await;
            held
        };
        // The frames in a queue that the host uses no more are gone, and nobody reads that of a
        // pair that is not served.
        let is_read = |pair: &usize| {
            let state = self.state();
            state.serves(*pair * 2) && state.port.attached[*pair]
        };
        while self.receiving.unread().iter().any(is_read) {
            sleep(LOOK).await;
            // No frame may come to an empty queue any more: without a turn it would not be read.
            self.pass().await;
        }
        self.pass().await;
        drop(held);
        self.pass().await;
    }

    /// Returns true when each receiveq has begun a new turn: the guest then has all that was read.
    /// Returns false if one has not within [`PASS_MAX`].
    async fn pass(&self) -> bool {
        let all = async {
            for route in self.receivers() {
                route.ask(Order::Refresh).await;
            }
        };
        timeout(PASS_MAX, all).await.is_ok()
    }
}

/// Releases the held receiveqs when the change ends, also where its future is dropped. A turn that
/// follows later finds them released.
struct Held(Arc<Inner>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.receiving.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, bytes: u64, work_ns: u64, workers: &[(usize, u64)]) -> Sample {
        let workers = workers.iter().copied().collect();
        Sample { at, bytes, work_ns, turns: 10, full: 4, workers }
    }

    #[test]
    fn two_samples_make_a_window_of_what_was_done_between_them() {
        let start = Instant::now();
        let before = sample(start, 1000, 5_000_000, &[(0, 30_000_000), (2, 0)]);
        let after = start + Duration::from_millis(100);
        let mut after = sample(after, 51_000, 125_000_000, &[(0, 125_000_000), (1, 99_000_000)]);
        (after.turns, after.full) = (30, 19);
        let window = Window {
            now_ns: 7,
            len_ns: 100_000_000,
            pairs: 4,
            bytes: 50_000,
            // Worker 1 has got its queues within the window.
            busiest_permille: 950,
            work_permille: 1200,
            waiting_permille: 750,
        };
        assert_eq!(after.since(&before, 4, 7), window);
        // Without turns, and without time.
        let window = before.since(&before, 2, 0);
        assert_eq!((window.waiting_permille, window.work_permille, window.len_ns), (0, 0, 1));
    }
}
