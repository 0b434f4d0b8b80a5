//! The control sockets: creates them with the permissions of the plan, accepts clients and bounds
//! their number.
//!
//! A client that connects and sends nothing must not keep others from being served. So each step of
//! a client has a timeout, the number of clients is bounded for each user and in all, and a client
//! beyond these bounds replaces one that is idle, or is answered with status 503 at once.

use crate::api;
use crate::api::Role;
use crate::client_places::Places;
use crate::http_connection::answer;
use crate::refusal_log::{Refused, Why};
use crate::reserve::{Refill, Reserve};
use crate::state::State;
use crate::stream::ClientStream;
use axum::http::{Method, StatusCode};
use axum::{Extension, Router};
use manyring_config::plan::DaemonPlan;
use manyring_engine::{FailureLines, aside_for};
use manyring_serve::service::{Service, Whose};
use manyring_serve::times::{CLIENT_NAME, CONTROL_LISTEN, CONTROL_LISTEN_RETRY};
use manyring_supervisor::model::Who;
use manyring_transport::vhost_user::{ListenError, Listener as Named, SocketPermissions, Unnamed};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A control socket of the plan, and how far it is made.
#[derive(Debug)]
pub struct Bound {
    role: Role,
    key: &'static str,
    path: PathBuf,
    permissions: SocketPermissions,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    /// A socket that the service manager or the previous daemon handed in. Its path exists.
    Named(Named),
    /// A socket that was created without a path. It gets its path when the devices are served.
    Unnamed(Unnamed),
    /// No socket yet: another process listens at the path, or the file system does not respond.
    /// Creating the socket is retried.
    Waits,
}

/// Creates the control sockets of the plan, for the owner alone unless the plan admits more users.
/// A new socket gets its path later, in [`serve`].
///
/// # Errors
/// One line that begins with the key of the socket that could not be created.
pub async fn bind(plan: &DaemonPlan, service: &Arc<Service>) -> Result<Vec<Bound>, String> {
    let role = |key| if key == "control" { Role::Change } else { Role::Read };
    let mut all = Vec::new();
    for (path, key) in plan.controls() {
        let permissions = plan.private(key);
        let socket = match socket(service, (path, key), permissions).await {
            Ok(socket) => socket,
            Err(error @ (ListenError::Taken { .. } | ListenError::Slow { .. }))
                if plan.wait != Some(0) =>
            {
                tracing::warn!(%error, "control: creating the socket failed; retrying");
                Socket::Waits
            }
            Err(error) => return Err(format!("{}: {error}", plan.place.at(key))),
        };
        all.push(Bound { role: role(key), key, path: path.to_owned(), permissions, socket });
    }
    Ok(all)
}

async fn socket(
    service: &Arc<Service>,
    (path, key): (&Path, &'static str),
    permissions: SocketPermissions,
) -> Result<Socket, ListenError> {
    if let Some(handed) = service.take(Whose::Control(key), path, permissions).await {
        return handed.map(Socket::Named);
    }
    let at = path.to_owned();
    let bound = aside_for("", move || Unnamed::bind(&at, permissions));
    let slow = || ListenError::Slow { path: path.to_owned() };
    let bound = timeout(CONTROL_LISTEN, bound).await.ok().flatten();
    bound.unwrap_or_else(|| Err(slow())).map(Socket::Unnamed)
}

/// Serves the clients of all control sockets; never returns. The sockets get their paths only when
/// `begun` resolves, which is when the devices are served: so a client that can connect sees all
/// devices. The last clone of `names` is dropped when each socket has its path or is retried; the
/// start of the daemon waits for that.
pub async fn serve(
    sockets: Vec<Bound>,
    state: State,
    service: &Arc<Service>,
    (begun, names): (oneshot::Receiver<()>, mpsc::Sender<()>),
) {
    let _ = begun.await;
    let mut tasks = JoinSet::new();
    for bound in sockets {
        let refused = Arc::new(Refused::default());
        let router = api::router(state.clone(), bound.role, refused.clone());
        let (service, names) = (service.clone(), names.clone());
        tasks.spawn(async move {
            let mut socket = bound.socket.named(&bound.path, bound.permissions, names).await;
            let _kept = service.keep(Whose::Control(bound.key), &mut socket);
            let clients = Clients { places: Places::default(), reserve: Reserve::new(), refused };
            clients.serve(socket.socket(), &router).await;
        });
    }
    drop(names);
    while tasks.join_next().await.is_some() {}
    std::future::pending().await
}

impl Socket {
    /// Gives the socket its path, and returns the socket; retries until this succeeds. Drops
    /// `names` after the first attempt, whether it succeeded or not: the start of the daemon waits
    /// for that ([`serve`]).
    async fn named(
        self,
        path: &Path,
        permissions: SocketPermissions,
        names: mpsc::Sender<()>,
    ) -> Named {
        match self {
            Self::Named(socket) => return socket,
            Self::Unnamed(socket) => {
                let named = aside_for("", move || socket.publish());
                match timeout(CONTROL_LISTEN, named).await.ok().flatten() {
                    Some(Ok(socket)) => return socket,
                    failed => {
                        let error = failed.and_then(Result::err).map(|error| error.to_string());
                        let problem = "control: creating the socket failed; retrying";
                        tracing::warn!(path = %path.display(), error, "{problem}");
                    }
                }
            }
            Self::Waits => {}
        }
        drop(names);
        freed(path, permissions).await
    }
}

/// Retries to create the socket, until its path is free and the file system responds.
async fn freed(path: &Path, permissions: SocketPermissions) -> Named {
    loop {
        tokio::time::sleep(CONTROL_LISTEN_RETRY).await;
        if let Ok(socket) = Named::bind_aside("", path.to_owned(), permissions).await {
            tracing::info!(path = %path.display(), "control: listening");
            return socket;
        }
    }
}

/// The connected clients of one control socket.
#[derive(Debug)]
struct Clients {
    places: Places,
    reserve: Arc<Reserve>,
    refused: Arc<Refused>,
}

impl Clients {
    /// Called when `accept` failed because no descriptor is left, and an earlier client's
    /// connection uses the reserved one. When that client has got its answer and disconnects, the
    /// reserve is refilled. If this takes too long, an idle client is disconnected.
    async fn make_room(&self) {
        if timeout(CONTROL_LISTEN_RETRY, self.reserve.refilled()).await.is_err()
            && self.places.free_one()
        {
            let _ = timeout(CONTROL_LISTEN_RETRY, self.reserve.refilled()).await;
        }
        self.reserve.refill();
    }

    /// Accepts clients and answers their requests until the daemon ends.
    async fn serve(&self, socket: &UnixListener, router: &Router) {
        let (mut tasks, mut lines) = (JoinSet::new(), FailureLines::default());
        loop {
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
            };
            match accepted {
                Ok((stream, _)) => {
                    // Before the stream is wrapped: only a tokio stream has `peer_cred`.
                    let who = user(&stream);
                    // Declared before the stream, so dropped after it: the refill needs the
                    // descriptor that the stream frees.
                    let refill = Refill(self.reserve.clone());
                    let stream = ClientStream::new(stream);
                    let Some(place) = self.places.take(who.uid) else {
                        turn_away(&stream);
                        let (status, asked) = (StatusCode::SERVICE_UNAVAILABLE, (&Method::GET, ""));
                        let why = Why("too many clients".to_owned());
                        self.refused.log(&who, asked, status, Some(&why));
                        continue;
                    };
                    let busy = place.busy.clone();
                    let router = router.clone();
                    let task = tasks.spawn(async move {
                        let janitor = stream.janitor();
                        let router = router.layer(Extension(named(who).await));
                        answer(stream, router, &busy).await;
                        // The client keeps its place until the descriptors that it sent are closed.
                        // Otherwise it could reconnect and send more than one thread can close.
                        janitor.idle().await;
                        drop((refill, place));
                    });
                    self.places.serve(task);
                }
                // No descriptor is left: with the reserved one closed, the next `accept` succeeds.
                Err(error) if is_out_of_fds(&error) && self.reserve.spend() => {}
                Err(error) => {
                    if let Some(failures) = lines.count() {
                        tracing::warn!(failures, %error, "control: accept failed; retrying");
                    }
                    self.make_room().await;
                }
            }
        }
    }
}

/// Answers a client with status 503 without reading its request.
fn turn_away(stream: &ClientStream) {
    const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
        connection: close\r\ncontent-length: 28\r\n\r\n{\"error\":\"too many clients\"}";
    stream.try_write(BUSY);
}

/// Returns the user and process that connected, as `SO_PEERCRED` says; the program's name is left
/// empty. If the kernel gives no credentials, the user is `u32::MAX`, the number of no user.
fn user(stream: &UnixStream) -> Who {
    let Ok(peer) = stream.peer_cred() else { return Who { uid: u32::MAX, ..Who::default() } };
    Who { uid: peer.uid(), pid: peer.pid().unwrap_or_default(), ..Who::default() }
}

/// Adds the name of the client's program to `who`, if a thread reads the name in /proc within
/// [`CLIENT_NAME`]. A read of /proc may take seconds while many programs read there.
async fn named(who: Who) -> Who {
    /// Threads that read a name at a time.
    static THREADS: Semaphore = Semaphore::const_new(4);
    let pid = who.pid;
    let read = async {
        let thread = THREADS.acquire().await.ok()?;
        aside_for("", move || {
            let _thread = thread;
            std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()
        })
        .await?
    };
    let comm = timeout(CLIENT_NAME, read).await.ok().flatten().unwrap_or_default();
    Who { comm: comm.trim_end().to_owned(), ..who }
}

fn is_out_of_fds(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}
