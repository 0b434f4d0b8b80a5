//! The workers: start (the only place that starts threads), place, move a queue, stop.

use crate::handle::{QueueHandle, Route};
use crate::orders::{Command, Mailbox, QueueId};
use crate::policy::polling::Polling;
use crate::running::Run;
use crate::sentry;
use crate::stats::WorkerStats;
use crate::worker::Worker;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use tokio::sync::Notify;

/// How the workers run.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Workers at most; started on demand.
    pub workers_max: usize,
    /// Microseconds to look for work before sleeping; at most 32, 0 = never.
    pub spin_us: u32,
    /// Use io_uring where the kernel allows it.
    pub uring: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        let workers_max = std::thread::available_parallelism().map_or(1, usize::from);
        Self { workers_max, spin_us: 32, uring: true }
    }
}

#[derive(Debug)]
struct WorkerHandle {
    mailbox: Arc<Mailbox>,
    stats: Arc<WorkerStats>,
    thread: Option<JoinHandle<()>>,
    has_ring: bool,
    /// The thread, as the kernel's accounts name it.
    thread_id: i32,
}

/// The workers of the daemon.
#[derive(Debug)]
pub struct Pool {
    options: PoolOptions,
    workers: Mutex<Vec<WorkerHandle>>,
    next_id: AtomicU64,
    /// Every running queue, for the balance.
    routes: Mutex<Vec<Weak<Route>>>,
    /// A worker has not slept for a while and has more than one queue to serve.
    pub(crate) saturated: Arc<Notify>,
}

/// Why a queue did not stop properly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker is gone")]
pub struct StopError;

impl Pool {
    /// A pool with no worker yet.
    #[must_use]
    pub fn new(options: PoolOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            workers: Mutex::default(),
            next_id: AtomicU64::new(1),
            routes: Mutex::default(),
            saturated: Arc::default(),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<WorkerHandle>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the first worker if none runs. Returns whether disks can use io_uring; `None` if no
    /// thread could be started.
    #[must_use]
    pub fn has_ring(&self) -> Option<bool> {
        let mut workers = self.lock();
        if workers.is_empty() {
            workers.push(start_worker(0, &self.options, self.saturated.clone())?);
        }
        workers.first().map(|w| w.has_ring)
    }

    /// How many workers run.
    #[must_use]
    pub fn worker_count(&self) -> usize {
        self.lock().len()
    }

    /// Counters of each worker.
    #[must_use]
    pub fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.lock().iter().map(|w| w.stats.clone()).collect()
    }

    /// Workers at most.
    #[must_use]
    pub fn workers_max(&self) -> usize {
        self.options.workers_max
    }

    /// The kernel's ids of the workers' threads.
    pub(crate) fn thread_ids(&self) -> Vec<i32> {
        self.lock().iter().map(|w| w.thread_id).collect()
    }

    /// Places a queue on the first worker; the balance moves it when that is worth it.
    pub(crate) fn start(self: &Arc<Self>, queue: impl Run + 'static) -> Option<QueueHandle> {
        self.has_ring()?;
        let id = QueueId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let route = Arc::new(Route::new(id, self.clone(), queue.stats().clone()));
        let mailbox = self.lock().first()?.mailbox.clone();
        queue.stats().worker.set(0);
        // Known before it pops: whoever looks for running queues misses none that has requests.
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.retain(|r| r.strong_count() > 0);
        routes.push(Arc::downgrade(&route));
        mailbox.send(Command::Start(id, Box::new(queue)));
        Some(QueueHandle::new(route))
    }

    /// Every queue that runs now.
    pub(crate) fn routes(&self) -> Vec<Arc<Route>> {
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.iter().filter_map(Weak::upgrade).collect()
    }

    /// The mailbox of worker `index`, which is started if it may be and does not run.
    pub(crate) fn mailbox(&self, index: usize) -> Option<Arc<Mailbox>> {
        let mut workers = self.lock();
        while workers.len() <= index && workers.len() < self.options.workers_max {
            let saturated = self.saturated.clone();
            let worker = start_worker(workers.len(), &self.options, saturated)?;
            workers.push(worker);
        }
        // A queue opened for a ring cannot run where the kernel refused one (out of memory, fds).
        let has_ring = workers.first()?.has_ring;
        workers.get(index).filter(|w| w.has_ring || !has_ring).map(|w| w.mailbox.clone())
    }

    /// Ends all workers and waits for their threads. What is in flight is abandoned.
    pub fn quit(&self) {
        let mut workers = self.lock();
        workers.iter().for_each(|w| w.mailbox.send(Command::Quit));
        for worker in workers.iter_mut() {
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join();
            }
        }
        workers.clear();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.quit();
    }
}

/// Starts a thread and waits until it is ready; `None` if it could not be had.
fn start_worker(
    index: usize,
    options: &PoolOptions,
    saturated: Arc<Notify>,
) -> Option<WorkerHandle> {
    sentry::start().then_some(())?;
    let mailbox = Arc::new(Mailbox::new().ok()?);
    let stats = Arc::new(WorkerStats::default());
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let (uring, polling) = (options.uring, Polling::new(options.spin_us));
    let (inbox, counters) = (mailbox.clone(), stats.clone());
    let thread = std::thread::Builder::new()
        .name(format!("worker-{index}"))
        .spawn(move || match Worker::new(uring, polling, inbox, counters, saturated) {
            Ok(worker) => {
                let id = rustix::thread::gettid().as_raw_nonzero().get();
                let _ = ready.send(Some((worker.has_ring(), id)));
                worker.run();
            }
            Err(errno) => {
                tracing::error!(%errno, "worker {index} cannot start");
                let _ = ready.send(None);
            }
        })
        .ok()?;
    let (has_ring, thread_id) = started.recv().ok().flatten()?;
    if uring && !has_ring {
        tracing::warn!("io_uring is refused here: disks use plain reads and writes");
    }
    Some(WorkerHandle { mailbox, stats, thread: Some(thread), has_ring, thread_id })
}
