//! vhost-user: one socket, one device; server and client mode; listens again for ever.
//!
//! ```text
//! accept -> session: message -> effects -> reply, until the front-end leaves or breaks a rule
//!        -> tear down: every queue stops, memory is unmapped -> accept
//! ```
//! While a session runs a second client is refused at once; one that comes while the old session
//! is torn down waits (QEMU never talks again to a socket that closed on it).

mod listener;
mod requests;
pub mod session;
mod socket;
mod vring;

pub use listener::{ListenError, Listener, PATH_LEN_MAX, SocketPermissions, check_path};
pub use requests::FrontError;
pub use socket::SocketError;

use manyring_device::{Device, Event, EventKind};
use requests::Front;
use socket::Connection;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

/// Where the front-end comes from.
#[derive(Debug)]
pub enum Endpoint {
    /// We listen; the socket's name appears when the device can serve.
    Listen {
        /// The socket's name.
        path: PathBuf,
        /// Who may connect.
        permissions: SocketPermissions,
    },
    /// The front-end listens; we connect, and again for ever.
    Connect {
        /// The socket's name.
        path: PathBuf,
    },
    /// A socket handed in: listening, or connected already.
    Inherited {
        /// The socket.
        socket: rustix::fd::OwnedFd,
    },
}

/// How a device is served.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// End after the first session.
    pub one_off: bool,
    /// Longest time from connecting to the first message.
    pub handshake_timeout: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self { one_off: false, handshake_timeout: Duration::from_secs(10) }
    }
}

/// First and longest pause between two attempts to connect.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Faults that can wait to be heard: two for each queue, more are only counted.
const EVENTS_MAX: usize = 512;

/// Whether a session is open, for the control API.
pub type Connected = watch::Sender<bool>;

/// Serves `device` at `endpoint` until `stop` turns true.
///
/// # Errors
/// [`ListenError`] if the socket cannot be had; nothing is created then.
pub async fn serve(
    device: Arc<dyn Device>,
    endpoint: Endpoint,
    options: ServeOptions,
    connected: Connected,
    mut stop: watch::Receiver<bool>,
) -> Result<(), ListenError> {
    let server = Server { device, options, connected };
    let stopped = async move {
        let _ = stop.wait_for(|stop| *stop).await;
    };
    match endpoint {
        Endpoint::Listen { path, permissions } => {
            let listener = Listener::bind(&path, permissions)?;
            tracing::info!(device = server.device.name(), path = %path.display(), "listening");
            tokio::select! {
                () = server.accept_for_ever(listener.socket()) => {}
                () = stopped => {}
            }
        }
        Endpoint::Connect { path } => tokio::select! {
            () = server.connect_for_ever(&path) => {}
            () = stopped => {}
        },
        Endpoint::Inherited { socket } => {
            let failed = |source| ListenError::Io { path: PathBuf::from("--fd"), source };
            tokio::select! {
                result = server.serve_inherited(socket) => result.map_err(failed)?,
                () = stopped => {}
            }
        }
    }
    Ok(())
}

struct Server {
    device: Arc<dyn Device>,
    options: ServeOptions,
    connected: Connected,
}

impl Server {
    async fn accept_for_ever(&self, listener: &tokio::net::UnixListener) {
        let mut waiting = None;
        loop {
            let stream = match waiting.take() {
                Some(stream) => stream,
                None => accept(listener).await,
            };
            let front = tokio::select! {
                front = self.run(stream) => front,
                never = self.refuse_others(listener) => match never {},
            };
            if let Some(front) = front {
                let tear_down = front.tear_down();
                tokio::pin!(tear_down);
                // One client may wait; a further one is refused.
                loop {
                    tokio::select! {
                        () = &mut tear_down => break,
                        stream = accept(listener) => {
                            if waiting.is_none() { waiting = Some(stream) }
                        }
                    }
                }
            }
            self.connected.send_replace(false);
            if self.options.one_off {
                return;
            }
        }
    }

    /// Closes every connection that comes. Never returns.
    async fn refuse_others(&self, listener: &tokio::net::UnixListener) -> Infallible {
        loop {
            drop(accept(listener).await);
            tracing::warn!(device = self.device.name(), "second client refused");
        }
    }

    async fn connect_for_ever(&self, path: &std::path::Path) {
        let (mut pause, longest) = BACK_OFF;
        loop {
            match UnixStream::connect(path).await {
                Ok(stream) => {
                    pause = BACK_OFF.0;
                    self.run_to_end(stream).await;
                    if self.options.one_off {
                        return;
                    }
                }
                Err(error) => {
                    let path = path.display();
                    tracing::debug!(device = self.device.name(), %path, %error, "cannot connect");
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    async fn serve_inherited(&self, socket: rustix::fd::OwnedFd) -> std::io::Result<()> {
        let listening = rustix::net::sockopt::socket_acceptconn(&socket)?;
        if listening {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            self.accept_for_ever(&tokio::net::UnixListener::from_std(listener)?).await;
        } else {
            let stream = std::os::unix::net::UnixStream::from(socket);
            stream.set_nonblocking(true)?;
            self.run_to_end(UnixStream::from_std(stream)?).await;
        }
        Ok(())
    }

    async fn run_to_end(&self, stream: UnixStream) {
        if let Some(front) = self.run(stream).await {
            front.tear_down().await;
        }
        self.connected.send_replace(false);
    }

    /// Runs a session until it ends; what is left must be torn down.
    async fn run(&self, stream: UnixStream) -> Option<Front> {
        let (sender, mut events) = mpsc::channel(EVENTS_MAX);
        let mut front = Front::new(self.device.clone(), sender);
        let mut changes = self.device.config_changes();
        changes.mark_unchanged();
        let mut connection = Connection::new(stream);
        let mut silence = Some(self.options.handshake_timeout);
        let device = self.device.name();
        self.connected.send_replace(true);
        tracing::info!(device, "front-end connected");
        loop {
            tokio::select! {
                message = connection.receive(silence) => {
                    silence = None;
                    if let Err(end) = self.answer(&connection, &mut front, message).await {
                        self.tell_end(&end);
                        return Some(front);
                    }
                }
                Some(event) = events.recv() => {
                    if self.hear(event) {
                        return Some(front);
                    }
                }
                Ok(()) = changes.changed() => front.send_config_change(),
            }
        }
    }

    async fn answer(
        &self,
        connection: &Connection,
        front: &mut Front,
        message: Result<socket::Message, SocketError>,
    ) -> Result<(), SessionEnd> {
        let message = message?;
        let request = message.header.request;
        tracing::trace!(device = self.device.name(), request, "message");
        if let Some(reply) = front.handle(message).await? {
            connection.send(&reply).await?;
        }
        Ok(())
    }

    /// True if the session must end.
    fn hear(&self, event: Event) -> bool {
        let (device, queue) = (self.device.name(), event.index);
        match event.kind {
            EventKind::Fault(error) => {
                tracing::warn!(device, queue, %error, "queue stopped: fault of its driver");
                false
            }
            EventKind::MemoryLost => {
                tracing::warn!(device, queue, "session ends: guest memory was cut away");
                true
            }
        }
    }

    fn tell_end(&self, end: &SessionEnd) {
        let device = self.device.name();
        match end {
            SessionEnd::Socket(SocketError::Closed) => {
                tracing::info!(device, "front-end has left");
            }
            error => tracing::warn!(device, %error, "session ends"),
        }
    }
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionEnd {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Front(#[from] FrontError),
}

/// Accepts the next client. Out of fds: waits, rather than spin on a socket that stays readable.
async fn accept(listener: &tokio::net::UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}
