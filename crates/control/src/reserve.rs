//! `Reserve`: one file descriptor that the control socket keeps open, to close it when `accept`
//! fails with `EMFILE` or `ENFILE`. So the operator's next client is answered although front-ends
//! have used up all other descriptors.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The reserved descriptor; `None` after [`Self::spend`] has closed it for the connection of a
/// client.
#[derive(Debug)]
pub(super) struct Reserve {
    kept: Mutex<Option<OwnedFd>>,
    refilled: Notify,
}

impl Reserve {
    pub(super) fn new() -> Arc<Self> {
        let reserve = Self { kept: Mutex::new(None), refilled: Notify::new() };
        reserve.refill();
        Arc::new(reserve)
    }

    fn lock(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the reserved descriptor, so that the next `accept` succeeds. Returns false if the
    /// descriptor was closed already.
    pub(super) fn spend(&self) -> bool {
        self.lock().take().is_some()
    }

    /// Opens the reserved descriptor again, if it is closed and the process may open one more.
    pub(super) fn refill(&self) {
        let mut kept = self.lock();
        if kept.is_none() {
            *kept = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
        if kept.is_some() {
            self.refilled.notify_one();
        }
    }

    /// Returns when [`Self::refill`] has found the reserved descriptor open, or has opened it.
    pub(super) async fn refilled(&self) {
        self.refilled.notified().await;
    }
}

/// Refills the reserve when it is dropped: a client's task drops it after the client's connection.
#[derive(Debug)]
pub(super) struct Refill(pub(super) Arc<Reserve>);

impl Drop for Refill {
    fn drop(&mut self) {
        self.0.refill();
    }
}
