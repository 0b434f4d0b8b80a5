//! `Front`: accepts the clients of a device, and hands them to the device process that serves it.

mod assign;
mod failures;
mod hand_off;
mod reclaim;
mod source;

pub(super) use reclaim::release;

use super::handoff::{AdoptedSession, LingeringIo, Locked};
use super::journal_store::{Handing, JournalStore};
use super::process::DeviceProcess;
use super::{Asked, Processes};
use failures::Failures;
use manyring_backend::blk::{Ending, Marks};
use manyring_config::plan::{ANY_USER, Wanted};
use manyring_device::blk::Resize;
use manyring_device::net::{NetSide, OwnedPort};
use manyring_engine::{ForeignFd, StandIns, aside};
use manyring_serve::assemble::Part;
use manyring_serve::channel::watched;
use manyring_serve::counts::Counts;
use manyring_serve::times::{FRONT_RETRY, SHRINK};
use manyring_transport::vhost_user::{Endpoint, ListenError};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use source::Source;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use tokio::io::Interest;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Serves a device from a device process until `stop` turns true.
///
/// # Errors
/// [`ListenError`]: the socket cannot be listened on; nothing was created.
pub(crate) async fn serve(
    processes: &Processes,
    part: &Part,
    wanted: &Wanted,
    endpoint: Endpoint,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ListenError> {
    let mut stopping = stop.clone();
    let (view, domain) = (&part.view, part.view.process.as_deref().unwrap_or_default());
    let device = wanted.plan().name.as_str();
    let journals = processes.budgets.store(device, view.side.stats.count());
    let (mut source, name) = Source::of(endpoint, &wanted.plan().name, domain).await?;
    let is_single = source.is_single() || wanted.plan().one_off;
    let counts = Counts::new(view.side.stats.clone(), part.remote.clone());
    let counts = counts.map_err(|errno| io_error(errno.into()))?;
    let counts = Arc::new(counts.of_port(part.owned.as_port().map(|net| net.port().clone())));
    let (asks, adopted_sessions) = processes.register(wanted.plan(), domain);
    let owner = adopted_sessions.first().map(|adopted_session| adopted_session.domain.clone());
    let waiting = inherited(processes, &journals, adopted_sessions);
    let LingeringIo { held, marks, part: _ } = processes.lingering_io(device);
    let counted = |count: usize| StandIns::up_to(u32::try_from(count).unwrap_or(u32::MAX));
    let ending = |Locked { byte, only_reads, unmarked }: Locked| {
        let part = counted(unmarked.len());
        Arc::new(Ending::of(byte, !only_reads, unmarked, part))
    };
    let held = held.into_iter().map(|process| (process, counted(1))).collect();
    let endings = marks.into_iter().map(ending).collect();
    let mut front = Front {
        processes,
        wanted,
        domain,
        part,
        counts,
        request_servers: JoinSet::new(),
        endings,
        marks: Weak::new(),
        process: None,
        held,
        journals,
        owner,
        waiting,
        asks,
        is_single,
        failures: Failures::default(),
    };
    loop {
        let next = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            next = front.next(&mut source) => next,
        };
        if matches!(next, Next::Over) {
            break;
        }
        // The future is on the heap: most devices have no front-end, and their tasks stay small.
        tokio::select! {
            () = Box::pin(front.handle(next)) => {}
            () = stopped(&mut stopping) => break,
        }
    }
    if let Some(name) = name {
        name.removed(device).await;
    }
    front.close().await;
    source.close().await;
    Ok(())
}

/// Returns when a process has ended.
async fn gone(process: &OwnedFd) -> io::Result<()> {
    watched(process.try_clone()?, Interest::READABLE)?.readable().await.map(drop)
}

fn io_error(source: io::Error) -> ListenError {
    ListenError::Io { path: Path::new("a device process").to_path_buf(), source }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Stores front-ends that were handed over. One of another domain than the first is returned.
fn inherited(
    processes: &Processes,
    journals: &JournalStore,
    adopted_sessions: Vec<AdoptedSession>,
) -> Option<Waiting> {
    let owner = adopted_sessions.first()?.domain.clone();
    let (mut waiting, surplus) = (None, processes.budgets.surplus(&owner));
    for adopted_session in adopted_sessions {
        if adopted_session.domain == owner {
            journals.inherit(adopted_session, &surplus);
        } else {
            let AdoptedSession { domain, socket, .. } = adopted_session;
            waiting = Some(Waiting { socket: journals.hold(socket), domain });
        }
    }
    waiting
}

/// Returns when the device has a front-end, and no device process serves it.
async fn orphaned(journals: &JournalStore, process: Option<&Arc<DeviceProcess>>) {
    match process {
        _ if !journals.is_used() => std::future::pending().await,
        Some(process) => process.ended().await,
        None => {}
    }
}

/// Returns when the device and its journal store are free for the waiting client.
async fn ready(journals: &JournalStore, owner: Option<&String>, waiting: Option<&Waiting>) {
    match waiting {
        None => std::future::pending().await,
        Some(waiting) if owner.is_some_and(|owner| *owner != waiting.domain) => {
            journals.unused().await;
        }
        Some(_) => journals.has_place().await,
    }
}

/// A client that has connected, and is not in the journal store yet.
pub(super) struct Waiting {
    pub socket: Arc<ForeignFd>,
    /// The domain of its user.
    domain: String,
}

struct Front<'a> {
    processes: &'a Processes,
    wanted: &'a Wanted,
    domain: &'a str,
    part: &'a Part,
    counts: Arc<Counts>,
    /// The request servers of a network device or disk, which end with the device process.
    request_servers: JoinSet<Option<Ending>>,
    /// For former device processes: handles that tell whether their requests are still in flight.
    endings: Vec<Arc<Ending>>,
    /// The lock marks of the present device process, while its request server runs.
    marks: Weak<Marks>,
    /// The device process that was given the device; `None`: none has it.
    process: Option<Arc<DeviceProcess>>,
    /// Pidfds of an earlier supervisor's device processes that have not ended, counted in the
    /// budget of front-ends.
    held: Vec<(OwnedFd, StandIns)>,
    /// The front-ends with their journals, which outlive their device processes.
    journals: Arc<JournalStore>,
    /// The domain of the front-ends.
    owner: Option<String>,
    /// The client that has connected. Further clients stay in the kernel's backlog.
    waiting: Option<Waiting>,
    /// Requests to hand the device over, or to shrink its disk. Both end the device process first.
    asks: mpsc::Receiver<Asked>,
    /// True if the device ends with its first session (`--one-off`).
    is_single: bool,
    failures: Failures,
}

/// An event for the front of a device.
enum Next {
    /// A client has connected; this is its socket.
    Came(Arc<ForeignFd>),
    /// The waiting client can be handed to a device process now.
    Ready,
    /// The device process of the front-ends has ended: another one must be started.
    Orphaned,
    /// The only session of the device has ended.
    Over,
    /// The front-end to which the supervisor had connected has disconnected: connect to it again.
    Free,
    /// The device goes to another supervisor, or its disk becomes smaller.
    Asked(Asked),
}

impl Front<'_> {
    /// Waits for the next event: requests first, then the end of the device process, then clients.
    /// One client waits in `waiting`, others in the kernel's backlog.
    async fn next(&mut self, source: &mut Source) -> Next {
        let is_paused = self.processes.is_paused();
        if is_paused {
            tokio::select! {
                Some(asked) = self.asks.recv() => return Next::Asked(asked),
                () = self.processes.go_on() => {}
            }
        }
        let asks = &mut self.asks;
        let (journals, process, owner, waiting) =
            (&self.journals, &self.process, &self.owner, &self.waiting);
        let has_served = owner.is_some();
        let (is_over, is_busy) =
            (self.is_single && has_served, source.is_exclusive() && journals.is_used());
        let accepts = waiting.is_none() && !is_over && !is_busy;
        tokio::select! {
            biased;
            Some(asked) = asks.recv() => Next::Asked(asked),
            () = journals.unused(), if is_over => Next::Over,
            () = journals.unused(), if is_busy => Next::Free,
            () = orphaned(journals, process.as_ref()) => Next::Orphaned,
            () = ready(journals, owner.as_ref(), waiting.as_ref()) => Next::Ready,
            came = source.next(&self.wanted.plan().name, journals), if accepts => {
                Next::Came(came)
            }
        }
    }

    async fn handle(&mut self, next: Next) {
        let device = self.wanted.plan().name.as_str();
        match next {
            Next::Came(socket) => match self.domain_of(&socket) {
                Ok(domain) => self.waiting = Some(Waiting { socket, domain }),
                Err(error) => {
                    tracing::warn!(device, %error, "client refused: reading its user failed");
                }
            },
            Next::Ready => {
                if let Some(waiting) = self.waiting.take() {
                    self.hand_over(waiting).await;
                }
            }
            Next::Orphaned => self.go_on().await,
            Next::Over | Next::Free => {}
            Next::Asked(Asked::HandoffRequest(handoff_request)) => {
                self.hand_off(handoff_request).await
            }
            Next::Asked(Asked::Shrink { size, done }) => {
                let _ = done.send(self.shrink(size).await);
            }
        }
    }

    /// Hands a client to the device process, once that process runs and has the device.
    async fn hand_over(&mut self, client: Waiting) {
        let name = self.wanted.plan().name.as_str();
        let domain = client.domain.as_str();
        if self
            .process
            .as_ref()
            .is_some_and(|process| process.name() != domain && process.has(name))
        {
            let processes = self.processes;
            tokio::select! {
                () = self.leave() => {}
                () = processes.paused() => {
                    self.waiting = Some(client);
                    return;
                }
            }
        }
        let Some(process) = self.given(domain).await else {
            if self.processes.is_paused() {
                self.waiting = Some(client);
            } else {
                drop(client);
                sleep(FRONT_RETRY).await;
            }
            return;
        };
        let Waiting { socket, domain } = client;
        let surplus = self.processes.budgets.surplus(&domain);
        (self.process, self.owner) = (Some(process.clone()), Some(domain));
        let number = match self.journals.add(socket, &surplus) {
            Ok(number) => number,
            Err(error) => {
                self.log_refused_client(error);
                return sleep(FRONT_RETRY).await;
            }
        };
        let handing = self.journals.handing(number);
        self.tell(&process, handing).await;
    }

    /// Hands clients to a device process. If another supervisor takes over meanwhile, the device
    /// process ends, and the next one gets the clients, here or at the other supervisor.
    async fn tell(&self, process: &DeviceProcess, handing: Handing) {
        tokio::select! {
            () = process.connect(handing) => {}
            // The process may have got only some clients: the next process gets all of them.
            () = self.processes.paused() => {
                process.leave("a takeover by another daemon is under way");
            }
        }
    }

    /// Hands the front-ends of a device process that has ended to the next device process.
    async fn go_on(&mut self) {
        let Some(owner) = self.owner.clone() else { return };
        if self.process.as_ref().is_some_and(|process| !process.has_yielded()) {
            self.journals.orphan();
        }
        let domain = owner.as_str();
        while self.journals.is_used() {
            let Some(process) = self.given(domain).await else {
                if self.processes.is_paused() {
                    return;
                }
                sleep(FRONT_RETRY).await;
                continue;
            };
            let handings = self.journals.handings();
            let device = self.wanted.plan().name.as_str();
            tracing::info!(device, process = domain, pid = process.pid(), "front-end resumed");
            self.process = Some(process.clone());
            return self.tell(&process, handings).await;
        }
        self.part.view.connected.send_replace(false);
    }

    /// Makes the disk smaller when no request of a device process is in flight: a write in flight
    /// would make the file grow again. The next device process serves the same front-ends, and
    /// notifies their guests of the new size.
    async fn shrink(&mut self, size: u64) -> Result<u64, Errno> {
        let Some(disk) = self.part.owned.as_disk().cloned() else { return Err(Errno::OPNOTSUPP) };
        let ended = timeout(SHRINK, async {
            if let Some(process) = &self.process {
                process.end_yielding("one of its disks is shrunk").await;
            }
            self.release(false).await
        });
        ended.await.map_err(|_| Errno::BUSY)?.map_err(|_| Errno::IO)?;
        aside(move || disk.resize(Some(size))).await.unwrap_or(Err(Errno::IO))
    }

    /// Returns the domain of the user who has connected.
    fn domain_of(&self, socket: &ForeignFd) -> io::Result<String> {
        if self.domain != ANY_USER {
            return Ok(self.domain.to_owned());
        }
        let peer = rustix::net::sockopt::socket_peercred(socket)?;
        Ok(format!("{ANY_USER}{}", peer.uid.as_raw()))
    }

    fn net(&self) -> Option<&Arc<OwnedPort>> {
        self.part.owned.as_port()
    }
}

#[cfg(test)]
mod tests;
