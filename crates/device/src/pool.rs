//! The workers: start (the only place that starts threads), place, move a queue, stop.

use crate::doorbell::{Call, Kick};
use crate::policy::polling::Polling;
use crate::queue::RunningQueue;
use crate::stats::{Counter, QueueStats};
use crate::worker::{Command, Mailbox, QueueId, Worker};
use manyring_memory::GuestMemory;
use manyring_queue::{QueueError, RingAddresses};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

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

/// What a worker has done.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// Queues it owns.
    pub queues: Counter,
    /// Times it slept.
    pub sleeps: Counter,
    /// Nanoseconds it slept.
    pub slept_ns: Counter,
}

#[derive(Debug)]
struct WorkerHandle {
    mailbox: Arc<Mailbox>,
    stats: Arc<WorkerStats>,
    thread: Option<JoinHandle<()>>,
    has_ring: bool,
}

/// The workers of the daemon.
#[derive(Debug)]
pub struct Pool {
    options: PoolOptions,
    workers: Mutex<Vec<WorkerHandle>>,
    next_id: AtomicU64,
}

/// Why a queue did not stop properly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker is gone")]
pub struct StopError;

impl Pool {
    /// A pool with no worker yet.
    #[must_use]
    pub fn new(options: PoolOptions) -> Arc<Self> {
        let workers = Mutex::default();
        Arc::new(Self { options, workers, next_id: AtomicU64::new(1) })
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
            workers.push(start_worker(0, &self.options)?);
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

    /// Places a queue on a worker.
    pub(crate) fn start(self: &Arc<Self>, queue: RunningQueue) -> Option<QueueHandle> {
        self.has_ring()?;
        let id = QueueId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let stats = queue.stats().clone();
        let workers = self.lock();
        let (worker, mailbox) = (0, workers.first()?.mailbox.clone());
        drop(workers);
        mailbox.send(Command::Start(id, Box::new(queue)));
        Some(QueueHandle { id, pool: self.clone(), worker: AtomicUsize::new(worker), stats })
    }

    /// The mailbox of worker `index`, which is started if it may be and does not run.
    fn mailbox(&self, index: usize) -> Option<Arc<Mailbox>> {
        let mut workers = self.lock();
        while workers.len() <= index && workers.len() < self.options.workers_max {
            let worker = start_worker(workers.len(), &self.options)?;
            workers.push(worker);
        }
        workers.get(index).map(|w| w.mailbox.clone())
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
fn start_worker(index: usize, options: &PoolOptions) -> Option<WorkerHandle> {
    let mailbox = Arc::new(Mailbox::new().ok()?);
    let stats = Arc::new(WorkerStats::default());
    let (ready, started) = std::sync::mpsc::sync_channel(1);
    let (uring, polling) = (options.uring, Polling::new(options.spin_us));
    let (inbox, counters) = (mailbox.clone(), stats.clone());
    let thread = std::thread::Builder::new()
        .name(format!("worker-{index}"))
        .spawn(move || match Worker::new(uring, polling, inbox, counters) {
            Ok(worker) => {
                let _ = ready.send(Some(worker.has_ring()));
                worker.run();
            }
            Err(errno) => {
                tracing::error!(%errno, "worker {index} cannot start");
                let _ = ready.send(None);
            }
        })
        .ok()?;
    let has_ring = started.recv().ok().flatten()?;
    if uring && !has_ring {
        tracing::warn!("io_uring is refused here: disks use plain reads and writes");
    }
    Some(WorkerHandle { mailbox, stats, thread: Some(thread), has_ring })
}

/// A running queue, as its session holds it.
#[derive(Debug)]
pub struct QueueHandle {
    id: QueueId,
    pool: Arc<Pool>,
    worker: AtomicUsize,
    stats: Arc<QueueStats>,
}

impl QueueHandle {
    fn send(&self, command: Command) {
        if let Some(mailbox) = self.pool.mailbox(self.worker.load(Ordering::Relaxed)) {
            mailbox.send(command);
        }
    }

    /// The worker that owns the queue.
    #[must_use]
    pub fn worker(&self) -> usize {
        self.worker.load(Ordering::Relaxed)
    }

    /// Stops the queue once nothing is in flight, and returns its base.
    ///
    /// # Errors
    /// [`StopError`] if the worker has ended.
    pub async fn stop(self) -> Result<u16, StopError> {
        let (reply, base) = oneshot::channel();
        self.send(Command::Stop(self.id, reply));
        base.await.map_err(|_| StopError)
    }

    /// Gives the queue a new snapshot; returns when no request uses an older one.
    ///
    /// # Errors
    /// [`QueueError::Ring`] if the ring is not in it: the queue then goes on with the old one.
    pub async fn set_memory(
        &self,
        memory: Arc<GuestMemory>,
        addresses: RingAddresses,
    ) -> Result<(), QueueError> {
        let (reply, done) = oneshot::channel();
        self.send(Command::Memory(self.id, memory, addresses, reply));
        // A worker that has ended uses no memory.
        done.await.unwrap_or(Ok(()))
    }

    /// Serves the ring, or lets it wait; returns when the worker knows.
    pub async fn set_enabled(&self, enabled: bool) {
        let (reply, done) = oneshot::channel();
        self.send(Command::Enable(self.id, enabled, reply));
        let _ = done.await;
    }

    /// Replaces the kick.
    pub fn set_kick(&self, kick: Option<Kick>) {
        self.send(Command::Kick(self.id, kick));
    }

    /// Replaces the call.
    pub fn set_call(&self, call: Option<Arc<Call>>) {
        self.send(Command::Call(self.id, call));
    }

    /// Replaces the err.
    pub fn set_err(&self, err: Option<Arc<Call>>) {
        self.send(Command::Err(self.id, err));
    }

    /// Moves the running queue to worker `index`: it stops popping, reaps what is in flight, and
    /// goes on there. Returns false if there is no such worker.
    pub async fn move_to(&self, index: usize) -> bool {
        let Some(target) = self.pool.mailbox(index) else { return false };
        if index == self.worker() {
            return true;
        }
        let (reply, queue) = oneshot::channel();
        self.send(Command::Detach(self.id, reply));
        let Ok(queue) = queue.await else { return false };
        self.stats.moves.add(1);
        target.send(Command::Start(self.id, queue));
        self.worker.store(index, Ordering::Relaxed);
        true
    }
}
