//! `Leases`: groups of limits with devices in several device processes. Each of these processes has
//! a lease of such a group, and a thread of the supervisor divides the group's time among them, as
//! `engine/limit/divide.rs` decides.
//!
//! ```text
//! join, leave   a device process has one more, or one less, device of a group: control thread
//! divider       reads what processes have used, and writes what they are granted: every 10 ms
//!               while a device of the group works, else when a process rings
//! ```
//! If all devices of a group are in one process, the process has no lease: it applies the group's
//! full rates by itself. It gets a lease when another process has a device of the group, and keeps
//! the lease as long as it lives, even while it has no device of the group. Creating a lease reads
//! /proc, and reading a file that a process writes may be slow: the control thread does neither.

use super::process::DeviceProcess;
use manyring_config::plan::GroupPlan;
use manyring_engine::limit::divide::{Account, Claim, Divider, TICK};
use manyring_engine::limit::lease::Usages;
use manyring_engine::{aside, clock_now_ns};
use manyring_protocol::message::Command;
use manyring_serve::lease_file::LeaseFiles;
use manyring_serve::outgoing::MessageFd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shortest time between two ticks: a little less than [`TICK`], since a wait may end early.
const TICK_NS: u64 = 9_500_000;

/// The groups of limits that have a device in a device process. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Leases(Arc<Mutex<Registry>>);

/// The groups, and the eventfd that wakes the divider.
#[derive(Debug, Default)]
struct Registry {
    groups: BTreeMap<String, Arc<Shared>>,
    /// The burst of each group, in milliseconds.
    bursts_ms: BTreeMap<String, u64>,
    /// Wakes the divider for a new lease; `None`: it has not started.
    wakes: Option<Arc<OwnedFd>>,
}

/// A group, with the device processes that have its devices.
#[derive(Debug, Default)]
struct Shared {
    burst_ms: AtomicU64,
    parts: Mutex<Vec<Arc<Part>>>,
}

/// A device process with devices of a group.
#[derive(Debug)]
struct Part {
    process: Arc<DeviceProcess>,
    members: AtomicU64,
    /// `None`: the process applies the group's full rates by itself.
    lease: Mutex<Option<Arc<LeaseFiles>>>,
    /// True if the process has a lease, or gets one.
    is_leased: AtomicBool,
    /// The process's account in the group, and the usages that the process last reported. Only the
    /// divider's thread uses these.
    said: Mutex<(Account, Usages)>,
}

/// Counts one device of a group for a device process, as long as this value exists.
#[derive(Debug)]
struct Membership {
    leases: Leases,
    group: String,
    part: Arc<Part>,
}

/// The membership of a device in its group of limits, if it has one.
#[derive(Debug)]
pub(super) struct InGroup {
    leases: Leases,
    membership: Option<Membership>,
}

impl InGroup {
    /// Moves the device to the group that a command `Limit` to the process names.
    pub(super) fn follow(&mut self, command: &Command, process: &Arc<DeviceProcess>) {
        let Command::Limit { group, .. } = command else { return };
        let group = group.as_ref().map(|group| &group.name);
        if self.membership.as_ref().map(|membership| &membership.group) != group {
            self.membership = group.map(|group| self.leases.join(group, process));
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let mut registry = self.leases.lock();
        let Some(shared) = registry.groups.get(&self.group).cloned() else { return };
        self.part.members.fetch_sub(1, Ordering::Relaxed);
        shared.forget();
        if lock(&shared.parts).is_empty() {
            registry.groups.remove(&self.group);
        }
        // The divider then grants the time of this device to the other processes.
        registry.ring();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Registry> {
        lock(&self.0)
    }

    /// Returns the membership of a device that is in no group yet.
    pub(super) fn of_device(&self) -> InGroup {
        InGroup { leases: self.clone(), membership: None }
    }

    /// Sets the bursts of all groups.
    pub(super) fn follow(&self, groups: &[GroupPlan]) {
        let mut registry = self.lock();
        let burst_ms = |plan: &GroupPlan| (plan.name.clone(), plan.limit.rates().burst_ms);
        registry.bursts_ms = groups.iter().map(burst_ms).collect();
        for (name, shared) in &registry.groups {
            let burst_ms = registry.bursts_ms.get(name).copied().unwrap_or(0);
            shared.burst_ms.store(burst_ms, Ordering::Relaxed);
        }
    }

    /// Counts one more device of a group for the process. Once a group has two processes, both get
    /// leases.
    fn join(&self, group: &str, process: &Arc<DeviceProcess>) -> Membership {
        let mut registry = self.lock();
        let burst_ms = registry.bursts_ms.get(group).copied().unwrap_or(0);
        let shared = registry.groups.entry(group.to_owned()).or_default().clone();
        shared.burst_ms.store(burst_ms, Ordering::Relaxed);
        shared.forget();
        let mut parts = lock(&shared.parts);
        let is_same = |part: &&Arc<Part>| Arc::ptr_eq(&part.process, process);
        let part = match parts.iter().find(is_same) {
            Some(part) => part.clone(),
            None => {
                let part = Arc::new(Part::new(process));
                parts.push(part.clone());
                part
            }
        };
        part.members.fetch_add(1, Ordering::Relaxed);
        let all = if parts.len() > 1 { parts.clone() } else { Vec::new() };
        drop(parts);
        let lacks_lease = |part: &Arc<Part>| !part.is_leased.swap(true, Ordering::Relaxed);
        for part in all.into_iter().filter(lacks_lease) {
            tokio::spawn(part.lease(group.to_owned(), self.clone()));
        }
        Membership { leases: self.clone(), group: group.to_owned(), part }
    }

    /// Returns the groups with leases.
    fn leased(&self) -> Vec<Arc<Shared>> {
        let registry = self.lock();
        let is_leased = |shared: &&Arc<Shared>| !shared.leases().is_empty();
        registry.groups.values().filter(is_leased).cloned().collect()
    }
}

impl Registry {
    /// Has the divider look at all groups; starts its thread the first time. Returns the eventfd
    /// that wakes it.
    fn wake(&mut self, leases: &Leases) -> Result<Arc<OwnedFd>, std::io::Error> {
        let wakes = match &self.wakes {
            Some(wakes) => wakes.clone(),
            None => {
                let wakes = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
                let wakes = Arc::new(wakes);
                let (leases, groups) = (leases.clone(), Vec::new());
                let dividing = Dividing { leases, wakes: wakes.clone(), groups };
                let thread = std::thread::Builder::new().name("limit-divider".to_owned());
                thread.spawn(move || dividing.run())?;
                self.wakes.insert(wakes).clone()
            }
        };
        self.ring();
        Ok(wakes)
    }

    /// Wakes the divider, if it has started.
    fn ring(&self) {
        self.wakes.iter().for_each(|wakes| _ = rustix::io::write(wakes, &1_u64.to_ne_bytes()));
    }
}

impl Shared {
    /// Drops the processes that have no device of the group any more, and have no lease or have
    /// ended.
    fn forget(&self) {
        let is_in = |part: &Arc<Part>| {
            let is_kept = part.is_leased.load(Ordering::Relaxed) && part.process.serves();
            part.members.load(Ordering::Relaxed) > 0 || is_kept
        };
        lock(&self.parts).retain(is_in);
    }

    /// Returns the processes that have a lease, with the lease's files.
    fn leases(&self) -> Vec<(Arc<Part>, Arc<LeaseFiles>)> {
        let parts = lock(&self.parts);
        parts.iter().filter_map(|part| Some((part.clone(), lock(&part.lease).clone()?))).collect()
    }
}

impl Part {
    fn new(process: &Arc<DeviceProcess>) -> Self {
        Self {
            process: process.clone(),
            members: AtomicU64::new(0),
            lease: Mutex::default(),
            is_leased: AtomicBool::new(false),
            said: Mutex::default(),
        }
    }

    /// Gives the process a lease. Without a lease the process would use the group's full rates
    /// beside the other processes, and with a lease that nobody divides it would get no time: so
    /// this retries until the files and the divider's thread are there, or the process ends.
    async fn lease(self: Arc<Self>, group: String, leases: Leases) {
        let process = self.process.clone();
        let mut is_told = false;
        let (wakes, (files, fds)) = loop {
            let wakes = leases.lock().wake(&leases).ok();
            let files = match wakes {
                Some(_) => aside(LeaseFiles::new).await.and_then(Result::ok),
                None => None,
            };
            match wakes.zip(files) {
                Some(made) => break made,
                None if !process.serves() => return,
                None => {
                    if !std::mem::replace(&mut is_told, true) {
                        let process = process.name();
                        let problem = "dividing the limit failed: no file or thread available; \
                                       retrying";
                        tracing::warn!(process, group, "{problem}");
                    }
                    tokio::time::sleep(TICK).await;
                }
            }
        };
        *lock(&self.lease) = Some(Arc::new(files));
        process.ring.lead_to(&wakes);
        leases.lock().ring();
        let fds = fds.into_iter().map(MessageFd::from).collect();
        process.tell_in_turn(Command::Lease { group }, fds).await;
    }
}

/// The state of the thread that divides the time of groups.
struct Dividing {
    leases: Leases,
    wakes: Arc<OwnedFd>,
    groups: Vec<Divided>,
}

/// A group of which the divider's thread divides the time.
struct Divided {
    shared: Arc<Shared>,
    divider: Divider,
    is_awake: bool,
    ticks_at_ns: u64,
    /// The number of processes with a lease when the group was last woken.
    seen: usize,
}

impl Dividing {
    fn run(mut self) {
        loop {
            if self.wait() {
                let _ = rustix::io::read(&self.wakes, &mut [0; 8]);
                self.look();
            }
            // Tick a group only when its tick is due: a process that rings all the time must not
            // cause more ticks.
            let is_due =
                |group: &&mut Divided| group.is_awake && clock_now_ns() >= group.ticks_at_ns;
            self.groups.iter_mut().filter(is_due).for_each(Divided::tick);
            self.groups.retain(|group| !group.shared.leases().is_empty());
        }
    }

    /// Waits for the next tick, or until the divider is woken; true if it was woken.
    fn wait(&self) -> bool {
        let is_awake = self.groups.iter().any(|group| group.is_awake);
        let tick = Timespec::try_from(TICK).ok().filter(|_| is_awake);
        match poll(&mut [PollFd::new(&*self.wakes, PollFlags::IN)], tick.as_ref()) {
            Ok(count) => count > 0,
            Err(Errno::INTR) => false,
            Err(_) => {
                // Without a pause this loop would use a whole CPU.
                std::thread::sleep(TICK);
                false
            }
        }
    }

    /// Adds new groups, and wakes the groups in which a process has rung, joined or left.
    fn look(&mut self) {
        let all = self.leases.leased();
        all.iter().for_each(|shared| shared.forget());
        let parts = all.iter().flat_map(|shared| shared.leases()).map(|(part, _)| part);
        let rung: Vec<_> = parts.filter(|part| part.process.ring.hear()).collect();
        for shared in all {
            let leases = shared.leases();
            let has_rung = |(part, _): &(Arc<Part>, Arc<LeaseFiles>)| {
                rung.iter().any(|other| Arc::ptr_eq(&other.process, &part.process))
            };
            let (seen, is_rung) = (leases.len(), leases.iter().any(has_rung));
            match self.groups.iter_mut().find(|group| Arc::ptr_eq(&group.shared, &shared)) {
                Some(group) if is_rung || group.seen != seen => {
                    group.seen = seen;
                    group.wake();
                }
                Some(_) => {}
                None => {
                    let divider = Divider::new(clock_now_ns());
                    let (is_awake, ticks_at_ns) = (true, 0);
                    self.groups.push(Divided { shared, divider, is_awake, ticks_at_ns, seen });
                }
            }
        }
    }
}

impl Divided {
    fn wake(&mut self) {
        self.divider.wake();
        self.is_awake = true;
    }

    fn tick(&mut self) {
        let leases = self.shared.leases();
        let claim = |(part, files): &(Arc<Part>, Arc<LeaseFiles>)| {
            let (account, said) = &mut *lock(&part.said);
            *said = files.usages().unwrap_or(*said);
            (*account, Claim { members: part.members.load(Ordering::Relaxed), usages: *said })
        };
        let mut all: Vec<_> = leases.iter().map(claim).collect();
        let burst_ms = self.shared.burst_ms.load(Ordering::Relaxed);
        let now_ns = clock_now_ns();
        self.ticks_at_ns = now_ns + TICK_NS;
        self.is_awake = self.divider.tick(&mut all, burst_ms, now_ns);
        for ((part, files), (account, _)) in leases.iter().zip(&all) {
            lock(&part.said).0 = *account;
            files.grant(self.is_awake, &account.granted_ns());
        }
        // A process may have written its usage before it saw that the divider goes to sleep: look
        // again.
        let is_news = |((_, files), (_, claim)): (&(Arc<Part>, Arc<LeaseFiles>), &(_, Claim))| {
            files.usages() != Some(claim.usages)
        };
        if !self.is_awake && leases.iter().zip(&all).any(is_news) {
            self.is_awake = true;
        }
    }
}
