//! The listening half: a private socket, a bounded number of clients, a descriptor kept for them.
//!
//! Whoever may connect can also connect and say nothing. So a client has a time for each thing that
//! it has to do, a user a number of clients, and further ones are turned away: nobody waits behind
//! those that are idle.

use super::api::Role;
use super::patient::{Patient, Prompt};
use super::places::{Busy, Places};
use super::reserve::{Refill, Reserve};
use super::{State, Who, api};
use crate::config::plan::DaemonPlan;
use crate::service::{Kept, Service, Whose};
use axum::{Extension, Router};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use manyring_transport::vhost_user::{ListenError, Listener as Named, SocketPermissions};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

/// Longest time for the head of a request, and between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before the name of the socket is tried again that another process has.
const RETRY: Duration = Duration::from_millis(200);

/// A control socket.
#[derive(Debug)]
pub(crate) struct Bound {
    role: Role,
    path: PathBuf,
    permissions: SocketPermissions,
    /// None: another process has its name, and is waited for.
    socket: Option<Named>,
    /// The service manager has it as well.
    kept: Option<Kept>,
}

/// Listens where the plan says, for the owner alone unless it says more.
///
/// # Errors
/// One line, which names the key.
pub(crate) fn bind(plan: &DaemonPlan, service: &Arc<Service>) -> Result<Vec<Bound>, String> {
    let role = |key| if key == "control" { Role::Change } else { Role::Read };
    let bind = |(path, key): (&Path, &'static str)| {
        let (role, permissions) = (role(key), plan.private(key));
        let whose = Whose::Control(key);
        let mut kept = None;
        let socket = match service.listen(whose, path, permissions) {
            Ok(mut socket) => {
                kept = service.keep(whose, &mut socket);
                Some(socket)
            }
            Err(error @ ListenError::Taken { .. }) if plan.wait != Some(0) => {
                tracing::warn!(%error, "no control requests yet: its socket is tried again");
                None
            }
            Err(error) => return Err(format!("{}: {error}", plan.place.at(key))),
        };
        Ok(Bound { role, path: path.to_owned(), permissions, socket, kept })
    };
    plan.controls().map(bind).collect()
}

/// Answers for ever; without a socket only waits for ever.
pub(crate) async fn serve(sockets: Vec<Bound>, state: State) {
    let mut tasks = JoinSet::new();
    for bound in sockets {
        let router = api::router(state.clone(), bound.role);
        tasks.spawn(async move {
            let _kept = bound.kept;
            let socket = match bound.socket {
                Some(socket) => socket,
                None => freed(&bound.path, bound.permissions).await,
            };
            let clients = Clients { places: Places::default(), reserve: Reserve::new() };
            clients.serve(socket.socket(), &router).await;
        });
    }
    while tasks.join_next().await.is_some() {}
    std::future::pending().await
}

/// The socket, when its name can be had.
async fn freed(path: &Path, permissions: SocketPermissions) -> Named {
    loop {
        tokio::time::sleep(RETRY).await;
        if let Ok(socket) = Named::bind(path, permissions) {
            tracing::info!(path = %path.display(), "control requests are answered from now on");
            return socket;
        }
    }
}

/// Those who are connected.
#[derive(Debug)]
struct Clients {
    places: Places,
    reserve: Arc<Reserve>,
}

impl Clients {
    /// No descriptor is left, and an earlier client has the place of the one that is kept. A client
    /// that asks is soon answered, and leaves. One that only stays has to go.
    async fn make_room(&self) {
        if tokio::time::timeout(RETRY, self.reserve.refilled()).await.is_err()
            && self.places.free_one()
        {
            let _ = tokio::time::timeout(RETRY, self.reserve.refilled()).await;
        }
        self.reserve.refill();
    }

    /// Answers for ever.
    async fn serve(&self, socket: &UnixListener, router: &Router) {
        let mut tasks = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                Some(_) = tasks.join_next() => continue,
            };
            match accepted {
                Ok((stream, _)) => {
                    let who = who(&stream);
                    // Dropped behind the stream, whose descriptor is free by then.
                    let refill = Refill(self.reserve.clone());
                    let Some(place) = self.places.take(who.uid) else {
                        turn_away(&stream);
                        continue;
                    };
                    let busy = place.busy.clone();
                    let router = router.clone().layer(Extension(who));
                    let task = tasks.spawn(async move {
                        answer(stream, router, &busy).await;
                        drop((refill, place));
                    });
                    self.places.serve(task);
                }
                // No descriptor is left: this client takes the place of the one that is kept.
                Err(error) if is_out_of_fds(&error) && self.reserve.spend() => {}
                Err(error) => {
                    tracing::warn!(%error, "control socket: cannot accept");
                    self.make_room().await;
                }
            }
        }
    }
}

/// Answers a client until it leaves, or does not keep the times.
pub(super) async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    busy: &Arc<Busy>,
) {
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let (router, asking) = (TowerToHyperService::new(router), busy.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        asking.asks.store(true, Ordering::Relaxed);
        let (answer, asking) = (router.call(request.map(Prompt::new)), asking.clone());
        async move {
            let answer = answer.await;
            asking.asks.store(false, Ordering::Relaxed);
            answer
        }
    });
    let stream = TokioIo::new(Patient::new(stream, busy.clone()));
    if let Err(error) = server.serve_connection(stream, service).await {
        tracing::debug!(%error, "a client of the control socket");
    }
}

/// Tells a client that there are too many, without a look at what it asks.
fn turn_away(stream: &UnixStream) {
    const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
        connection: close\r\ncontent-length: 28\r\n\r\n{\"error\":\"too many clients\"}";
    let _ = stream.try_write(BUSY);
}

/// The process that has connected, as the kernel tells.
fn who(stream: &UnixStream) -> Who {
    let Ok(peer) = stream.peer_cred() else { return Who { uid: u32::MAX, ..Who::default() } };
    let pid = peer.pid().unwrap_or_default();
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Who { uid: peer.uid(), pid, comm: comm.trim_end().to_owned() }
}

fn is_out_of_fds(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}
