//! `QueueHandle`: a running queue as its session holds it; `Route`: which worker owns it.

use crate::doorbell::{Call, Kick};
use crate::orders::{Command, Order, QueueId, Reply};
use crate::pool::{Home, Pool, StopError};
use crate::stats::QueueStats;
use manyring_memory::GuestMemory;
use manyring_queue::{Base, QueueError, RingAddresses};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot};

/// Longest time that a queue which is to move waits for its requests in flight. A disk that hangs
/// must not hold back the requests that it would still serve, nor every other move.
const MOVE_PATIENCE: Duration = Duration::from_millis(100);

/// Where a queue runs. Whoever sends it a command holds the lock, so that no command goes to a
/// worker that has just given the queue away.
#[derive(Debug)]
pub struct Route {
    id: QueueId,
    pool: Arc<Pool>,
    worker: Mutex<usize>,
    stats: Arc<QueueStats>,
    home: Home,
    /// Its worker was chosen by the operator: it never moves.
    is_pinned: bool,
}

impl Route {
    /// The route of a queue that begins on `worker`, and stays there if it is pinned.
    pub(crate) fn new(
        id: QueueId,
        pool: Arc<Pool>,
        stats: Arc<QueueStats>,
        worker: usize,
        (home, is_pinned): (Home, bool),
    ) -> Self {
        stats.worker.set(worker as u64);
        Self { id, pool, worker: Mutex::new(worker), stats, home, is_pinned }
    }

    /// Sends an order to the worker that owns the queue; the lock is kept by the caller.
    async fn send(&self, order: Order) -> MutexGuard<'_, usize> {
        let worker = self.worker.lock().await;
        if let Some(mailbox) = self.pool.mailbox(*worker) {
            mailbox.send(Command::Order(self.id, order));
        }
        worker
    }

    /// Gives an order and waits for its reply; `None` if the queue runs no more.
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
        // A queue that has stopped has none.
        self.ask(Order::Fence).await;
    }

    /// The queue's counters.
    pub fn stats(&self) -> &QueueStats {
        &self.stats
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.is_pinned
    }

    /// The worker, unless the queue is just moving.
    pub(crate) fn worker(&self) -> Option<usize> {
        self.worker.try_lock().ok().map(|worker| *worker)
    }

    /// See [`QueueHandle::move_to`]. The old worker hands the queue to the new one itself: the
    /// queue does not wait for the control thread, which may be busy.
    pub(crate) async fn move_to(&self, index: usize) -> bool {
        // Who has the lock for longer than a moment stops the queue, which may take for ever, or
        // moves it: neither is waited for, as the moves of all other queues wait for this one.
        let Ok(mut worker) = self.worker.try_lock() else { return false };
        if *worker == index {
            return true;
        }
        if self.is_pinned {
            return false;
        }
        let Some(seat) = self.pool.seat(index) else { return false };
        let Some(mailbox) = self.pool.mailbox(*worker) else { return false };
        let (reply, mut moved) = oneshot::channel();
        mailbox.send(Command::Order(self.id, Order::Move(seat, reply)));
        let moved = match tokio::time::timeout(MOVE_PATIENCE, &mut moved).await {
            Ok(moved) => moved,
            Err(_) => {
                mailbox.send(Command::Order(self.id, Order::Stay));
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

/// A running queue. Dropped without [`Self::stop`] a worker's queue runs on until its worker ends.
#[derive(Debug)]
pub struct QueueHandle(Runs);

/// Who runs the queue, and so hears its orders.
#[derive(Debug)]
enum Runs {
    Worker(Arc<Route>),
    /// A task of the control thread.
    Task(mpsc::UnboundedSender<Order>),
}

impl QueueHandle {
    pub(crate) fn new(route: Arc<Route>) -> Self {
        Self(Runs::Worker(route))
    }

    /// A queue that a task of the control thread runs: it heeds all orders but those of a move.
    pub fn of_task(orders: mpsc::UnboundedSender<Order>) -> Self {
        Self(Runs::Task(orders))
    }

    /// The worker's route, unless the control thread runs the queue.
    pub fn route(&self) -> Option<&Arc<Route>> {
        match &self.0 {
            Runs::Worker(route) => Some(route),
            Runs::Task(_) => None,
        }
    }

    /// Gives an order and waits for its reply; `None` if the queue runs no more. Nothing is asked
    /// without waiting: who is slow must not gather what a front-end sends meanwhile, fds above
    /// all.
    async fn ask<T>(&self, order: impl FnOnce(Reply<T>) -> Order) -> Option<T> {
        match &self.0 {
            Runs::Worker(route) => route.ask(order).await,
            Runs::Task(orders) => {
                let (reply, answer) = oneshot::channel();
                let _ = orders.send(order(reply));
                answer.await.ok()
            }
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
    pub async fn stop(self) -> Result<Base, StopError> {
        let base = match &self.0 {
            Runs::Worker(route) => {
                let (reply, base) = oneshot::channel();
                // The lock is kept: a queue that stops does not move.
                let _stays = route.send(Order::Stop(reply)).await;
                base.await.ok()
            }
            Runs::Task(_) => self.ask(Order::Stop).await,
        };
        base.ok_or(StopError)
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
        // A queue that runs no more uses no memory.
        self.ask(|fence| Order::Memory(memory, addresses, fence)).await.unwrap_or(Ok(()))
    }

    /// Serves the ring, or lets it wait. Returns when the worker knows, and if the ring is to wait,
    /// when nothing that was taken from it is in flight any more.
    pub async fn set_enabled(&self, enabled: bool) {
        self.ask(|fence| Order::Enable(enabled, fence)).await;
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

    /// Moves the running queue to worker `index`: it stops popping, reaps what is in flight, and
    /// goes on there. Returns false if there is no such worker, if the operator has chosen the
    /// queue's own one, if it stops or moves just now, or if a request in flight did not end in
    /// time: the queue goes on where it is. Needs a tokio runtime with time.
    pub async fn move_to(&self, index: usize) -> bool {
        match self.route() {
            Some(route) => route.move_to(index).await,
            None => false,
        }
    }
}
