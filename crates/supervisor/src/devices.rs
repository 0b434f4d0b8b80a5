//! `DeviceManager`: the one task that owns all devices. It carries changes out, one after another,
//! and answers each when it is done.
//!
//! ```text
//! new      opens the plan's devices; those that cannot be opened are retried (held_elsewhere.rs)
//! serve    until the process is told to stop:
//!              a task of a device has ended     its device is shown with the reason
//!              a change has arrived             prepare, commit, retire (carry_out.rs); answer
//! Tasks    a task for each device, which can be stopped by itself: a `Front` opens the device,
//!          listens at its socket and serves it
//! ```
//! No other code adds, removes or replaces a device. A change waits for the change before it. It
//! does not wait for the devices that the earlier change retires (`retiring.rs`), unless both
//! changes touch the same device.

mod admit;
mod carry_out;
mod change_in_progress;
mod defer;
mod front;
mod held_elsewhere;
mod pending_changes;
mod prepare;
mod retiring;
mod saved_devices;
mod shared;
mod switch_changes;

pub use admit::{Denied, admitted, is_bound};

use crate::links::HostLinks;
use crate::model::{Change, ChangeSender, Order, Registry};
use crate::processes::{Handoff, Processes};
use crate::xen::XenDisks;
use front::{Front, Stage};
use held_elsewhere::{Asked, First, Later, MaxWait, Tried, Wait, refuse_if_none_is_left};
use manyring_config::plan::{DaemonPlan, DevicePlan, Numa, Plan, Wanted};
use manyring_engine::{AsideRow, Pool, PoolOptions, allowed_cpus};
use manyring_memory::Topology;
use manyring_serve::assemble::{Assemble, AssembleError, Tasks, listens_at};
use manyring_serve::log;
use manyring_serve::service::{Service, Whose};
use manyring_serve::times::DEVICES_END;
use manyring_transport::vhost_user::{Endpoint, SocketPermissions};
use retiring::Retiring;
use saved_devices::{Kept, with_kept};
use shared::Shared;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Owns all devices of the process, and carries changes of them out, one after another.
#[derive(Debug)]
pub struct DeviceManager {
    shared: Arc<Shared>,
    fronts: Vec<Front>,
    xens: Vec<XenDisks>,
    /// The subscription to the kernel's reports of interfaces; `None` when a task in `followers`
    /// has it.
    links: Option<HostLinks>,
    tasks: Tasks,
    /// The running plan: the devices that are served, and those that wait until they can be opened.
    plan: Plan,
    /// By device name: the plan that replaces the device's present plan when its session has ended.
    pending: HashMap<String, Wanted>,
    /// Number of changes that this process has carried out.
    generation: u64,
    kept: Kept,
    /// Changes that wait until devices have stopped.
    retiring: Retiring,
    changes: ChangeSender,
    orders: mpsc::Receiver<Order>,
    /// The channel that publishes the generation and the running plan to other tasks.
    shown: watch::Sender<(u64, Arc<Plan>)>,
    /// Each `Front` that is created at the start has a clone of this sender. A `Front` drops its
    /// clone when its device listens or waits for a resource. When all clones are dropped,
    /// [`Self::begun`] completes, and the process reports that it is ready.
    begins: Option<mpsc::Sender<()>>,
    begun: Option<mpsc::Receiver<()>>,
    /// Tasks in the background, which are aborted when the device manager stops.
    followers: JoinSet<()>,
}

/// Makes the worker pool of a plan. It starts no thread yet.
pub fn pool(plan: &Plan) -> Arc<Pool> {
    let options = PoolOptions {
        workers_max: plan.daemon.workers,
        polling: plan.daemon.polling.policy(),
        uring: plan.daemon.io_uring,
    };
    Pool::pinned(options, plan.pins())
}

impl DeviceManager {
    /// Opens every disk and port of the plan, and then the capture files. Creates no socket.
    /// Dropping the manager removes everything that it created, apart from capture files. `pool`:
    /// made by [`pool`]. `handoff`: the state that an earlier supervisor handed over.
    ///
    /// # Errors
    /// No device can be opened; or one cannot, and the plan does not let it wait (`wait = 0`).
    pub async fn new(
        plan: &Plan,
        pool: Arc<Pool>,
        service: Arc<Service>,
        mut handoff: Handoff,
    ) -> Result<Self, AssembleError> {
        manyring_memory::install_sigbus_handler();
        // In a takeover a device may wait here only if it waits in the running supervisor, too. Any
        // other device may be in use by a guest, which would lose it: so this start fails, and the
        // running supervisor continues.
        let may_wait = handoff.is_there.then(|| std::mem::take(&mut handoff.waits));
        let shared = Arc::new(Shared::new(plan, pool, service, &mut handoff)?);
        let (plan, kept) = with_kept(plan)?;
        shared.service.retain(listening(&plan));
        shared.release_others(&plan).await;
        // Subscribe before a port is opened, so that a deletion of its interface is reported.
        let links = Some(HostLinks::open(&plan));
        let tried = Self::try_all(&plan, &shared, may_wait, &handoff.is_last).await?;
        shared.pool.has_ring().ok_or(AssembleError::Workers)?;
        let (changes, orders) = ChangeSender::new();
        let shown = watch::Sender::new((1, Arc::new(plan.clone())));
        let (begins, begun) = mpsc::channel(1);
        let mut manager = Self {
            shared,
            fronts: Vec::new(),
            xens: Vec::new(),
            links,
            tasks: Tasks::default(),
            plan,
            pending: HashMap::new(),
            generation: 1,
            kept,
            retiring: Retiring::default(),
            changes,
            orders,
            shown,
            begins: Some(begins),
            begun: Some(begun),
            followers: JoinSet::new(),
        };
        for tried in tried {
            manager.add_front(tried)?;
        }
        let io_uring = manager.plan.daemon.io_uring;
        let mut left = std::mem::take(&mut handoff.xen);
        for xen in &manager.plan.xen_blk {
            let (pool, devices) = (manager.pool().clone(), manager.devices().clone());
            let shared = (pool, devices, manager.shared.groups.clone());
            let apart = (manager.shared.processes.clone(), manager.shared.domains);
            manager.xens.push(XenDisks::new(xen, io_uring, shared, apart, &mut left)?);
        }
        Ok(manager)
    }

    /// Returns a receiver of the generation and the running plan, which reports each change.
    pub fn shown(&self) -> watch::Receiver<(u64, Arc<Plan>)> {
        self.shown.subscribe()
    }

    /// Returns the sender of the queue from which this task takes changes.
    pub fn changes(&self) -> &ChangeSender {
        &self.changes
    }

    /// Tries to open each device of the plan; returns an error for a device that may not wait.
    /// Without `may_wait` (no takeover) [`MaxWait`] decides which devices may wait. With
    /// `may_wait`, only the devices that it names may: the running daemon serves the others. Once
    /// `is_last` is set no other daemon runs, and every device may wait.
    async fn try_all(
        plan: &Plan,
        shared: &Arc<Shared>,
        may_wait: Option<HashSet<String>>,
        is_last: &AtomicBool,
    ) -> Result<Vec<Tried>, AssembleError> {
        let mut max_wait = MaxWait::new(shared.wait, shared.keeps_on);
        let mut none = MaxWait::of_next();
        let row = AsideRow::default();
        let asked: Vec<_> = plan.wanted().map(|wanted| Asked::new(wanted, shared, &row)).collect();
        row.go_on();
        let mut tried = Vec::new();
        for asked in asked {
            let is_strict = may_wait.as_ref().is_some_and(|names| !names.contains(asked.name()));
            let max_wait = if is_strict { &mut none } else { &mut max_wait };
            let wanted = asked.wanted().clone();
            let answer = asked.answered(max_wait, &shared.host, &row).await;
            // Read after the wait: once the running supervisor has died, nobody else serves the
            // device.
            let is_strict = is_strict && !is_last.load(Ordering::Relaxed);
            let (served, first) = match answer {
                Ok((_, First::Held(e) | First::Failed(e))) if is_strict => return Err(e),
                Err(error) if is_strict || may_wait.is_none() => return Err(error),
                answer => answer.unwrap_or_else(|error| (None, First::Failed(error))),
            };
            tried.push(Tried { wanted, served, first });
        }
        if plan.xen_blk.is_empty() {
            refuse_if_none_is_left(&mut tried)?;
        }
        Ok(tried)
    }

    /// Adds the front of a device after its first try, and shows the device as served or as
    /// waiting.
    fn add_front(&mut self, Tried { wanted, served, first }: Tried) -> Result<(), AssembleError> {
        let mut wait = Wait::new(self.shared.clone(), wanted.clone());
        let stage = match wait.begin(first) {
            Later::Opened(opened) => match wanted.decorated(opened) {
                Ok(opened) => {
                    let made = self.shared.made(&wanted, opened);
                    self.devices().add(made.view().clone());
                    Stage::Made(made)
                }
                Err(error) if self.shared.tries_again() => {
                    wait.note(&error);
                    Stage::Waits(Later::Held)
                }
                Err(error) => return Err(error),
            },
            later => Stage::Waits(later),
        };
        let begins = self.begins.clone();
        self.fronts.push(Front { wanted, wait, stage, served, begins });
        Ok(())
    }

    /// Returns the pool of this process's worker threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.shared.pool
    }

    /// Returns the device processes that this supervisor runs.
    pub fn processes(&self) -> &Processes {
        &self.shared.processes
    }

    /// Returns the registry of devices: those that are served, and those that wait.
    pub fn devices(&self) -> &Registry {
        &self.shared.devices
    }

    /// The future completes when every device of the start listens or waits for a resource.
    /// [`Self::serve`] must run meanwhile.
    pub fn begun(&mut self) -> impl Future<Output = ()> + use<> {
        let begun = self.begun.take();
        async move {
            if let Some(mut begun) = begun {
                while begun.recv().await.is_some() {}
            }
        }
    }

    /// Serves every device until `stop` turns true, or until all `--one-off` ones have ended.
    ///
    /// # Errors
    /// Listening on a socket failed; or no device is served when the time for which devices may
    /// wait is over.
    pub async fn serve(&mut self, stop: &watch::Receiver<bool>) -> Result<(), AssembleError> {
        let balance = self.pool().clone().balance();
        self.followers.spawn(balance);
        let nodes = Topology::of_host(allowed_cpus());
        if let (Numa::Auto, Some(topology)) = (self.plan.daemon.numa, nodes) {
            self.followers.spawn(self.pool().clone().follow_memory(topology));
        }
        let links = self.links.take().unwrap_or_default();
        if links.is_open() {
            self.followers.spawn(links.follow(self.devices().clone()));
        } else {
            self.links = Some(links);
        }
        let has_xen = !self.xens.is_empty();
        std::mem::take(&mut self.fronts).into_iter().for_each(|front| self.start(front));
        // `begun` completes when all clones of the sender are dropped: drop the manager's own.
        self.begins = None;
        for xen in self.xens.drain(..) {
            let name = xen.name().to_owned();
            self.tasks.start(&name, |stop| async move {
                xen.serve(stop).await;
                Ok(())
            });
        }
        let waited = self.shared.clone();
        let waited = waited.waited();
        tokio::pin!(waited);
        let (mut may_wait, mut stop, mut stops) = (true, stop.clone(), stop.clone());
        // Without a control socket nobody can add a device after the last one has ended.
        let may_come = self.plan.daemon.control.is_some() && self.shared.keeps_on;
        let mut has_ended = false;
        while !(self.tasks.is_empty() && (has_ended || !may_come)) {
            tokio::select! {
                Some((name, result)) = self.tasks.ended() => match result {
                    Ok(()) => has_ended |= !self.remove_one_off(&name),
                    Err(error) if self.shared.keeps_on => self.failed(&name, &error),
                    Err(error) => return Err(error),
                },
                () = &mut waited, if may_wait => {
                    may_wait = false;
                    if !has_xen {
                        self.shared.refuse_if_none_is_served()?;
                    }
                }
                Some(next) = self.retiring.next(&mut self.orders, &self.shared.processes) => {
                    // A stop drops the change that is under way; its client reads that the daemon
                    // is stopping.
                    tokio::select! {
                        () = self.act(next) => {}
                        _ = stops.wait_for(|stop| *stop) => {}
                    }
                }
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        // Tell a supervisor that is taking over before any device ends. Otherwise it would take
        // the end of this process for a crash, and serve although the operator stopped the daemon.
        self.processes().tell_successor().await;
        self.tasks.stop_all();
        match timeout(DEVICES_END, self.all_ended()).await {
            Ok(ended) => ended?,
            Err(_) => {
                let devices = self.tasks.names();
                tracing::warn!(devices, "closing devices timed out; exiting");
            }
        }
        self.processes().end().await;
        self.followers.abort_all();
        Ok(())
    }

    /// Returns when the tasks of all devices have ended. The caller has told the tasks to stop.
    ///
    /// # Errors
    /// The error of the first task that ended with one.
    async fn all_ended(&mut self) -> Result<(), AssembleError> {
        while let Some((_, result)) = self.tasks.ended().await {
            result?;
        }
        Ok(())
    }

    /// Spawns the task that serves a device from its front.
    fn start(&mut self, front: Front) {
        let (shared, name) = (self.shared.clone(), front.wanted.plan().name.clone());
        self.tasks.start(&name, |stop| front.serve(shared, stop));
    }

    /// Starts to watch the host's interfaces, unless a task does already or no device of `plan`
    /// has one.
    fn follow_links(&mut self, plan: &Plan) {
        if self.links.take().is_none() {
            return;
        }
        let links = HostLinks::open(plan);
        if links.is_open() {
            self.followers.spawn(links.follow(self.devices().clone()));
        } else {
            self.links = Some(links);
        }
    }
}

impl DeviceManager {
    /// Removes a device whose only session has ended, if the control API created the device.
    /// Returns false for a device of the configuration, which stays in the plan: the caller then
    /// ends the process with its last device.
    fn remove_one_off(&mut self, name: &str) -> bool {
        let is_of_api = self.find(name).is_some_and(|device| device.is_of_api());
        if is_of_api {
            let (changes, name) = (self.changes.clone(), name.to_owned());
            let removed = async move { changes.follow(Change::Delete { name, force: true }).await };
            self.followers.spawn(removed);
        }
        is_of_api
    }

    /// Shows a device as failed. Its task ended with an error and is not retried, because the
    /// device inherited its socket and cannot create it again.
    fn failed(&self, name: &str, error: &AssembleError) {
        let reason = error.to_string();
        tracing::error!(device = name, reason, "the device failed and is no longer served");
        self.devices().fail(name, reason);
    }
}

/// Returns every socket that a process with this plan listens on.
fn listening(plan: &Plan) -> impl Iterator<Item = (Whose<'_>, PathBuf, SocketPermissions)> {
    let control = |(path, key): (&Path, &'static str)| {
        (Whose::Control(key), path.to_owned(), plan.daemon.private(key))
    };
    let device = |device: &'_ DevicePlan| match listens_at(device) {
        Some(Endpoint::Listen { path, permissions }) => Some((path, permissions)),
        _ => None,
    };
    let device = move |plan| {
        let (path, permissions) = device(plan)?;
        Some((Whose::Device(plan.name.as_str()), path, permissions))
    };
    plan.daemon.controls().map(control).chain(plan.devices().filter_map(device))
}

/// Returns the command line of a device process, without its name. A device process starts as many
/// workers as the plan gives the daemon.
pub fn process_arguments(plan: &DaemonPlan) -> Vec<OsString> {
    // The sandbox is the first argument: a device process reads it before any other.
    let sandbox = format!("--sandbox={}", plan.sandbox.name());
    let mut arguments: Vec<OsString> = vec!["device-process".into(), sandbox.into()];
    arguments.extend(log::arguments().into_iter().map(OsString::from));
    arguments.push(format!("--workers={}", plan.workers).into());
    for cpus in &plan.worker_cpus {
        let cpus: Vec<_> = cpus.iter().map(ToString::to_string).collect();
        arguments.extend(["--worker-cpus".into(), cpus.join(",").into()]);
    }
    arguments.extend(plan.polling.options().into_iter().map(OsString::from));
    if !plan.io_uring {
        arguments.push("--no-io-uring".into());
    }
    if plan.numa == Numa::Off {
        arguments.push("--numa=off".into());
    }
    arguments
}
