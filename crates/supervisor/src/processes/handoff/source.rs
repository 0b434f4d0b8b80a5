//! The running supervisor hands everything over to the next one.

use super::Reply;
use super::protocol::{DeviceHandoff, HandoffMessage};
use crate::processes::{Asked, Awaited, Processes, Xen, spawner};
use manyring_engine::{Janitor, aside};
use manyring_protocol::message;
use manyring_serve::channel::{Channel, NO_FDS};
use manyring_serve::service::{HandedSocket, Service};
use manyring_serve::times::{HANDOFF_END, HANDOFF_LAST, HANDOFF_OPEN};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// The devices of the running supervisor, by name.
#[derive(Debug)]
pub struct Shown {
    /// The devices that the running supervisor serves.
    pub served: Vec<String>,
    /// The served devices whose image a helper process of this supervisor reads.
    pub helped: Vec<String>,
    /// The served devices whose interface has an XDP program of this supervisor.
    pub bound: Vec<String>,
    /// The devices that wait for a resource, and are tried again.
    pub waits: Vec<String>,
}

/// A request to hand over a device, or the disks of a Xen. After the answer, the device is not
/// served unless the takeover fails.
#[derive(Debug)]
pub struct HandoffRequest {
    pub(in crate::processes) reply: oneshot::Sender<Result<DeviceHandoff, String>>,
    /// Closed when the takeover has failed.
    pub(in crate::processes) resumes: oneshot::Receiver<()>,
}

impl HandoffRequest {
    /// Returns when the takeover fails while the request is not answered yet.
    pub(crate) async fn is_void(&mut self) {
        let _ = (&mut self.resumes).await;
    }

    /// Answers with the messages that hand the device over; returns when the takeover has failed.
    pub(crate) async fn answer(self, left: Result<Vec<(HandoffMessage, Vec<OwnedFd>)>, String>) {
        let message_fds = |(left, fds): (HandoffMessage, Vec<OwnedFd>)| {
            (left, fds.into_iter().map(Into::into).collect::<Vec<_>>())
        };
        let share = left.map(|left| left.into_iter().map(message_fds).collect());
        let _ = self.reply.send(share);
        let _ = self.resumes.await;
    }
}

impl Processes {
    /// Hands everything over to the supervisor that listens at `path`. Returns only if that fails:
    /// this supervisor then continues to serve. `shown` returns the devices; it is called again
    /// after the changes that were under way.
    ///
    /// # Errors
    /// One line: a device cannot be handed over, or the takeover failed.
    pub async fn hand_over(
        &self,
        path: &Path,
        service: &Arc<Service>,
        shown: impl Fn() -> Shown,
    ) -> Result<std::convert::Infallible, String> {
        let retiring = self.changes.awaited();
        self.can_hand_over(&shown(), &retiring)?;
        let away = |xen: &Xen| !*xen.is_there.borrow();
        if let Some(Xen { name, .. }) = self.xens().into_iter().find(away) {
            return Err(format!("the xenstore of {name} is unavailable; try again later"));
        }
        // The file system of the path may not answer.
        let (at, to) = (path.display(), path.to_owned());
        let socket = aside(move || connect(&to)).await.ok_or("internal error")?;
        let (socket, pid) = socket.map_err(|error| format!("{at}: {error}"))?;
        let refused = |problem: &str| {
            tracing::warn!(problem, "takeover refused");
            problem.to_owned()
        };
        if service.is_managed() && aside(move || spawner::is_next(pid)).await != Some(true) {
            let problem = "the service manager would kill a process that it has not started; send \
                           SIGUSR2 to this daemon instead";
            return Err(refused(problem));
        }
        let unopened: Vec<_> = self.adopted_sessions().keys().cloned().collect();
        if !unopened.is_empty() {
            let names = unopened.join(", ");
            return Err(refused(&format!("devices with front-ends are still opening: {names}")));
        }
        // The kernel ends every process of a container with the first one.
        if std::process::id() == 1 && pid != 0 {
            let problem =
                "this daemon is the first process of its container: the container would end";
            return Err(refused(problem));
        }
        let channel = Channel::new(socket, Arc::new(Janitor::of("takeover")));
        let channel = Arc::new(channel.map_err(|error| format!("{at}: {error}"))?);
        if self.is_paused() {
            return Err(refused("another takeover is under way"));
        }
        // Waits for changes that have begun. Until `_alone` is dropped, no other change begins.
        let _alone = self.changes.takeover().await.map_err(|problem| refused(&problem))?;
        // Those changes may have added devices that cannot be handed over: check again.
        let shown = shown();
        self.can_hand_over(&shown, &Awaited::default())?;
        // From here on no device process starts, and each front waits for its handoff request.
        self.pauses.send_replace(true);
        *self.successor() = Some(channel.clone());
        let result = self.hand_off(&channel, service, shown.waits).await;
        let Err(problem) = result else {
            // The device processes have quiesced and are killed, and none is started again. The
            // next supervisor does not wait until this process has closed its descriptors.
            service.succeeded_by(pid);
            channel.finish();
            tracing::info!("taken over by the next process");
            manyring_serve::log::finish();
            std::process::exit(0);
        };
        tracing::warn!(problem, "takeover failed; the device processes resume");
        // The next supervisor must get `GoesOn` before a device process starts here, even if this
        // supervisor dies then.
        self.tell_successor().await;
        self.keep_uplinks().await;
        self.pauses.send_replace(false);
        Err(problem)
    }

    /// Refuses a takeover if a device has no device process, has a helper, or is an interface by
    /// AF_XDP. An interface can have one XDP program at a time. A helper of this supervisor keeps
    /// the image locked and its socket's path in use as long as this supervisor runs, so the next
    /// supervisor could not start its own helper, and would end. Devices and switches that a change
    /// under way removes (`retiring`) are not looked at.
    fn can_hand_over(&self, shown: &Shown, retiring: &Awaited) -> Result<(), String> {
        let is_here = |device: &&String| !retiring.devices.contains(device);
        let served = shown.served.iter().filter(is_here);
        let others: Vec<_> = served.filter(|device| !self.has_front(device)).cloned().collect();
        let names = |of: &[String]| of.iter().filter(is_here).cloned().collect::<Vec<_>>();
        let uplinks = self.bound_uplinks().into_iter();
        let uplinks = uplinks.filter(|switch| !retiring.switches.contains(switch));
        let bound = names(&shown.bound).into_iter().chain(uplinks).collect();
        for (names, problem) in [
            (others, "not served by a device process"),
            (names(&shown.helped), "images of helpers are not handed over"),
            (bound, "interfaces by AF_XDP are not handed over"),
        ] {
            if !names.is_empty() {
                return Err(format!("{problem}: {}", names.join(", ")));
            }
        }
        Ok(())
    }

    /// Sends `GoesOn` to the supervisor that takes over, if there is one, because this process
    /// continues to serve or was stopped. The next supervisor reads each message as it arrives, so
    /// the socket has room. If it does not read, it misses this message, but also earlier ones,
    /// without which it serves nothing.
    pub(crate) async fn tell_successor(&self) {
        let Some(channel) = self.successor().take() else { return };
        if let Ok(bytes) = message::emit(&HandoffMessage::GoesOn {}) {
            let _ = timeout(HANDOFF_LAST, channel.send(&bytes, NO_FDS)).await;
        }
    }

    /// Sends everything to the next supervisor; returns when that supervisor has answered `Taken`.
    /// `waits`: the devices that wait for a resource.
    pub(super) async fn hand_off(
        &self,
        channel: &Channel,
        service: &Arc<Service>,
        waits: Vec<String>,
    ) -> Result<(), String> {
        tracing::info!("takeover by another process; device processes quiesce");
        let (mut shares, mut waiting) = (Vec::new(), Vec::new());
        for front in self.fronts() {
            let (reply, replied) = oneshot::channel();
            let (waits, resumes) = oneshot::channel();
            match front.try_send(Asked::HandoffRequest(HandoffRequest { reply, resumes })) {
                Ok(()) => {
                    shares.push(replied);
                    waiting.push(waits);
                }
                // A front that ends has nothing to hand over.
                Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(_)) => {
                    return Err("the last takeover is being rolled back; try again".to_owned());
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
                // The disks of this Xen are not served any more.
                Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(_)) => {
                    return Err(format!("the last takeover of {} is being rolled back", xen.name));
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
        let gathered = timeout(HANDOFF_END, async {
            for share in shares {
                if let Ok(share) = share.await {
                    all.extend(share?);
                }
            }
            all.extend(self.share_uplinks().await?);
            Ok::<_, String>(())
        });
        gathered.await.map_err(|_| "a device process did not end in time".to_owned())??;
        all.push((HandoffMessage::End {}, Vec::new()));
        for (left, fds) in all {
            let bytes = message::emit(&left).map_err(|error| error.to_string())?;
            let sent = timeout(HANDOFF_OPEN, channel.send(&bytes, &fds)).await;
            sent.map_err(|_| "the next process does not read the handoff".to_owned())?
                .map_err(|error| error.to_string())?;
        }
        let reply = timeout(HANDOFF_OPEN, channel.receive()).await;
        let reply = reply.map_err(|_| "the next process timed out".to_owned())?;
        let reply = reply.map_err(|error| error.to_string())?.ok_or("the next process ended")?;
        let Reply::Taken {} = message::parse(&reply.0).map_err(|error| error.to_string())?;
        // The next supervisor may have died after it sent `Taken`.
        if channel.is_alone() { Err("the next process ended".to_owned()) } else { Ok(()) }
    }
}

/// Connects to the next supervisor, which runs as this process's user. Returns the socket and the
/// process. May block.
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
