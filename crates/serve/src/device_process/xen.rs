//! `ProcessXen`: a Xen guest's disk in its device process. Maps the rings that the supervisor
//! names, and serves them on descriptors that the supervisor opened.

use super::say;
use crate::assemble::disk;
use crate::assemble::xen;
use crate::channel::Channel;
use crate::counts;
use crate::supervisor_client::SupervisorClient;
use crate::view::DeviceView;
use manyring_device::blk::blkif::{Abi, Attachment, XenBlkDevice, XenBlkOptions};
use manyring_engine::{Call, Event, Kick, Pool, QueueHandle, aside};
use manyring_memory::simgrant::SimGrants;
use manyring_memory::{EventPort, GrantDevice, GrantMapper};
use manyring_protocol::message::{Command, Report, XenFrontEnd, XenReport, XenRing};
use manyring_protocol::spec::XenBlkSpec;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;

/// Most faults that wait to be reported. A few suffice: the first one ends the connection.
const EVENTS_MAX: usize = 16;

/// The disk of a Xen guest that this device process serves.
pub(super) struct ProcessXen {
    view: DeviceView,
    device: Arc<XenBlkDevice>,
    counters: OwnedFd,
    channel: Arc<Channel>,
    /// The rings of the front-end that connects next; each came in a message of its own.
    rings: Vec<Ring>,
    /// Locked while a connection starts or stops; the next command waits for the lock.
    running: Arc<Mutex<Running>>,
}

struct Ring {
    ring: XenRing,
    fds: Vec<OwnedFd>,
}

#[derive(Default)]
struct Running {
    queues: Vec<QueueHandle>,
    /// The task that reports faults of the front-end.
    faults: JoinSet<()>,
}

/// The worker pool of the process, and its channel to the supervisor.
pub(super) type Parts = (Arc<Pool>, Arc<Channel>);

impl ProcessXen {
    /// Opens the disk on descriptors that the supervisor sent.
    ///
    /// # Errors
    /// A text of one line: the descriptors do not fit the spec.
    pub(super) async fn open(
        name: &str,
        XenBlkSpec { disk, options, fault }: XenBlkSpec,
        mut fds: Vec<OwnedFd>,
        ((pool, channel), uring, supervisor): (Parts, bool, SupervisorClient),
    ) -> Result<Self, String> {
        if fds.is_empty() {
            return Err("supervisor: a disk without counters".to_owned());
        }
        let counters = fds.remove(0);
        let disk = (disk, options.read_only);
        let opened = aside(move || disk::granted(disk, fds, uring, supervisor)).await;
        let opened = opened.ok_or("internal error: the disk was not created")??;
        let opened = disk::decorated(opened, fault);
        let options = XenBlkOptions { name: name.to_owned(), ..options };
        let device = Arc::new(XenBlkDevice::new(options, opened, pool));
        let view = DeviceView::new(&device, (String::new(), "process"), None);
        let (rings, running) = Default::default();
        Ok(Self { view, device, counters, channel, rings, running })
    }

    pub(super) fn view(&self) -> &DeviceView {
        &self.view
    }

    /// Writes the disk's counters to the supervisor's file.
    pub(super) fn count(&self) {
        counts::write(&self.counters, &self.view.side);
    }

    /// Handles a command of the supervisor about the disk's front-end.
    pub(super) fn handle(&mut self, command: Command, fds: Vec<OwnedFd>) {
        match command {
            Command::XenRing { ring, .. } => self.rings.push(Ring { ring, fds }),
            Command::XenConnect { front, .. } => self.connect(front, fds),
            Command::XenDisconnect { number, .. } => self.disconnect(number),
            _ => {}
        }
    }

    /// Serves a front-end: maps its rings and starts its queues in a task, which reports success or
    /// the reason of a failure.
    fn connect(&mut self, front: XenFrontEnd, mut fds: Vec<OwnedFd>) {
        let rings = std::mem::take(&mut self.rings);
        let (device, channel) = (self.device.clone(), self.channel.clone());
        let running = self.running.clone();
        tokio::spawn(async move {
            let mut running = running.lock().await;
            let (name, number) = (device.name().to_owned(), front.number);
            let (events, faults) = mpsc::channel(EVENTS_MAX);
            let started =
                aside(move || started(&device, &front, (fds.pop(), rings), &events)).await;
            let (queues, error) = started
                .unwrap_or_else(|| (Vec::new(), Some(xen::refused("internal error".to_owned()))));
            let said = match error {
                None => {
                    running.queues = queues;
                    let tells = tell(channel.clone(), name.clone(), (number, faults));
                    running.faults.spawn(tells);
                    XenReport::Started {}
                }
                Some(error) => {
                    xen::stop_all(queues).await;
                    XenReport::Refused { text: error.text, passes: error.is_passing }
                }
            };
            say(&channel, &Report::Xen { device: name, number, said }).await;
        });
    }

    /// Stops the queues of the front-end in a task, which then reports that.
    fn disconnect(&self, number: u64) {
        let (device, channel) = (self.view.name().to_owned(), self.channel.clone());
        let running = self.running.clone();
        tokio::spawn(async move {
            running.lock().await.stop().await;
            say(&channel, &Report::Xen { device, number, said: XenReport::Stopped {} }).await;
        });
    }

    /// Removes the disk: stops its queues, and reports when all its descriptors and mappings are
    /// closed.
    pub(super) fn remove(self, name: String) {
        tokio::spawn(async move {
            self.running.lock().await.stop().await;
            self.count();
            let channel = self.channel.clone();
            aside(move || drop(self)).await;
            say(&channel, &Report::Removed { device: name }).await;
        });
    }
}

impl Running {
    async fn stop(&mut self) {
        xen::stop_all(std::mem::take(&mut self.queues)).await;
        self.faults.shutdown().await;
    }
}

/// Reports faults of the queues of one connection.
async fn tell(
    channel: Arc<Channel>,
    device: String,
    (number, mut faults): (u64, mpsc::Receiver<Event>),
) {
    while let Some(event) = faults.recv().await {
        if let Some(text) = xen::fault_of(&event) {
            let said = XenReport::Fault { text };
            say(&channel, &Report::Xen { device: device.clone(), number, said }).await;
        }
    }
}

/// Maps all rings of a front-end and starts their queues, one after the other, until one fails. May
/// block.
fn started(
    device: &XenBlkDevice,
    front: &XenFrontEnd,
    (grants, rings): (Option<OwnedFd>, Vec<Ring>),
    events: &mpsc::Sender<Event>,
) -> xen::Begun {
    let mapper = match grants.ok_or(Errno::BADF).and_then(|grants| mapper(front, grants)) {
        Ok(mapper) => mapper,
        Err(errno) => return (Vec::new(), Some(xen::failed("grants".to_owned(), errno))),
    };
    let attach = |(index, ring)| attachment(front, (index, ring), &mapper, events);
    let attachments: Result<Vec<_>, _> = rings.into_iter().enumerate().map(attach).collect();
    match attachments {
        Ok(attachments) => xen::begin(device, attachments),
        Err(errno) => (Vec::new(), Some(xen::failed("event channels".to_owned(), errno))),
    }
}

fn mapper(front: &XenFrontEnd, grants: OwnedFd) -> Result<GrantMapper, Errno> {
    let domain = front.domain;
    Ok(match front.seat {
        None => GrantMapper::Device { device: Arc::new(GrantDevice::of_fd(grants)), domain },
        Some(at) => {
            let grants = SimGrants::new(grants, at.entries, 0, at.seat);
            GrantMapper::Simulated(Arc::new(grants.map_err(|_| Errno::NOMEM)?))
        }
    })
}

fn attachment(
    front: &XenFrontEnd,
    (index, Ring { ring, mut fds }): (usize, Ring),
    mapper: &GrantMapper,
    events: &mpsc::Sender<Event>,
) -> Result<Attachment, Errno> {
    let journal = if ring.has_journal { fds.pop() } else { None };
    let mut fds = fds.into_iter();
    let own = fds.next().ok_or(Errno::BADF)?;
    let (kick, call) = match ring.port {
        Some(port) => {
            let port = Arc::new(EventPort::of_fd(own, port));
            (Kick::of_port(port.clone()), Call::of_port(port))
        }
        None => {
            let other = fds.next().ok_or(Errno::BADF)?;
            let kick = Kick::new(own).map_err(|_| Errno::PROTO)?;
            (kick, Call::new(other).map_err(|_| Errno::PROTO)?)
        }
    };
    Ok(Attachment {
        index,
        abi: Abi::ALL.get(front.abi).copied().unwrap_or_default(),
        ring_refs: ring.refs,
        persistent: front.persistent,
        indirect_segments_max: front.indirect_segments_max,
        journal,
        takeover: front.takeover,
        mapper: mapper.clone(),
        kick,
        call: Arc::new(call),
        events: events.clone(),
    })
}
