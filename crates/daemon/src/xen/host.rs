//! `XenHost`: serves one disk of a Xen guest, as its handshake asks: opens what the tool stack
//! names, connects queues to the front-end's rings, stops them.

use super::hypervisor::{Bell, Hypervisor, Lender};
use super::{Shared, disk_name};
use crate::assemble::disk::{self, DiskError};
use crate::assemble::{Blk, Kind, Part};
use manyring_backend::blk::{Disk, ImageError};
use manyring_device::Later;
use manyring_device::blk::blkif::{Attachment, XenBlkDevice, XenBlkOptions};
use manyring_engine::{Event, EventKind, QueueHandle, aside};
use manyring_transport::vhost_user::Connected;
use manyring_transport::xenbus::state::Config;
use manyring_transport::xenbus::{
    Assignment, Channel, Command, DeviceId, Disk as DiskNodes, Host, HostError, Offer,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long a file is waited for that another process or disk has: a guest that restarts has its
/// new disk before the old one is gone.
const FILE_PATIENCE: Duration = Duration::from_secs(10);
/// Pause before it is tried again.
const FILE_RETRY: Duration = Duration::from_millis(100);
/// Faults that wait to be told: the first one ends the connection.
const EVENTS_MAX: usize = 16;

/// Serves one disk.
#[derive(Debug)]
pub(super) struct XenHost {
    id: DeviceId,
    shared: Arc<Shared>,
    hypervisor: Arc<Hypervisor>,
    /// To this disk's own handshake.
    commands: mpsc::Sender<Command>,
    stop: watch::Receiver<bool>,
    opened: Option<Opened>,
    running: Option<Running>,
}

/// What was opened for the tool stack.
#[derive(Debug)]
struct Opened {
    device: Arc<XenBlkDevice>,
    connected: Connected,
    /// Tells of resizes.
    _tasks: JoinSet<()>,
}

/// Queues that are connected to a front-end.
#[derive(Debug)]
struct Running {
    queues: Vec<QueueHandle>,
    /// Tells of faults.
    _tasks: JoinSet<()>,
    /// Dropped when the queues have stopped: until then pages of the domain are mapped.
    _held: (Lender, Vec<Channel>),
}

/// A front-end's queues, as far as they could be started.
struct Started {
    queues: Vec<QueueHandle>,
    held: Option<(Lender, Vec<Channel>)>,
    error: Option<String>,
}

impl XenHost {
    pub(super) fn new(
        id: DeviceId,
        shared: Arc<Shared>,
        hypervisor: Arc<Hypervisor>,
        commands: mpsc::Sender<Command>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { id, shared, hypervisor, commands, stop, opened: None, running: None }
    }

    pub(super) fn id(&self) -> &DeviceId {
        &self.id
    }

    /// The disk's name in logs, counters and the control API.
    fn name(&self) -> String {
        disk_name(&self.shared.plan, &self.id)
    }

    async fn open_disk(&self, assignment: &Assignment) -> Result<Arc<dyn Disk>, HostError> {
        let plan = self.shared.plan.disk(&assignment.params).map_err(HostError)?;
        let (read_only, io_uring) = (!assignment.writable, self.shared.io_uring);
        let deadline = Instant::now() + FILE_PATIENCE;
        let mut stop = self.stop.clone();
        loop {
            let plan = plan.clone();
            let opened = aside(move || disk::open(&plan, read_only, io_uring)).await;
            match opened {
                None => return Err(HostError("the daemon has failed".to_owned())),
                Some(Ok(disk)) => return Ok(disk::decorated(disk, self.shared.plan.fault)),
                Some(Err(DiskError::Image(ImageError::InUse { .. })))
                    if Instant::now() < deadline && !*stop.borrow() =>
                {
                    let stopped = stop.wait_for(|stop| *stop);
                    let _ = tokio::time::timeout(FILE_RETRY, stopped).await;
                }
                Some(Err(error)) => return Err(HostError(format!("params: {error}"))),
            }
        }
    }

    fn options(&self, assignment: &Assignment) -> XenBlkOptions {
        let plan = &self.shared.plan;
        XenBlkOptions {
            read_only: !assignment.writable,
            writeback: plan.writeback,
            discard: plan.discard && assignment.discard_enable,
            barrier: plan.barrier,
            persistent: plan.persistent,
            persistent_max: plan.persistent_max,
            indirect_segments_max: plan.indirect_segments_max,
            ring_page_order_max: plan.ring_page_order_max,
            moderation: plan.moderation.law(),
            ..XenBlkOptions::new(self.name(), plan.num_queues)
        }
    }

    async fn open_device(
        &mut self,
        assignment: &Assignment,
    ) -> Result<(Offer, DiskNodes), HostError> {
        // The file of the former one is let go of first: it may be the same.
        self.close_device();
        let disk = self.open_disk(assignment).await?;
        let options = self.options(assignment);
        let device = Arc::new(XenBlkDevice::new(options, disk, self.shared.pool.clone()));
        let part = Part::new(Kind::Blk(Blk::Xen(device.clone())), self.id.back_folder());
        let connected = part.connected.clone();
        self.shared.devices.add(part);
        let mut tasks = JoinSet::new();
        tasks.spawn(tell_resizes(device.clone(), self.commands.clone()));
        let answer = (device.offer(), device.disk_nodes());
        self.opened = Some(Opened { device, connected, _tasks: tasks });
        Ok(answer)
    }

    fn close_device(&mut self) {
        if self.opened.take().is_some() {
            self.shared.devices.remove(&self.name());
        }
    }

    async fn start_queues(&mut self, config: &Config) -> Result<(), HostError> {
        let Some(opened) = &self.opened else {
            return Err(HostError("the disk is not open".to_owned()));
        };
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let (device, hypervisor) = (opened.device.clone(), self.hypervisor.clone());
        let (id, shared) = (self.id.clone(), self.shared.clone());
        let connection = config.clone();
        // Mapping and binding are calls of the hypervisor, which may take their time.
        let started =
            aside(move || start(&id, &shared, &device, &hypervisor, &connection, &sender)).await;
        let Some(Started { queues, held, error }) = started else {
            return Err(HostError("the daemon has failed".to_owned()));
        };
        let error = match (held, error) {
            (Some(held), None) => {
                let mut tasks = JoinSet::new();
                tasks.spawn(tell_faults(config.number, events, self.commands.clone()));
                self.running = Some(Running { queues, _tasks: tasks, _held: held });
                opened.connected.send_replace(true);
                return Ok(());
            }
            (held, error) => {
                stop_all(queues).await;
                drop(held);
                error
            }
        };
        Err(HostError(error.unwrap_or_default()))
    }

    async fn stop_queues(&mut self) {
        if let Some(opened) = &self.opened {
            opened.connected.send_replace(false);
        }
        if let Some(Running { queues, .. }) = &mut self.running {
            stop_all(std::mem::take(queues)).await;
        }
        let running = self.running.take();
        // While the process ends the front-end stays connected: the next one goes on.
        let over = (!*self.stop.borrow()).then(|| (self.shared.clone(), self.id.clone()));
        aside(move || {
            // Event channels are closed by calls.
            drop(running);
            if let Some((shared, id)) = over {
                shared.state_dir.forget(&id);
            }
        })
        .await;
    }
}

impl Host for XenHost {
    fn queues_max(&self) -> u32 {
        u32::try_from(self.shared.plan.num_queues).unwrap_or(u32::MAX)
    }

    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> Later<'a, Result<(Offer, DiskNodes), HostError>> {
        Box::pin(self.open_device(assignment))
    }

    fn connect<'a>(&'a mut self, config: &'a Config) -> Later<'a, Result<(), HostError>> {
        Box::pin(self.start_queues(config))
    }

    fn disconnect(&mut self) -> Later<'_, ()> {
        Box::pin(self.stop_queues())
    }

    fn close(&mut self) {
        self.close_device();
    }
}

/// Maps the rings of a front-end, binds its event channels and starts its queues. May block.
fn start(
    id: &DeviceId,
    shared: &Shared,
    device: &XenBlkDevice,
    hypervisor: &Hypervisor,
    config: &Config,
    events: &mpsc::Sender<Event>,
) -> Started {
    let domain = config.assignment.frontend_id;
    let mut started = Started { queues: Vec::new(), held: None, error: None };
    let lender = match hypervisor.lender(domain) {
        Ok(lender) => lender,
        Err(errno) => {
            started.error = Some(format!("cannot map pages of domain {domain}: {errno}"));
            return started;
        }
    };
    let (connection, mut channels) = (&config.connection, Vec::new());
    for (index, queue) in connection.queues.iter().enumerate() {
        let bell = match hypervisor.bind(domain, queue.event_channel, config.takeover) {
            Ok(bell) => bell,
            Err(errno) => {
                let port = queue.event_channel;
                let problem = format!("queue {index}: cannot bind event channel {port}: {errno}");
                started.error = Some(problem);
                break;
            }
        };
        let Bell { kick, call, channel } = bell;
        let journal = shared.state_dir.journal(id, index, config.takeover);
        let journal = journal.inspect_err(|error| {
            let device = device.name();
            tracing::warn!(device, %error, "a ring is served that nobody can take over");
        });
        channels.extend(channel);
        let attachment = Attachment {
            index,
            abi: connection.abi,
            ring_refs: queue.ring_refs.clone(),
            persistent: config.persistent,
            indirect_segments_max: config.offer.indirect_segments_max,
            journal: journal.ok(),
            takeover: config.takeover,
            mapper: lender.mapper().clone(),
            kick,
            call,
            events: events.clone(),
        };
        match device.start(attachment) {
            Ok(queue) => started.queues.push(queue),
            Err(error) => {
                started.error = Some(format!("queue {index}: {error}"));
                break;
            }
        }
    }
    started.held = Some((lender, channels));
    started
}

/// Stops queues; returns when nothing of theirs is in use any more.
async fn stop_all(queues: Vec<QueueHandle>) {
    let mut stops = JoinSet::new();
    for queue in queues {
        stops.spawn(queue.stop());
    }
    while stops.join_next().await.is_some() {}
}

/// Tells the handshake of each change of the disk.
async fn tell_resizes(device: Arc<XenBlkDevice>, commands: mpsc::Sender<Command>) {
    let mut changes = device.changes();
    while changes.changed().await.is_ok() {
        if commands.send(Command::Resized(device.disk_nodes())).await.is_err() {
            return;
        }
    }
}

/// Tells the handshake of what its queues met.
async fn tell_faults(
    number: u32,
    mut events: mpsc::Receiver<Event>,
    commands: mpsc::Sender<Command>,
) {
    while let Some(Event { index, kind }) = events.recv().await {
        let text = match kind {
            EventKind::Fault(error) => format!("queue {index}: {error}"),
            EventKind::MemoryLost => format!("queue {index}: a page of the guest is gone"),
            EventKind::PortGone => continue,
        };
        if commands.send(Command::Fault { number, text }).await.is_err() {
            return;
        }
    }
}
