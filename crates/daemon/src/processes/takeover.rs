//! A supervisor is taken over by the next one (`manyring run --takeover CONTROL`): both halves.
//!
//! ```text
//! the next one                                   the one that runs
//! reads its configuration, starts
//! processes, listens   -- POST /v1/takeover -->  its device processes quiesce; hands nobody over
//!                                   <-- sockets, disks with their locks, front-ends --
//! opens all that its plan names
//! `Taken`                           ---------------------->  ends; else it goes on
//! its device processes go on with the front-ends
//! ```
//! Until `Taken` the supervisor that runs keeps all that it hands over. If the other one ends, says
//! something else or takes too long, device processes are started again and go on with their
//! front-ends: what both see is a pause. The next one serves nobody before the other process has
//! ended.
//!
//! The running supervisor may also die during a takeover. Before it goes on or stops, it sends a
//! message that says so. A next supervisor that has no such message and sees the running process
//! end takes its place (`before.rs`).

use super::before::{ANEW, Before, END_TIMEOUT, End, STOPPED, TOO_SLOW, has_no_name, is_deserted};
use super::channel::{Came, Channel, NO_FDS};
use super::handoff_message::{DeviceHandoff, HandoffMessage, LingeringIo, Locked};
use super::journal_store::AdoptedSession;
use super::message;
use super::{Asked, Processes, Xen};
use crate::service::{HandedSocket, Service};
use manyring_engine::{Janitor, aside};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long the next supervisor may take to open all that its plan names.
const OPEN_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the next supervisor may take to make room for a last message.
const TELL_TIMEOUT: Duration = Duration::from_millis(100);

/// The answer of the next supervisor to the one that runs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Reply {
    /// It has all, and serves when the other one has ended.
    Taken {},
}

/// The devices of the supervisor that runs, by their names.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) served: Vec<String>,
    /// They are tried again and again.
    pub(crate) waits: Vec<String>,
}

/// The front of a device, or the disks of a Xen, are asked for their share. Afterwards they wait
/// until the device processes go on.
#[derive(Debug)]
pub(crate) struct HandoffRequest {
    pub(super) reply: oneshot::Sender<Result<DeviceHandoff, String>>,
    /// Its sender is dropped when the other supervisor has not taken over.
    pub(super) resumes: oneshot::Receiver<()>,
}

impl HandoffRequest {
    /// Returns when the other supervisor has not taken over, before this was answered.
    pub(crate) async fn is_void(&mut self) {
        let _ = (&mut self.resumes).await;
    }

    /// Answers with what is left; returns when the other supervisor has not taken over.
    pub(crate) async fn answer(self, left: Result<Vec<(HandoffMessage, Vec<OwnedFd>)>, String>) {
        let message_fds = |(left, fds): (HandoffMessage, Vec<OwnedFd>)| {
            (left, fds.into_iter().map(Into::into).collect::<Vec<_>>())
        };
        let share = left.map(|left| left.into_iter().map(message_fds).collect());
        let _ = self.reply.send(share);
        let _ = self.resumes.await;
    }
}

/// The locks and the contents in memory of Xen guests' disks, which the supervisor that ends hands
/// to the next one.
#[derive(Debug, Default)]
pub(crate) struct OfXen {
    pub(crate) locks: Vec<OwnedFd>,
    pub(crate) memory: Vec<XenBytes>,
}

/// The bytes of a Xen guest's disk in memory ([`HandoffMessage::XenMemory`]).
#[derive(Debug)]
pub(crate) struct XenBytes {
    pub(crate) kind: String,
    pub(crate) domain: u16,
    pub(crate) device: u32,
    pub(crate) params: String,
    pub(crate) file: OwnedFd,
}

impl Processes {
    /// Hands everything over to the supervisor that listens at `path`. Returns only if that fails:
    /// then all goes on here.
    ///
    /// # Errors
    /// One line: some devices are served by no device process, or the other supervisor has not
    /// taken over.
    pub(crate) async fn hand_over(
        &self,
        path: &Path,
        service: &Arc<Service>,
        Shown { served, waits }: Shown,
    ) -> Result<std::convert::Infallible, String> {
        let unisolated: Vec<_> =
            served.into_iter().filter(|device| !self.has_front(device)).collect();
        if !unisolated.is_empty() {
            let names = unisolated.join(", ");
            return Err(format!(
                "served by no device process, and so by no other process: {names}"
            ));
        }
        let away = |xen: &Xen| !*xen.is_there.borrow();
        if let Some(Xen { name, .. }) = self.xens().into_iter().find(away) {
            return Err(format!("the xenstore of {name} is gone: when it is there again"));
        }
        // The file system in which the name is looked up may not answer.
        let (at, to) = (path.display(), path.to_owned());
        let socket = aside(move || connect(&to)).await.ok_or("the daemon has failed")?;
        let (socket, pid) = socket.map_err(|error| format!("{at}: {error}"))?;
        let refused = |problem: &str| {
            tracing::warn!(problem, "not taken over");
            problem.to_owned()
        };
        if service.is_managed() && !super::begin::is_next(pid) {
            let problem = "the service manager would end it: SIGUSR2 has this daemon start one";
            return Err(refused(problem));
        }
        let unopened: Vec<_> = self.adopted_sessions().keys().cloned().collect();
        if !unopened.is_empty() {
            let names = unopened.join(", ");
            return Err(refused(&format!("front-ends wait for what opens slowly: {names}")));
        }
        // The kernel ends every process of a container with the first one.
        if std::process::id() == 1 && pid != 0 {
            let problem = "this daemon is the first process of its container, which ends with it";
            return Err(refused(problem));
        }
        let channel = Channel::new(socket, Arc::new(Janitor::of("takeover")));
        let channel = Arc::new(channel.map_err(|error| format!("{at}: {error}"))?);
        if self.is_paused() {
            return Err(refused("another takeover is under way"));
        }
        let Ok(_alone) = timeout(END_TIMEOUT, self.changes.write()).await else {
            return Err(refused("a change is under way"));
        };
        self.pauses.send_replace(true);
        *self.successor() = Some(channel.clone());
        let result = self.hand_off(&channel, service, waits).await;
        let Err(problem) = result else {
            // The device processes have quiesced and are killed, and none is started again: what
            // this process still has to close may take long, and the next one does not wait for it.
            service.succeeded_by(pid);
            channel.finish();
            tracing::info!("the next process has taken over");
            crate::log::finish();
            std::process::exit(0);
        };
        tracing::warn!(problem, "not taken over: the device processes go on");
        // The next supervisor must know that before a device process starts here, whatever becomes
        // of this one.
        self.tell_successor().await;
        self.pauses.send_replace(false);
        Err(problem)
    }

    /// Tells the supervisor that would take over, if there is one, that it is not to serve: this
    /// process goes on, or it stops because it was told to. The next supervisor reads each message
    /// as it comes, so the socket has room for this one. A next supervisor that does not read
    /// misses this message; it then lacks what this supervisor sent before, too, and serves nothing
    /// without that.
    pub(crate) async fn tell_successor(&self) {
        let Some(channel) = self.successor().take() else { return };
        if let Ok(bytes) = message::emit(&HandoffMessage::GoesOn {}) {
            let _ = timeout(TELL_TIMEOUT, channel.send(&bytes, NO_FDS)).await;
        }
    }

    async fn hand_off(
        &self,
        channel: &Channel,
        service: &Arc<Service>,
        waits: Vec<String>,
    ) -> Result<(), String> {
        tracing::info!("another process takes over: the device processes park");
        let (mut shares, mut waiting) = (Vec::new(), Vec::new());
        for front in self.fronts() {
            let (reply, replied) = oneshot::channel();
            let (waits, resumes) = oneshot::channel();
            match front.try_send(Asked::HandoffRequest(HandoffRequest { reply, resumes })) {
                Ok(()) => {
                    shares.push(replied);
                    waiting.push(waits);
                }
                // A front that ends has nothing to leave.
                Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(_)) => {
                    return Err("a device has not heard of the takeover before this one".to_owned());
                }
            }
        }
        for xen in self.xens() {
            let (reply, replied) = oneshot::channel();
            let (waits, resumes) = oneshot::channel();
            match xen.asks.try_send(HandoffRequest { reply, resumes }) {
                Ok(()) => {
                    shares.push(replied);
                    waiting.push(waits);
                }
                // Its disks are served no more.
                Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(_)) => {
                    let name = xen.name;
                    return Err(format!("{name} has not heard of the takeover before this one"));
                }
            }
        }
        let sockets = service.listening().await.map_err(|error| error.to_string())?;
        let socket = |HandedSocket { name, socket, file }: HandedSocket| {
            let fds = file.into_iter().chain([socket]).map(Into::into).collect();
            (HandoffMessage::Socket { name }, fds)
        };
        let mut all: DeviceHandoff = sockets.into_iter().map(socket).collect();
        all.extend(waits.into_iter().map(|device| (HandoffMessage::Waits { device }, Vec::new())));
        all.extend(self.unclaimed_io().map_err(|error| error.to_string())?);
        let gathered = timeout(END_TIMEOUT, async {
            for share in shares {
                if let Ok(share) = share.await {
                    all.extend(share?);
                }
            }
            Ok::<_, String>(())
        });
        gathered.await.map_err(|_| "a device process does not end".to_owned())??;
        all.push((HandoffMessage::End {}, Vec::new()));
        for (left, fds) in all {
            let bytes = message::emit(&left).map_err(|error| error.to_string())?;
            let sent = timeout(OPEN_TIMEOUT, channel.send(&bytes, &fds)).await;
            sent.map_err(|_| "it does not read".to_owned())?.map_err(|error| error.to_string())?;
        }
        let reply = timeout(OPEN_TIMEOUT, channel.receive()).await;
        let reply = reply.map_err(|_| "it is not ready in time".to_owned())?;
        let reply = reply.map_err(|error| error.to_string())?.ok_or("it has ended")?;
        let Reply::Taken {} = message::parse(&reply.0).map_err(|error| error.to_string())?;
        // It may have died since it said so.
        if channel.is_alone() { Err("it has ended".to_owned()) } else { Ok(()) }
    }
}

/// Connects to the next supervisor, of this process's user: the socket, and its process. May block.
fn connect(path: &Path) -> io::Result<(OwnedFd, u32)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok((socket, peer.pid.as_raw_nonzero().get().unsigned_abs()))
}

/// Everything that the supervisor before this one has handed over.
#[derive(Debug, Default)]
pub(crate) struct Handoff {
    /// There is such a supervisor.
    pub(crate) is_there: bool,
    pub(crate) sockets: Vec<HandedSocket>,
    /// The description that holds a disk, or the queues of a tap, by device.
    pub(crate) opened: HashMap<String, Vec<OwnedFd>>,
    pub(super) clients: HashMap<String, Vec<AdoptedSession>>,
    pub(crate) xen: OfXen,
    /// Devices that the other supervisor does not serve either, as things are.
    pub(crate) waits: HashSet<String>,
    /// Processes and requests of its device processes that have not ended, by device.
    pub(super) lingering_io: HashMap<String, LingeringIo>,
    before: Option<Before>,
    /// Set when the supervisor that runs has died: nobody is left who could go on in place of this
    /// one.
    pub(crate) is_last: Arc<AtomicBool>,
}

impl Handoff {
    /// Takes over from the supervisor behind the socket `control`, which waits for
    /// [`Self::accept`]. Before it asks, this starts as many device processes as that supervisor
    /// has, with `arguments`, so that guests do not wait for their start.
    ///
    /// # Errors
    /// One line: the supervisor refuses, or cannot be reached.
    pub(crate) async fn of(control: &Path, arguments: Vec<OsString>) -> Result<Self, String> {
        let processes = processes_of(control).await;
        super::begin::warm_processes(arguments.into(), processes.unwrap_or(1)).await;
        let mut name = control.as_os_str().to_owned();
        name.push(format!(".takeover-{}", std::process::id()));
        let path = PathBuf::from(name);
        let failed = |error: io::Error| format!("--takeover: {}: {error}", path.display());
        let listener = listen(&path).map_err(failed)?;
        let (asked, at) = (control.to_owned(), path.clone());
        let body = serde_json::json!({ "socket": at }).to_string();
        let mut refused = tokio::spawn(async move {
            let post = (hyper::Method::POST, "/v1/takeover");
            let max_wait = END_TIMEOUT + OPEN_TIMEOUT;
            crate::client::change::<serde_json::Value>(&asked, post, body, max_wait).await
        });
        let accepted = tokio::select! {
            accepted = accept(&listener) => accepted.map_err(failed),
            refused = &mut refused => Err(match refused {
                Ok(Err(error)) => error,
                _ => "--takeover: the daemon has answered, and handed nothing over".to_owned(),
            }),
        };
        let _ = std::fs::remove_file(&path);
        let answers = || async { processes_of(control).await.is_some() };
        if accepted.is_err() && processes.is_some() && is_deserted(control, answers).await {
            if has_no_name(control).await {
                return Err(STOPPED.to_owned());
            }
            // It has answered before, and guests have only lost what a crash takes from them.
            tracing::warn!("--takeover: the daemon has died: {ANEW}");
            return Ok(Self { is_last: Arc::new(true.into()), ..Self::default() });
        }
        let (mut handoff, before) = (Self { is_there: true, ..Self::default() }, accepted?);
        let read = handoff.read(&before).await;
        match (read, &before) {
            (Ok(()), _) => {
                handoff.before = Some(before);
                Ok(handoff)
            }
            (Err(None), before) if before.has_died().await => {
                tracing::warn!("--takeover: the daemon has died while it handed over: {ANEW}");
                let sockets = std::mem::take(&mut handoff.sockets);
                // The last descriptor of a front-end's file may take long to close.
                aside(move || drop(handoff)).await;
                Ok(Self { sockets, is_last: Arc::new(true.into()), ..Self::default() })
            }
            (Err(None), _) => {
                Err("--takeover: the daemon does not hand over: its log says why".to_owned())
            }
            (Err(Some(error)), _) => Err(format!("--takeover: {error}")),
        }
    }

    /// Reads all that is handed over.
    ///
    /// # Errors
    /// One line; `None`: the other supervisor has ended its end of the channel before all was read.
    async fn read(&mut self, before: &Before) -> Result<(), Option<String>> {
        let handoff = self;
        let mut kept = Vec::new();
        loop {
            let came = timeout(END_TIMEOUT + OPEN_TIMEOUT, before.channel.receive()).await;
            let came = came.map_err(|_| Some("the daemon hands nothing over".to_owned()))?;
            let came: Option<Came> = came.map_err(|error| Some(error.to_string()))?;
            let Some((bytes, mut fds)) = came else { return Err(None) };
            let mut pop = || fds.take().pop();
            match message::parse(&bytes).map_err(|error| Some(error.to_string()))? {
                HandoffMessage::GoesOn {} => {
                    return Err(Some("the daemon goes on: its log says why".to_owned()));
                }
                HandoffMessage::Socket { name } => {
                    handoff.sockets.extend(pop().map(|socket| HandedSocket {
                        name,
                        socket,
                        file: fds.take().pop(),
                    }))
                }
                HandoffMessage::Disk { device } | HandoffMessage::Queues { device } => {
                    handoff.opened.entry(device).or_default().extend(fds.take());
                }
                HandoffMessage::Locks {} => handoff.xen.locks.extend(fds.take()),
                HandoffMessage::XenMemory { kind, domain, device, params } => {
                    let of = |file| XenBytes { kind, domain, device, params, file };
                    handoff.xen.memory.extend(pop().map(of));
                }
                HandoffMessage::Waits { device } => {
                    handoff.waits.insert(device);
                }
                HandoffMessage::Held { device } => {
                    handoff.lingering_io.entry(device).or_default().held.extend(fds.take());
                }
                HandoffMessage::Marked { device, byte, only_reads } => {
                    let lingering_io = handoff.lingering_io.entry(device).or_default();
                    lingering_io.marks.push(Locked { byte, only_reads, unmarked: fds.take() });
                }
                HandoffMessage::Kept { entry, .. } => kept.push((entry, fds.take())),
                HandoffMessage::Client { device, domain, answering } => {
                    let entries = std::mem::take(&mut kept);
                    let Some(socket) = pop() else { continue };
                    let adopted_session = AdoptedSession { domain, socket, entries, answering };
                    handoff.clients.entry(device).or_default().push(adopted_session);
                }
                HandoffMessage::End {} => return Ok(()),
            }
        }
    }

    /// Everything is open: the other supervisor ends. Returns when it serves nobody any more. That
    /// supervisor alone decides when it has been told: one that is slow is waited for, since it
    /// would end on reading this, whether or not anybody is there to go on.
    ///
    /// # Errors
    /// One line: it goes on by itself, or it cannot be told whether it does.
    pub(crate) async fn accept(before: Option<Before>) -> Result<(), String> {
        let Some(before) = before else { return Ok(()) };
        let bytes = message::emit(&Reply::Taken {}).map_err(|error| error.to_string())?;
        let was_told = before.channel.send(&bytes, NO_FDS).await.is_ok();
        let ended = before.end(was_told);
        tokio::pin!(ended);
        let ended = match timeout(END_TIMEOUT, &mut ended).await {
            Ok(ended) => ended,
            Err(_) => {
                tracing::warn!("--takeover: the daemon does not end: waiting");
                ended.await
            }
        };
        match ended {
            End::Taken => tracing::info!("taken over"),
            End::Died => tracing::warn!("--takeover: the daemon has died: its guests go on here"),
            // Two supervisors would serve the same disks.
            End::GoesOn => return Err(TOO_SLOW.to_owned()),
        }
        Ok(())
    }

    /// Has `opens` open what the other supervisor has left, as long as that one waits. If it waits
    /// no longer, this process ends where it stands: what it would still set of a tap, also in
    /// releasing that, would be set of the other one's. If it has died, nobody else goes on
    /// with it.
    pub(crate) async fn while_it_waits<T>(
        before: &mut Option<Before>,
        is_last: &AtomicBool,
        opens: impl Future<Output = T>,
    ) -> T {
        if let Some(opened) = super::before::unless_it_goes_on(before, is_last, opens).await {
            return opened;
        }
        tracing::error!("{TOO_SLOW}");
        crate::log::finish();
        std::process::exit(1);
    }

    /// The supervisor that waits.
    pub(crate) fn take_before(&mut self) -> Option<Before> {
        self.before.take()
    }
}

/// The number of device processes that a supervisor has; `None` if it does not say.
async fn processes_of(control: &Path) -> Option<usize> {
    let shown = crate::client::look::<serde_json::Value>(control, "/v1/processes").await;
    let is_there = |process: &&serde_json::Value| process["pid"] != 0;
    let count = |shown: serde_json::Value| {
        Some(shown["processes"].as_array()?.iter().filter(is_there).count())
    };
    shown.ok().and_then(count)
}

fn listen(path: &Path) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 1)?;
    super::channel::watched(socket, tokio::io::Interest::READABLE)
}

async fn accept(listener: &tokio::io::unix::AsyncFd<OwnedFd>) -> io::Result<Before> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let accept = |socket: &OwnedFd| Ok(rustix::net::accept_with(socket, flags)?);
    loop {
        let socket = listener.async_io(tokio::io::Interest::READABLE, accept).await?;
        // Who may connect to the name depends on the umask.
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        if peer.uid == rustix::process::geteuid() {
            let channel = Channel::new(socket, Arc::new(Janitor::of("takeover")))?;
            return Ok(Before::new(channel, peer.pid));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::channel::pair;
    use rustix::process::getpid;

    fn with_channels<F: Future<Output = ()>>(test: impl FnOnce(Channel, Channel) -> F) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (a, b) = pair().unwrap();
            let new = |socket| Channel::new(socket, Arc::new(Janitor::of("test"))).unwrap();
            test(new(a), new(b)).await;
        });
    }

    #[test]
    fn a_supervisor_that_waited_no_longer_is_not_taken_over() {
        with_channels(|next, runs| async move {
            let accepted = tokio::spawn(Handoff::accept(Some(Before::new(next, getpid()))));
            // The answer is there, and nobody has read it.
            while runs.receive_buffered().is_none() {
                tokio::task::yield_now().await;
            }
            assert!(!accepted.is_finished());
            runs.finish();
            accepted.await.unwrap().unwrap();
        });
        with_channels(|next, runs| async move {
            let taken = message::emit(&Reply::Taken {}).unwrap();
            next.send(&taken, NO_FDS).await.unwrap();
            drop(runs);
            assert!(next.ended().await.is_err());
        });
    }

    #[test]
    fn a_supervisor_that_is_slow_to_end_is_waited_for_and_one_that_has_died_is_not_believed() {
        with_channels(|next, runs| async move {
            let accepted = tokio::spawn(Handoff::accept(Some(Before::new(next, getpid()))));
            tokio::time::sleep(END_TIMEOUT * 5 / 4).await;
            // It reads now what would end it.
            assert!(runs.receive_buffered().is_some() && !runs.is_alone());
            runs.finish();
            accepted.await.unwrap().unwrap();
        });
        with_channels(|next, runs| async move {
            let taken = message::emit(&Reply::Taken {}).unwrap();
            next.send(&taken, NO_FDS).await.unwrap();
            drop(next);
            assert!(runs.receive_buffered().is_some() && runs.is_alone());
        });
    }

    /// Has the device processes `runs`, in which the device `d` waits, be taken over. Returns what
    /// the next supervisor has read from the channel.
    async fn taken_over(runs: &Processes, (next, channel): (Channel, Channel)) -> Handoff {
        let service = Service::from_environment(&[]);
        let before = Before::new(next, getpid());
        let mut handoff = Handoff::default();
        let reads = async {
            handoff.read(&before).await.unwrap();
            let taken = message::emit(&Reply::Taken {}).unwrap();
            before.channel.send(&taken, NO_FDS).await.unwrap();
        };
        let waits = vec!["d".to_owned()];
        let (handed_off, ()) = tokio::join!(runs.hand_off(&channel, &service, waits), reads);
        handed_off.unwrap();
        handoff
    }

    #[test]
    fn what_remains_of_a_device_process_is_left_again_as_long_as_its_device_waits() {
        let (process, _other) = pair().unwrap();
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let known = inode(&process);
        let (wrote, read) = ((7, false), (9, true));
        let (copy, _of_copy) = pair().unwrap();
        let copied = inode(&copy);
        let mut copies = vec![copy];
        let locked =
            |(byte, only_reads)| Locked { byte, only_reads, unmarked: std::mem::take(&mut copies) };
        let lingering_io =
            LingeringIo { held: vec![process], marks: [wrote, read].map(locked).into() };
        let of_device = [("d".to_owned(), lingering_io)];
        let mut handoff = Handoff { lingering_io: of_device.into(), ..Handoff::default() };
        // Each supervisor is taken over twice: after one that fails it still has all.
        for supervisor in 2..5 {
            let runs = Processes::new(Vec::new(), &mut handoff);
            for _ in 0..2 {
                with_channels(async |next, channel| {
                    handoff = taken_over(&runs, (next, channel)).await;
                });
                assert!(handoff.waits.contains("d"), "supervisor {supervisor}");
                let LingeringIo { held, marks } = &handoff.lingering_io["d"];
                let held: Vec<_> = held.iter().map(inode).collect();
                assert_eq!(held, [known], "supervisor {supervisor}");
                let known: Vec<_> = marks.iter().map(|mark| (mark.byte, mark.only_reads)).collect();
                assert_eq!(known, [wrote, read], "supervisor {supervisor}");
                let copies = marks.iter().map(|mark| mark.unmarked.iter().map(inode).collect());
                let copies: Vec<Vec<_>> = copies.collect();
                assert_eq!(copies, [vec![copied], Vec::new()], "supervisor {supervisor}");
            }
        }
    }
}
