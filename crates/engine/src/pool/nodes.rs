//! Binds the workers to the NUMA node that holds the memory of the guests, as
//! [`crate::policy::numa`] decides.
//!
//! ```text
//! loop:  wait until a queue starts, or LOOK_MIN .. LOOK_MAX since the last look, twice as long
//!        after each one that found nothing new; without a queue there is no timer
//!        ask the kernel on which nodes a sample of the guests' pages lies
//!        bind the workers whose CPUs the operator has not chosen
//! ```
//! Each worker binds itself: a sandbox allows a thread to choose its own CPUs, and no other's. A
//! worker that starts later is bound when it starts.

use crate::blocking::aside;
use crate::policy::numa::{NodeChoice, PAGES_MIN};
use crate::pool::Pool;
use crate::worker::mailbox::Command;
use manyring_memory::{NodeSample, Topology, sample_nodes};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The least and the largest time between two looks at the nodes of the guests' memory.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(64);
/// The number of pages of the first sample, and of the largest one. Samples grow until this process
/// has touched enough of their pages. The largest sample takes the kernel 3 ms, in which no thread
/// of this process can map or unmap memory.
const SAMPLE_MIN: usize = 256;
const SAMPLE_MAX: usize = 16384;

/// The nodes of the guests' memory in the last sample, and the node of the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestNodes {
    /// The node to whose CPUs the workers are bound; `None`: they run on all CPUs.
    pub node: Option<usize>,
    /// For each node, how many pages of the last sample lie there.
    pub pages: Vec<u64>,
}

/// The node to which a pool's workers are bound, and the last sample.
#[derive(Debug, Default)]
pub(super) struct Binding {
    pub(super) nodes: GuestNodes,
    /// The CPUs of that node; `None`: the workers run on all CPUs.
    pub(super) cpus: Option<Vec<usize>>,
}

impl Pool {
    /// Binds the workers to the node of the guests' memory, and keeps them there. Never returns.
    pub async fn follow_memory(self: Arc<Self>, topology: Topology) {
        let (mut choice, mut wait, mut mapped) = (NodeChoice::default(), LOOK_MIN, 0);
        loop {
            if self.routes().is_empty() {
                self.started.notified().await;
                wait = LOOK_MIN;
            }
            let _ = tokio::time::timeout(wait, self.started.notified()).await;
            let Some(sample) = aside(sample).await.flatten() else { return };
            let has_changed = choice.look(&sample.pages);
            if has_changed {
                self.bind(&topology, &choice, &sample);
            }
            self.binding().nodes.pages = sample.pages;
            let is_new = has_changed || choice.is_undecided() || mapped != sample.mapped;
            wait = if is_new { LOOK_MIN } else { (wait * 2).min(LOOK_MAX) };
            mapped = sample.mapped;
        }
    }

    fn bind(&self, topology: &Topology, choice: &NodeChoice, sample: &NodeSample) {
        let cpus = choice.node().and_then(|node| topology.cpus_of(node));
        let (node, pages) = (cpus.and(choice.node()), &sample.pages);
        tracing::info!(?node, ?pages, "workers follow the NUMA node of the guests' memory");
        // With the lock: a worker that starts now is bound by this choice or by the next one.
        let places = self.lock();
        let mut binding = self.binding();
        (binding.nodes.node, binding.cpus) = (node, cpus.cloned());
        let bound = cpus.map_or(topology.allowed(), Vec::as_slice);
        for place in places.iter().skip(self.worker_cpus.len()) {
            if let Some(running) = place.open() {
                running.mailbox.send(Command::Bind(bound.to_vec()));
            }
        }
    }

    pub(super) fn binding(&self) -> std::sync::MutexGuard<'_, Binding> {
        self.binding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the nodes of the guests' memory in the last sample.
    #[must_use]
    pub fn guest_nodes(&self) -> GuestNodes {
        self.binding().nodes.clone()
    }
}

/// Asks the kernel for the nodes of a sample of pages; `None`: the kernel does not report them.
fn sample() -> Option<NodeSample> {
    let mut count = SAMPLE_MIN;
    loop {
        let sample = sample_nodes(count);
        let sample = sample.inspect_err(|errno| {
            tracing::info!(%errno, "the NUMA nodes of guests' memory are unknown");
        });
        let sample = sample.ok()?;
        if count >= SAMPLE_MAX || sample.pages.iter().sum::<u64>() >= PAGES_MIN {
            return Some(sample);
        }
        count *= 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::allowed_cpus;
    use crate::policy::polling::Polling;
    use crate::pool::{Pins, PoolOptions};

    #[test]
    fn workers_are_bound_to_the_node_unless_the_operator_has_chosen_their_cpus() {
        let allowed = allowed_cpus();
        let (first, last) = (allowed[0], *allowed.last().unwrap());
        let pins = Pins { worker_cpus: vec![vec![first]], ..Pins::default() };
        let options = PoolOptions { workers_max: 3, polling: Polling::NEVER, uring: false };
        let pool = Pool::pinned(options, pins);
        let _leases = [0, 1].map(|worker| pool.lease(worker).unwrap());
        let topology = Topology::new(vec![vec![first], vec![last]], allowed.clone());
        let mut choice = NodeChoice::default();
        let pages = vec![0, 200];
        let sample = NodeSample { pages: pages.clone(), mapped: 1 };
        assert!(!choice.look(&pages) && choice.look(&pages));
        pool.bind(&topology, &choice, &sample);
        let _later = pool.lease(2).unwrap();
        let cpus_of = |worker: usize| {
            let id = pool.views()[worker].thread_id.unwrap();
            let id = rustix::process::Pid::from_raw(id);
            let set = rustix::thread::sched_getaffinity(id).unwrap();
            allowed.iter().copied().filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>()
        };
        // The worker that ran follows its mailbox.
        while cpus_of(1) != [last] {
            std::thread::yield_now();
        }
        assert_eq!((cpus_of(0), cpus_of(2)), (vec![first], vec![last]));
        let views = pool.views().into_iter().map(|view| view.cpus.unwrap());
        assert_eq!(views.collect::<Vec<_>>(), [vec![first], vec![last], vec![last]]);
        let spread = [100, 100];
        assert!(!choice.look(&spread) && !choice.look(&spread), "half is enough to stay");
        let spread = [150, 100];
        assert!(!choice.look(&spread) && choice.look(&spread));
        pool.bind(&topology, &choice, &sample);
        while cpus_of(1) != allowed {
            std::thread::yield_now();
        }
        assert_eq!(pool.guest_nodes().node, None);
        assert_eq!(pool.views()[1].cpus, None);
    }
}
