//! `XenHost`: one disk of a Xen guest, for its handshake (`transport::xenbus`), which calls it to
//! open the image that the tool stack names, to connect queues to the front-end's rings, and to
//! stop them.

use super::in_device_process::{self, Apart};
use super::memory::{Bytes, Memory};
use super::start::{Started, start};
use super::{Shared, disk_name};
use crate::processes::XenMeasures;
use manyring_backend::blk::{Disk, ImageError};
use manyring_config::plan::DiskPlan;
use manyring_device::blk::HostDisk;
use manyring_device::blk::blkif::{XenBlkDevice, disk_nodes};
use manyring_device::{Owned, PendingResult};
use manyring_engine::{Event, QueueHandle, aside};
use manyring_protocol::spec::XenBlkSpec;
use manyring_serve::assemble::Part;
use manyring_serve::assemble::disk::{self, DiskError};
use manyring_serve::assemble::xen::{fault_of, stop_all};
use manyring_serve::times::{XEN_FILE, XEN_FILE_RETRY};
use manyring_serve::view::DeviceView;
use manyring_transport::vhost_user::Connected;
use manyring_transport::xenbus::state::Negotiated;
use manyring_transport::xenbus::{
    Assignment, Channel, Command, DeviceId, DiskGeometry as DiskNodes, Host, HostError, Offer,
};
use manyring_xen::{Hypervisor, Lender};
use std::sync::{Arc, Weak};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// The most faults that are queued for the handshake. The first one ends the connection.
const EVENTS_MAX: usize = 16;

/// The supervisor's task for one disk, as the disk's handshake calls it.
#[derive(Debug)]
pub(super) struct XenHost {
    id: DeviceId,
    shared: Arc<Shared>,
    hypervisor: Arc<Hypervisor>,
    /// Commands to this disk's own handshake.
    commands: mpsc::Sender<Command>,
    stop: watch::Receiver<bool>,
    /// Tells this task to leave the disk to the disk's next task.
    leave: watch::Sender<bool>,
    opened: Option<Opened>,
    /// True if taking over the rings failed for a reason that may pass: the disk is opened again.
    is_tried_again: bool,
    /// The task that closes the disk that was open before.
    closing: Option<JoinHandle<Option<()>>>,
    running: Option<Running>,
}

/// A disk that was opened for the tool stack.
#[derive(Debug)]
struct Opened {
    disk: Arc<HostDisk>,
    connected: Connected,
    served: Served,
    /// For a disk in memory: the value of the xenstore node `params`.
    in_memory: Option<String>,
    /// The task that sends resizes of the disk to the handshake.
    _tasks: JoinSet<()>,
}

/// Where the queues of a disk run: in this process, or in a device process.
#[derive(Debug)]
enum Served {
    Here(Arc<XenBlkDevice>),
    /// In a device process.
    Apart(Box<Apart>),
}

/// Queues that are connected to a front-end.
#[derive(Debug)]
struct Running {
    queues: Vec<QueueHandle>,
    /// The tasks that send faults of the front-end to the handshake.
    _tasks: JoinSet<()>,
    /// Dropped after the queues have stopped, which use these grants and event channels.
    _held: (Option<Lender>, Vec<Channel>),
    /// For queues that a device process serves: the resources that stay open here.
    _kept: Option<in_device_process::Kept>,
}

impl XenHost {
    pub(super) fn new(
        id: DeviceId,
        shared: Arc<Shared>,
        hypervisor: Arc<Hypervisor>,
        commands: mpsc::Sender<Command>,
        leave: watch::Sender<bool>,
    ) -> Self {
        let (stop, opened, closing, running) = (leave.subscribe(), None, None, None);
        let is_tried_again = false;
        Self {
            id,
            shared,
            hypervisor,
            commands,
            stop,
            leave,
            opened,
            is_tried_again,
            closing,
            running,
        }
    }

    pub(super) fn id(&self) -> &DeviceId {
        &self.id
    }

    /// Returns the disk's name in logs, counters and the control API.
    fn name(&self) -> String {
        disk_name(&self.shared.plan, &self.id)
    }

    async fn open_disk(&self, assignment: &Assignment) -> Result<Arc<dyn Disk>, HostError> {
        let plan = self.shared.plan.disk(&assignment.params).map_err(HostError::new)?;
        let io_uring = self.shared.io_uring;
        let how = (!assignment.writable, self.shared.plan.options.logical_block_size);
        let deadline = Instant::now() + XEN_FILE;
        let mut stop = self.stop.clone();
        loop {
            let (plan, name) = (plan.clone(), self.name());
            let held = match self.shared.memory_of(&self.id, &assignment.params) {
                Ok(None) => None,
                Ok(Some(Bytes::File(file))) => Some(file),
                Ok(Some(Bytes::Disk { disk, .. })) => {
                    self.shared.forget_memory(&self.id);
                    return Ok(disk);
                }
                Err(error) => return Err(HostError::new(format!("params: {error}"))),
            };
            let means = disk::Means { io_uring, held, helpers: None, remotely: None };
            let opened = aside(move || disk::open((&name, &plan), how, means)).await;
            match opened {
                None => return Err(HostError::new("internal error")),
                Some(Ok((disk, _))) => {
                    self.shared.forget_memory(&self.id);
                    return Ok(disk::decorated(disk, self.shared.plan.fault));
                }
                Some(Err(DiskError::Image(ImageError::InUse { .. })))
                    if Instant::now() < deadline && !*stop.borrow() =>
                {
                    let stopped = stop.wait_for(|stop| *stop);
                    let _ = tokio::time::timeout(XEN_FILE_RETRY, stopped).await;
                }
                Some(Err(error)) => return Err(HostError::new(format!("params: {error}"))),
            }
        }
    }

    async fn open_device(
        &mut self,
        assignment: &Assignment,
    ) -> Result<(Offer, DiskNodes), HostError> {
        // Close the former disk first: the new one may have the same file.
        self.close_device();
        self.closed().await;
        let disk = self.open_disk(assignment).await?;
        let (read_only, discard) = (!assignment.writable, assignment.discard_enable);
        let options = self.shared.plan.options_of(self.name(), read_only, discard);
        let plan = self.shared.plan.disk(&assignment.params).map_err(HostError::new)?;
        let shown = (self.id.back_folder(), "xen");
        let domain = self.shared.plan.domain(self.shared.domains, self.id.domain);
        let (host, view, served) = match domain {
            Some(domain) => {
                let disk_spec =
                    plan.spec("", None).ok_or_else(|| HostError::new("params: names no disk"))?;
                let (block_size, read_only) = (options.logical_block_size, options.read_only);
                let host = Arc::new(HostDisk::new(disk, block_size, read_only));
                let owned = Owned::XenDisk(host.clone());
                let side = owned.side(&options.name, options.num_queues);
                let view = DeviceView::new(side, shown, Some(domain));
                let part = Part { owned, view: view.clone(), remote: None, capture: None };
                let (options, fault) = (options.clone(), self.shared.plan.fault);
                let spec = XenBlkSpec { disk: disk_spec, options, fault };
                let apart = Apart::new(&self.id, &self.shared, part, spec);
                (host, view, Served::Apart(Box::new(apart)))
            }
            None => {
                let device = XenBlkDevice::new(options.clone(), disk, self.shared.pool.clone());
                let device = Arc::new(device);
                self.shared.groups.limit(device.limit(), &self.shared.plan.limit);
                let (host, view) = (device.host().clone(), DeviceView::new(&device, shown, None));
                (host, view, Served::Here(device))
            }
        };
        let connected = view.connected.clone();
        self.shared.devices.add(view);
        let measures = match &served {
            Served::Apart(apart) => Some(apart.front().measures()),
            Served::Here(_) => None,
        };
        let mut tasks = JoinSet::new();
        let (weak, changes) = (Arc::downgrade(&host), host.changes());
        tasks.spawn(tell_resizes(weak, changes, measures, self.commands.clone()));
        let answer = (options.offer(&host), disk_nodes(&host));
        let in_memory = matches!(plan, DiskPlan::Memory { .. }).then(|| assignment.params.clone());
        self.shared.note_in_memory(&self.id, in_memory.is_some());
        self.opened = Some(Opened { disk: host, connected, served, in_memory, _tasks: tasks });
        Ok(answer)
    }

    fn close_device(&mut self) {
        // True if the next task, or this one, opens the disk again: then keep the bytes of a disk
        // in memory.
        let is_left = std::mem::take(&mut self.is_tried_again) || *self.stop.borrow();
        if let Some(opened) = self.opened.take() {
            // Dropping the entry closes nothing: `opened` still has the device.
            drop(self.shared.devices.remove(&self.name()));
            let Opened { disk, served, in_memory, .. } = opened;
            let (shared, id) = (self.shared.clone(), self.id.clone());
            self.closing = Some(tokio::spawn(async move {
                let (lies_apart, here) = match served {
                    Served::Here(device) => (false, Some(device)),
                    Served::Apart(apart) => {
                        apart.close().await;
                        (true, None)
                    }
                };
                if let Some(params) = in_memory.filter(|_| is_left) {
                    let bytes = Bytes::Disk { disk: disk.disk().clone(), lies_apart };
                    shared.keep_memory(&id, Memory { params, bytes });
                }
                shared.note_in_memory(&id, false);
                close_aside((disk, here)).await.ok().flatten()
            }));
        }
    }

    /// Waits until the former disk is closed, so that another process or disk can open its file.
    pub(super) async fn closed(&mut self) {
        if let Some(closing) = self.closing.take() {
            let _ = closing.await;
        }
    }

    async fn start_queues(&mut self, config: &Negotiated) -> Result<(), HostError> {
        let Some(opened) = &mut self.opened else {
            return Err(HostError::new("the disk is not open"));
        };
        let device = match &mut opened.served {
            Served::Here(device) => device.clone(),
            Served::Apart(apart) => {
                let (served, kept) = apart.start(config, &self.stop).await?;
                let mut tasks = JoinSet::new();
                let (commands, leave) = (self.commands.clone(), self.leave.clone());
                tasks.spawn(in_device_process::follow(served, config.number, commands, leave));
                let (queues, held, kept) = (Vec::new(), (None, Vec::new()), Some(kept));
                self.running = Some(Running { queues, _tasks: tasks, _held: held, _kept: kept });
                opened.connected.send_replace(true);
                return Ok(());
            }
        };
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let hypervisor = self.hypervisor.clone();
        let (id, shared) = (self.id.clone(), self.shared.clone());
        let connection = config.clone();
        // Mapping pages and binding event channels are calls of the hypervisor, which may block.
        let started =
            aside(move || start(&id, &shared, &device, &hypervisor, &connection, &sender)).await;
        let Some(Started { queues, held, error }) = started else {
            return Err(HostError::new("internal error"));
        };
        match (held, error) {
            (Some((lender, channels)), None) => {
                let held = (Some(lender), channels);
                let mut tasks = JoinSet::new();
                tasks.spawn(tell_faults(config.number, events, self.commands.clone()));
                self.running = Some(Running { queues, _tasks: tasks, _held: held, _kept: None });
                opened.connected.send_replace(true);
                Ok(())
            }
            (held, error) => {
                stop_all(queues).await;
                // Closing an event channel is a call that may block.
                aside(move || drop(held)).await;
                Err(error.unwrap_or_else(|| HostError::new("the device has no queue")))
            }
        }
    }

    async fn stop_queues(&mut self) {
        if let Some(opened) = &self.opened {
            opened.connected.send_replace(false);
            if let (Served::Apart(apart), Some(_)) = (&opened.served, &self.running) {
                // Stop the device process before `running` is dropped: `running` keeps the event
                // channels of the process bound.
                apart.stop().await;
            }
        }
        if let Some(Running { queues, .. }) = &mut self.running {
            stop_all(std::mem::take(queues)).await;
        }
        let running = self.running.take();
        // If this task leaves the disk, the front-end stays connected and the next task takes the
        // rings over: keep the journals.
        let over = (!*self.stop.borrow()).then_some(());
        let (shared, id) = (self.shared.clone(), self.id.clone());
        aside(move || {
            // Closing an event channel is a call that may block.
            drop(running);
            for journal in shared.journals.take(&id).into_iter().filter(|_| over.is_none()) {
                shared.state_dir.bound(&journal);
                if let Err(error) = shared.state_dir.restore(&journal) {
                    tracing::warn!(device = %id, %error, "recreating a missing journal failed");
                }
            }
            if over.is_some() {
                shared.state_dir.forget(&id);
            }
        })
        .await;
    }
}

impl Host for XenHost {
    fn queues_max(&self) -> u32 {
        u32::try_from(self.shared.plan.options.num_queues).unwrap_or(u32::MAX)
    }

    fn open<'a>(
        &'a mut self,
        assignment: &'a Assignment,
    ) -> PendingResult<'a, Result<(Offer, DiskNodes), HostError>> {
        Box::pin(self.open_device(assignment))
    }

    fn connect<'a>(
        &'a mut self,
        config: &'a Negotiated,
    ) -> PendingResult<'a, Result<(), HostError>> {
        Box::pin(async move {
            let connected = self.start_queues(config).await;
            let passes = |error: &HostError| config.takeover && error.is_passing;
            self.is_tried_again = connected.as_ref().is_err_and(passes);
            connected
        })
    }

    fn disconnect(&mut self) -> PendingResult<'_, ()> {
        Box::pin(self.stop_queues())
    }

    fn close(&mut self) {
        self.close_device();
    }
}

/// Drops `opened` on another thread: the last close of a block device waits until the host has
/// written the device's page cache back.
fn close_aside<T: Send + 'static>(opened: T) -> JoinHandle<Option<()>> {
    tokio::spawn(aside(move || drop(opened)))
}

/// Sends each change of the disk's size to the handshake, as long as the disk is open.
async fn tell_resizes(
    disk: Weak<HostDisk>,
    mut changes: watch::Receiver<u64>,
    measures: Option<XenMeasures>,
    commands: mpsc::Sender<Command>,
) {
    while changes.changed().await.is_ok() {
        // The device process must know the new size before the guest does.
        if let Some(measures) = &measures {
            measures.measured().await;
        }
        let Some(disk) = disk.upgrade().map(|disk| disk_nodes(&disk)) else { return };
        if commands.send(Command::Resized(disk)).await.is_err() {
            return;
        }
    }
}

/// Sends the faults that the queues met to the handshake.
async fn tell_faults(
    number: u32,
    mut events: mpsc::Receiver<Event>,
    commands: mpsc::Sender<Command>,
) {
    while let Some(event) = events.recv().await {
        let Some(text) = fault_of(&event) else { continue };
        if commands.send(Command::Fault { number, text }).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// Takes its time to close, as a block device does whose bytes are not written yet.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(XEN_FILE);
        }
    }

    #[test]
    fn disk_that_takes_long_to_close_holds_nothing_up_but_its_next_opening() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (written, is_written) = channel();
            let mut closing = close_aside(Slow(is_written));
            let early = tokio::time::timeout(XEN_FILE_RETRY, &mut closing).await;
            assert!(early.is_err(), "it is not closed yet");
            written.send(()).unwrap();
            closing.await.unwrap();
        });
    }
}
