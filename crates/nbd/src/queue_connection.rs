//! `QueueConnection`: the state that a queue and the reconnector thread share.

use super::join::JoinedConnection;
use manyring_backend::blk::Connection;
use manyring_backend::sys::uring::Inbox;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A message of the reconnector thread to a queue.
#[derive(Debug)]
pub(super) enum News {
    /// A new connection, on which the queue sends its requests.
    Joined(JoinedConnection),
    /// The server has been unreachable for longer than `reconnect`: requests must fail.
    GaveUp,
}

/// The inbox that wakes a queue when there are news, and the `user_data` of that event.
#[derive(Clone, Debug)]
pub(super) struct QueueInbox {
    pub(super) inbox: Arc<Inbox>,
    pub(super) user_data: u64,
}

/// The state that a queue and the reconnector thread share.
#[derive(Debug, Default)]
pub(super) struct QueueConnection {
    seat: Mutex<Option<QueueInbox>>,
    news: Mutex<Option<News>>,
    has_news: AtomicBool,
    /// Counts the ticks of the reconnector thread: the clock by which the queue times its requests.
    tick: AtomicU32,
    /// True if a request is in flight, so that the reconnector thread must wake the queue at each
    /// tick.
    pub(super) is_busy: AtomicBool,
    pub(super) counts: Arc<ConnectionCounts>,
}

/// The counters of one queue's connection. Only the queue's worker writes them; any thread may read
/// them.
#[derive(Debug, Default)]
pub(super) struct ConnectionCounts {
    pub(super) connected: AtomicBool,
    pub(super) shared: AtomicBool,
    pub(super) losses: AtomicU64,
    pub(super) in_flight: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
}

impl ConnectionCounts {
    /// Adds to a counter of which this thread is the only writer.
    pub(super) fn add(counter: &AtomicU64, n: usize) {
        let n = u64::try_from(n).unwrap_or(u64::MAX);
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Resets the gauges: the connection's queue was dropped.
    pub(super) fn end(&self) {
        self.connected.store(false, Ordering::Relaxed);
        self.in_flight.store(0, Ordering::Relaxed);
    }

    /// The counters in the form that the disk reports.
    pub(super) fn shown(&self) -> Connection {
        Connection {
            is_up: self.connected.load(Ordering::Relaxed),
            is_shared: self.shared.load(Ordering::Relaxed),
            losses: self.losses.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            bytes_sent: self.sent.load(Ordering::Relaxed),
            bytes_received: self.received.load(Ordering::Relaxed),
        }
    }
}

impl QueueConnection {
    /// The shared state of a new queue, which continues the counters of a queue that was dropped.
    pub(super) fn new(counts: Arc<ConnectionCounts>) -> Self {
        Self { counts, ..Self::default() }
    }

    fn seat(&self) -> MutexGuard<'_, Option<QueueInbox>> {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn news(&self) -> MutexGuard<'_, Option<News>> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the inbox that wakes the queue from now on; `None`: nothing wakes it.
    pub(super) fn sit(&self, seat: Option<QueueInbox>) {
        *self.seat() = seat;
    }

    /// Stores news for the queue, and wakes the queue. Older news that the queue has not taken are
    /// dropped.
    pub(super) fn tell(&self, news: News) {
        drop(self.news().replace(news));
        self.has_news.store(true, Ordering::Release);
        self.wake();
    }

    /// Counts a tick, a quarter of `request_timeout`, and wakes a queue that is busy.
    pub(super) fn tick(&self) {
        self.tick.fetch_add(1, Ordering::Relaxed);
        if self.is_busy.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(seat) = &*self.seat() {
            seat.inbox.put(seat.user_data, 0);
        }
    }

    /// True if the queue has taken all news.
    pub(super) fn is_told(&self) -> bool {
        !self.has_news.load(Ordering::Relaxed)
    }

    /// Takes the news. If there are none, this costs one atomic load.
    pub(super) fn take(&self) -> Option<News> {
        if !self.has_news.load(Ordering::Relaxed) {
            return None;
        }
        // The flag is cleared before the news are taken: if the reconnector thread puts new ones
        // there between the two steps, it sets the flag again.
        self.has_news.store(false, Ordering::Relaxed);
        self.news().take()
    }

    /// Returns the time, as a number of ticks.
    pub(super) fn now(&self) -> u32 {
        self.tick.load(Ordering::Relaxed)
    }
}
