//! `start`: the queues of a front-end, from the nodes that name them to workers that serve them.

use super::Shared;
use super::hypervisor::{Bell, Hypervisor, Lender};
use super::state_dir::Held;
use crate::assemble::in_words;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice};
use manyring_device::is_shortage;
use manyring_engine::{Event, QueueHandle};
use manyring_transport::xenbus::state::Config;
use manyring_transport::xenbus::{Channel, DeviceId, HostError};
use rustix::io::Errno;
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
    config: &Config,
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
        let journal = shared.state_dir.journal(id, index, config.takeover);
        let journal = match journal {
            Err(error) if config.takeover && is_shortage(error.errno()) => {
                return Err(HostError { text: error.to_string(), is_passing: true });
            }
            journal => journal.inspect_err(|error| {
                let (device, queue) = (device.name(), index);
                tracing::warn!(device, queue, %error, "a ring is served that nobody can take over");
            }),
        };
        held.extend(journal.as_ref().ok().and_then(|file| shared.state_dir.held(id, index, file)));
        Ok(Attachment {
            index,
            abi: config.connection.abi,
            ring_refs: config.connection.queues[index].ring_refs.clone(),
            persistent: config.persistent,
            indirect_segments_max: config.offer.indirect_segments_max,
            journal: journal.ok(),
            takeover: config.takeover,
            mapper: lender.mapper().clone(),
            kick: bell.kick,
            call: bell.call,
            events: events.clone(),
        })
    };
    // What may be missing is there for all queues before the first of them answers a request.
    let queues = 0..config.connection.queues.len();
    let attachments: Result<Vec<_>, _> = queues.map(&mut attach).collect();
    let started_all = attachments.and_then(|attachments| {
        attachments.into_iter().try_for_each(|attachment| {
            let index = attachment.index;
            let queue = device.start(attachment).map_err(|error| HostError {
                text: format!("queue {index}: {}", in_words(&error)),
                is_passing: error.is_shortage(),
            });
            started.queues.push(queue?);
            Ok(())
        })
    });
    started.error = started_all.err();
    if started.error.is_none() {
        held.iter_mut().for_each(Held::measure);
        shared.journals.add(id, held);
    }
    started.held = Some((lender, channels));
    started
}

fn bind(hypervisor: &Hypervisor, config: &Config, index: usize) -> Result<Bell, HostError> {
    let (domain, port) =
        (config.assignment.frontend_id, config.connection.queues[index].event_channel);
    let bell = hypervisor.bind(domain, port, config.inherited);
    bell.map_err(|errno| failed(format!("queue {index}: cannot bind event channel {port}"), errno))
}

fn failed(what: String, errno: Errno) -> HostError {
    HostError { text: format!("{what}: {errno}"), is_passing: is_shortage(errno) }
}
