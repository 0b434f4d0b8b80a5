//! Hands the disks of a Xen to the next supervisor (`processes/handoff/source.rs`).
//!
//! The tasks leave their disks, as at the end of the process: the rings stay as they are, with
//! their journals, and images and event channels are closed. The tasks of the next supervisor take
//! the rings over. The handoff carries the locks by which no other daemon serves these disks, and
//! the bytes of disks in memory.
//!
//! If requests of a disk do not complete in time, its device process is killed. Until the host has
//! ended these requests, the open files of the device process keep a byte of the image locked (its
//! mark), so that the next supervisor cannot open the image. An image that is only read can be
//! opened before that: the next supervisor gets the marks, and gives the disk to no device process
//! before these files are closed.

use super::memory::{Bytes, Memory};
use super::{Disks, Shared, XenDisks, disk_name};
use crate::processes::{HandoffMessage, HandoffRequest, OfXen, XenBytes, XenEndings};
use manyring_serve::times::{XEN_HAND_OFF, XEN_QUIESCE};
use manyring_transport::xenbus::DeviceId;
use rustix::fd::OwnedFd;
use std::collections::{BTreeSet, HashMap};
use std::sync::{MutexGuard, PoisonError, Weak};
use tokio::task::JoinSet;
use tokio::time::timeout;

impl XenDisks {
    /// Hands the disks over. The caller has told their tasks to leave them. Returns only if the
    /// takeover has failed: the disks are then served here again.
    pub(super) async fn hand_over(&self, disks: &mut Disks, mut handoff_request: HandoffRequest) {
        let left = tokio::select! {
            left = self.leave(disks) => left,
            // The takeover has failed already: another device was too slow.
            () = handoff_request.is_void() => return,
        };
        handoff_request.answer(left).await;
        self.shared.state_dir.sign();
    }

    async fn leave(
        &self,
        disks: &mut Disks,
    ) -> Result<Vec<(HandoffMessage, Vec<OwnedFd>)>, String> {
        if timeout(XEN_QUIESCE, disks.all_ended()).await.is_err() {
            self.end_processes_of(disks).await?;
            let _ = timeout(XEN_HAND_OFF, disks.all_ended()).await;
            if let Some(id) = disks.running.keys().find(|id| self.shared.is_in_memory(id)) {
                return Err(format!("stopping the disk {id} in memory timed out"));
            }
        }
        self.left()
    }

    /// Kills the device processes whose disks do not stop, and waits until they have ended. Their
    /// requests may still be in flight in the kernel.
    ///
    /// # Errors
    /// The kernel does not end a process, so the process still has the event channels of its guest.
    /// The next supervisor could not bind these channels, and would close the disks.
    async fn end_processes_of(&self, disks: &Disks) -> Result<(), String> {
        let mut processes = BTreeSet::new();
        for id in disks.running.keys() {
            let Some(process) = self.shared.plan.domain(self.shared.domains, id.domain) else {
                return Err(format!(
                    "stopping the disk {id}, which no device process serves, timed out"
                ));
            };
            tracing::warn!(
                device = %id,
                process,
                "stopping the disk timed out; killing its device process"
            );
            processes.insert(process);
        }
        let all: JoinSet<_> = processes
            .into_iter()
            .map(|process| {
                let processes = self.shared.processes.clone();
                async move {
                    processes.end_one(&process, "a takeover by another daemon is under way").await
                }
            })
            .collect();
        let ended: Result<(), String> = all.join_all().await.into_iter().collect();
        ended.map_err(|problem| format!("{problem}, whose disk did not stop in time"))
    }

    fn left(&self) -> Result<Vec<(HandoffMessage, Vec<OwnedFd>)>, String> {
        let failed = |error: std::io::Error| error.to_string();
        let locks = self.shared.state_dir.locks().map_err(failed)?;
        let mut left = vec![(HandoffMessage::Locks {}, locks)];
        for (id, Memory { params, bytes }) in self.shared.memory().iter() {
            let DeviceId { kind, domain, device } = id.clone();
            let params = params.clone();
            let file = match bytes {
                Bytes::File(file) => file.try_clone().map_err(failed)?,
                Bytes::Disk { disk, lies_apart: true } => {
                    let file = disk.hand_memory().map_err(|errno| errno.to_string())?;
                    file.ok_or("internal error: a disk in memory without a file")?
                }
                Bytes::Disk { .. } => {
                    return Err(format!("the memory disk {id} is served by this process itself"));
                }
            };
            left.push((HandoffMessage::XenMemory { kind, domain, device, params }, vec![file]));
        }
        for (id, endings) in self.shared.endings().iter() {
            let endings =
                endings.upgrade().map(|endings| endings.left(&disk_name(&self.shared.plan, id)));
            left.extend(endings.into_iter().flatten().map(|marked| (marked, Vec::new())));
        }
        Ok(left)
    }
}

impl Shared {
    fn endings(&self) -> MutexGuard<'_, HashMap<DeviceId, Weak<XenEndings>>> {
        self.endings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the handles for the requests in flight of a disk that a task begins to serve. Drops
    /// those of tasks that have ended.
    pub(super) fn note_endings(&self, id: &DeviceId, of_disk: Weak<XenEndings>) {
        let mut all = self.endings();
        all.retain(|_, endings| endings.strong_count() > 0);
        all.insert(id.clone(), of_disk);
    }
}

/// Takes the memory of the disks of these kinds out of `left`, which another supervisor handed
/// over.
pub(super) fn taken(left: &mut OfXen, kinds: &[String]) -> HashMap<DeviceId, Memory> {
    let all = std::mem::take(&mut left.memory);
    let (own, others): (Vec<_>, _) = all.into_iter().partition(|of| kinds.contains(&of.kind));
    left.memory = others;
    let memory = |XenBytes { kind, domain, device, params, file }| {
        (DeviceId { kind, domain, device }, Memory { params, bytes: Bytes::File(file) })
    };
    own.into_iter().map(memory).collect()
}
