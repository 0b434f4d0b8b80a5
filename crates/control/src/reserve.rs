//! A file descriptor that is kept for the operator: the control socket answers one client although
//! front-ends have taken all others.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The descriptor, or none while a client has its place.
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

    /// Closes the descriptor, so that the next one that is opened finds room. False: it was closed.
    pub(super) fn spend(&self) -> bool {
        self.lock().take().is_some()
    }

    /// Keeps a descriptor again, if one can be had.
    pub(super) fn refill(&self) {
        let mut kept = self.lock();
        if kept.is_none() {
            *kept = eventfd(0, EventfdFlags::CLOEXEC).ok();
        }
        if kept.is_some() {
            self.refilled.notify_one();
        }
    }

    /// Returns when a descriptor has been kept again.
    pub(super) async fn refilled(&self) {
        self.refilled.notified().await;
    }
}

/// Refills the reserve when a client has left.
#[derive(Debug)]
pub(super) struct Refill(pub(super) Arc<Reserve>);

impl Drop for Refill {
    fn drop(&mut self) {
        self.0.refill();
    }
}
