//! `XenFront`: the supervisor's part of a Xen guest's disk that a device process serves.
//!
//! The supervisor negotiates through xenstore, opens and locks the image, binds the event channels
//! and opens the journals (`crate::xen`); the device process gets these, maps the rings and serves
//! them. A device process that dies leaves the rings as a killed daemon does: the disk's task ends
//! then, and the next one takes the rings over by their journals, in the next device process
//! (docs/design/0012).

use super::Processes;
use super::domain_members::AssignedDevice;
use super::front::release;
use super::handoff::{HandoffMessage, Locked};
use super::journal_store::JournalStore;
use super::process::{DeviceProcess, Unresponsive};
use super::request_server::{RequestServer, handed};
use super::xen_line::{Stage, XenLine};
use manyring_backend::blk::Ending;
use manyring_device::Owned;
use manyring_engine::{StandIns, aside};
use manyring_protocol::message::{Command, XenFrontEnd, XenRing};
use manyring_protocol::spec::XenBlkSpec;
use manyring_serve::assemble::Part;
use manyring_serve::counts::Counts;
use manyring_serve::times::PROCESS_ANSWER;
use manyring_serve::view::DeviceView;
use rustix::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A front-end that a device process is to serve, with what was opened for it.
#[derive(Debug)]
pub(crate) struct XenLent {
    pub(crate) front: XenFrontEnd,
    /// The grant device, or the memory of a simulated domain.
    pub(crate) grants: OwnedFd,
    pub(crate) rings: Vec<XenLentRing>,
}

/// A ring of the front-end.
#[derive(Debug)]
pub(crate) struct XenLentRing {
    pub(crate) ring: XenRing,
    /// The event channel of the ring, and the ring's journal.
    pub(crate) fds: Vec<OwnedFd>,
}

/// Why a device process does not serve a front-end.
#[derive(Debug)]
pub(crate) enum XenRefusal {
    /// The queue of commands is full, or the process has ended: the next process may serve it, and
    /// takes its rings over.
    Lost(String),
    /// The front-end cannot be served.
    Refused { text: String, passes: bool },
}

/// For a read-only image: handles that tell whether requests of the disk's device processes, the
/// present one included, are in flight. (For a writable image its lock tells that.) If the disk is
/// handed to another supervisor before the requests have ended, that supervisor waits for them.
#[derive(Debug, Default)]
pub(crate) struct XenEndings(Mutex<Vec<Arc<Ending>>>);

impl XenEndings {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Ending>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the messages that hand these handles to another supervisor.
    pub(crate) fn left(&self, device: &str) -> Vec<HandoffMessage> {
        let left = |ending: &Arc<Ending>| HandoffMessage::Marked {
            device: device.to_owned(),
            byte: ending.mark(),
            only_reads: !ending.may_write(),
        };
        self.lock().iter().map(left).collect()
    }
}

/// The supervisor's part of a Xen guest's disk that a device process serves.
#[derive(Debug)]
pub(crate) struct XenFront {
    processes: Processes,
    domain: String,
    owned: Owned,
    view: DeviceView,
    spec: XenBlkSpec,
    counts: Option<Arc<Counts>>,
    request_servers: JoinSet<Option<Ending>>,
    endings: Arc<XenEndings>,
    taken: Option<Taken>,
    /// The device process that has the disk, for others to watch.
    process: watch::Sender<Option<Arc<DeviceProcess>>>,
    /// The number of the disk's last connection to a front-end.
    number: u64,
}

/// The device process that has the disk, and the disk's state in it.
#[derive(Debug)]
struct Taken {
    process: Arc<DeviceProcess>,
    line: Arc<XenLine>,
}

/// A connection that a device process serves.
#[derive(Debug)]
pub(crate) struct XenServed {
    pub(crate) process: XenProcess,
    /// Faults of the front-end: the first one ends the connection.
    pub(crate) faults: mpsc::Receiver<String>,
}

/// The device process that serves the connection.
#[derive(Debug)]
pub(crate) struct XenProcess(Arc<DeviceProcess>);

impl XenProcess {
    /// Returns when the device process has ended.
    pub(crate) async fn ended(&self) {
        self.0.ended().await;
    }
}

impl XenFront {
    /// Makes the front of an open disk, which the device process of the domain in `part` will
    /// serve.
    pub(crate) fn new(processes: &Processes, part: Part, spec: XenBlkSpec) -> Self {
        let Part { owned, view, .. } = part;
        let domain = view.process.clone().unwrap_or_default();
        processes.prepare_xen();
        // Requests of an earlier supervisor's device processes.
        let marks = processes.lingering_io(view.name()).marks.into_iter();
        let ending = |left: Locked| {
            let part = StandIns::up_to(u32::try_from(left.unmarked.len()).unwrap_or(u32::MAX));
            Arc::new(Ending::of(left.byte, !left.only_reads, left.unmarked, part))
        };
        let endings = Arc::new(XenEndings(Mutex::new(marks.map(ending).collect())));
        let (processes, request_servers) = (processes.clone(), JoinSet::new());
        let (counts, taken, process) = (None, None, watch::Sender::new(None));
        Self {
            processes,
            domain,
            owned,
            view,
            spec,
            counts,
            request_servers,
            endings,
            taken,
            process,
            number: 0,
        }
    }

    /// Returns the handles for requests in flight, which exist as long as this front.
    pub(crate) fn endings(&self) -> Weak<XenEndings> {
        Arc::downgrade(&self.endings)
    }

    /// Returns when no request of a device process is in flight. The caller has taken the disk from
    /// its device process.
    async fn release(&mut self) -> Result<(), String> {
        while self.request_servers.join_next().await.is_some() {}
        let endings = self.endings.lock().clone();
        release(&self.owned, &endings, self.view.name(), &self.domain).await?;
        self.endings.lock().clear();
        Ok(())
    }

    /// Has the device process serve a front-end.
    ///
    /// # Errors
    /// [`XenRefusal`]; nothing of the front-end is in use any more.
    pub(crate) async fn connect(&mut self, lent: XenLent) -> Result<XenServed, XenRefusal> {
        let XenLent { mut front, grants, rings } = lent;
        let device = self.view.name().to_owned();
        self.given(rings.len()).await.map_err(XenRefusal::Lost)?;
        let Some(Taken { process, line }) = &self.taken else {
            return Err(XenRefusal::Lost("internal error".to_owned()));
        };
        self.number += 1;
        front.number = self.number;
        let faults = line.connects(self.number);
        for XenLentRing { ring, fds } in rings {
            let command = Command::XenRing { device: device.clone(), ring };
            process.tell_in_turn(command, fds.into_iter().map(Into::into).collect()).await;
        }
        let command = Command::XenConnect { device, front };
        process.tell_in_turn(command, vec![grants.into()]).await;
        // A device process that does not read its commands shows this only by a missing answer.
        let _ = process.ask();
        let answer = tokio::select! {
            answer = line.answered() => answer,
            () = process.ended() => Stage::Idle,
        };
        match answer {
            Stage::Started => Ok(XenServed { process: XenProcess(process.clone()), faults }),
            Stage::Refused { text, passes } => Err(XenRefusal::Refused { text, passes }),
            _ => Err(XenRefusal::Lost("the device process has ended".to_owned())),
        }
    }

    /// Has the device process stop serving the rings and leave them as they are; returns when it
    /// has, or when the process has ended. A process that does not do so in time is killed.
    pub(crate) async fn disconnect(&self) {
        let Some(Taken { process, line }) = &self.taken else { return };
        let (device, number) = (self.view.name().to_owned(), self.number);
        line.disconnects();
        let handing_off = async {
            process.tell_in_turn(Command::XenDisconnect { device, number }, Vec::new()).await;
            line.answered().await;
        };
        let left = async {
            tokio::select! {
                () = handing_off => {}
                () = process.ended() => {}
            }
        };
        if timeout(PROCESS_ANSWER, left).await.is_err() {
            process.evict("stopping a ring timed out").await;
        }
    }

    /// Returns a handle to the device process that has the disk, whichever that is when the handle
    /// is used.
    pub(crate) fn holder(&self) -> XenHolder {
        XenHolder(self.process.subscribe())
    }

    /// Returns a handle to report a change of the disk's size to the device process that has the
    /// disk then.
    pub(crate) fn measures(&self) -> XenMeasures {
        XenMeasures { process: self.process.subscribe(), device: self.view.name().to_owned() }
    }

    /// Takes the disk from its device process. No request of a device process is in flight when
    /// this returns, so that the image's lock can be released.
    pub(crate) async fn close(mut self) {
        let name = self.view.name().to_owned();
        if let Some(Taken { process, .. }) = self.taken.take() {
            process.remove(&name).await;
            if process.serves() && process.devices().is_empty() {
                process.end_yielding("its last disk was removed").await;
            }
            if process.serves() && timeout(PROCESS_ANSWER, self.release()).await.is_err() {
                // The device process reported that it stopped the disk, but keeps the image.
                process.evict("it does not release an image").await;
            }
            if let Err(error) = self.release().await {
                tracing::warn!(
                    device = name,
                    error,
                    "waiting for the requests in flight failed; image released"
                );
            }
        }
        if let Some(counts) = self.counts.take() {
            aside(move || counts.end()).await;
        }
    }

    /// Gives the disk, for `queues` queues, to the domain's device process, which is started if
    /// needed.
    async fn given(&mut self, queues: usize) -> Result<(), String> {
        let name = self.view.name().to_owned();
        let process = self
            .processes
            .running(&self.domain)
            .await
            .ok_or("a takeover by another daemon is under way")?;
        let is_same = |taken: &Taken| Arc::ptr_eq(&taken.process, &process) && process.has(&name);
        if self.taken.as_ref().is_some_and(is_same) {
            return Ok(());
        }
        self.taken = None;
        self.release().await?;
        self.give(process, queues).await
    }

    async fn give(&mut self, process: Arc<DeviceProcess>, queues: usize) -> Result<(), String> {
        let (name, view) = (self.view.name().to_owned(), &self.view);
        let Owned::XenDisk(host) = &self.owned else { return Err("no disk".to_owned()) };
        (0..queues).for_each(|index| drop(view.side.stats.to_run(index)));
        let counts = match &self.counts {
            Some(counts) => counts.clone(),
            None => {
                let counts =
                    Counts::new(view.side.stats.clone(), None).map_err(|e| e.to_string())?;
                self.counts.insert(Arc::new(counts)).clone()
            }
        };
        let disk = host.disk().clone();
        let fds = aside(move || handed(&*disk, queues)).await;
        let fds = fds.ok_or("internal error")?;
        let (mut fds, marks) = fds?;
        // The device process may have requests in flight as soon as it has the file: a release of
        // the image must wait for their end.
        self.endings.lock().extend(marks.as_ref().map(|marks| Arc::new(marks.end())));
        fds.insert(0, counts.begin().map_err(|errno| errno.to_string())?);
        let fds = fds.into_iter().map(Into::into).collect();
        let line = Arc::new(XenLine::default());
        let (connected, xen) = (view.connected.clone(), Some(line.clone()));
        let ((asks, asked), journals) = (mpsc::channel(1), JournalStore::new(&name, 0));
        let limits = self.processes.limits();
        let limit = limits.borrow().of(&name);
        let given = AssignedDevice { connected, counts, net: None, asks, journals, xen };
        let command = Command::XenDisk { device: name.clone(), spec: self.spec.clone() };
        let given = process.give(command, fds, vec![limit], given).await;
        given.map_err(|Unresponsive| "the device process is ending".to_owned())?;
        let (device, owned, marks) = (name, self.owned.clone(), marks.map(Arc::new));
        let request_server = RequestServer {
            device,
            owned,
            process: process.clone(),
            limits,
            leases: self.processes.leases.clone(),
            joins: None,
            marks,
            // xenstore names only files: there is no NBD server.
            remote: None,
        };
        self.request_servers.spawn(request_server.attend(asked));
        self.process.send_replace(Some(process.clone()));
        self.taken = Some(Taken { process, line });
        Ok(())
    }
}

/// A handle to the device process that has a disk.
#[derive(Clone, Debug)]
pub(crate) struct XenHolder(watch::Receiver<Option<Arc<DeviceProcess>>>);

impl XenHolder {
    /// Kills the process; the log shows this reason.
    pub(crate) fn end(&self, reason: &str) {
        if let Some(process) = &*self.0.borrow() {
            process.end(reason);
        }
    }
}

/// A handle to the device process that has a disk, to report changes of the disk's size.
#[derive(Debug)]
pub(crate) struct XenMeasures {
    process: watch::Receiver<Option<Arc<DeviceProcess>>>,
    device: String,
}

impl XenMeasures {
    /// Has the device process read the disk's size again; returns when it has, or does not answer.
    /// A guest that learned the size earlier could use sectors that the device process refuses.
    pub(crate) async fn measured(&self) {
        let Some(process) = self.process.borrow().clone() else { return };
        let command = process.tell(Command::Measure { device: self.device.clone() }, Vec::new());
        let knows = async {
            // The first question may have been sent before the change: wait for the answer to a
            // second one, too.
            for _ in 0..2 {
                if let Some(question) = process.ask() {
                    process.answered(question).await;
                }
            }
        };
        if command.is_ok() {
            tokio::select! {
                _ = timeout(PROCESS_ANSWER, knows) => {}
                () = process.ended() => {}
            }
        }
    }
}
