//! vhost-user: serves one device at one socket, in server or client mode, to one front-end after
//! another.
//!
//! ```text
//! accept -> session: message -> effects -> reply, until the front-end leaves or breaks a rule
//!        -> tear down: every queue stops, memory is unmapped -> accept
//! ```
//! A client is refused only while a session runs whose front-end is still connected. A client that
//! connects while the old session is torn down waits, since QEMU does not reconnect to a socket
//! that has closed its connection. Waiting clients that have disconnected meanwhile are skipped.

mod answer;
mod clients;
mod inflight;
mod listener;
mod meter;
mod pace;
mod requests;
mod saved_session;
pub mod session;
mod session_end;
mod socket;
mod socket_error;
mod transfer;
mod unsent;
mod vring;

pub use clients::{Endpoint, connect_now};
pub use listener::{
    ListenError, Listener, PATH_LEN_MAX, SocketName, SocketPermissions, Unnamed, check_path,
    look_at_path, names_left, remove_name,
};
pub use requests::{FrontError, is_of_vring};
pub use saved_session::{
    AnswerState, Client, ENTRY_FDS_MAX, Entry, JournalUpdate, SavedEntry, SavedSession,
    SessionJournal, entries_max,
};
pub use socket_error::SocketError;

use clients::ClientSource;
use manyring_device::Device;
use manyring_engine::{Event, EventKind, Janitor, Origin, aside_for, cpu_time};
use manyring_memory::MemoryRules;
use meter::Meter;
use requests::{ServedFrontEnd, told_if_slow};
use socket::{Connection, ForeignStream, has_left};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use unsent::SessionLack;

/// The options with which a device is served.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// True: end after the first session.
    pub one_off: bool,
    /// The longest time from connecting to the front-end's first message.
    pub handshake_timeout: Duration,
    /// Which files the guest's memory may lie in, and how large it may be.
    pub memory: MemoryRules,
    /// Returns the CPU time that the calling thread has used, for which front-ends are charged.
    pub cpu_time: fn() -> Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            one_off: false,
            handshake_timeout: Duration::from_secs(10),
            memory: MemoryRules::default(),
            cpu_time,
        }
    }
}

/// First and longest pause between two attempts to connect to a front-end.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Longest time to close a session's file descriptors before a warning is logged.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a second client waits before it is refused: the first one may be about to disconnect.
/// A front-end's socket stays open after it was closed, while a process that the front-end has
/// forked has not called exec.
const DOUBT: Duration = Duration::from_millis(50);
/// Longest wait for requests in flight when the daemon stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// The most events that wait for the session: two for each of 256 queues. Further events are
/// counted, but not logged.
const EVENTS_MAX: usize = 512;

/// The channel that tells the control API whether a session is open.
pub type Connected = watch::Sender<bool>;

/// Serves `device` at `endpoint` until `stop` turns true. Then the socket is unlinked, so that no
/// client connects to a daemon that ends, and an open session stops its queues. Requests that a
/// disk does not complete within a second are abandoned.
///
/// # Errors
/// [`ListenError`]: the socket cannot be listened on; nothing was created.
pub async fn serve(
    device: Arc<dyn Device>,
    endpoint: Endpoint,
    options: ServeOptions,
    connected: Connected,
    stop: watch::Receiver<bool>,
) -> Result<(), ListenError> {
    let janitor = Arc::new(Janitor::of(device.name()));
    let meter = Meter::new(device.name(), options.cpu_time, janitor.clone());
    let deadline = OnceLock::new();
    let server = Server { device, options, connected, stop, janitor, meter, deadline };
    match endpoint {
        Endpoint::Listen { path, permissions } => {
            let listener = Listener::bind_aside(server.device.name(), path, permissions).await?;
            server.listen(listener).await;
        }
        Endpoint::Bound(listener) => server.listen(listener).await,
        Endpoint::Connect { path } => server.connect_for_ever(&path).await,
        Endpoint::Handed(clients) => {
            server.accept_for_ever(&ClientSource::Handed(Mutex::new(clients))).await;
        }
        Endpoint::Inherited { socket } => {
            let failed = |source| ListenError::Io { path: PathBuf::from("--fd"), source };
            server.serve_inherited(socket).await.map_err(failed)?;
        }
    }
    Ok(())
}

struct Server {
    device: Arc<dyn Device>,
    options: ServeOptions,
    connected: Connected,
    stop: watch::Receiver<bool>,
    /// Checks and closes the file descriptors that front-ends send.
    janitor: Arc<Janitor>,
    /// Limits the number of messages that the front-ends of this device send, and their CPU time,
    /// over all sessions.
    meter: Meter,
    /// The time at which requests in flight are abandoned; set once the daemon stops.
    deadline: OnceLock<Instant>,
}

impl Server {
    /// Returns when the daemon stops.
    async fn stopped(&self) {
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }

    /// Returns when the daemon has been stopping for [`STOP_TIMEOUT`].
    async fn given_up(&self) {
        self.stopped().await;
        let deadline = self.deadline.get_or_init(|| Instant::now() + STOP_TIMEOUT);
        tokio::time::sleep_until(*deadline).await;
    }

    /// Serves the clients of a listening socket. Unlinks the socket as soon as the daemon stops.
    async fn listen(&self, mut listener: Listener) {
        tracing::info!(device = self.device.name(), path = %listener.path(), "listening");
        let name = listener.take_name();
        let clients = ClientSource::Listens(listener.into_socket());
        let (ends, ended) = oneshot::channel::<()>();
        let without_name = async {
            tokio::select! {
                () = self.stopped() => {}
                _ = ended => {}
            }
            if let Some(name) = name {
                name.removed(self.device.name()).await;
            }
        };
        let served = async {
            self.accept_for_ever(&clients).await;
            drop(ends);
        };
        tokio::join!(without_name, served);
        self.close(clients);
    }

    async fn accept_for_ever(&self, clients: &ClientSource) {
        let mut waiting = None;
        while !*self.stop.borrow() {
            let stream = Arc::new(tokio::select! {
                stream = self.next(clients, waiting.take()) => stream,
                () = self.stopped() => return,
            });
            // Boxed: the future is large, and most of a thousand devices have no session.
            let mut run = Box::pin(self.run(stream.clone()));
            let mut doubt = None;
            let ended = loop {
                tokio::select! {
                    // The end of the session comes before the next client, which waits for it.
                    biased;
                    ended = &mut run => break ended,
                    // One client waits here. Further ones stay in the kernel's backlog.
                    next = self.accept(clients), if waiting.is_none() => {
                        doubt = match (has_left(&stream), has_left(&next)) {
                            (true, _) => None,
                            (false, true) => Some(Instant::now()),
                            (false, false) => Some(Instant::now() + DOUBT),
                        };
                        waiting = Some(next);
                    }
                    () = passed(doubt) => {
                        doubt = None;
                        if !has_left(&stream) {
                            waiting = None;
                            self.tell_refused();
                        }
                    }
                }
            };
            drop(stream);
            // Clients that connect during the teardown stay in the kernel's backlog, and are served
            // afterwards.
            Box::pin(self.tear_down(ended)).await;
            if self.options.one_off {
                return;
            }
        }
    }

    fn close(&self, clients: ClientSource) {
        if let ClientSource::Listens(listener) = clients
            && let Ok(listener) = listener.into_std()
        {
            self.janitor.dispose(listener);
        }
    }

    /// Returns the next client to serve: `waiting`, or the next one that connects. A client that
    /// has disconnected is skipped if there is another one behind it. The last client gets a
    /// session even if it has disconnected, so that its end is logged.
    async fn next(&self, clients: &ClientSource, waiting: Option<ForeignStream>) -> ForeignStream {
        let mut next = match waiting {
            Some(stream) => stream,
            None => self.accept(clients).await,
        };
        while has_left(&next) {
            self.janitor.room().await;
            let at_once = |context: &mut Context<'_>| Poll::Ready(clients.poll_accept(context));
            let Poll::Ready(Ok(stream)) = std::future::poll_fn(at_once).await else { break };
            next = ForeignStream::new(stream, self.janitor.clone());
        }
        next
    }

    /// Accepts the next client, once few enough of the refused ones wait to be closed.
    async fn accept(&self, clients: &ClientSource) -> ForeignStream {
        self.janitor.room().await;
        self.meter.paid().await;
        let stream = clients.accept(self.device.name()).await;
        self.meter.count_client();
        ForeignStream::new(stream, self.janitor.clone())
    }

    fn tell_refused(&self) {
        tracing::warn!(device = self.device.name(), "client refused: the device has one");
    }

    async fn connect_for_ever(&self, path: &std::path::Path) {
        let (mut pause, longest) = BACK_OFF;
        while !*self.stop.borrow() {
            match self.connect(path).await {
                Ok(stream) => {
                    pause = BACK_OFF.0;
                    Box::pin(self.run_to_end(stream)).await;
                    if self.options.one_off {
                        return;
                    }
                }
                Err(error) => {
                    let path = path.display();
                    tracing::debug!(device = self.device.name(), %path, %error, "connect failed");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stopped() => {}
            }
            pause = (pause * 2).min(longest);
        }
    }

    /// Connects on a thread of its own: the file system of the path may not respond, and the end of
    /// the daemon does not wait for it.
    async fn connect(&self, path: &std::path::Path) -> std::io::Result<UnixStream> {
        let path = path.to_path_buf();
        let stream = tokio::select! {
            stream = aside_for(self.device.name(), move || connect_now(&path)) => stream,
            () = self.stopped() => None,
        };
        UnixStream::from_std(stream.unwrap_or_else(|| Err(ErrorKind::Interrupted.into()))?)
    }

    async fn serve_inherited(&self, socket: rustix::fd::OwnedFd) -> std::io::Result<()> {
        let listening = rustix::net::sockopt::socket_acceptconn(&socket)?;
        if listening {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            let clients = ClientSource::Listens(UnixListener::from_std(listener)?);
            self.accept_for_ever(&clients).await;
            self.close(clients);
        } else {
            let stream = std::os::unix::net::UnixStream::from(socket);
            stream.set_nonblocking(true)?;
            Box::pin(self.run_to_end(UnixStream::from_std(stream)?)).await;
        }
        Ok(())
    }

    async fn run_to_end(&self, stream: UnixStream) {
        let stream = ForeignStream::new(stream.into(), self.janitor.clone());
        let ended = self.run(Arc::new(stream)).await;
        self.tear_down(ended).await;
    }

    /// Tears a session down: stops every queue, and waits until its file descriptors are closed.
    /// While the daemon stops, neither is waited for longer than [`STOP_TIMEOUT`].
    async fn tear_down(&self, ended: Ended) {
        let Ended { front, connection, origin } = ended;
        let quiesces = connection.as_ref().is_some_and(Connection::quiesces);
        tokio::select! {
            () = told_if_slow(
                self.device.name(),
                "the queues of a closed session are still stopping",
                self.meter.charged(front.tear_down()),
            ) => {}
            // Not if another process serves the rings next: it must not start while requests of
            // this process are in flight.
            () = self.given_up(), if !quiesces => {
                let device = self.device.name();
                tracing::warn!(device, "requests in flight did not complete; abandoning them");
            }
        }
        drop(connection);
        self.connected.send_replace(false);
        let closed = async {
            if origin.is_blocked() {
                tokio::time::sleep(self.janitor.penance()).await;
            }
            self.closed().await;
        };
        tokio::select! {
            () = closed => {}
            () = self.stopped() => {}
        }
    }

    /// Returns when all file descriptors of a session are closed. The next session begins only
    /// then, so that a front-end whose descriptors block on close ties up at most the device's
    /// janitor and the descriptors of one session.
    async fn closed(&self) {
        if tokio::time::timeout(CLOSE_TIMEOUT, self.janitor.idle()).await.is_err() {
            let device = self.device.name();
            tracing::warn!(device, "closing a front-end's descriptor is blocked; waiting");
            self.janitor.idle().await;
        }
    }

    /// Runs a session until it ends. The caller must pass the result to [`Self::tear_down`].
    async fn run(&self, stream: Arc<ForeignStream>) -> Ended {
        let ended = self.run_to_stop(stream.clone()).await;
        if !ended.connection.as_ref().is_some_and(Connection::quiesces) {
            stream.end();
        }
        ended
    }

    async fn run_to_stop(&self, stream: Arc<ForeignStream>) -> Ended {
        let (sender, mut events) = mpsc::channel(EVENTS_MAX);
        let origin = Origin::new(self.janitor.clone());
        let rules = self.options.memory;
        let mut front =
            ServedFrontEnd::new(self.device.clone(), rules, sender, self.janitor.clone());
        let mut changes = self.device.config_changes();
        changes.mark_unchanged();
        let mut connection = Connection::new(stream, origin.clone());
        let mut silence = Some(self.options.handshake_timeout);
        let device = self.device.name();
        self.meter.begin_message();
        self.connected.send_replace(true);
        tracing::info!(device, "front-end connected");
        let mut awaited = SessionLack::default();
        match self.resume(&mut connection, &mut front).await {
            Ok(false) => {}
            Ok(true) => {
                // A resumed session: its handshake is over, and it may have missed a change of the
                // configuration space.
                silence = None;
                changes.mark_changed();
            }
            Err(end) => {
                self.tell_end(&end);
                return Ended { front, connection: None, origin };
            }
        }
        loop {
            let next = async {
                self.meter.paid().await;
                connection.next(silence, &self.meter).await
            };
            let start_due = front.start_due();
            tokio::select! {
                message = next => {
                    silence = None;
                    let answered = self.attend(&mut connection, &mut front, message).await;
                    awaited.note(front.unsent(), Instant::now());
                    if let Err(end) = answered {
                        self.log_events(&mut events);
                        self.tell_end(&end);
                        return Ended { front, connection: None, origin };
                    }
                }
                () = front.transfer_state() => {}
                Some(event) = events.recv() => {
                    if self.log_event(event) {
                        return Ended { front, connection: None, origin };
                    }
                }
                () = origin.blocked() => {
                    self.tell_blocked(&origin);
                    return Ended { front, connection: None, origin };
                }
                () = passed(start_due) => {
                    // The ring's start may wait long for the host, but not once the daemon ends.
                    tokio::select! {
                        () = self.meter.charged(front.start_waiting()) => {}
                        () = self.given_up() => {}
                    }
                }
                () = passed(awaited.due()) => awaited.tell(device),
                Ok(()) = changes.changed() => front.send_config_change(),
                () = self.stopped() => {
                    return Ended { front, connection: Some(connection), origin };
                }
            }
        }
    }

    /// Logs an event of a queue. True if the session must end.
    pub(super) fn log_event(&self, event: Event) -> bool {
        let (device, queue) = (self.device.name(), event.index);
        match event.kind {
            EventKind::Fault(error) => {
                tracing::warn!(device, queue, %error, "queue stopped: fault of its driver");
                false
            }
            EventKind::MemoryLost => {
                tracing::warn!(device, queue, "session closed: guest memory was truncated");
                true
            }
            EventKind::PortGone => {
                tracing::warn!(device, queue, "receiveq stopped: the port is down or gone");
                self.device.port_lost();
                false
            }
        }
    }
}

/// A session that has ended, to be torn down.
struct Ended {
    front: ServedFrontEnd,
    /// Kept open if the daemon stops, so that the front-end sees the end of the connection only
    /// when its requests are done.
    connection: Option<Connection>,
    origin: Arc<Origin>,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionEnd {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Front(#[from] FrontError),
    #[error("the previous process died while it sent an answer; the front-end must reconnect")]
    Unanswered,
}

/// Returns when `time` has come; never returns if `time` is `None`.
async fn passed(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
