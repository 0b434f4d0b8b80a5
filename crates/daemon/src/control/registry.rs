//! `Registry`: the devices that the control API shows and changes. Those of Xen guests come and go.

use crate::assemble::Part;
use std::sync::{Arc, PoisonError, RwLock};
use tokio::sync::Semaphore;

/// A device under control.
#[derive(Debug)]
pub(crate) struct Controlled {
    pub(crate) part: Part,
    /// One change at a time: a host that hangs must not collect threads.
    pub(super) changing: Arc<Semaphore>,
}

/// The devices, in the order in which they came. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registry(Arc<RwLock<Vec<Arc<Controlled>>>>);

impl Registry {
    /// All devices, as they are at this moment.
    pub(crate) fn all(&self) -> Vec<Arc<Controlled>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The device of this name.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Controlled>> {
        let devices = self.0.read().unwrap_or_else(PoisonError::into_inner);
        devices.iter().find(|device| device.part.name() == name).cloned()
    }

    /// Adds a device, whose name no other one has; one that had it before is shown no more.
    pub(crate) fn add(&self, part: Part) {
        let mut devices = self.0.write().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.part.name() != part.name());
        devices.push(Arc::new(Controlled { part, changing: Arc::new(Semaphore::new(1)) }));
    }

    /// Forgets a device.
    pub(crate) fn remove(&self, name: &str) {
        let mut devices = self.0.write().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.part.name() != name);
    }
}
