//! `Changes`: changes and takeovers exclude each other, since the next supervisor has read its
//! configuration when it takes over.

use super::Processes;
use manyring_serve::times::HANDOFF_END;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use tokio::time::timeout;

/// The changes that are under way.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Read-locked by each change, and write-locked by a takeover.
    lock: Arc<RwLock<()>>,
    /// The devices whose ends changes wait for.
    awaited: Mutex<Vec<String>>,
}

impl Changes {
    /// Locks for a takeover: changes that have begun are waited for, and no other begins.
    ///
    /// # Errors
    /// One line: a change takes longer than a takeover waits.
    pub(super) async fn takeover(&self) -> Result<OwnedRwLockWriteGuard<()>, String> {
        if let Ok(alone) = timeout(HANDOFF_END, self.lock.clone().write_owned()).await {
            return Ok(alone);
        }
        /// Devices that the message names.
        const NAMED_MAX: usize = 8;
        let mut devices = self.awaited();
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

    /// The devices whose ends changes wait for.
    pub(super) fn awaited(&self) -> Vec<String> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Processes {
    /// Locks for a change. Waits while another supervisor takes over, and returns only if the
    /// takeover fails.
    pub(crate) async fn change(&self) -> OwnedRwLockReadGuard<()> {
        self.changes.lock.clone().read_owned().await
    }

    /// Locks for a change as `change` does, without waiting. `None`: another supervisor takes
    /// over.
    pub fn change_now(&self) -> Option<OwnedRwLockReadGuard<()>> {
        self.changes.lock.clone().try_read_owned().ok()
    }

    /// Notes the devices whose ends changes wait for.
    pub(crate) fn changes_wait_for(&self, devices: Vec<String>) {
        *self.changes.awaited.lock().unwrap_or_else(PoisonError::into_inner) = devices;
    }
}
