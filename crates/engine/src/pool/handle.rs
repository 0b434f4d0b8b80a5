//! `QueueHandle`: the session's handle of a running queue; `Route`: which worker owns the queue.

use crate::fds::doorbell::{Call, Kick};
use crate::pool::{Home, Pool, StopError};
use crate::running::orders::{Order, QueueId, Reply};
use crate::stats::QueueStats;
use crate::worker::mailbox::Command;
use manyring_memory::GuestMemory;
use manyring_queue::{Base, QueueError, RingAddresses};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, oneshot};

/// The maximum time for which a queue that is to move pauses for its requests in flight; then it
/// stays. A request that the disk never finishes must neither keep the queue paused nor delay other
/// moves.
const MOVE_TIMEOUT: Duration = Duration::from_millis(100);

/// The worker that runs a queue. A sender of an order holds the lock until the order is in the
/// worker's mailbox, so that no order goes to a worker that has just given the queue to another
/// one.
#[derive(Debug)]
pub struct Route {
    id: QueueId,
    pool: Arc<Pool>,
    worker: Mutex<usize>,
    stats: Arc<QueueStats>,
    home: Home,
    /// The operator has chosen the queue's worker: the queue never moves.
    is_pinned: bool,
}

impl Route {
    /// Makes the route of a queue that begins on `worker`, and stays there if it is pinned.
    pub(crate) fn new(
        id: QueueId,
        pool: Arc<Pool>,
        stats: Arc<QueueStats>,
        worker: usize,
        home: Home,
        is_pinned: bool,
    ) -> Self {
        stats.worker.set(worker as u64);
        Self { id, pool, worker: Mutex::new(worker), stats, home, is_pinned }
    }

    /// Sends an order to the worker that owns the queue. Returns the lock: while the caller holds
    /// it, the queue does not move.
    async fn send(&self, order: Order) -> MutexGuard<'_, usize> {
        let worker = self.worker.lock().await;
        if let Some(mailbox) = self.pool.mailbox(*worker) {
            mailbox.send(Command::Order(self.id, order));
        }
        worker
    }

    /// Sends an order to the queue, and returns its reply; `None` if the queue runs no more.
    pub async fn ask<T>(&self, order: impl FnOnce(Reply<T>) -> Order) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        drop(self.send(order(reply)).await);
        answer.await.ok()
    }

    /// See [`QueueHandle::set_enabled`].
    pub async fn set_enabled(&self, enabled: bool) {
        self.ask(|fence| Order::Enable(enabled, fence)).await;
    }

    /// Returns when every request that the queue has popped until now is done.
    pub async fn fence(&self) {
        // If there is no reply, the queue has stopped, and has no request in flight.
        self.ask(Order::Fence).await;
    }

    /// Returns the queue's counters.
    pub fn stats(&self) -> &QueueStats {
        &self.stats
    }

    pub(crate) fn id(&self) -> QueueId {
        self.id
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// Returns the worker that owns the queue; `None` while the queue moves, or while an order is
    /// sent.
    pub fn worker(&self) -> Option<usize> {
        self.worker.try_lock().ok().map(|worker| *worker)
    }

    /// See [`QueueHandle::move_to`]. The old worker passes the queue to the new one itself: the
    /// queue does not wait for the control thread, which may be busy.
    pub(crate) async fn move_to(&self, index: usize) -> bool {
        // Another task that holds the lock for long either stops the queue, which may take for
        // ever, or moves it. Wait for neither: the balance decides nothing more until all its moves
        // are done.
        let Ok(mut worker) = self.worker.try_lock() else { return false };
        if *worker == index {
            return true;
        }
        if self.is_pinned {
            return false;
        }
        let Some(lease) = self.pool.lease(index) else { return false };
        let Some(mailbox) = self.pool.mailbox(*worker) else { return false };
        let (reply, mut moved) = oneshot::channel();
        mailbox.send(Command::Move(self.id, lease, reply));
        let moved = match tokio::time::timeout(MOVE_TIMEOUT, &mut moved).await {
            Ok(moved) => moved,
            Err(_) => {
                mailbox.send(Command::Stay(self.id));
                moved.await
            }
        };
        if moved.is_err() {
            return false;
        }
        self.stats.moves.add(1);
        self.stats.worker.set(index as u64);
        *worker = index;
        true
    }
}

/// A session's handle of a running queue. If this is dropped without [`Self::stop`], the worker
/// serves the queue until the worker ends.
#[derive(Debug)]
pub struct QueueHandle(Arc<Route>);

impl QueueHandle {
    pub(crate) fn new(route: Arc<Route>) -> Self {
        Self(route)
    }

    /// Returns the route, which says which worker owns the queue.
    pub fn route(&self) -> &Arc<Route> {
        &self.0
    }

    /// Sends an order to the queue, and returns its reply; `None` if the queue runs no more. The
    /// session waits for the reply of every order, so that a front-end which sends faster than the
    /// queue follows cannot pile up orders, and above all the file descriptors in them.
    async fn ask<T>(&self, order: impl FnOnce(Reply<T>) -> Order) -> Option<T> {
        self.0.ask(order).await
    }

    /// Returns the worker that owns the queue; `None` while the queue moves, or while an order is
    /// sent.
    #[must_use]
    pub fn worker(&self) -> Option<usize> {
        self.0.worker()
    }

    /// Stops the queue once nothing is in flight, and returns its base (for `GET_VRING_BASE`).
    ///
    /// # Errors
    /// [`StopError`]: the worker ended before it replied.
    pub async fn stop(self) -> Result<Base, StopError> {
        let (reply, base) = oneshot::channel();
        // The lock is kept until the reply: a queue that stops must not move.
        let _stays = self.0.send(Order::Stop(reply)).await;
        base.await.map_err(|_| StopError)
    }

    /// Sets a new snapshot of guest memory; returns when no request uses an older one.
    ///
    /// # Errors
    /// [`QueueError::Ring`]: the new snapshot does not contain the ring. The queue keeps the old
    /// snapshot.
    pub async fn set_memory(
        &self,
        memory: Arc<GuestMemory>,
        addresses: RingAddresses,
    ) -> Result<(), QueueError> {
        // If there is no reply, the queue has ended, and uses no memory.
        self.ask(|fence| Order::Memory(memory, addresses, fence)).await.unwrap_or(Ok(()))
    }

    /// Enables or disables the queue (`SET_VRING_ENABLE`). After "disable", returns when no chain
    /// that was taken from the ring is in flight any more.
    pub async fn set_enabled(&self, enabled: bool) {
        self.ask(|fence| Order::Enable(enabled, fence)).await;
    }

    /// The session ends: leaves chains that are set aside to the next session, if the ring has a
    /// record of them. [`Self::stop`] follows.
    pub async fn leave_aside(&self) {
        self.ask(Order::LeaveAside).await;
    }

    /// Replaces the kick.
    pub async fn set_kick(&self, kick: Option<Kick>) {
        self.ask(|reply| Order::Kick(kick, reply)).await;
    }

    /// Replaces the call.
    pub async fn set_call(&self, call: Option<Arc<Call>>) {
        self.ask(|reply| Order::Call(call, reply)).await;
    }

    /// Replaces the err.
    pub async fn set_err(&self, err: Option<Arc<Call>>) {
        self.ask(|reply| Order::Err(err, reply)).await;
    }

    /// Moves the running queue to worker `index`: the queue stops popping, waits for what is in
    /// flight, and continues on the other worker. Needs a tokio runtime with time.
    ///
    /// Returns false, and the queue stays where it is, if worker `index` cannot run, if the
    /// operator has chosen the queue's worker, if the queue is stopping or moving now, or if a
    /// request in flight did not end in time.
    pub async fn move_to(&self, index: usize) -> bool {
        self.0.move_to(index).await
    }
}
