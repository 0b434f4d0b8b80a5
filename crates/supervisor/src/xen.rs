//! The disks of a Xen's guests: found in xenstore, each served by a task of its own.
//!
//! ```text
//! XenDisks    one xenstore: connects, connects again if it is lost; follows which disks exist
//!   serve       a disk's handshake (transport::xenbus), which asks
//!     Host        opens the disk, maps rings, starts and stops queues
//!       Hypervisor  grants and event channels, of this machine's Xen or of a simulated one
//! ```
//! The control API shows a disk from the opening of its file until the tool stack has removed the
//! disk.

mod hand_off;
mod host;
mod in_device_process;
mod journal_watch;
mod memory;
mod start;

use crate::model::Registry;
use crate::processes::{HandoffRequest, OfXen, Processes, XenEndings};
use host::XenHost;
use journal_watch::Journals;
use manyring_config::plan::{Domains, STATE_DIR, XenBlkPlan, XenPlan};
use manyring_engine::Pool;
use manyring_serve::assemble::AssembleError;
use manyring_serve::limit_groups::Groups;
use manyring_serve::times::{XEN_STOP, XENSTORE_RETRY};
use manyring_transport::xenbus::{
    Command, DEVICE, DeviceId, Discovery, Presence, SOCKET, ServeError, Store, StoreEndpoint,
    StoreError, default_endpoint, serve,
};
use manyring_xen::{Hypervisor, HypervisorError, Served, StateDir, StateDirError};
use memory::Memory;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// The most commands that wait for a disk's task.
const COMMANDS_MAX: usize = 16;
/// This path exists if the kernel's own back-end (xen-blkback) serves disks.
const KERNELS_BACK_END: &str = "/sys/bus/xen-backend/drivers/vbd";
/// The kind of disk that xen-blkback serves.
const KERNELS_KIND: &str = "vbd";

/// Why the disks of a Xen cannot be served. `at` is the wrong key, as the user wrote it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub(crate) enum XenError {
    #[error("{at}: Xen or xenstored is not running: neither {SOCKET} nor {DEVICE} exists")]
    Missing { at: String },
    #[error("{at}: {source}")]
    Store { at: String, source: StoreError },
    #[error("{at}: {source}")]
    Hypervisor { at: String, source: HypervisorError },
    #[error("{at}: {source}")]
    StateDir { at: String, source: StateDirError },
    #[error(
        "{at}: \"{KERNELS_KIND}\" is in use by this kernel's xen-blkback; unload it (rmmod), or \
         name another kind"
    )]
    Kernel { at: String },
}

impl From<XenError> for AssembleError {
    fn from(error: XenError) -> Self {
        Self::Xen(Box::new(error))
    }
}

/// The parts of the process that all disks of one Xen share.
#[derive(Debug)]
struct Shared {
    plan: XenBlkPlan,
    io_uring: bool,
    pool: Arc<Pool>,
    devices: Registry,
    groups: Groups,
    state_dir: StateDir,
    journals: Journals,
    processes: Processes,
    domains: Domains,
    /// For disks in memory whose task has ended: their bytes, for the next task.
    memory: Mutex<HashMap<DeviceId, Memory>>,
    /// The disks in memory that a task serves now.
    in_memory: Mutex<HashSet<DeviceId>>,
    /// For each disk that a task has: handles that tell whether requests of its device processes
    /// are in flight.
    endings: Mutex<HashMap<DeviceId, Weak<XenEndings>>>,
}

/// The disks of one Xen.
#[derive(Debug)]
pub(crate) struct XenDisks {
    shared: Arc<Shared>,
    endpoint: StoreEndpoint,
    store: Store,
    hypervisor: Arc<Hypervisor>,
}

impl XenDisks {
    /// Connects to xenstore and to the hypervisor. `left`: locks and memory of disks that another
    /// supervisor handed over. Must run in a tokio runtime.
    ///
    /// # Errors
    /// [`XenError`]
    pub(crate) fn new(
        plan: &XenBlkPlan,
        io_uring: bool,
        (pool, devices, groups): (Arc<Pool>, Registry, Groups),
        (processes, domains): (Processes, Domains),
        left: &mut OfXen,
    ) -> Result<Self, XenError> {
        let (key, endpoint) = match &plan.xen {
            XenPlan::Simulated { socket } => ("simulated", StoreEndpoint::Socket(socket.clone())),
            XenPlan::Real { xenstore: Some(path) } => ("xenstore", endpoint_at(path)),
            XenPlan::Real { xenstore: None } => {
                let at = plan.place.at("xenstore");
                ("xenstore", default_endpoint().ok_or(XenError::Missing { at })?)
            }
        };
        let is_real = matches!(plan.xen, XenPlan::Real { .. });
        let has_kernels_kind = plan.kinds.iter().any(|kind| kind == KERNELS_KIND);
        if is_real && has_kernels_kind && Path::new(KERNELS_BACK_END).exists() {
            return Err(XenError::Kernel { at: plan.place.at("kinds") });
        }
        let at = || plan.place.at(key);
        let store = Store::open(&endpoint, plan.domain);
        let store = store.map_err(|source| XenError::Store { at: at(), source })?;
        let hypervisor = Hypervisor::open(&plan.xen);
        let hypervisor = hypervisor.map_err(|source| XenError::Hypervisor { at: at(), source })?;
        let served = match &plan.xen {
            XenPlan::Simulated { socket } => Served::Simulated(socket),
            XenPlan::Real { .. } => Served::Machine(Path::new(STATE_DIR)),
        };
        let refused = |source| {
            let is_in_use = matches!(source, StateDirError::InUse { .. });
            let at = plan.place.at(if is_in_use { "kinds" } else { "state_dir" });
            XenError::StateDir { at, source }
        };
        let state_dir = StateDir::open(&plan.state_dir, &plan.kinds, served, &mut left.locks);
        let (state_dir, journals) = (state_dir.map_err(refused)?, Journals::default());
        let (plan, memory) = (plan.clone(), Mutex::new(hand_off::taken(left, &plan.kinds)));
        let shared = Arc::new(Shared {
            plan,
            io_uring,
            pool,
            devices,
            groups,
            state_dir,
            journals,
            processes,
            domains,
            memory,
            in_memory: Mutex::default(),
            endings: Mutex::default(),
        });
        Ok(Self { shared, endpoint, store, hypervisor: Arc::new(hypervisor) })
    }

    /// Returns the name of the back-end. The names of its disks begin with it.
    pub(crate) fn name(&self) -> &str {
        &self.shared.plan.name
    }

    /// Serves the disks until `stop` turns true. If xenstore is lost, connects again: until then
    /// the queues run on, and then new tasks take them over. If another supervisor takes over,
    /// hands all disks over to it.
    pub(crate) async fn serve(mut self, mut stop: watch::Receiver<bool>) {
        let mut disks = Disks::default();
        let (mut asked, is_there) = self.shared.processes.register_xen(self.name());
        let is_lost = loop {
            let (leave, leaving) = watch::channel(false);
            let mut handoff_request: Option<HandoffRequest> = None;
            let lost = tokio::select! {
                () = ended(&mut stop) => None,
                error = self.follow(&mut disks, &leaving) => Some(error),
                asked = asked.recv() => { handoff_request = asked; None }
            };
            let next = match &lost {
                None => None,
                Some(error) => {
                    is_there.send_replace(false);
                    let next = self.find_again(error, &stop).await;
                    is_there.send_replace(next.is_some());
                    next
                }
            };
            // All tasks leave their disks: after a reconnection, new tasks take the rings over.
            leave.send_replace(true);
            disks.leave_all();
            if let Some(handoff_request) = handoff_request {
                self.hand_over(&mut disks, handoff_request).await;
                disks.there = None;
                continue;
            }
            match next {
                // The task of a disk that hangs ends later; the other disks do not wait for it.
                Some(next) => (self.store, self.hypervisor) = next,
                None => break lost.is_some(),
            }
            disks.there = None;
        };
        if tokio::time::timeout(XEN_STOP, disks.all_ended()).await.is_err() {
            let xen = &self.shared.plan.name;
            tracing::warn!(xen, "requests in flight of disks did not complete; abandoning them");
        }
        // Remove the journals of disks that xenstore no longer has. Without xenstore it is unknown
        // which these are.
        if let (Some(there), false) = (&disks.there, is_lost) {
            self.shared.state_dir.keep(|disk| there.contains(disk));
        }
    }

    /// Starts a task for each disk that appears. Returns when xenstore is lost, with the reason.
    async fn follow(&self, disks: &mut Disks, leaving: &watch::Receiver<bool>) -> StoreError {
        let kinds = self.shared.plan.kinds.clone();
        let discovery = Discovery::new(self.store.clone(), kinds).await;
        let mut discovery = match discovery {
            Ok(discovery) => discovery,
            Err(error) => return error,
        };
        let (sender, mut presences) = mpsc::channel(1);
        // Discovery runs in a task of its own: `select!` would cancel it in the middle, and lose
        // the disks that it had found.
        let mut looks = JoinSet::new();
        looks.spawn(async move {
            loop {
                let seen = discovery.next().await;
                let is_lost = seen.is_err();
                if sender.send(seen).await.is_err() || is_lost {
                    return;
                }
            }
        });
        let (sender, mut lost) = mpsc::channel(1);
        looks.spawn(journal_watch::watch(self.shared.clone(), sender));
        loop {
            tokio::select! {
                Some(id) = lost.recv() => disks.leave(&id),
                seen = presences.recv() => match seen {
                    None => return self.store.lost().await,
                    Some(Err(error)) => return error,
                    Some(Ok(seen)) => {
                        let is_first = disks.there.is_none();
                        disks.there.get_or_insert_default();
                        for presence in seen {
                            match presence {
                                Presence::Appeared(id) => disks.appeared(id, self, leaving),
                                Presence::Vanished(id) => disks.vanished(&id),
                            }
                        }
                        if is_first {
                            self.shared.keep_memory_of(|disk| disks.is_there(disk) == Some(true));
                        }
                    }
                },
                Some(id) = disks.ended() => disks.go_on(id, self, leaving),
            }
        }
    }

    /// Connects again to a xenstore whose connection was lost; retries until xenstore answers.
    /// `None`: the process is stopping.
    async fn find_again(
        &self,
        error: &StoreError,
        stop: &watch::Receiver<bool>,
    ) -> Option<(Store, Arc<Hypervisor>)> {
        let plan = &self.shared.plan;
        tracing::error!(
            xen = plan.name,
            %error,
            "xenstore is unavailable; disks keep running; retrying"
        );
        while !ends_within(stop, XENSTORE_RETRY).await {
            let store = Store::open(&self.endpoint, plan.domain);
            let (Ok(store), Ok(hypervisor)) = (store, Hypervisor::open(&plan.xen)) else {
                continue;
            };
            let mut stop = stop.clone();
            let answers = tokio::select! {
                () = ended(&mut stop) => return None,
                children = store.children("backend") => children.is_ok(),
            };
            if answers {
                tracing::info!(xen = plan.name, "connected to xenstore again");
                return Some((store, Arc::new(hypervisor)));
            }
        }
        None
    }

    async fn serve_disk(
        store: Store,
        mut host: XenHost,
        commands: mpsc::Receiver<Command>,
        stop: watch::Receiver<bool>,
    ) -> DeviceId {
        let id = host.id().clone();
        let served = serve(&store, id.clone(), &mut host, commands, stop.clone()).await;
        host.closed().await;
        if let Err(ServeError::Store(error)) = served
            && !error.is_lost()
        {
            tracing::error!(device = %id, %error, "the disk failed; retrying in a second");
            ends_within(&stop, XENSTORE_RETRY).await;
        }
        id
    }
}

/// The channels to the task of a disk.
#[derive(Debug)]
struct Serving {
    commands: mpsc::Sender<Command>,
    /// Turns true when the task has to leave the disk to another task or process.
    leave: watch::Sender<bool>,
}

/// The disks that xenstore has, and the tasks that serve disks.
#[derive(Debug, Default)]
struct Disks {
    /// The disks that xenstore has; `None`: not read yet since the last connection to xenstore.
    there: Option<HashSet<DeviceId>>,
    tasks: JoinSet<DeviceId>,
    /// Disks that have a task, also disks that xenstore no longer has.
    running: HashMap<DeviceId, Serving>,
}

impl Disks {
    fn appeared(&mut self, id: DeviceId, xen: &XenDisks, stop: &watch::Receiver<bool>) {
        self.there.get_or_insert_default().insert(id.clone());
        self.go_on(id, xen, stop);
    }

    fn vanished(&mut self, id: &DeviceId) {
        if let Some(there) = &mut self.there {
            there.remove(id);
        }
        if let Some(sender) = self.running.get(id).map(|serving| serving.commands.clone()) {
            // The task's channel may be full: a task of its own waits for room in it.
            tokio::spawn(async move { sender.send(Command::Vanished).await });
        }
    }

    /// Tells the task of a disk to leave the disk as it is; the disk's next task takes it over.
    fn leave(&self, id: &DeviceId) {
        if let Some(serving) = self.running.get(id) {
            serving.leave.send_replace(true);
        }
    }

    fn leave_all(&self) {
        self.running.keys().for_each(|id| self.leave(id));
    }

    /// Waits for a task that ends; returns its disk. `None`: there is no task, or the task
    /// panicked.
    async fn ended(&mut self) -> Option<DeviceId> {
        let id = self.tasks.join_next().await?.ok()?;
        self.running.remove(&id);
        Some(id)
    }

    async fn all_ended(&mut self) {
        while self.ended().await.is_some() {}
    }

    /// True if xenstore has the disk. `None`: the disks were not read yet.
    fn is_there(&self, id: &DeviceId) -> Option<bool> {
        self.there.as_ref().map(|there| there.contains(id))
    }

    /// Starts a task for a disk that xenstore has and that has no task. A disk that was removed and
    /// added again while requests of its previous task are in flight gets its task when that one
    /// has ended.
    fn go_on(&mut self, id: DeviceId, xen: &XenDisks, stop: &watch::Receiver<bool>) {
        let is_there = self.is_there(&id);
        if is_there == Some(false) {
            xen.shared.forget_memory(&id);
        }
        if *stop.borrow() || is_there != Some(true) || self.running.contains_key(&id) {
            return;
        }
        let (sender, commands) = mpsc::channel(COMMANDS_MAX);
        let (leave, stop) = watch::channel(false);
        self.running.insert(id.clone(), Serving { commands: sender.clone(), leave: leave.clone() });
        let (shared, hypervisor) = (xen.shared.clone(), xen.hypervisor.clone());
        let host = XenHost::new(id, shared, hypervisor, sender, leave);
        self.tasks.spawn(XenDisks::serve_disk(xen.store.clone(), host, commands, stop));
    }
}

/// Returns the name of a disk in logs, counters and the control API.
fn disk_name(plan: &XenBlkPlan, DeviceId { kind, domain, device }: &DeviceId) -> String {
    format!("{}-{kind}-{domain}-{device}", plan.name)
}

fn endpoint_at(path: &Path) -> StoreEndpoint {
    let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device());
    let path = path.to_owned();
    if is_device { StoreEndpoint::Device(path) } else { StoreEndpoint::Socket(path) }
}

/// Waits for `time`, and returns false. Returns true at once when `stop` turns true.
async fn ends_within(stop: &watch::Receiver<bool>, time: Duration) -> bool {
    tokio::time::timeout(time, ended(&mut stop.clone())).await.is_ok()
}

/// Returns when `stop` has turned true.
async fn ended(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
