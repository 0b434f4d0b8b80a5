//! `Journals`: watches the journal files of rings that are served, since a user or a program may
//! remove them, and a compromised device process may make them too long.
//!
//! A journal that was removed or replaced, by a cleaner of old files or by an operator, is still
//! mapped and written. But the next process would not find it, and would have to close the disk. So
//! each journal is checked once a second. When a journal is gone, the disk's task leaves the disk,
//! as at the end of the process: its queues stop, the journal is written into a new file, and the
//! disk's next task takes the rings over by that file. A journal that was truncated cannot be
//! restored while requests are in flight, so a warning is logged.
//!
//! A device process can write to its journals, and only this check keeps a compromised process
//! from filling the file system with them. A journal that is longer than any ring needs is
//! truncated, and its process is killed. Serving a ring stores to the mapped journal, which causes
//! no event; every other way to make the file longer causes one at once ([`StateDir::writes`]).

use super::Shared;
use crate::processes::XenHolder;
use manyring_engine::aside;
use manyring_serve::channel::watched;
use manyring_serve::times::{XEN_JOURNALS_LOOK, XEN_JOURNALS_MIN};
use manyring_transport::xenbus::DeviceId;
use manyring_xen::{Fate, Held, StateDir};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// The size of the buffer for inotify events of the folder, in bytes.
const EVENTS_BYTES: usize = 4096;

/// The journals of all disks that are served, by disk.
#[derive(Debug, Default)]
pub(super) struct Journals {
    held: Mutex<HashMap<DeviceId, Kept>>,
}

/// The journals of one disk, and the process that writes to them.
#[derive(Debug)]
struct Kept {
    journals: Vec<Held>,
    /// The device process that serves the disk; `None`: this process serves it.
    process: Option<XenHolder>,
}

/// What a check of all journals has found.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// Disks whose journals are gone and can be written again.
    pub(super) lost: Vec<DeviceId>,
    /// Device processes one of whose journals is too long.
    pub(super) fills: Vec<XenHolder>,
}

impl Journals {
    /// Watches the journals of a disk whose queues start, in a device process or here.
    pub(super) fn add(&self, disk: &DeviceId, journals: Vec<Held>, process: Option<XenHolder>) {
        let kept = Kept { journals, process };
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(disk.clone(), kept);
    }

    /// Stores the sizes of a disk's journals, once its queues are served.
    pub(super) fn measure(&self, disk: &DeviceId) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let journals = held.get_mut(disk).into_iter().flat_map(|kept| &mut kept.journals);
        journals.for_each(Held::measure);
    }

    /// Ends the watch of a disk's journals, when its queues have stopped; returns the journals.
    pub(super) fn take(&self, disk: &DeviceId) -> Vec<Held> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.remove(disk).map(|kept| kept.journals).unwrap_or_default()
    }

    /// True if no disk is served.
    pub(super) fn is_empty(&self) -> bool {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Checks all journals; truncates those that are too long, and logs once for each what is wrong
    /// with it.
    pub(super) fn look(&self, folder: &StateDir) -> Looked {
        let mut looked = Looked::default();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for (disk, Kept { journals, process }) in held.iter_mut() {
            let mut is_lost = false;
            for journal in journals.iter_mut() {
                let fate = folder.fate(journal);
                if fate == Fate::Grown {
                    folder.cut(journal);
                    looked.fills.extend(process.clone());
                }
                // Until its ring is served, the right size of a journal is not known: report only a
                // journal that is too long.
                if journal.is_told || !journal.is_measured() && fate != Fate::Grown {
                    continue;
                }
                journal.is_told = fate != Fate::Kept;
                let path = folder.path_of(journal).display().to_string();
                match fate {
                    Fate::Kept => {}
                    Fate::Grown => tracing::warn!(
                        device = %disk,
                        path,
                        "the journal is longer than a ring needs; truncated, and its device \
                         process is ended"
                    ),
                    Fate::Gone if folder.can_write(journal) => {
                        tracing::warn!(
                            device = %disk,
                            path,
                            "the journal is missing; recreating it"
                        );
                        is_lost = true;
                    }
                    Fate::Gone => tracing::warn!(device = %disk, path, "the journal is missing"),
                    Fate::Cut => tracing::warn!(
                        device = %disk,
                        path,
                        "the journal was truncated; the guest loses its disk if the daemon is \
                         killed"
                    ),
                }
            }
            if is_lost {
                looked.lost.push(disk.clone());
            }
        }
        looked
    }
}

/// Checks the journals once a second, and after a call that wrote to one. Sends the disks whose
/// journals are gone, and ends device processes whose journals are too long.
pub(super) async fn watch(shared: Arc<Shared>, sender: mpsc::Sender<DeviceId>) {
    let looking = shared.clone();
    let writes = aside(move || looking.state_dir.writes()).await.flatten();
    let writes = writes.and_then(|fd| watched(fd, Interest::READABLE).ok());
    loop {
        let _ = timeout(XEN_JOURNALS_LOOK, written(writes.as_ref())).await;
        if !shared.journals.is_empty() {
            let looking = shared.clone();
            let looked = aside(move || looking.journals.look(&looking.state_dir)).await;
            let Looked { lost, fills } = looked.unwrap_or_default();
            fills.iter().for_each(|process| process.end("it fills state_dir with a journal"));
            for id in lost {
                if sender.send(id).await.is_err() {
                    return;
                }
            }
        }
        sleep(XEN_JOURNALS_MIN).await;
    }
}

/// Returns when a system call has written to a file in the folder of journals; never, if that
/// cannot be watched.
async fn written(writes: Option<&AsyncFd<OwnedFd>>) {
    let Some(writes) = writes else { return std::future::pending().await };
    let read = |fd: &OwnedFd| Ok(rustix::io::read(fd, &mut [0; EVENTS_BYTES])?);
    if writes.async_io(Interest::READABLE, read).await.is_err() {
        std::future::pending().await
    }
}
