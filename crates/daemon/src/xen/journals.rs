//! `Journals`: the journals of rings that are served, watched for somebody who takes them away.
//!
//! A journal that was removed or replaced, by a cleaner of old files or by an operator, is still
//! mapped and written. But the next process would not find it, and would have to close the disk.
//! So each is looked at once a second. When one is gone, its disk is left as at the end of the
//! process: its queues stop, the journal is written into a new file, and the disk is taken over
//! from there. One that was cut cannot be restored while requests wait, so the operator is told.

use super::state_dir::{Held, StateDir};
use manyring_transport::xenbus::DeviceId;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// The journals of all disks that are served, by disk.
#[derive(Debug, Default)]
pub(super) struct Journals {
    held: Mutex<HashMap<DeviceId, Vec<Held>>>,
}

/// Whether a journal is still whole and in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is where it was.
    Kept,
    /// The folder has it no more, or another file under its name.
    Gone,
    /// It is shorter than it was: what it said is lost.
    Cut,
}

impl Journals {
    /// The queues of a disk are served.
    pub(super) fn add(&self, disk: &DeviceId, held: Vec<Held>) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(disk.clone(), held);
    }

    /// The queues of a disk have stopped.
    pub(super) fn take(&self, disk: &DeviceId) -> Vec<Held> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.remove(disk).unwrap_or_default()
    }

    /// True if no disk is served.
    pub(super) fn is_empty(&self) -> bool {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Looks at all of them. Returns the disks whose journals are gone and can be written again;
    /// logs once what became of each.
    pub(super) fn look(&self, folder: &StateDir) -> Vec<DeviceId> {
        let mut lost = Vec::new();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for (disk, journals) in held.iter_mut() {
            let mut is_lost = false;
            for journal in journals.iter_mut().filter(|journal| !journal.is_told) {
                let fate = folder.fate(journal);
                journal.is_told = fate != Fate::Kept;
                let path = folder.path_of(journal).display().to_string();
                match fate {
                    Fate::Kept => {}
                    Fate::Gone if folder.can_write(journal) => {
                        tracing::warn!(device = %disk, path, "journal is gone: begun again");
                        is_lost = true;
                    }
                    Fate::Gone => tracing::warn!(device = %disk, path, "journal is gone"),
                    Fate::Cut => tracing::warn!(
                        device = %disk,
                        path,
                        "journal was cut: the guest loses its disk if the daemon is killed"
                    ),
                }
            }
            if is_lost {
                lost.push(disk.clone());
            }
        }
        lost
    }
}
