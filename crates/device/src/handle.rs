//! `QueueHandle`: a running queue as its session holds it; `Route`: which worker owns it.

use crate::doorbell::{Call, Kick};
use crate::net::{Ask, ControlHandle};
use crate::orders::{Command, QueueId};
use crate::pool::{Pool, StopError};
use crate::queue::Change;
use crate::stats::QueueStats;
use manyring_memory::GuestMemory;
use manyring_queue::{QueueError, RingAddresses};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, oneshot};

/// Longest time that a queue which is to move waits for its requests in flight. A disk that hangs
/// must not hold back the requests that it would still serve, nor every other move.
const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// Where a queue runs. Whoever sends it a command holds the lock, so that no command goes to a
/// worker that has just given the queue away.
#[derive(Debug)]
pub(crate) struct Route {
    id: QueueId,
    pool: Arc<Pool>,
    worker: Mutex<usize>,
    stats: Arc<QueueStats>,
}

impl Route {
    pub(crate) fn new(id: QueueId, pool: Arc<Pool>, stats: Arc<QueueStats>) -> Self {
        stats.worker.set(0);
        Self { id, pool, worker: Mutex::new(0), stats }
    }

    /// Sends a command to the worker that owns the queue; the lock is kept by the caller.
    async fn send(&self, command: Command) -> MutexGuard<'_, usize> {
        let worker = self.worker.lock().await;
        if let Some(mailbox) = self.pool.mailbox(*worker) {
            mailbox.send(command);
        }
        worker
    }

    /// See [`QueueHandle::set_enabled`].
    pub(crate) async fn set_enabled(&self, enabled: bool) {
        let (reply, done) = oneshot::channel();
        drop(self.send(Command::Enable(self.id, enabled, reply)).await);
        let _ = done.await;
    }

    /// Changes what a network queue goes by; returns when its worker does.
    pub(crate) async fn change(&self, change: Change) {
        let (reply, done) = oneshot::channel();
        drop(self.send(Command::Change(self.id, change, reply)).await);
        let _ = done.await;
    }

    /// Returns when every request that the queue has popped until now is done.
    pub(crate) async fn barrier(&self) {
        let (reply, done) = oneshot::channel();
        drop(self.send(Command::Barrier(self.id, reply)).await);
        // A queue that has stopped has none.
        let _ = done.await;
    }

    pub(crate) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// The worker, unless the queue is just moving.
    pub(crate) fn worker(&self) -> Option<usize> {
        self.worker.try_lock().ok().map(|worker| *worker)
    }

    /// See [`QueueHandle::move_to`].
    pub(crate) async fn move_to(&self, index: usize) -> bool {
        let Some(target) = self.pool.mailbox(index) else { return false };
        let mut worker = self.worker.lock().await;
        if *worker == index {
            return true;
        }
        let Some(mailbox) = self.pool.mailbox(*worker) else { return false };
        let (reply, mut detached) = oneshot::channel();
        mailbox.send(Command::Detach(self.id, reply));
        let queue = match tokio::time::timeout(MOVE_PATIENCE, &mut detached).await {
            Ok(queue) => queue,
            Err(_) => {
                mailbox.send(Command::Stay(self.id));
                detached.await
            }
        };
        let Ok(queue) = queue else { return false };
        self.stats.moves.add(1);
        self.stats.worker.set(index as u64);
        target.send(Command::Start(self.id, queue));
        *worker = index;
        true
    }
}

/// A running queue. Dropped without [`Self::stop`] a worker's queue runs on until its worker ends.
#[derive(Debug)]
pub struct QueueHandle(Runs);

/// Who runs the queue.
#[derive(Debug)]
enum Runs {
    Worker(Arc<Route>),
    Control(ControlHandle),
}

impl QueueHandle {
    pub(crate) fn new(route: Arc<Route>) -> Self {
        Self(Runs::Worker(route))
    }

    pub(crate) fn control(handle: ControlHandle) -> Self {
        Self(Runs::Control(handle))
    }

    /// The worker's route, unless the control thread runs the queue.
    pub(crate) fn route(&self) -> Option<&Arc<Route>> {
        match &self.0 {
            Runs::Worker(route) => Some(route),
            Runs::Control(_) => None,
        }
    }

    /// The worker that owns the queue; `None` while it moves, or if the control thread runs it.
    #[must_use]
    pub fn worker(&self) -> Option<usize> {
        self.route().and_then(|route| route.worker())
    }

    /// Stops the queue once nothing is in flight, and returns its base.
    ///
    /// # Errors
    /// [`StopError`] if the worker has ended.
    pub async fn stop(self) -> Result<u16, StopError> {
        match self.0 {
            Runs::Worker(route) => {
                let (reply, base) = oneshot::channel();
                // The lock is kept: a queue that stops does not move.
                let _stays = route.send(Command::Stop(route.id, reply)).await;
                base.await.map_err(|_| StopError)
            }
            Runs::Control(handle) => handle.ask(Ask::Stop).await.ok_or(StopError),
        }
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
        match &self.0 {
            Runs::Worker(route) => {
                let (reply, done) = oneshot::channel();
                drop(route.send(Command::Memory(route.id, memory, addresses, reply)).await);
                // A worker that has ended uses no memory.
                done.await.unwrap_or(Ok(()))
            }
            Runs::Control(handle) => {
                let asked = handle.ask(|reply| Ask::Memory(memory, addresses, reply));
                asked.await.unwrap_or(Ok(()))
            }
        }
    }

    /// Serves the ring, or lets it wait; returns when the worker knows.
    pub async fn set_enabled(&self, enabled: bool) {
        match &self.0 {
            Runs::Worker(route) => route.set_enabled(enabled).await,
            Runs::Control(handle) => {
                handle.ask(|reply| Ask::Enable(enabled, reply)).await;
            }
        }
    }

    /// Replaces the kick.
    pub async fn set_kick(&self, kick: Option<Kick>) {
        match &self.0 {
            Runs::Worker(route) => drop(route.send(Command::Kick(route.id, kick)).await),
            Runs::Control(handle) => {
                handle.ask(|reply| Ask::Kick(kick, reply)).await;
            }
        }
    }

    /// Replaces the call.
    pub async fn set_call(&self, call: Option<Arc<Call>>) {
        match &self.0 {
            Runs::Worker(route) => drop(route.send(Command::Call(route.id, call)).await),
            Runs::Control(handle) => {
                handle.ask(|reply| Ask::Call(call, reply)).await;
            }
        }
    }

    /// Replaces the err.
    pub async fn set_err(&self, err: Option<Arc<Call>>) {
        match &self.0 {
            Runs::Worker(route) => drop(route.send(Command::Err(route.id, err)).await),
            Runs::Control(handle) => {
                handle.ask(|reply| Ask::Err(err, reply)).await;
            }
        }
    }

    /// Moves the running queue to worker `index`: it stops popping, reaps what is in flight, and
    /// goes on there. Returns false if there is no such worker, or if a request in flight did not
    /// end in time: the queue goes on where it is. Needs a tokio runtime with time.
    pub async fn move_to(&self, index: usize) -> bool {
        match self.route() {
            Some(route) => route.move_to(index).await,
            None => false,
        }
    }
}
