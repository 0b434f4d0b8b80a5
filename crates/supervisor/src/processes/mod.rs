//! Device processes: a process for each trust domain, so that a front-end harms no other domain's
//! devices (docs/design/0021).
//!
//! ```text
//! the supervisor (manyring run)             a device process (manyring device-process):
//!                                           crates/serve
//! front.rs            listens, accepts,     device_process.rs     sessions, workers and guest
//!                     opens, locks images                         memory, as in one process
//! process.rs          commands, reports,    device_process/xen.rs maps a front-end's rings, serves
//!                     the end of a process
//! spawner.rs          starts processes
//! start_backoff.rs    when one may start again
//! request_server.rs   serves requests   <-  supervisor_client.rs  asks for what needs rights
//! journal_store.rs    keeps journals    <-  session_journal.rs    writes the journal of a session
//! lease_holders.rs    divides limits    <-> lease_file.rs         its grant, and what it used
//! measuring.rs        has disks measured    device_process/nbd.rs talks to the server of a disk
//! xen_front.rs        hands disks over  <-> xen_line.rs           checks the answers
//! switches.rs         tells of ports,   ->  device_process/switch.rs
//!                     opens uplinks                               carries frames between ports
//! stderr_relay.rs     passes log lines on   sandbox.rs, identity.rs, system_calls.rs
//!                                                                 what a process gives up
//!
//! the next supervisor (a takeover)
//! handoff/            source.rs hands over to destination.rs in the next one, by protocol.rs
//! process/quiesce.rs  a device process stops, and its front-ends stay connected
//! ```
//! The supervisor reads no byte that a front-end sends to a device process, and maps no guest
//! memory. The control thread never blocks on a device process: commands wait in a bounded queue,
//! and a device process that does not read them is killed. The supervisor checks reports as the
//! messages of a hostile peer. A device process that dies is started again; its front-ends stay
//! connected, and their guests see a pause.

mod answer_deadline;
mod budgets;
mod domain_members;
mod front;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handoff;
mod journal_store;
mod lease_holders;
mod limits;
mod measuring;
mod process;
mod process_state;
mod process_view;
mod request_server;
mod spawner;
mod start_backoff;
mod stderr_relay;
mod switches;
mod takeover_lock;
mod workers;
mod xen_front;
mod xen_line;

pub(crate) use front::serve;
pub use handoff::HandoffMessage;
use handoff::{AdoptedSession, DeviceHandoff, LingeringIo};
pub use handoff::{Before, Handoff, HandoffRequest, OfXen, Shown, XenBytes};
use manyring_serve::times::PROCESS_COUNTERS_WAIT;
pub(crate) use measuring::Measuring;
pub use process_view::ProcessInfo;
pub use spawner::start_next;
pub(crate) use workers::workers_of;
pub(crate) use xen_front::{
    XenEndings, XenFront, XenHolder, XenLent, XenLentRing, XenMeasures, XenRefusal, XenServed,
};

use budgets::Budgets;
use journal_store::JournalStore;
use lease_holders::Leases;
use limits::Limits;
use manyring_config::plan::DevicePlan;
use manyring_engine::aside;
use manyring_serve::assemble::Switches;
use manyring_serve::channel::Channel;
use manyring_serve::counts::Counts;
use manyring_serve::device_process::sandbox;
use process::DeviceProcess;
use process_state::State;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
pub(crate) use takeover_lock::Awaited;
use takeover_lock::TakeoverLock;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The device processes of a supervisor, by their domains. Clones share them.
#[derive(Clone, Debug)]
pub struct Processes {
    kept: Arc<Mutex<BTreeMap<String, Serving>>>,
    /// The command line of each device process.
    arguments: Arc<[OsString]>,
    /// The command line of device processes for Xen guests.
    xen_arguments: Arc<[OsString]>,
    limits: Arc<watch::Sender<Arc<Limits>>>,
    leases: Leases,
    /// The front of each device.
    fronts: Arc<Mutex<HashMap<String, Registered>>>,
    xens: Arc<Mutex<Vec<Xen>>>,
    /// True while no device process may start, because another supervisor takes over.
    pauses: Arc<watch::Sender<bool>>,
    /// The channel to the supervisor that takes over.
    successor: Arc<Mutex<Option<Arc<Channel>>>>,
    changes: Arc<TakeoverLock>,
    budgets: Arc<Budgets>,
    switches: Switches,
    /// Front-ends that an earlier supervisor handed over and no front has taken yet, by device.
    adopted_sessions: Arc<Mutex<HashMap<String, Vec<AdoptedSession>>>>,
    /// The domain of each device whose front-ends were handed over and that has no front yet, and
    /// the workers that it needs: the first process of a domain has enough for all of them.
    adopted_workers: Arc<Mutex<HashMap<String, (String, usize)>>>,
    /// Processes and requests of an earlier supervisor that have not ended, by device.
    lingering_io: Arc<Mutex<HashMap<String, LingeringIo>>>,
}

/// A Xen whose guests' disks this supervisor serves.
#[derive(Clone, Debug)]
struct Xen {
    name: String,
    /// The queue of handoff requests.
    asks: mpsc::Sender<HandoffRequest>,
    /// True while the connection to its xenstore is up. Without it the next supervisor could not
    /// take the disks over.
    is_there: watch::Receiver<bool>,
}

/// A request to the front of a device. The front ends the device process, and then carries the
/// request out.
#[derive(Debug)]
enum Asked {
    /// Hand the device to another supervisor.
    HandoffRequest(HandoffRequest),
    /// Make the disk smaller, to this size.
    Shrink { size: u64, done: oneshot::Sender<Result<u64, Errno>> },
}

/// A device that has a front.
#[derive(Debug)]
struct Registered {
    /// The request queue of the front.
    asks: mpsc::Sender<Asked>,
    /// The domain whose process has the device, or is to have it: the one of the plan, or that of
    /// the user who connected last.
    domain: String,
    /// The least number of workers that its device process must have: one more than the highest
    /// number in `queue_workers`.
    workers: usize,
}

/// The device process of a domain, with the history of its starts.
#[derive(Debug)]
struct Serving {
    process: Arc<DeviceProcess>,
    /// The number of workers that the domain's devices needed when the process was started.
    workers: usize,
    started: Instant,
    starts: u64,
    /// Shortest time between this start and the next one.
    pause: Duration,
}

impl Processes {
    /// `arguments`: the command line of each device process. `handoff`: the state that an earlier
    /// supervisor handed over. `switches`: the switches of the supervisor.
    pub(crate) fn new(arguments: Vec<OsString>, handoff: &mut Handoff, switches: Switches) -> Self {
        handoff.lingering_io.values_mut().for_each(LingeringIo::count);
        let of_xen = arguments.iter().cloned().chain([sandbox::XEN_OPTION.into()]).collect();
        Self {
            kept: Arc::default(),
            arguments: arguments.into(),
            xen_arguments: of_xen,
            limits: Arc::default(),
            leases: Leases::default(),
            fronts: Arc::default(),
            xens: Arc::default(),
            pauses: Arc::new(watch::Sender::new(false)),
            successor: Arc::default(),
            changes: Arc::default(),
            budgets: Arc::default(),
            switches,
            adopted_sessions: Arc::new(Mutex::new(std::mem::take(&mut handoff.clients))),
            adopted_workers: Arc::default(),
            lingering_io: Arc::new(Mutex::new(std::mem::take(&mut handoff.lingering_io))),
        }
    }

    /// Reserves the file descriptors that sessions of a device need, before the device is served:
    /// descriptors of other devices' front-ends could use up all that the process may open.
    pub(crate) fn set_apart(&self, device: &str, queues: usize) {
        self.budgets.set_apart(device, queues);
    }

    /// Registers the front of a device. Returns the queue of requests to the front, and the
    /// front-ends that an earlier supervisor handed over. The registration ends when the receiver
    /// is dropped.
    fn register(
        &self,
        device: &DevicePlan,
        domain: &str,
    ) -> (mpsc::Receiver<Asked>, Vec<AdoptedSession>) {
        let (asks, asked) = mpsc::channel(1);
        spawner::prepare(self.arguments.clone());
        let adopted_sessions = self.adopted_sessions().remove(&device.name).unwrap_or_default();
        let owner = adopted_sessions.first().map(|session| session.domain.as_str());
        let domain = owner.unwrap_or(domain).to_owned();
        let registered = Registered { asks, domain, workers: workers_of(device) };
        let mut fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.retain(|_, front| !front.asks.is_closed());
        fronts.insert(device.name.clone(), registered);
        self.adopted_workers().remove(&device.name);
        (asked, adopted_sessions)
    }

    /// Registers the disks of a Xen for handoffs, until the receiver is dropped. Returns the queue
    /// of handoff requests, and the sender by which the caller reports whether its connection to
    /// xenstore is up.
    pub(crate) fn register_xen(
        &self,
        name: &str,
    ) -> (mpsc::Receiver<HandoffRequest>, watch::Sender<bool>) {
        let ((asks, asked), (there, is_there)) = (mpsc::channel(1), watch::channel(true));
        let xen = Xen { name: name.to_owned(), asks, is_there };
        self.xens.lock().unwrap_or_else(PoisonError::into_inner).push(xen);
        (asked, there)
    }

    fn xens(&self) -> Vec<Xen> {
        let xens = self.xens.lock().unwrap_or_else(PoisonError::into_inner);
        xens.iter().filter(|xen| !xen.asks.is_closed()).cloned().collect()
    }

    /// Starts a warm process for Xen guests.
    fn prepare_xen(&self) {
        spawner::prepare(self.xen_arguments.clone());
    }

    /// Keeps the front-ends from an earlier supervisor whose devices have a front here, and
    /// releases the others. `workers`: those that such a device needs; `None`: it has no front.
    pub(crate) async fn keep_adopted_sessions(&self, workers: impl Fn(&str) -> Option<usize>) {
        let all = std::mem::take(&mut *self.adopted_sessions());
        let (kept, others) = all.into_iter().partition(|(device, _)| workers(device).is_some());
        let kept: HashMap<String, Vec<AdoptedSession>> = kept;
        let needs = |(device, sessions): (&String, &Vec<AdoptedSession>)| {
            let domain = sessions.first()?.domain.clone();
            Some((device.clone(), (domain, workers(device)?)))
        };
        *self.adopted_workers() = kept.iter().filter_map(needs).collect();
        *self.adopted_sessions() = kept;
        let others: HashMap<String, Vec<AdoptedSession>> = others;
        for device in others.keys() {
            tracing::warn!(
                device,
                "front-ends disconnected: no device process serves the device any more"
            );
        }
        // Closing the last descriptor of a front-end's file may take long.
        aside(move || drop(others)).await;
    }

    fn adopted_sessions(&self) -> MutexGuard<'_, HashMap<String, Vec<AdoptedSession>>> {
        self.adopted_sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the handles of an earlier supervisor's processes and requests that may still use the
    /// device.
    fn lingering_io(&self, device: &str) -> LingeringIo {
        let mut lingering_io = self.lingering_io.lock().unwrap_or_else(PoisonError::into_inner);
        lingering_io.remove(device).unwrap_or_default()
    }

    /// Copies of the [`Self::lingering_io`] of devices that wait here, or that this supervisor does
    /// not serve. The copies go to the next supervisor; this one keeps its own, since the takeover
    /// may fail.
    fn unclaimed_io(&self) -> io::Result<DeviceHandoff> {
        let lingering_io = self.lingering_io.lock().unwrap_or_else(PoisonError::into_inner);
        let mut share = DeviceHandoff::new();
        for (device, lingering_io) in lingering_io.iter() {
            share.extend(lingering_io.share(device)?);
        }
        Ok(share)
    }

    fn has_front(&self, device: &str) -> bool {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        fronts.get(device).is_some_and(|of| !of.asks.is_closed())
    }

    /// Makes a disk in a device process smaller. The device process ends first, so that no request
    /// is in flight. The next device process serves the same front-ends, and notifies their guests
    /// of the new size (configuration change).
    ///
    /// # Errors
    /// `EBUSY`: requests in flight did not end in time, or another supervisor takes over; the size
    /// is unchanged. Any other error is that of resizing the disk.
    pub async fn shrink(&self, device: &str, size: u64) -> Result<u64, Errno> {
        let (done, is_done) = oneshot::channel();
        let front = {
            let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
            fronts.get(device).map(|of| of.asks.clone())
        };
        let asked = front.map(|front| front.try_send(Asked::Shrink { size, done }));
        if !matches!(asked, Some(Ok(()))) {
            return Err(Errno::BUSY);
        }
        is_done.await.unwrap_or(Err(Errno::BUSY))
    }

    fn fronts(&self) -> Vec<mpsc::Sender<Asked>> {
        let fronts = self.fronts.lock().unwrap_or_else(PoisonError::into_inner);
        let asks = fronts.values().map(|of| &of.asks);
        asks.filter(|asks| !asks.is_closed()).cloned().collect()
    }

    fn successor(&self) -> MutexGuard<'_, Option<Arc<Channel>>> {
        self.successor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_paused(&self) -> bool {
        *self.pauses.borrow()
    }

    /// Kills the device process of a domain, if there is one, because another supervisor gets its
    /// devices. Returns when it has ended.
    ///
    /// # Errors
    /// The kernel does not end the process, which still has its devices.
    pub(crate) async fn end_one(&self, domain: &str, reason: &str) -> Result<(), String> {
        let process = self.lock().get(domain).map(|kept| kept.process.clone());
        let Some(process) = process else { return Ok(()) };
        process.leave(reason);
        process.ended_or_stuck().await;
        match process.state() {
            State::Stuck => Err(format!("the kernel has not ended the device process {domain}")),
            _ => Ok(()),
        }
    }

    /// Returns the journal stores of all devices of a domain's device process.
    fn journals_of(&self, domain: &str) -> Vec<Arc<JournalStore>> {
        self.lock().get(domain).map(|kept| kept.process.all_journals()).unwrap_or_default()
    }

    /// Kills all device processes. Closing their channels would not end a compromised process.
    pub(crate) async fn end(&self) {
        let processes: Vec<_> = self.lock().values().map(|kept| kept.process.clone()).collect();
        let all: JoinSet<_> = processes
            .into_iter()
            .map(|process| async move { process.end_yielding("the daemon is stopping").await })
            .collect();
        let _ = tokio::time::timeout(PROCESS_COUNTERS_WAIT, all.join_all()).await;
    }

    /// Waits until the future completes, or until another supervisor begins to take over.
    async fn unless_paused(&self, waits: impl Future<Output = ()>) {
        tokio::select! {
            () = waits => {}
            () = self.paused() => {}
        }
    }

    /// Returns when a takeover has begun: no device process may start.
    async fn paused(&self) {
        let _ = self.pauses.subscribe().wait_for(|pauses| *pauses).await;
    }

    /// Returns when no takeover is under way: device processes may start.
    async fn go_on(&self) {
        let _ = self.pauses.subscribe().wait_for(|pauses| !pauses).await;
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Serving>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks every device process for its counters. A process that does not answer in time is shown
    /// as unresponsive, and its devices with their last counters. Later calls do not wait for it
    /// until it has answered.
    pub async fn count(&self) {
        let processes: Vec<_> = self.lock().values().map(|kept| kept.process.clone()).collect();
        Self::count_all(processes, |_| true).await;
    }

    /// As [`Self::count`], for one device: only its device process is asked.
    pub async fn count_of(&self, device: &str) {
        let has = |kept: &&Serving| kept.process.has(device);
        let process = self.lock().values().find(has).map(|kept| kept.process.clone());
        Self::count_all(process.into_iter().collect(), |name| name == device).await;
    }

    /// Asks these processes for the counters of the devices for which `is_meant` is true.
    async fn count_all(processes: Vec<Arc<DeviceProcess>>, is_meant: impl Fn(&str) -> bool) {
        let began = Instant::now();
        let asked: Vec<_> =
            processes.into_iter().filter_map(|process| Some((process.ask()?, process))).collect();
        for (question, process) in asked {
            let longest = if process.answers() { PROCESS_COUNTERS_WAIT } else { Duration::ZERO };
            let answered = process.answered(question);
            let answers = tokio::time::timeout_at(began + longest, answered).await.is_ok();
            process.note_answer(answers);
            let counts: Vec<Arc<Counts>> = process.counts(&is_meant);
            // Another thread reads the files, since reading a file that a process writes may be
            // slow.
            aside(move || counts.iter().for_each(|counts| counts.read())).await;
        }
    }
}
