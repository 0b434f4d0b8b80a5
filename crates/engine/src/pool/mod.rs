//! The pool of workers: starts workers (no other code does), places queues, moves them, and stops
//! the workers.

mod balance;
pub(crate) mod handle;
pub(crate) mod nodes;
mod wake;

use crate::accounts::{ThreadTimes, bind, cpu_time, thread_times};
use crate::fds::sentry;
use crate::policy::polling::{Policy, Polling};
use crate::pool::handle::{QueueHandle, Route};
use crate::pool::nodes::GuestNodes;
use crate::pool::wake::wake;
use crate::running::orders::{Order, QueueId};
use crate::running::run::Run;
use crate::stats::WorkerStats;
use crate::watch::{Post, Serves};
use crate::worker::mailbox::{Command, Lease, Mailbox};
use crate::worker::reports::Reports;
use crate::worker::{Worker, WorkerContext};
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_backend::sys::uring::are_reserved;
use manyring_memory::{Duty, take_duty};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How the workers run.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The maximum of workers; a worker starts when a queue needs it.
    pub workers_max: usize,
    /// How long a worker polls for work before it sleeps.
    pub polling: Polling,
    /// Use io_uring where the kernel allows it.
    pub uring: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        let workers_max = std::thread::available_parallelism().map_or(1, usize::from);
        Self { workers_max, polling: Polling::default(), uring: true }
    }
}

/// The operator's choice of workers' CPUs and of queues' workers. The balance decides the rest.
#[derive(Clone, Debug, Default)]
pub struct Pins {
    /// The CPUs of each worker; workers after the last entry run on any CPU of the process.
    pub worker_cpus: Vec<Vec<usize>>,
    /// By a device's name, the worker of each of its queues, or of each queue pair of a network
    /// device; the balance places the queues after the last entry.
    pub queue_workers: HashMap<String, Vec<usize>>,
}

/// The device and unit of a queue: queues with the same home move together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Home {
    /// The name of the device.
    pub device: String,
    /// The queue of a block device, or the pair of a network device.
    pub unit: usize,
}

/// The state of a worker, for reports and the balance.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// The worker's counters: the sum over its thread and the worker's earlier threads.
    pub stats: Arc<WorkerStats>,
    /// The CPUs to which the worker is bound.
    pub cpus: Option<Vec<usize>>,
    /// True if `cpus` are those of the guests' NUMA node, and not the operator's choice.
    pub follows_memory: bool,
    /// The kernel's id of the worker's thread, if the thread runs.
    pub thread_id: Option<i32>,
    /// The CPU times of that thread, by the kernel's accounts.
    pub(crate) times: ThreadTimes,
    /// True if the worker can get queues.
    pub(crate) is_open: bool,
}

impl WorkerView {
    /// Returns the nanoseconds that the worker's threads ran, by the kernel's accounts.
    #[must_use]
    pub fn ran_ns(&self) -> u64 {
        self.stats.ran_before_ns.value() + self.times.ran_ns
    }
}

/// The progress of a worker, to be compared with an earlier value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// The worker.
    pub worker: usize,
    /// The kernel's id of its thread.
    pub thread_id: i32,
    /// Grows with each round; odd while the worker works, even while it sleeps.
    pub beats: u64,
}

impl Pulse {
    /// True if the worker works, and has made no progress since `earlier`.
    #[must_use]
    pub fn hangs_since(&self, earlier: &Self) -> bool {
        self == earlier && self.beats % 2 == 1
    }
}

#[derive(Debug)]
struct Running {
    mailbox: Arc<Mailbox>,
    thread: JoinHandle<()>,
    has_ring: bool,
    /// The kernel's id of the thread.
    thread_id: i32,
    /// Shows whether the thread is blocked in a call.
    post: Arc<Post>,
}

/// A worker that runs, or has run, or may run.
#[derive(Debug, Default)]
struct Place {
    stats: Arc<WorkerStats>,
    running: Option<Running>,
}

impl Place {
    /// Returns the thread, unless it is about to end.
    fn open(&self) -> Option<&Running> {
        self.running.as_ref().filter(|running| !running.mailbox.is_closed())
    }
}

/// The workers of the daemon.
#[derive(Debug)]
pub struct Pool {
    /// This pool, for the threads that watch its workers.
    me: Weak<Self>,
    options: PoolOptions,
    worker_cpus: Vec<Vec<usize>>,
    /// By a device's name; for queues that start from now on.
    queue_workers: Mutex<HashMap<String, Vec<usize>>>,
    places: Mutex<Vec<Place>>,
    /// The NUMA node of the workers; taken after `places`.
    binding: Mutex<GuestNodes>,
    /// Notified of each queue that starts.
    started: tokio::sync::Notify,
    next_id: AtomicU64,
    /// Every running queue, for the balance.
    routes: Mutex<Vec<Weak<Route>>>,
    /// By these the workers report to the balance.
    pub(crate) reports: Arc<Reports>,
}

/// The error of a queue that did not stop properly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker is gone")]
pub struct StopError;

impl Pool {
    /// Makes a pool with no worker yet, whose queues the balance places.
    #[must_use]
    pub fn new(options: PoolOptions) -> Arc<Self> {
        Self::pinned(options, Pins::default())
    }

    /// Makes a pool with no worker yet. CPUs of workers beyond [`PoolOptions::workers_max`] are not
    /// used, and a queue that is pinned to such a worker cannot start.
    #[must_use]
    pub fn pinned(options: PoolOptions, pins: Pins) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            options,
            worker_cpus: pins.worker_cpus,
            queue_workers: Mutex::new(pins.queue_workers),
            places: Mutex::default(),
            binding: Mutex::default(),
            started: tokio::sync::Notify::new(),
            next_id: AtomicU64::new(1),
            routes: Mutex::default(),
            reports: Arc::default(),
        })
    }

    /// Chooses the workers of queues that start from now on; see [`Pins::queue_workers`].
    pub fn set_queue_workers(&self, queue_workers: HashMap<String, Vec<usize>>) {
        *self.queue_workers.lock().unwrap_or_else(PoisonError::into_inner) = queue_workers;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the first worker if it does not run. Returns true if disks can use io_uring; `None`
    /// if no thread could be started.
    #[must_use]
    pub fn has_ring(&self) -> Option<bool> {
        self.run(&mut self.lock(), 0).map(|running| running.has_ring)
    }

    /// Returns how many workers run.
    #[must_use]
    pub fn worker_count(&self) -> usize {
        self.lock().iter().filter(|place| place.open().is_some()).count()
    }

    /// Returns the progress of each worker that runs.
    #[must_use]
    pub fn pulses(&self) -> Vec<Pulse> {
        let places = self.lock();
        let pulse = |(worker, place): (usize, &Place)| {
            let running = place.open()?;
            let (thread_id, beats) = (running.thread_id, running.post.beats());
            Some(Pulse { worker, thread_id, beats })
        };
        places.iter().enumerate().filter_map(pulse).collect()
    }

    /// Returns the name of the device whose queue takes a turn on a worker; an empty string if no
    /// device's does, or several devices' do.
    #[must_use]
    pub fn device_at(&self, worker: usize) -> String {
        let post = self.lock().get(worker).and_then(|place| Some(place.open()?.post.clone()));
        // The lock of the workers is not held here: the search for the device takes it.
        post.map(|post| post.device()).unwrap_or_default()
    }

    /// Returns the counters of each worker that runs or has run.
    #[must_use]
    pub fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.lock().iter().map(|place| place.stats.clone()).collect()
    }

    /// Returns every worker that runs, has run or may run. Reads /proc, which may take long: never
    /// call this on the control thread.
    #[must_use]
    pub fn views(&self) -> Vec<WorkerView> {
        let mut views = self.views_without_times();
        // Read `/proc` without the lock: starting a queue and feeding the watchdog need the lock.
        for view in &mut views {
            view.times = view.thread_id.map(thread_times).unwrap_or_default();
        }
        views
    }

    fn views_without_times(&self) -> Vec<WorkerView> {
        let places = self.lock();
        let has_ring = places.iter().find_map(|place| Some(place.open()?.has_ring));
        let view = |index| {
            let place = places.get(index);
            let running = place.and_then(Place::open);
            let stats = place.map(|place| place.stats.clone()).unwrap_or_default();
            let thread_id = running.map(|running| running.thread_id);
            WorkerView {
                stats,
                cpus: self.cpus_of(index),
                follows_memory: index >= self.worker_cpus.len(),
                thread_id,
                times: ThreadTimes::default(),
                is_open: running.is_none_or(|running| {
                    Some(running.has_ring) == has_ring && !running.post.is_held()
                }),
            }
        };
        (0..self.options.workers_max).map(view).collect()
    }

    /// Places a queue on the worker that the operator has chosen, otherwise on the first one; the
    /// balance moves it later if that is worth it.
    pub fn start(self: &Arc<Self>, queue: Box<dyn Run>, home: Home) -> Option<QueueHandle> {
        self.has_ring()?;
        let pin = {
            let pins = self.queue_workers.lock().unwrap_or_else(PoisonError::into_inner);
            pins.get(&home.device).and_then(|workers| workers.get(home.unit).copied())
        };
        let worker = pin.unwrap_or_else(|| self.first_that_comes_back());
        let lease = self.lease(worker)?;
        let id = QueueId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let stats = queue.stats().clone();
        let route = Arc::new(Route::new(id, self.clone(), stats, worker, home, pin.is_some()));
        // Register the queue before it pops: a search finds every queue that has requests.
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.retain(|r| r.strong_count() > 0);
        routes.push(Arc::downgrade(&route));
        lease.start(id, queue, None);
        self.started.notify_one();
        Some(QueueHandle::new(route))
    }

    /// Returns the first worker that is not stuck in a call for a device, or else the first of all.
    fn first_that_comes_back(&self) -> usize {
        let places = self.lock();
        let is_held = |index: &usize| {
            let running = places.get(*index).and_then(Place::open);
            running.is_some_and(|running| running.post.is_held())
        };
        (0..self.options.workers_max).find(|index| !is_held(index)).unwrap_or(0)
    }

    /// Returns the name of the device of a queue that runs.
    pub(crate) fn device_of(&self, queue: QueueId) -> Option<String> {
        let route = self.routes().into_iter().find(|route| route.id() == queue);
        route.map(|route| route.home().device.clone())
    }

    /// Returns every queue that runs now.
    pub fn routes(&self) -> Vec<Arc<Route>> {
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.iter().filter_map(Weak::upgrade).collect()
    }

    /// Has the queues of these devices read their rules and limits anew. Returns when each has, or
    /// when `max_wait` is over: a queue that is moving or stopping follows when it can. Needs a
    /// tokio runtime with time.
    pub async fn refresh(&self, is_wanted: impl Fn(&str) -> bool, max_wait: Duration) {
        let routes = self.routes().into_iter().filter(|route| is_wanted(&route.home().device));
        let asked: Vec<_> = routes
            .map(|route| tokio::spawn(async move { route.ask(Order::Refresh).await }))
            .collect();
        let all = async {
            for asked in asked {
                let _ = asked.await;
            }
        };
        let _ = tokio::time::timeout(max_wait, all).await;
    }

    /// Returns the mailbox of worker `index`, which has a queue and therefore runs.
    pub(crate) fn mailbox(&self, index: usize) -> Option<Arc<Mailbox>> {
        self.lock().get(index).and_then(Place::open).map(|running| running.mailbox.clone())
    }

    /// Takes a lease at worker `index`; starts the worker if it may run and does not.
    pub(crate) fn lease(&self, index: usize) -> Option<Lease> {
        let mut places = self.lock();
        // A queue that was opened for an io_uring cannot run on a worker to which the kernel
        // refused one (out of memory or descriptors).
        let has_ring = self.run(&mut places, 0)?.has_ring;
        // A worker may end once between the two calls, so there are two attempts.
        (0..2).find_map(|_| {
            let running = self.run(&mut places, index).filter(|r| r.has_ring || !has_ring)?;
            Lease::take(&running.mailbox)
        })
    }

    /// Returns worker `index`; starts it if it may run and does not.
    fn run<'a>(&self, places: &'a mut Vec<Place>, index: usize) -> Option<&'a Running> {
        if index >= self.options.workers_max {
            return None;
        }
        if places.len() <= index {
            places.resize_with(index + 1, Place::default);
        }
        let place = &mut places[index];
        if place.open().is_none() {
            if let Some(ended) = place.running.take() {
                let _ = ended.thread.join();
            }
            place.running = Some(self.start_worker(index, place.stats.clone())?);
        }
        place.running.as_ref()
    }

    /// Returns the CPUs of worker `index`: those that the operator has chosen, or those of the node
    /// of the guests' memory. `None`: all.
    fn cpus_of(&self, index: usize) -> Option<Vec<usize>> {
        let chosen = self.worker_cpus.get(index).cloned();
        chosen.or_else(|| self.binding().cpus.clone())
    }

    /// Starts a thread and waits until it is ready; `None` if the system has none.
    fn start_worker(&self, index: usize, stats: Arc<WorkerStats>) -> Option<Running> {
        sentry::start().then_some(())?;
        let mailbox = Arc::new(Mailbox::new().ok()?);
        let (ready, started) = std::sync::mpsc::sync_channel(1);
        let uring = self.options.uring;
        let wake = wake();
        stats.policy.wake_ns.set(wake.ns);
        let policy = Policy::new(self.options.polling, wake.ns, index as u64);
        let (cpus, follows_memory) = (self.cpus_of(index), index >= self.worker_cpus.len());
        // The first worker stays: a new guest must not depend on whether the system has a thread.
        // This worker ends only to free threads of the kernel's io_uring, when these are more than
        // its next start takes.
        let pool = self.me.clone();
        let device_of = move |queue| pool.upgrade()?.device_of(QueueId(queue));
        let post = Post::new(Serves::Queues(Box::new(device_of)));
        let lot = WorkerContext {
            reports: self.reports.clone(),
            stays: index == 0,
            is_irreplaceable: uring && are_reserved(),
            post: post.clone(),
        };
        let (inbox, counters) = (mailbox.clone(), stats);
        let run = move || {
            take_duty(Duty::Touch);
            let ends = inbox.clone();
            let bound = cpus.map_or(Ok(()), |cpus| bind(&cpus)).or_else(|errno| {
                // The host's CPUs have changed since the node was chosen: this worker runs on all.
                if follows_memory { Ok(()) } else { Err(errno) }
            });
            match bound.and_then(|()| Worker::new(uring, policy, inbox, counters.clone(), lot)) {
                Ok(worker) => {
                    let id = rustix::thread::gettid().as_raw_nonzero().get();
                    let _ = ready.send(Some((worker.has_ring(), id)));
                    worker.run();
                    let ran_ns = u64::try_from(cpu_time().as_nanos()).unwrap_or(u64::MAX);
                    counters.ran_before_ns.add(ran_ns);
                    // The pool keeps the ended thread until the next one replaces it.
                    ends.end();
                }
                Err(errno) => {
                    tracing::error!(%errno, "starting worker {index} failed");
                    let _ = ready.send(None);
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("worker-{index}"));
        let thread = starter::spawn(ThreadRole::Worker, thread, run).ok()?;
        let (has_ring, thread_id) = started.recv().ok().flatten()?;
        if uring && !has_ring {
            tracing::warn!("io_uring is unavailable; disks use plain reads and writes");
        }
        Some(Running { mailbox, thread, has_ring, thread_id, post })
    }

    /// Ends all workers and waits for their threads. Requests in flight are abandoned.
    pub fn quit(&self) {
        let mut places = self.lock();
        let running: Vec<_> = places.drain(..).filter_map(|place| place.running).collect();
        running.iter().for_each(|running| running.mailbox.send(Command::Quit));
        for running in running {
            let _ = running.thread.join();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.quit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_has_ended_is_started_again_for_the_next_queue() {
        let pool = Pool::new(PoolOptions { workers_max: 3, polling: Polling::NEVER, uring: false });
        assert_eq!((pool.has_ring(), pool.worker_count()), (Some(false), 1));
        assert!(pool.lease(2).is_some() && pool.lease(3).is_none());
        assert_eq!(pool.worker_count(), 2, "the one between them is not needed");
        let first = pool.views()[2].thread_id;
        let mailbox = pool.mailbox(2).unwrap();
        assert!(mailbox.close());
        mailbox.send(Command::Quit);
        assert_eq!((pool.worker_count(), pool.views()[2].thread_id), (1, None));
        while mailbox.event().is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(pool.mailbox(2).is_none());
        assert!(pool.lease(2).is_some());
        let second = pool.views()[2].thread_id;
        assert!(second.is_some() && second != first, "{first:?}, then {second:?}");
        assert!(pool.worker_stats()[2].ran_before_ns.value() > 0, "its time is not forgotten");
    }

    #[test]
    fn while_the_first_worker_has_ended_others_can_be_given_queues_and_then_it_runs_again() {
        let pool = Pool::new(PoolOptions { workers_max: 3, polling: Polling::NEVER, uring: false });
        assert!(pool.has_ring().is_some() && pool.lease(1).is_some());
        let end_first = || {
            let mailbox = pool.mailbox(0).unwrap();
            assert!(mailbox.close());
            mailbox.send(Command::Quit);
        };
        end_first();
        assert!(pool.views().iter().all(|view| view.is_open));
        assert_eq!(pool.worker_count(), 1);
        assert!(pool.lease(1).is_some() && pool.lease(2).is_some());
        end_first();
        assert!(pool.lease(0).is_some());
        assert_eq!(pool.worker_count(), 3);
    }

    #[test]
    fn a_worker_runs_on_the_cpus_that_were_chosen_for_it() {
        let cpu = *crate::accounts::allowed_cpus().last().unwrap();
        let pins = Pins { worker_cpus: vec![vec![cpu]], ..Pins::default() };
        let pool = Pool::pinned(
            PoolOptions { workers_max: 2, polling: Polling::NEVER, uring: false },
            pins,
        );
        assert!(pool.has_ring().is_some() && pool.lease(1).is_some());
        let allowed = |view: &WorkerView| {
            let id = view.thread_id.unwrap();
            let text = std::fs::read_to_string(format!("/proc/self/task/{id}/status")).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.unwrap().trim().to_owned()
        };
        let views = pool.views();
        assert_eq!(allowed(&views[0]), cpu.to_string());
        let own = std::fs::read_to_string("/proc/self/status").unwrap();
        assert!(own.contains(&format!("Cpus_allowed_list:\t{}\n", allowed(&views[1]))));
    }
}
