//! `Handoff`: the next supervisor receives everything that the running one hands over.

use super::predecessor::{
    ANEW, Before, End, STOPPED, TOO_SLOW, has_no_name, is_deserted, unless_it_goes_on,
};
use super::protocol::{AdoptedSession, HandoffMessage, LingeringIo, Locked};
use super::{OfXen, Reply, XenBytes};
use crate::processes::spawner;
use manyring_engine::{Janitor, aside};
use manyring_protocol::message;
use manyring_protocol::nbd::{ExportSpec, NbdTarget};
use manyring_serve::channel::{Came, Channel, NO_FDS, watched};
use manyring_serve::control_client;
use manyring_serve::outgoing::by_name;
use manyring_serve::service::HandedSocket;
use manyring_serve::times::{HANDOFF_END, HANDOFF_OPEN};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::time::timeout;

/// Everything that the running supervisor handed over.
#[derive(Debug, Default)]
pub struct Handoff {
    /// True if there is a running supervisor.
    pub(crate) is_there: bool,
    /// The listening sockets of devices and of the control API.
    pub sockets: Vec<HandedSocket>,
    /// By device: the open file description that holds an image's lock or a disk's memory, or the
    /// queues of a tap.
    pub(crate) opened: HashMap<String, Vec<OwnedFd>>,
    /// Capture files, by device.
    pub(crate) captures: HashMap<String, Vec<OwnedFd>>,
    /// The exports of NBD servers whose size and flags guests have read, by device.
    pub(crate) exports: HashMap<String, (NbdTarget, ExportSpec)>,
    pub(in crate::processes) clients: HashMap<String, Vec<AdoptedSession>>,
    pub(crate) xen: OfXen,
    /// Devices that wait for a resource in the running supervisor.
    pub(crate) waits: HashSet<String>,
    /// By device: device processes of the running supervisor that have not ended, and handles for
    /// their requests in flight.
    pub(in crate::processes) lingering_io: HashMap<String, LingeringIo>,
    before: Option<Before>,
    /// Set when the running supervisor has died: from then on nobody else can serve the devices.
    pub is_last: Arc<AtomicBool>,
}

impl Handoff {
    /// Takes over from the supervisor behind the socket `control`, which waits for
    /// [`Self::accept`]. First starts as many device processes as that supervisor has, with
    /// `arguments`, so that guests do not wait for them.
    ///
    /// # Errors
    /// One line: the supervisor refuses, or cannot be reached.
    pub async fn of(control: &Path, arguments: Vec<OsString>) -> Result<Self, String> {
        let processes = processes_of(control).await;
        spawner::warm_processes(arguments.into(), processes.unwrap_or(1)).await;
        let mut name = control.as_os_str().to_owned();
        name.push(format!(".takeover-{}", std::process::id()));
        let path = PathBuf::from(name);
        let failed = |error: io::Error| format!("--takeover: {}: {error}", path.display());
        let listener = listen(&path).map_err(failed)?;
        let (asked, at) = (control.to_owned(), path.clone());
        let body = serde_json::json!({ "socket": at }).to_string();
        let mut refused = tokio::spawn(async move {
            let post = (hyper::Method::POST, "/v1/takeover");
            let max_wait = HANDOFF_END + HANDOFF_OPEN;
            control_client::change::<serde_json::Value>(&asked, post, body, max_wait).await
        });
        let accepted = tokio::select! {
            accepted = accept(&listener) => accepted.map_err(failed),
            refused = &mut refused => Err(match refused {
                Ok(Err(error)) => error,
                _ => "--takeover: the running daemon answered and handed nothing over".to_owned(),
            }),
        };
        // Only one connection is needed, and `accept` has got it or has failed: remove the path.
        let _ = std::fs::remove_file(&path);
        let answers = || async { processes_of(control).await.is_some() };
        if accepted.is_err() && processes.is_some() && is_deserted(control, answers).await {
            if has_no_name(control).await {
                return Err(STOPPED.to_owned());
            }
            // The supervisor answered before it died: for guests this is like a crash of the
            // daemon.
            tracing::warn!("--takeover: the running daemon died; {ANEW}");
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
                tracing::warn!("--takeover: the running daemon died while it handed over; {ANEW}");
                let sockets = std::mem::take(&mut handoff.sockets);
                // Closing the last descriptor of a front-end's file may take long.
                aside(move || drop(handoff)).await;
                Ok(Self { sockets, is_last: Arc::new(true.into()), ..Self::default() })
            }
            (Err(None), _) => {
                Err("--takeover: refused by the running daemon; see its log".to_owned())
            }
            (Err(Some(error)), _) => Err(format!("--takeover: {error}")),
        }
    }

    /// Reads all messages of the handoff.
    ///
    /// # Errors
    /// One line; `None`: the running supervisor closed the channel before the last message.
    async fn read(&mut self, before: &Before) -> Result<(), Option<String>> {
        let handoff = self;
        let mut kept = Vec::new();
        loop {
            let came = timeout(HANDOFF_END + HANDOFF_OPEN, before.channel.receive()).await;
            let came = came
                .map_err(|_| Some("timed out; the running daemon hands nothing over".to_owned()))?;
            let came: Option<Came> = came.map_err(|error| Some(error.to_string()))?;
            let Some((bytes, mut fds)) = came else { return Err(None) };
            let mut pop = || fds.take().pop();
            match message::parse(&bytes).map_err(|error| Some(error.to_string()))? {
                HandoffMessage::GoesOn {} => {
                    return Err(Some("the running daemon continues; see its log".to_owned()));
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
                HandoffMessage::Capture { device } => {
                    handoff.captures.insert(device, fds.take());
                }
                HandoffMessage::Export { device, target, told } => {
                    handoff.exports.insert(device, (target, told));
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
                HandoffMessage::SavedFds { named, .. } => kept.extend(by_name(named, fds.take())),
                HandoffMessage::Client { device, domain } => {
                    // The descriptors of a client precede the client.
                    let named = std::mem::take(&mut kept);
                    let mut fds = fds.take().into_iter();
                    let (Some(socket), journal) = (fds.next(), fds.next()) else { continue };
                    let adopted_session = AdoptedSession { domain, socket, journal, named };
                    handoff.clients.entry(device).or_default().push(adopted_session);
                }
                HandoffMessage::End {} => return Ok(()),
            }
        }
    }

    /// Tells the running supervisor that everything is open here (`Taken`), and returns when that
    /// supervisor serves nobody any more. Waits for it without a timeout: once it reads `Taken` it
    /// ends, even if this process has gone meanwhile.
    ///
    /// # Errors
    /// One line: the running supervisor continues, or may do so.
    pub async fn accept(before: Option<Before>) -> Result<(), String> {
        let Some(before) = before else { return Ok(()) };
        let bytes = message::emit(&Reply::Taken {}).map_err(|error| error.to_string())?;
        let was_told = before.channel.send(&bytes, NO_FDS).await.is_ok();
        let ended = before.end(was_told);
        tokio::pin!(ended);
        let ended = match timeout(HANDOFF_END, &mut ended).await {
            Ok(ended) => ended,
            Err(_) => {
                tracing::warn!("--takeover: waiting for the running daemon to end");
                ended.await
            }
        };
        match ended {
            End::Taken => tracing::info!("taken over"),
            End::Died => {
                tracing::warn!("--takeover: the running daemon died; serving its guests here")
            }
            // Do not serve: two supervisors would serve the same disks.
            End::GoesOn => return Err(TOO_SLOW.to_owned()),
        }
        Ok(())
    }

    /// Runs `opens`, which opens the devices that were handed over, while the running supervisor
    /// waits. If that supervisor stops waiting and serves again, this process exits at once: it has
    /// queues of the same taps, and even by closing them in order it would change settings of a tap
    /// that a guest uses. If the running supervisor has died, `opens` runs to its end.
    pub async fn while_it_waits<T>(
        before: &mut Option<Before>,
        is_last: &AtomicBool,
        opens: impl Future<Output = T>,
    ) -> T {
        if let Some(opened) = unless_it_goes_on(before, is_last, opens).await {
            return opened;
        }
        tracing::error!("{TOO_SLOW}");
        manyring_serve::log::finish();
        std::process::exit(1);
    }

    /// Returns the running supervisor, once; `None` if there is none.
    pub fn take_before(&mut self) -> Option<Before> {
        self.before.take()
    }
}

/// Asks a supervisor for the number of its device processes; `None`: it has not answered, or its
/// answer has no list of processes.
async fn processes_of(control: &Path) -> Option<usize> {
    let shown = control_client::look::<serde_json::Value>(control, "/v1/processes").await;
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
    watched(socket, tokio::io::Interest::READABLE)
}

async fn accept(listener: &tokio::io::unix::AsyncFd<OwnedFd>) -> io::Result<Before> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let accept = |socket: &OwnedFd| Ok(rustix::net::accept_with(socket, flags)?);
    loop {
        let socket = listener.async_io(tokio::io::Interest::READABLE, accept).await?;
        // The umask decides who may connect to the socket: accept only this process's user.
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
    use crate::processes::Processes;
    use manyring_serve::assemble::Switches;
    use manyring_serve::channel::pair;
    use manyring_serve::service::Service;
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
            // The answer has arrived, and is unread.
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
            tokio::time::sleep(HANDOFF_END * 5 / 4).await;
            // It reads the message that would end it.
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

    /// Has a takeover begin of `runs`, whose device `d` waits. Returns the messages that the next
    /// supervisor read.
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
        let lingering_io = LingeringIo {
            held: vec![process],
            marks: [wrote, read].map(locked).into(),
            part: None,
        };
        let of_device = [("d".to_owned(), lingering_io)];
        let mut handoff = Handoff { lingering_io: of_device.into(), ..Handoff::default() };
        // Each supervisor is taken over twice: after a failed takeover it still has everything.
        for supervisor in 2..5 {
            let runs = Processes::new(Vec::new(), &mut handoff, Switches::default());
            for _ in 0..2 {
                with_channels(async |next, channel| {
                    handoff = taken_over(&runs, (next, channel)).await;
                });
                assert!(handoff.waits.contains("d"), "supervisor {supervisor}");
                let LingeringIo { held, marks, .. } = &handoff.lingering_io["d"];
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
