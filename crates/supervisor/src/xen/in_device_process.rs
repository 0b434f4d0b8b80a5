//! `Apart`: a disk whose front-end a device process serves. It opens the resources of the front-end
//! for the device process, and keeps others open until the process has left the rings.

use super::start::journal;
use super::{Shared, disk_name, ends_within};
use crate::processes::{XenFront, XenLent, XenLentRing, XenRefusal, XenServed};
use manyring_device::blk::blkif::Abi;
use manyring_engine::aside;
use manyring_protocol::message::{XenFrontEnd, XenRing};
use manyring_protocol::spec::XenBlkSpec;
use manyring_serve::assemble::Part;
use manyring_serve::assemble::xen::{failed, refused};
use manyring_serve::times::XEN_PROCESS_RETRY;
use manyring_transport::xenbus::state::Negotiated;
use manyring_transport::xenbus::{Channel, Command, DeviceId, HostError, SimulatedXen};
use manyring_xen::{Held, Hypervisor, LentBell};
use std::sync::Arc;
use tokio::sync::{mpsc, watch};

/// Most device processes in a row that may end before one of them serves a front-end that
/// connects.
const LIVES_MAX: u32 = 8;

/// A disk that the supervisor has open and a device process serves.
#[derive(Debug)]
pub(super) struct Apart {
    id: DeviceId,
    shared: Arc<Shared>,
    front: XenFront,
}

/// The parts of a front-end that the supervisor keeps open while a device process serves it.
#[derive(Debug)]
pub(super) struct Kept {
    _channels: Vec<Channel>,
    _xen: Option<Arc<SimulatedXen>>,
}

/// The resources of a front-end: `lent` goes to the device process, `kept` and `held` stay here.
struct Lent {
    lent: XenLent,
    kept: Kept,
    held: Vec<Held>,
}

impl Apart {
    /// Makes the object for a disk that the device process of its domain serves.
    pub(super) fn new(id: &DeviceId, shared: &Arc<Shared>, part: Part, spec: XenBlkSpec) -> Self {
        shared.processes.limit(&disk_name(&shared.plan, id), &shared.plan.limit);
        let front = XenFront::new(&shared.processes, part, spec);
        shared.note_endings(id, front.endings());
        let (id, shared) = (id.clone(), shared.clone());
        Self { id, shared, front }
    }

    pub(super) fn front(&self) -> &XenFront {
        &self.front
    }

    /// Has a device process serve a front-end. If the process ends before it reports that it
    /// serves the front-end, the next device process takes the rings over.
    pub(super) async fn start(
        &mut self,
        config: &Negotiated,
        stop: &watch::Receiver<bool>,
    ) -> Result<(XenServed, Kept), HostError> {
        let mut config = config.clone();
        for life in 1.. {
            let (id, shared, lent) = (self.id.clone(), self.shared.clone(), config.clone());
            let lent = aside(move || lend(&id, &shared, &lent)).await;
            let Lent { lent, kept, held } =
                lent.unwrap_or_else(|| Err(HostError::new("internal error")))?;
            // From here on the device process can write to the journals: watch their sizes.
            self.shared.journals.add(&self.id, held, Some(self.front.holder()));
            let refusal = match self.front.connect(lent).await {
                Ok(served) => {
                    self.shared.journals.measure(&self.id);
                    return Ok((served, kept));
                }
                Err(refusal) => refusal,
            };
            let (id, shared) = (self.id.clone(), self.shared.clone());
            // Closing an event channel is a call that may block.
            aside(move || {
                shared
                    .journals
                    .take(&id)
                    .iter()
                    .for_each(|journal| shared.state_dir.bound(journal));
                drop(kept);
            })
            .await;
            match refusal {
                XenRefusal::Refused { text, passes } => {
                    return Err(HostError { text, is_passing: passes });
                }
                XenRefusal::Lost(text) if life == LIVES_MAX || *stop.borrow() => {
                    return Err(HostError { text, is_passing: true });
                }
                XenRefusal::Lost(_) => {
                    (config.takeover, config.inherited) = (true, true);
                    ends_within(stop, XEN_PROCESS_RETRY).await;
                }
            }
        }
        Err(refused("no device process is available".to_owned()))
    }

    /// Has the device process stop serving the rings, and leave them as they are.
    pub(super) async fn stop(&self) {
        self.front.disconnect().await;
    }

    /// Takes the disk from its device process.
    pub(super) async fn close(self) {
        self.front.close().await;
    }
}

/// Passes the faults of a connection to the disk's handshake. When the device process has ended,
/// tells the disk's task to leave the disk, so that the next task takes it over.
pub(super) async fn follow(
    served: XenServed,
    number: u32,
    commands: mpsc::Sender<Command>,
    leave: watch::Sender<bool>,
) {
    let XenServed { process, mut faults } = served;
    loop {
        let fault = tokio::select! {
            () = process.ended() => {
                leave.send_replace(true);
                return;
            }
            Some(fault) = faults.recv() => fault,
        };
        if commands.send(Command::Fault { number, text: fault }).await.is_err() {
            return;
        }
    }
}

/// Opens the descriptors by which a device process serves a front-end. May block.
fn lend(id: &DeviceId, shared: &Shared, config: &Negotiated) -> Result<Lent, HostError> {
    let domain = config.assignment.frontend_id;
    let grants = Hypervisor::lend(&shared.plan.xen, domain)
        .map_err(|errno| failed(format!("cannot map pages of domain {domain}"), errno))?;
    let (mut rings, mut channels, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for (index, queue) in config.connection.queues.iter().enumerate() {
        let port = queue.event_channel;
        let bound = grants.bind(domain, port, config.inherited).map_err(|errno| {
            failed(format!("queue {index}: cannot bind event channel {port}"), errno)
        });
        let LentBell { mut fds, port, channel } = bound?;
        channels.extend(channel);
        let journal = journal(id, shared, (index, config.takeover))?;
        held.extend(journal.iter().filter_map(|file| shared.state_dir.held(id, index, file)));
        let (refs, has_journal) = (queue.ring_refs.clone(), journal.is_some());
        fds.extend(journal);
        rings.push(XenLentRing { ring: XenRing { refs, port, has_journal }, fds });
    }
    let front = XenFrontEnd {
        number: 0,
        domain,
        abi: Abi::ALL.iter().position(|abi| *abi == config.connection.abi).unwrap_or(0),
        persistent: config.persistent,
        indirect_segments_max: config.offer.indirect_segments_max,
        takeover: config.takeover,
        seat: grants.seat,
    };
    let kept = Kept { _channels: channels, _xen: grants.xen };
    Ok(Lent { lent: XenLent { front, grants: grants.grants, rings }, kept, held })
}
