//! `start`: the queues of a front-end, from the nodes that name them to workers that serve them.

use super::{Shared, disk_name};
use manyring_device::blk::blkif::{Attachment, XenBlkDevice};
use manyring_device::is_shortage;
use manyring_engine::{Event, QueueHandle};
use manyring_serve::assemble::xen::{begin, failed};
use manyring_transport::xenbus::state::Negotiated;
use manyring_transport::xenbus::{Channel, DeviceId, HostError};
use manyring_xen::{Bell, Hypervisor, Lender};
use rustix::fd::OwnedFd;
use tokio::sync::mpsc;

/// A front-end's queues, as far as they could be started.
#[derive(Default)]
pub(super) struct Started {
    pub(super) queues: Vec<QueueHandle>,
    pub(super) held: Option<(Lender, Vec<Channel>)>,
    pub(super) error: Option<HostError>,
}

/// Maps the rings of a front-end, binds its event channels and starts its queues. May block.
pub(super) fn start(
    id: &DeviceId,
    shared: &Shared,
    device: &XenBlkDevice,
    hypervisor: &Hypervisor,
    config: &Negotiated,
    events: &mpsc::Sender<Event>,
) -> Started {
    let (mut started, domain) = (Started::default(), config.assignment.frontend_id);
    let lender = match hypervisor.lender(domain) {
        Ok(lender) => lender,
        Err(errno) => {
            started.error = Some(failed(format!("cannot map pages of domain {domain}"), errno));
            return started;
        }
    };
    let (mut channels, mut held) = (Vec::new(), Vec::new());
    let mut attach = |index| {
        let bell = bind(hypervisor, config, index)?;
        channels.extend(bell.channel);
        let journal = journal(id, shared, (index, config.takeover))?;
        held.extend(journal.iter().filter_map(|file| shared.state_dir.held(id, index, file)));
        Ok(Attachment {
            index,
            abi: config.connection.abi,
            ring_refs: config.connection.queues[index].ring_refs.clone(),
            persistent: config.persistent,
            indirect_segments_max: config.offer.indirect_segments_max,
            journal,
            takeover: config.takeover,
            mapper: lender.mapper().clone(),
            kick: bell.kick,
            call: bell.call,
            events: events.clone(),
        })
    };
    let queues = 0..config.connection.queues.len();
    let attachments: Result<Vec<_>, _> = queues.map(&mut attach).collect();
    (started.queues, started.error) = match attachments {
        Ok(attachments) => begin(device, attachments),
        Err(error) => (Vec::new(), Some(error)),
    };
    if started.error.is_none() {
        shared.journals.add(id, held, None);
        shared.journals.measure(id);
    }
    started.held = Some((lender, channels));
    started
}

/// Opens the journal of a queue, or creates it. `None`: creating it failed, so no other process can
/// take the ring over; the ring is served all the same.
pub(super) fn journal(
    id: &DeviceId,
    shared: &Shared,
    (queue, takeover): (usize, bool),
) -> Result<Option<OwnedFd>, HostError> {
    match shared.state_dir.journal(id, queue, takeover) {
        Ok(journal) => Ok(Some(journal)),
        Err(error) if takeover && is_shortage(error.errno()) => {
            Err(HostError { text: error.to_string(), is_passing: true })
        }
        Err(error) => {
            let device = disk_name(&shared.plan, id);
            tracing::warn!(
                device,
                queue,
                %error,
                "serving without a journal: this ring cannot be resumed after a crash"
            );
            Ok(None)
        }
    }
}

fn bind(hypervisor: &Hypervisor, config: &Negotiated, index: usize) -> Result<Bell, HostError> {
    let (domain, port) =
        (config.assignment.frontend_id, config.connection.queues[index].event_channel);
    let bell = hypervisor.bind(domain, port, config.inherited);
    bell.map_err(|errno| failed(format!("queue {index}: cannot bind event channel {port}"), errno))
}
