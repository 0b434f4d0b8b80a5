//! `RequestServer`: serves the privileged requests of one device in a device process, and sends the
//! process commands when host or operator have changed the device.
//!
//! Requests are served one after the other. Those of a network device are paced (`net/pace.rs`), as
//! the same changes are for a device that the daemon serves itself. One request is served, and one
//! may wait; a device process that sends a third one is killed. While a connection to the server of
//! a disk is made (`Connect`), other requests are served, and another `Connect` is answered with
//! `EBUSY`.

mod connections;

use super::domain_members::PendingRequest;
use super::lease_holders::Leases;
use super::limits::Limits;
use super::process::DeviceProcess;
use manyring_protocol::message::{Command, PortFacts, PortFilter, PrivilegedRequest};
use manyring_protocol::nbd::NbdFailure;
use manyring_serve::assemble::nbd_host::Remote;
use manyring_serve::credentials;
use manyring_serve::outgoing::OutgoingMessage;
use manyring_serve::times::{FRONT_RETRY, NBD_SHUT, RECLAIM, UPLINK_RETRY};

use connections::Connections;
use manyring_backend::blk::{Disk, Ending, ImageDescriptors, ImageError, Marks};
use manyring_backend::net::HostFilter;
use manyring_backend::net::tap::lent::{Lent, LentTable};
use manyring_device::Owned;
use manyring_device::net::RssConfig;
use manyring_device::net::{NetSide, Offloads, Outside, OwnedPort};
use manyring_engine::{StandIns, aside};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

/// The most queues of a tap in one message to the next supervisor.
const QUEUES_MAX: usize = 64;

/// Opens the file descriptors by which a device process serves `queues` queues of a disk. Returns
/// also the lock marks that the supervisor keeps. Their copies of descriptors are counted in the
/// budget of front-ends, since their number grows with that of front-ends. May block.
///
/// # Errors
/// One line: opening or marking a descriptor failed, or the budget is used up.
pub(super) fn handed(
    disk: &dyn Disk,
    queues: usize,
) -> Result<(Vec<OwnedFd>, Option<Marks>), String> {
    let failed = |errno: Errno| errno.to_string();
    let Some(image) = disk.image() else {
        return Ok((disk.hand_memory().map_err(failed)?.into_iter().collect(), None));
    };
    let copies = u32::try_from(image.copies(queues)).unwrap_or(u32::MAX);
    let few = |_| {
        "too few open files are allowed (ulimit -n): lock_with_rings takes 2 of them and \
                   one for each queue"
    };
    let part = StandIns::take(copies).map_err(few)?;
    let handed = image.hand(queues).map_err(failed)?;
    let marks = image.marks(&handed, part).map_err(|errno| match errno {
        Errno::AGAIN | Errno::ACCESS => "the image is locked by another process".to_owned(),
        errno => failed(errno),
    })?;
    let ImageDescriptors { file, flushes } = handed;
    Ok(([file].into_iter().chain(flushes).collect(), marks))
}

/// Returns the file descriptors of a device for the next supervisor: the open file description that
/// holds an image's lock or a disk's memory, or the queues of a tap. Each inner list goes into one
/// message.
///
/// # Errors
/// One line: no descriptor is free.
pub(super) async fn left_of(owned: &Owned) -> Result<Vec<Vec<OwnedFd>>, String> {
    let failed = |errno: Errno| errno.to_string();
    match owned {
        Owned::Disk(host) | Owned::XenDisk(host) => {
            let disk = host.disk().clone();
            let left = aside(move || match disk.image() {
                Some(image) => image.hand_off().map(Some),
                None => disk.hand_memory(),
            });
            let left = left.await.ok_or("internal error")?.map_err(failed)?;
            Ok(left.map(|fd| vec![fd]).into_iter().collect())
        }
        // A macvtap is not handed over: every process can open queues of it.
        Owned::Port(net) if net.port().kind() != "tap" => Ok(Vec::new()),
        Owned::Port(net) => {
            let port = net.port().clone();
            if aside(move || port.is_gone()).await != Some(false) {
                return Ok(Vec::new());
            }
            // In its turn: an earlier lending, which nobody waits for, or a joining may be under
            // way.
            let (_, lent) = net.lend().await;
            let mut queues = lent.map_err(failed)?.map_or(Vec::new(), |lent| lent.queues);
            let mut left = Vec::new();
            while !queues.is_empty() {
                let rest = queues.split_off(queues.len().min(QUEUES_MAX));
                left.push(std::mem::replace(&mut queues, rest));
            }
            Ok(left)
        }
    }
}

/// Opens the queues of the device's interface for a command; returns neither facts nor descriptors
/// if the port has no interface. The number says how often the port had joined its interface by
/// then.
pub(super) async fn lent(net: &OwnedPort) -> Result<(u64, Lending), String> {
    let (joins, lent) = net.lend().await;
    let Some(lent) = lent.map_err(|errno| errno.to_string())? else {
        return Ok((joins, (None, Vec::new())));
    };
    let Lent { facts, mut queues, table } = lent;
    let table_key = table.as_ref().map(|table| table.key);
    queues.extend(table.map(|LentTable { map, .. }| map));
    let facts = PortFacts {
        interface: facts.interface,
        is_macvtap: facts.is_macvtap,
        offloads: facts.offloads.guest_features(),
        mtu: facts.mtu,
        table_key,
        can_hash: facts.can_hash,
        filter: said(facts.host_filter),
        chunk: facts.chunk,
    };
    Ok((joins, (Some(facts), queues)))
}

/// Describes the interface of a port for a command; its queues are sent later.
pub(super) fn not_lent(net: &OwnedPort) -> PortFacts {
    let port = net.port();
    PortFacts {
        interface: port.interface().unwrap_or_default().to_owned(),
        is_macvtap: port.kind() == "macvtap",
        offloads: port.given().guest_features(),
        mtu: port.mtu(),
        table_key: None,
        can_hash: port.can_hash(),
        filter: said(port.host_filter()),
        chunk: None,
    }
}

/// Returns when all sockets of the interface that were handed to processes of the domain `former`
/// are closed. A process that still has one could send frames on the interface.
pub(super) async fn let_go(net: &OwnedPort, former: Option<&str>) -> Result<(), String> {
    let began = Instant::now();
    let mut is_told = false;
    loop {
        if net.is_let_go().await.map_err(|errno| errno.to_string())? {
            return Ok(());
        }
        if began.elapsed() > RECLAIM && !std::mem::replace(&mut is_told, true) {
            let (device, process) = (net.name(), former.unwrap_or_default());
            let problem = match net.outside().is_gone {
                true => "interface is gone; waiting until it is back",
                false => {
                    "AF_XDP sockets of a former device process are still open, and may send on \
                     the interface; waiting until whoever has them ends"
                }
            };
            tracing::error!(device, process, "{problem}");
        }
        // A socket that another process keeps is unbound only when the interface is deleted: check
        // whether it is.
        if is_told {
            net.port_may_have_changed();
        }
        sleep((began.elapsed() / 8).clamp(Duration::from_millis(1), FRONT_RETRY)).await;
    }
}

/// Converts the host's filter of an interface for a command.
fn said(HostFilter { only_to, only_from: _, lacks_groups }: HostFilter) -> PortFilter {
    PortFilter { only_to, lacks_groups }
}

/// Serves the privileged requests of a device as long as a device process has it.
pub(super) struct RequestServer {
    pub(super) device: String,
    pub(super) owned: Owned,
    pub(super) process: Arc<DeviceProcess>,
    pub(super) limits: watch::Receiver<Arc<Limits>>,
    pub(super) leases: Leases,
    /// The port's count of joined interfaces when its queues were sent to the process: a higher
    /// count means that the port has other queues now. `None`: no queues were sent yet.
    pub(super) joins: Option<u64>,
    /// The lock marks of the device process; only for an image with `lock_with_rings`, and for a
    /// read-only image.
    pub(super) marks: Option<Arc<Marks>>,
    /// The NBD server of a disk, to which the supervisor connects.
    pub(super) remote: Option<Arc<Remote>>,
}

/// A connection to a server that is being made. Completes with the command that answers the
/// request.
type Connecting = Pin<Box<dyn Future<Output = OutgoingMessage> + Send>>;

/// Queues that are being opened. Completes with the port's count of joined interfaces at that time,
/// and with the descriptors.
type Renewing = Pin<Box<dyn Future<Output = (u64, Lending)> + Send>>;

/// The interface of a port, if it has one, and the descriptors of its queues.
type Lending = (Option<PortFacts>, Vec<OwnedFd>);

impl RequestServer {
    /// Serves the requests of a device process about its device until the device is taken from the
    /// process. Before it returns, it detaches the queues of the device from the host, and releases
    /// a lock that goes with the rings. Returns a handle that tells whether requests of the process
    /// are in flight, if the locks of the image cannot show that.
    pub(super) async fn attend(
        mut self,
        mut asks: mpsc::Receiver<PendingRequest>,
    ) -> Option<Ending> {
        let mut changes = match &self.owned {
            Owned::Port(net) => {
                let mut changes = net.changes();
                changes.mark_changed();
                changes
            }
            Owned::Disk(disk) | Owned::XenDisk(disk) => disk.changes(),
        };
        // A device process starts without a limit: send the limit even if it has not changed.
        let (mut limit, mut group) = (Limits::default().of(&self.device), self.leases.of_device());
        self.limits.mark_changed();
        let (mut connecting, mut renewing) = (None::<Connecting>, None::<Renewing>);
        let server = self.server();
        loop {
            tokio::select! {
                ask = asks.recv() => {
                    let Some(PendingRequest { number, request }) = ask else { break };
                    if let (PrivilegedRequest::Connect { limit_ms }, Some(server), None) =
                        (&request, &server, &connecting)
                    {
                        let limit = Duration::from_millis((*limit_ms).into());
                        connecting = Some(Box::pin(connect(server.clone(), number, limit)));
                        continue;
                    }
                    let error = self.done(request).await.map_or_else(Errno::raw_os_error, |()| 0);
                    self.process.tell_in_turn(Command::Done { number, error }, Vec::new()).await;
                }
                (command, fds) = connected(&mut connecting) => {
                    connecting = None;
                    self.process.tell_in_turn(command, fds).await;
                }
                renewed = renewed(&mut renewing) => renewing = self.tell_queues(renewed).await,
                Ok(()) = changes.changed() => self.tell_changes(&mut renewing).await,
                Ok(()) = self.limits.changed() => {
                    let now = self.limits.borrow_and_update().of(&self.device);
                    if limit != now {
                        group.follow(&now, &self.process);
                        limit = now.clone();
                        self.process.tell_in_turn(now, Vec::new()).await;
                    }
                }
            }
        }
        aside(move || drop((connecting, renewing, group))).await;
        if let Some((_, connections)) = server {
            self.shut(connections).await;
        }
        self.release().await
    }

    /// Takes the port back, or releases the disk's image. Returns the ending of the requests in
    /// flight, if the disk has marks for them.
    async fn release(self) -> Option<Ending> {
        let host = match self.owned {
            Owned::Port(net) => {
                net.take_back().await;
                // This may be the last use of the uplink of a switch that was changed meanwhile:
                // the close of its queues may block.
                aside(move || drop(net)).await;
                return None;
            }
            Owned::Disk(host) | Owned::XenDisk(host) => host,
        };
        let (disk, marks) = (host.disk().clone(), self.marks);
        let ended = aside(move || {
            let ending = marks.as_deref().map(Marks::end);
            // A device process that died has not released the lock that it held while its rings
            // ran. Its requests in flight have marks, which keep other processes from the image.
            disk.release();
            // Drop the marks last: while they exist, `front/hand_off.rs` treats the lock as held.
            drop(marks);
            ending
        });
        ended.await.flatten()
    }

    /// Returns the NBD server of the disk, and an empty list of connections to it.
    fn server(&self) -> Option<(Arc<Remote>, Arc<Connections>)> {
        let remote = self.remote.clone()?;
        let connections = Connections::new(&self.device, remote.connections_max());
        Some((remote, Arc::new(connections)))
    }

    /// Shuts the connections of a device process that no longer has the device.
    async fn shut(&self, connections: Arc<Connections>) {
        let ends = connections.clone();
        // A process that holds the socket's lock can delay the shutdown, but it cannot use the
        // socket meanwhile: so warn, and go on.
        if timeout(NBD_SHUT, aside(move || ends.end())).await.is_err() {
            tracing::warn!(
                device = self.device,
                "shutting down connections to the disk's server is slow"
            );
        }
        // A close of a socket may linger; waiting for the janitor interrupts it. Do so in a task,
        // which nothing awaits.
        tokio::spawn(async move { connections.closed().await });
    }

    /// Sends the present state of the interface or the size of the disk to the process. If the port
    /// has joined another interface, begins to open its queues.
    async fn tell_changes(&mut self, renewing: &mut Option<Renewing>) {
        let device = self.device.clone();
        let Some(net) = self.owned.as_port().cloned() else {
            return self.process.tell_in_turn(Command::Measure { device }, Vec::new()).await;
        };
        let outside = net.outside();
        if outside.is_gone {
            let former = renewing.take();
            aside(move || drop(former)).await;
        } else if self.joins != Some(outside.joins) && renewing.is_none() {
            *renewing = Some(Box::pin(renewal(net.clone(), self.process.name().to_owned())));
        }
        self.process.tell_in_turn(command(&net), Vec::new()).await;
    }

    /// Sends the process the queues that were opened. If the port has joined another interface
    /// meanwhile, sends nothing, and returns the attempt to open the queues of that one.
    async fn tell_queues(&mut self, (joins, lent): (u64, Lending)) -> Option<Renewing> {
        let net = self.owned.as_port().cloned()?;
        let outside = net.outside();
        if outside.is_gone || outside.joins != joins {
            // The close of the last copy of a socket may block.
            aside(move || drop(lent)).await;
            let again = renewal(net, self.process.name().to_owned());
            // When a deleted interface is back, `changes` reports it, and `tell_changes` begins the
            // next attempt.
            return (!outside.is_gone).then(|| Box::pin(again) as Renewing);
        }
        self.joins = Some(joins);
        let (Some(PortFacts { filter, chunk, .. }), mut queues) = lent else { return None };
        // Without the flow table, which the process has already. `chunk`: the queues are AF_XDP
        // sockets, and one more descriptor is their memory.
        queues.truncate(net.queue_pairs() + usize::from(chunk.is_some()));
        let queues = queues.into_iter().map(Into::into).collect();
        let device = self.device.clone();
        self.process.tell_in_turn(Command::Queues { device, filter, chunk }, queues).await;
        // Send the state of the interface again: the device checks the new queues when it receives
        // this command.
        self.process.tell_in_turn(command(&net), Vec::new()).await;
        None
    }

    /// Carries out a request. A `Connect` gets here only while another connection is being made, or
    /// if the disk has no server.
    async fn done(&self, request: PrivilegedRequest) -> Result<(), Errno> {
        match (&self.owned, request) {
            (Owned::Port(net), PrivilegedRequest::Pair { pair, attached }) => {
                net.lend_pair(pair.into(), attached).await
            }
            (Owned::Port(net), PrivilegedRequest::Offloads { bits }) => {
                net.lend_offloads(Offloads::of_guest(bits)).await
            }
            (Owned::Port(net), PrivilegedRequest::Rss { config }) => {
                let config = Some(config).filter(|config| !config.is_empty());
                let rss = config.map(|config| RssConfig::parse(&config)).transpose();
                net.lend_rss(rss.map_err(|_| Errno::INVAL)?).await
            }
            (Owned::Disk(host), PrivilegedRequest::Lock { is_held }) => {
                let (disk, marks) = (host.disk().clone(), self.marks.clone());
                let locked = aside(move || lock(&*disk, marks.as_deref(), is_held)).await;
                locked.unwrap_or(Err(Errno::IO))
            }
            // A connection is being made already.
            (Owned::Disk(_), PrivilegedRequest::Connect { .. }) if self.remote.is_some() => {
                Err(Errno::BUSY)
            }
            _ => Err(Errno::INVAL),
        }
    }
}

/// Connects to the server of a disk; returns the answer to the request `number` of the device
/// process.
async fn connect(
    (remote, connections): (Arc<Remote>, Arc<Connections>),
    number: u64,
    limit: Duration,
) -> OutgoingMessage {
    let failed = |errno: Errno| NbdFailure {
        text: format!("cannot be used: preparing the connection failed: {errno}"),
        is_limit: false,
        passes: true,
    };
    connections.closed().await;
    let given = match remote.connect(limit).await {
        Ok(connected) => {
            // On another thread: the certificates that are written into a file may be long.
            let given = aside(move || {
                connections.keep(&connected.socket)?;
                credentials::given(connected)
            });
            let given = given.await;
            given.unwrap_or(Err(Errno::IO)).map_err(failed)
        }
        Err(failure) => Err(failure),
    };
    let (failed, fds) = match given {
        Ok(fds) => (None, fds),
        Err(failure) => (Some(failure), Vec::new()),
    };
    (Command::Connected { number, failed }, fds.into_iter().map(Into::into).collect())
}

/// Opens the queues of a port for its device process; retries until that succeeds.
async fn renewal(net: Arc<OwnedPort>, process: String) -> (u64, Lending) {
    let mut is_told = false;
    loop {
        let lending = match let_go(&net, Some(&process)).await {
            Ok(()) => lent(&net).await,
            Err(error) => Err(error),
        };
        match lending {
            // AF_XDP has no sockets while its interface is gone: the next look finds that.
            Ok((_, (Some(_), queues))) if queues.is_empty() => {}
            Ok(lending) => return lending,
            Err(error) if !std::mem::replace(&mut is_told, true) => {
                let problem = "sending its queues to the device process failed; retrying";
                tracing::error!(device = net.name(), error, "{problem}");
            }
            Err(_) => {}
        }
        net.port_may_have_changed();
        sleep(UPLINK_RETRY).await;
    }
}

/// Waits for the queues that are being opened; never returns while there are none.
async fn renewed(renewing: &mut Option<Renewing>) -> (u64, Lending) {
    match renewing {
        Some(renewing) => renewing.await,
        None => std::future::pending().await,
    }
}

/// Waits for the connection that is being made; never returns while there is none.
async fn connected(connecting: &mut Option<Connecting>) -> OutgoingMessage {
    match connecting {
        Some(connecting) => connecting.await,
        None => std::future::pending().await,
    }
}

/// Takes or releases the lock of an image that is locked while rings run. May block.
fn lock(disk: &dyn Disk, marks: Option<&Marks>, is_held: bool) -> Result<(), Errno> {
    let image = disk.image().ok_or(Errno::INVAL)?;
    if !is_held {
        image.release_for(marks);
        return Ok(());
    }
    image.acquire_for(marks).map_err(|error| match error {
        ImageError::InUse { .. } => Errno::BUSY,
        ImageError::Lock { errno, .. } => errno,
        _ => Errno::IO,
    })
}

/// Makes the command with the present state of the interface and the operator's settings.
pub(super) fn command(net: &OwnedPort) -> Command {
    let Outside { link_up, is_gone, mtu, announcements, .. } = net.outside();
    Command::Outside { device: net.name().to_owned(), link_up, is_gone, mtu, announcements }
}
