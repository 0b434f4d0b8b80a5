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

use crate::accounts::allowed_cpus;
use crate::blocking::aside;
use crate::policy::numa::{NodeChoice, PAGES_MIN};
use crate::pool::{Place, Pool};
use crate::worker::mailbox::Command;
use manyring_memory::{Topology, sample_nodes};
use rustix::io::Errno;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The least and the largest time between two looks at the nodes of the guests' memory.
const LOOK_MIN: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(64);

/// The nodes of the guests' memory in the last sample, and the node of the workers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestNodes {
    /// The node to whose CPUs the workers are bound; `None`: they run on all CPUs.
    pub node: Option<usize>,
    /// For each node, how many pages of the last sample lie there.
    pub pages: Vec<u64>,
    /// The CPUs of the node that the workers are bound to.
    pub cpus: Option<Vec<usize>>,
}

impl Pool {
    /// Keeps the workers on the node of the guests' memory. Returns if the kernel tells no nodes.
    pub async fn follow_memory(self: Arc<Self>, topology: Topology) {
        let (mut choice, mut wait, mut mapped) = (NodeChoice::default(), LOOK_MIN, 0);
        loop {
            if self.routes().is_empty() {
                // The next guest may lie elsewhere.
                choice = NodeChoice::default();
                self.bind(&topology, None, Vec::new());
                self.started.notified().await;
                wait = LOOK_MIN;
            }
            if tokio::time::timeout(wait, self.started.notified()).await.is_ok() {
                // Guests decide how often queues start.
                tokio::time::sleep(LOOK_MIN).await;
                wait = LOOK_MIN;
            }
            let sample = match aside(|| sample_nodes(PAGES_MIN)).await {
                Some(Ok(sample)) => sample,
                Some(Err(errno @ (Errno::PERM | Errno::NOSYS))) => {
                    tracing::info!(%errno, "the NUMA nodes of guests' memory are unknown");
                    return self.bind(&topology, None, Vec::new());
                }
                // The host lacks memory: later.
                _ => {
                    wait = LOOK_MAX;
                    continue;
                }
            };
            let has_changed = choice.look(&sample.regions);
            self.bind(&topology, choice.node(), sample.pages());
            let is_new = has_changed || choice.is_undecided() || mapped != sample.mapped;
            wait = if is_new { LOOK_MIN } else { (wait * 2).min(LOOK_MAX) };
            mapped = sample.mapped;
        }
    }

    /// Binds the workers to a node, unless they are bound to it already, or more of them run than
    /// the node has CPUs for this process. `None`: to none.
    fn bind(&self, topology: &Topology, node: Option<usize>, pages: Vec<u64>) {
        let allowed = allowed_cpus();
        // With the lock: a worker that starts now is bound by this choice or by the next one.
        let places = self.lock();
        let free = || places.iter().skip(self.worker_cpus.len()).filter_map(Place::open);
        let mut cpus = node.and_then(|node| topology.cpus_of(node)).cloned();
        cpus.iter_mut().for_each(|cpus| cpus.retain(|cpu| allowed.contains(cpu)));
        let cpus = cpus.filter(|cpus| !cpus.is_empty() && cpus.len() >= free().count());
        let mut binding = self.binding();
        let node = node.filter(|_| cpus.is_some());
        if binding.cpus != cpus {
            tracing::info!(?node, ?pages, "workers follow the NUMA node of the guests' memory");
            for running in free() {
                running.mailbox.send(Command::Bind(cpus.as_ref().unwrap_or(&allowed).clone()));
            }
        }
        *binding = GuestNodes { node, pages, cpus };
    }

    pub(super) fn binding(&self) -> std::sync::MutexGuard<'_, GuestNodes> {
        self.binding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the nodes of the guests' memory in the last sample.
    #[must_use]
    pub fn guest_nodes(&self) -> GuestNodes {
        self.binding().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        pool.bind(&topology, Some(1), vec![0, 200]);
        let _later = pool.lease(2).unwrap();
        let cpus_of = |worker: usize| {
            let id = pool.views()[worker].thread_id.unwrap();
            let id = rustix::process::Pid::from_raw(id);
            let set = rustix::thread::sched_getaffinity(id).unwrap();
            allowed.iter().copied().filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>()
        };
        // The worker that ran follows its mailbox.
        let await_cpus = |worker: usize, cpus: &[usize]| {
            let is_there = || cpus_of(worker) == cpus;
            let pause = || std::thread::sleep(Duration::from_millis(1));
            let came = (0..60_000).any(|_| is_there() || (pause(), false).1);
            assert!(came, "worker {worker} is elsewhere");
        };
        await_cpus(1, &[last]);
        assert_eq!((cpus_of(0), cpus_of(2)), (vec![first], vec![last]));
        let views = pool.views().into_iter().map(|view| view.cpus.unwrap());
        assert_eq!(views.collect::<Vec<_>>(), [vec![first], vec![last], vec![last]]);
        let cpus = Some(vec![last]);
        let nodes = GuestNodes { node: Some(1), pages: vec![0, 200], cpus };
        assert_eq!(pool.guest_nodes(), nodes);
        // Two workers run by now, more than the node has CPUs.
        pool.bind(&topology, Some(1), vec![0, 200]);
        for worker in [1, 2] {
            await_cpus(worker, &allowed);
        }
        assert_eq!(pool.guest_nodes().node, None);
        assert_eq!(pool.views()[1].cpus, None);
    }
}
