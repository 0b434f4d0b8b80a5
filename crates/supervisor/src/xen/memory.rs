//! Disks of Xen guests that are in memory: passes their bytes from one task of a disk to the next
//! one.

use super::Shared;
use manyring_backend::blk::Disk;
use manyring_engine::aside;
use manyring_transport::xenbus::DeviceId;
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};

/// A disk in memory.
#[derive(Debug)]
pub(super) struct Memory {
    /// The value of the xenstore node `params`, by which the tool stack names the disk.
    pub(super) params: String,
    pub(super) bytes: Bytes,
}

/// The bytes of a disk in memory.
#[derive(Debug)]
pub(super) enum Bytes {
    /// The open disk has the bytes. `lies_apart`: a device process serves the disk, so the bytes
    /// are in a file that can be handed over.
    Disk { disk: Arc<dyn Disk>, lies_apart: bool },
    /// A file has the bytes; another supervisor handed it over.
    File(OwnedFd),
}

impl Shared {
    pub(super) fn memory(&self) -> MutexGuard<'_, HashMap<DeviceId, Memory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keep_memory(&self, id: &DeviceId, memory: Memory) {
        self.memory().insert(id.clone(), memory);
    }

    /// Returns the bytes of a disk that a former task has left. They stay stored here, since
    /// opening the disk may fail; when it is open, the caller drops them with
    /// [`Self::forget_memory`].
    pub(super) fn memory_of(&self, id: &DeviceId, params: &str) -> io::Result<Option<Bytes>> {
        let all = self.memory();
        match all.get(id) {
            None => Ok(None),
            Some(memory) if memory.params == params => memory.bytes.shared().map(Some),
            Some(_) => {
                drop(all);
                self.forget_memory(id);
                Ok(None)
            }
        }
    }

    pub(super) fn forget_memory(&self, id: &DeviceId) {
        if let Some(memory) = self.memory().remove(id) {
            // Freeing the memory of a large disk takes long.
            tokio::spawn(aside(move || drop(memory)));
        }
    }

    /// Stores whether a task serves this disk from memory now.
    pub(super) fn note_in_memory(&self, id: &DeviceId, is_open: bool) {
        let mut all = self.in_memory.lock().unwrap_or_else(PoisonError::into_inner);
        if is_open {
            all.insert(id.clone());
        } else {
            all.remove(id);
        }
    }

    pub(super) fn is_in_memory(&self, id: &DeviceId) -> bool {
        self.in_memory.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    /// Drops the bytes of disks that xenstore no longer has.
    pub(super) fn keep_memory_of(&self, is_there: impl Fn(&DeviceId) -> bool) {
        let gone: Vec<_> = self.memory().keys().filter(|id| !is_there(id)).cloned().collect();
        gone.iter().for_each(|id| self.forget_memory(id));
    }
}

impl Bytes {
    fn shared(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Disk { disk, lies_apart } => {
                Self::Disk { disk: disk.clone(), lies_apart: *lies_apart }
            }
            Self::File(file) => Self::File(file.try_clone()?),
        })
    }
}
