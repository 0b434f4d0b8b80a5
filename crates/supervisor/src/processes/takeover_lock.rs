//! `TakeoverLock`: a change and a takeover exclude each other. The next supervisor has read its
//! configuration before it takes over, and would not know of the change.

use super::Processes;
use manyring_serve::times::HANDOFF_END;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::timeout;

/// The lock between changes and a takeover, and what the changes under way wait for.
#[derive(Debug, Default)]
pub(super) struct TakeoverLock {
    /// Read-locked by each change, and write-locked by a takeover.
    lock: Arc<RwLock<()>>,
    awaited: Mutex<Awaited>,
}

/// The devices and switches that changes under way remove.
#[derive(Clone, Debug, Default)]
pub(crate) struct Awaited {
    /// The names of the devices that must stop before a change continues.
    pub(crate) devices: Vec<String>,
    /// The names of the switches that are removed or changed when these devices have stopped.
    pub(crate) switches: Vec<String>,
}

impl TakeoverLock {
    /// Waits until all changes that have begun are done, and takes the lock that keeps further
    /// changes from beginning.
    ///
    /// # Errors
    /// One line: a change takes longer than a takeover waits.
    pub(super) async fn takeover(&self) -> Result<OwnedRwLockWriteGuard<()>, String> {
        if let Ok(alone) = timeout(HANDOFF_END, self.lock.clone().write_owned()).await {
            return Ok(alone);
        }
        /// The most devices that the message names.
        const NAMED_MAX: usize = 8;
        let mut devices = self.awaited().devices;
        if devices.is_empty() {
            return Err("a change is under way".to_owned());
        }
        if devices.len() > NAMED_MAX {
            let more = format!("and {} more", devices.len() - NAMED_MAX);
            devices.truncate(NAMED_MAX);
            devices.push(more);
        }
        let devices = devices.join(", ");
        Err(format!("a change waits for devices that stop: {devices}; try again later"))
    }

    /// Returns the devices and switches that changes under way remove.
    pub(super) fn awaited(&self) -> Awaited {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Processes {
    /// Takes the lock that keeps a takeover from beginning during a change. While another
    /// supervisor takes over, this waits, and returns only if the takeover fails.
    pub(crate) async fn change(&self) -> OwnedRwLockReadGuard<()> {
        self.changes.lock.clone().read_owned().await
    }

    /// Takes the lock as `change` does, without waiting. `None`: another supervisor takes over.
    pub fn change_now(&self) -> Option<OwnedRwLockReadGuard<()>> {
        self.changes.lock.clone().try_read_owned().ok()
    }

    /// Stores the devices and switches that changes under way remove.
    pub(crate) fn changes_wait_for(&self, awaited: Awaited) {
        *self.changes.awaited.lock().unwrap_or_else(PoisonError::into_inner) = awaited;
    }
}
