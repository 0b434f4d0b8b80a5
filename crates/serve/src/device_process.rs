//! `manyring device-process`: the process of a trust domain. It serves the devices that the
//! supervisor sends it, and ends when the supervisor closes the channel.

mod clients;
mod denied;
mod grant;
mod groups;
pub mod identity;
mod lock_with_rings;
mod nbd;
mod net;
mod pins;
pub mod sandbox;
pub mod session_journal;
mod switch;
mod system_calls;
mod xen;

use crate::assemble::{Here, Opened, Tasks, options};
use crate::bucket::Bucket;
use crate::channel::{Channel, NO_FDS};
use crate::outgoing::by_name;
use crate::signals;
use crate::supervisor_client::{Answer, Outgoing, SupervisorClient, Unanswered};
use crate::times::{PROCESS_LIMIT_SEEN, PROCESS_QUIT};
use crate::view::DeviceView;
use crate::{counts, threads};
use grant::DeviceGrant;
use groups::ProcessGroups;
use manyring_backend::sys::starter::ThreadRole;
use manyring_config::plan::{DaemonPlan, Numa};
use manyring_device::blk::BlkOptions;
use manyring_device::net::{NetDevice, NetOptions};
use manyring_engine::{Janitor, Pins, Pool, PoolOptions, allowed_cpus, aside};
use manyring_memory::Topology;
use manyring_protocol::message::{self, Command, GroupRates, LimitRates, PortFilter, Report};
use manyring_protocol::spec::{BlkSpec, DeviceSpec, KindSpec, NetSpec};
use manyring_transport::vhost_user::{Client, Endpoint};
use net::ProcessNet;
use pins::QueueWorkers;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use switch::ProcessSwitch;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use xen::ProcessXen;

/// The most reports of devices that wait to be sent to the supervisor.
const SAID_MAX: usize = 64;
/// Most connections of one device that wait for its session to accept them.
const CLIENTS_MAX: usize = 16;

/// Serves devices until the supervisor closes the channel or has died.
///
/// # Errors
/// A text of one line: the device process cannot start, or the supervisor sent bytes that are no
/// command.
pub async fn run(plan: &DaemonPlan) -> Result<(), String> {
    manyring_memory::install_sigbus_handler();
    crate::fds::raise_limit();
    // Ignore SIGTERM and the like: a terminal sends a signal to the whole process group, but the
    // supervisor decides when its device processes end.
    let _outlived = (signals::outlive(false)?, signals::Ends::new()?);
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let closes = Arc::new(Janitor::of("the supervisor"));
    let channel = socket.and_then(|socket| Channel::new(socket, closes));
    let channel = channel.map_err(|error| format!("channel: {error}"))?;
    let (uring, polling) = (plan.io_uring, plan.polling.policy());
    let workers_max = sandbox::workers_max(plan.workers);
    let pins = Pins { worker_cpus: plan.worker_cpus.clone(), ..Pins::default() };
    let pool = Pool::pinned(PoolOptions { workers_max, polling, uring }, pins);
    pool.has_ring().ok_or("no worker thread available")?;
    let topology = (plan.numa == Numa::Auto).then(|| Topology::of_host(allowed_cpus())).flatten();
    // From here on only the starter thread can make threads: this call takes that right from the
    // control thread.
    sandbox::confine(ThreadRole::Control);
    manyring_memory::guard_memory();
    if let Some(refused) = identity::refused() {
        tracing::info!(refused, "isolation incomplete: shared with the daemon");
    }
    if let Some(refused) = sandbox::refused() {
        tracing::warn!(refused, "sandbox incomplete: refused by the kernel");
    }
    let balance = tokio::spawn(pool.clone().balance());
    let nodes = topology.map(|topology| tokio::spawn(pool.clone().follow_memory(topology)));
    let tells = tokio::spawn(denied::tell());
    let channel = Arc::new(channel);
    let (outgoing, queued) = mpsc::channel(SAID_MAX);
    let (tasks, devices, xens, groups, unanswered) = Default::default();
    let (threads, quiesces, switch) = Default::default();
    let bucket = Arc::new(Bucket::of_sessions());
    let queue_workers = QueueWorkers::new(pool.clone(), workers_max);
    let mut process = Inside {
        channel,
        pool,
        uring,
        tasks,
        devices,
        xens,
        groups,
        outgoing,
        unanswered,
        threads,
        quiesces,
        bucket,
        queue_workers,
        switch,
    };
    // Send the open file: the supervisor may not be allowed to open /proc/PID of a process of
    // another user.
    let stat: Vec<_> = std::fs::File::open("/proc/self/stat").into_iter().collect();
    if let Ok(ready) = message::emit(&Report::Ready {}) {
        let _ = process.channel.send(&ready, &stat).await;
    }
    let ended = process.attend(queued).await;
    balance.abort();
    tells.abort();
    nodes.inspect(tokio::task::JoinHandle::abort);
    process.tasks.stop_all();
    let stopped = async { while process.tasks.ended().await.is_some() {} };
    let _ = tokio::time::timeout(PROCESS_QUIT, stopped).await;
    // Dropping a disk in memory unmaps its pages, which may take long: not on this thread.
    let gone = (std::mem::take(&mut process.devices), std::mem::take(&mut process.xens));
    aside(move || drop(gone)).await;
    ended
}

struct Inside {
    channel: Arc<Channel>,
    pool: Arc<Pool>,
    uring: bool,
    tasks: Tasks,
    devices: HashMap<String, Device>,
    /// The disks of Xen guests.
    xens: HashMap<String, ProcessXen>,
    groups: ProcessGroups,
    outgoing: mpsc::Sender<Outgoing>,
    unanswered: Unanswered,
    /// The supervisor's file for the state of this process's threads (`threads.rs`).
    threads: Option<OwnedFd>,
    /// True once the devices quiesce for the next supervisor.
    quiesces: Arc<AtomicBool>,
    /// Limits the rate of the reports of all sessions.
    bucket: Arc<Bucket>,
    queue_workers: QueueWorkers,
    /// The switch that this process serves; the ports of its devices belong to it.
    switch: Option<ProcessSwitch>,
}

struct Device {
    /// Field order matters: this one is dropped first, so that no task follows the port of a device
    /// that is gone.
    net: Option<ProcessNet>,
    here: Here,
    clients: mpsc::Sender<Client>,
    counters: OwnedFd,
    /// The descriptors that belong to the journal of the next client, by name. They come in
    /// messages before that client.
    saved: BTreeMap<u64, Vec<OwnedFd>>,
}

impl Inside {
    async fn say(&self, report: &Report) {
        say(&self.channel, report).await;
    }

    /// Handles commands of the supervisor, and sends it the reports of the devices, until the
    /// supervisor is gone.
    async fn attend(&mut self, mut queued: mpsc::Receiver<Outgoing>) -> Result<(), String> {
        let channel = self.channel.clone();
        loop {
            tokio::select! {
                came = channel.receive() => {
                    let came = came.map_err(|error| format!("supervisor: {error}"))?;
                    let Some((bytes, mut fds)) = came else { return Ok(()) };
                    let command = message::parse(&bytes);
                    let command = command.map_err(|error| format!("supervisor: {error}"))?;
                    self.handle(command, fds.take()).await?;
                }
                Some(queued) = queued.recv() => {
                    let report = match queued {
                        Outgoing::Suspect { device } => Report::Suspect { device },
                        Outgoing::Gone { device, number } => Report::Gone { device, number },
                        Outgoing::Quiesced => Report::Quiesced {},
                        Outgoing::Needs => Report::Needs {},
                        Outgoing::Request { device, request, answer } => {
                            let number = self.unanswered.ask(&device, &request, answer);
                            Report::Request { device, number, request }
                        }
                    };
                    self.say(&report).await;
                }
            }
        }
    }

    async fn handle(&mut self, command: Command, mut fds: Vec<OwnedFd>) -> Result<(), String> {
        match command {
            Command::Device { device, spec, port } => {
                if fds.is_empty() {
                    return Err("supervisor: a device without its counters".to_owned());
                }
                let counters = fds.remove(0);
                let switched = self.switch.as_ref().and_then(|switch| switch.port(&device));
                self.add(&device, spec, DeviceGrant { port, fds, switched }, counters).await?;
            }
            Command::SavedFds { device, named } => {
                if let Some(device) = self.devices.get_mut(&device) {
                    device.saved.extend(by_name(named, fds));
                }
            }
            Command::Client { device, number } => self.connect(&device, fds, number),
            Command::Quiesce {} => self.quiesce(),
            Command::Remove { device } => self.remove(device),
            Command::Measure { device } => self.measure(&device),
            Command::Switch { device, spec, uplink } => {
                let supervisor = self.supervisor(&device);
                self.switch = Some(ProcessSwitch::new(&spec, uplink, fds, supervisor)?);
            }
            Command::SwitchPort { device, port } => {
                let switch = self.switch.as_mut();
                switch.ok_or("supervisor: a port without its switch")?.set(device, port)?;
            }
            Command::Outside { device, link_up, is_gone, mtu, announcements } => {
                self.outside(&device, is_gone, net::Wanted { link_up, mtu, announcements });
            }
            Command::Queues { device, filter, chunk } => {
                let renewed = self.renew(&device, fds, (filter, chunk));
                renewed.map_err(|errno| format!("supervisor: queues of {device}: {errno}"))?;
            }
            Command::Limit { device, rates, group } => self.limit(device, rates, group),
            Command::Lease { group } => self.groups.lease(group, fds, &self.outgoing)?,
            Command::Done { number, error } => {
                self.unanswered.answer(number, Answer { error, ..Answer::default() });
            }
            Command::Connected { number, failed } => {
                self.unanswered.answer(number, Answer { error: 0, failed, fds });
            }
            Command::Export { target, limit_ms } => {
                tokio::spawn(nbd::export(self.channel.clone(), target, limit_ms, fds));
            }
            Command::Threads {} => self.threads = fds.pop(),
            Command::Ping { number } => self.say(&Report::Counted { number }).await,
            Command::XenDisk { device, spec } => {
                let parts = (self.pool.clone(), self.channel.clone());
                let how = (parts, self.uring, self.supervisor(&device));
                let xen = ProcessXen::open(&device, spec, fds, how).await?;
                self.xens.insert(device, xen);
            }
            Command::XenRing { ref device, .. }
            | Command::XenConnect { ref device, .. }
            | Command::XenDisconnect { ref device, .. } => {
                if let Some(xen) = self.xens.get_mut(device) {
                    xen.handle(command, fds);
                }
            }
            Command::Count { number } => self.count(number).await,
        }
        Ok(())
    }

    /// Writes all counters to the supervisor's files, and reports that this is done, with the
    /// `number` of the command.
    async fn count(&mut self, number: u64) {
        self.threads.iter().for_each(|file| threads::write(file, &self.pool));
        let mut news = Vec::new();
        for (name, Device { net, here, counters, .. }) in &mut self.devices {
            counts::write(counters, &here.view.side);
            news.extend(net.as_mut().and_then(|net| net.news(name)));
        }
        self.xens.values().for_each(ProcessXen::count);
        for report in news {
            self.say(&report).await;
        }
        self.say(&Report::Counted { number }).await;
    }

    fn limit(&mut self, device: String, rates: LimitRates, group: Option<GroupRates>) {
        if let Some(limit) = self.view(&device).and_then(|view| view.side.limit.clone()) {
            self.groups.limit(&limit, rates, group);
            self.refresh(device);
        }
    }

    /// Tells the queues of a device to read its limit again.
    fn refresh(&self, device: String) {
        let pool = self.pool.clone();
        tokio::spawn(async move { pool.refresh(|of| of == device, PROCESS_LIMIT_SEEN).await });
    }

    fn supervisor(&self, device: &str) -> SupervisorClient {
        SupervisorClient { device: device.to_owned(), outgoing: self.outgoing.clone() }
    }

    fn view(&self, device: &str) -> Option<&DeviceView> {
        let here = self.devices.get(device).map(|device| &device.here.view);
        here.or_else(|| self.xens.get(device).map(ProcessXen::view))
    }

    /// Returns the switch, if `device` is the name of its uplink.
    fn uplink(&self, device: &str) -> Option<&ProcessSwitch> {
        self.switch.as_ref().filter(|switch| switch.is_uplink(device))
    }

    /// Applies the state of an interface (`is_gone`: it was deleted) and the operator's settings.
    fn outside(&self, device: &str, is_gone: bool, wanted: net::Wanted) {
        match (self.uplink(device), self.net(device)) {
            (Some(switch), _) if is_gone => switch.lose(),
            (None, Some(net)) => net.handle(is_gone, wanted),
            _ => {}
        }
    }

    /// Replaces the queues of a deleted interface by queues of the one that the supervisor joined
    /// in its place.
    fn renew(
        &self,
        device: &str,
        fds: Vec<OwnedFd>,
        (filter, chunk): (PortFilter, Option<u32>),
    ) -> Result<(), Errno> {
        match (self.uplink(device), self.net(device)) {
            (Some(switch), _) => switch.renew(fds, (filter, chunk)),
            (None, Some(net)) => net.renew(fds, (filter, chunk)),
            (None, None) => Ok(()),
        }
    }

    fn net(&self, device: &str) -> Option<&ProcessNet> {
        self.devices.get(device)?.net.as_ref()
    }

    async fn add(
        &mut self,
        name: &str,
        spec: DeviceSpec,
        grant: DeviceGrant,
        counters: OwnedFd,
    ) -> Result<(), String> {
        let DeviceSpec { front_end, queue_workers, kind } = spec;
        self.queue_workers.choose(name, queue_workers);
        let (supervisor, uring, of) = (self.supervisor(name), self.uring, kind.clone());
        let opened = aside(move || grant.opened(of, uring, supervisor)).await;
        let (opened, given) = opened.ok_or("internal error: the device was not created")??;
        // The supervisor sends the limit in a command after this one, and again at each change.
        let (here, net) = made(name, &kind, opened, &self.pool);
        let (clients, handed) = mpsc::channel(CLIENTS_MAX);
        self.tasks.serve(&here, Endpoint::Handed(handed), options::of_front_end(&front_end));
        self.tell_of_sessions(name, &here.view);
        let net = net.zip(given).map(|(net, given)| ProcessNet::new(net, &here.view, given.lent));
        let saved = BTreeMap::new();
        self.devices.insert(name.to_owned(), Device { net, here, clients, counters, saved });
        Ok(())
    }

    fn tell_of_sessions(&self, name: &str, view: &DeviceView) {
        let (channel, device) = (self.channel.clone(), name.to_owned());
        let (mut connected, quiesces) = (view.connected.subscribe(), self.quiesces.clone());
        tokio::spawn(async move {
            while connected.changed().await.is_ok() && !quiesces.load(Ordering::Relaxed) {
                let is_open = *connected.borrow_and_update();
                say(&channel, &Report::Session { device: device.clone(), is_open }).await;
            }
        });
    }

    /// Stops a device, and reports to the supervisor when all its descriptors and mappings are
    /// closed.
    fn remove(&mut self, name: String) {
        if let Some(xen) = self.xens.remove(&name) {
            return xen.remove(name);
        }
        let Some(closed) = self.close(&name) else { return };
        let channel = self.channel.clone();
        tokio::spawn(async move {
            closed.await;
            say(&channel, &Report::Removed { device: name }).await;
        });
    }

    /// Stops all devices for the next supervisor, and reports to the supervisor when all their
    /// descriptors and mappings are closed. The front-ends stay connected.
    fn quiesce(&mut self) {
        // Set this before any session ends: a session then saves its state, and does not report
        // that its front-end is gone.
        self.quiesces.store(true, Ordering::Relaxed);
        let names: Vec<_> = self.devices.keys().cloned().collect();
        let closing: JoinSet<_> = names.iter().filter_map(|name| self.close(name)).collect();
        let (outgoing, switch) = (self.outgoing.clone(), self.switch.take());
        tokio::spawn(async move {
            closing.join_all().await;
            if let Some(switch) = switch {
                switch.close().await;
            }
            let _ = outgoing.send(Outgoing::Quiesced).await;
        });
    }

    /// Stops a device. The future returns when all descriptors and mappings of the device are
    /// closed.
    fn close(&mut self, name: &str) -> Option<impl Future<Output = ()> + Send + use<>> {
        let device = self.devices.remove(name)?;
        self.unanswered.connects_no_more(name);
        self.queue_workers.forget(name);
        let stopping = self.tasks.stop(name);
        Some(async move {
            if let Some(mut stopping) = stopping {
                while stopping.changed().await.is_ok() {}
            }
            let Device { net, here, clients: _, counters, saved } = device;
            // First end the tasks that follow the port.
            drop(net);
            counts::write(&counters, &here.view.side);
            aside(move || drop((here, counters, saved))).await;
        })
    }

    /// Reads the size of a device's file again; the guest gets a configuration change notification.
    fn measure(&self, name: &str) {
        let Some(blk) = self.view(name).and_then(|view| view.side.as_blk().cloned()) else {
            return;
        };
        let name = name.to_owned();
        tokio::spawn(aside(move || {
            if let Err(errno) = blk.resizes.resize(None) {
                tracing::warn!(device = name, %errno, "resizing the disk failed");
            }
        }));
    }
}

/// Makes a device of its opened disk or port. `shown` is empty: the supervisor shows the endpoint
/// of the device.
fn made(
    name: &str,
    kind: &KindSpec,
    opened: Opened,
    pool: &Arc<Pool>,
) -> (Here, Option<Arc<NetDevice>>) {
    let shown = (String::new(), "process");
    match (kind, opened) {
        (KindSpec::Blk(BlkSpec { options, .. }), Opened::Disk(disk, _)) => {
            let options = BlkOptions { name: name.to_owned(), ..options.clone() };
            (Here::blk(options, disk, pool, shown), None)
        }
        (KindSpec::Net(NetSpec { options, .. }), Opened::Port(port, mac, _)) => {
            let options = NetOptions { name: name.to_owned(), mac, ..options.clone() };
            let (here, net) = Here::net(options, port, pool, shown);
            (here, Some(net))
        }
        _ => unreachable!("a disk is opened for a block device, a port for a network device"),
    }
}

pub(super) async fn say(channel: &Channel, report: &Report) {
    if let Ok(bytes) = message::emit(report) {
        // An error means that the supervisor is gone: the next read of the channel ends this
        // process.
        let _ = channel.send(&bytes, NO_FDS).await;
    }
}
