//! The listening half: a private socket, a bounded number of clients, a descriptor kept for them.

use super::reserve::{Refill, Reserve};
use super::{State, api};
use crate::config::plan::DaemonPlan;
use axum::serve::Listener;
use manyring_transport::vhost_user::{ListenError, Listener as Named, SocketPermissions};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Clients at a time; more wait in the socket's backlog.
const CLIENTS_MAX: usize = 64;

/// Pause before the name of the socket is tried again that another process has.
const RETRY: Duration = Duration::from_millis(200);

/// The control socket.
#[derive(Debug)]
pub(crate) enum Bound {
    /// The plan has none.
    None,
    Listens(Named),
    /// Another process has its name, and is waited for.
    Waits(PathBuf),
}

/// Listens where the plan says, for the owner alone; not at all where it says nothing.
///
/// # Errors
/// One line, which names the key.
pub(crate) fn bind(plan: &DaemonPlan) -> Result<Bound, String> {
    let Some(path) = plan.control.as_deref() else { return Ok(Bound::None) };
    match listen(path) {
        Ok(socket) => Ok(Bound::Listens(socket)),
        Err(error @ ListenError::Taken { .. }) if plan.wait != Some(0) => {
            tracing::warn!(%error, "no control requests yet: its socket is tried again");
            Ok(Bound::Waits(path.to_owned()))
        }
        Err(error) => Err(format!("{}: {error}", plan.place.at("control"))),
    }
}

fn listen(path: &Path) -> Result<Named, ListenError> {
    let permissions = SocketPermissions { mode: Some(0o600), ..SocketPermissions::default() };
    Named::bind(path, permissions)
}

/// Answers for ever; without a socket only waits for ever.
pub(crate) async fn serve(socket: Bound, state: State) {
    let socket = match socket {
        Bound::None => return std::future::pending().await,
        Bound::Listens(socket) => socket,
        Bound::Waits(path) => freed(&path).await,
    };
    let permits = Arc::new(Semaphore::new(CLIENTS_MAX));
    let clients = Clients { socket, permits, reserve: Reserve::new() };
    if let Err(error) = axum::serve(clients, api::router(state)).await {
        tracing::error!(%error, "control socket");
    }
    std::future::pending().await
}

/// The socket, when its name can be had.
async fn freed(path: &Path) -> Named {
    loop {
        tokio::time::sleep(RETRY).await;
        if let Ok(socket) = listen(path) {
            tracing::info!(path = %path.display(), "control requests are answered from now on");
            return socket;
        }
    }
}

#[derive(Debug)]
struct Clients {
    socket: Named,
    permits: Arc<Semaphore>,
    reserve: Arc<Reserve>,
}

impl Listener for Clients {
    type Io = Client;
    type Addr = ();

    async fn accept(&mut self) -> (Client, ()) {
        loop {
            let permit = self.permits.clone().acquire_owned().await.ok();
            match self.socket.socket().accept().await {
                Ok((stream, _)) => {
                    let refill = Refill(self.reserve.clone());
                    return (Client { stream, _refill: refill, _permit: permit }, ());
                }
                // No descriptor is left: this client takes the place of the one that is kept.
                Err(error) if is_out_of_fds(&error) && self.reserve.spend() => {}
                Err(error) => {
                    tracing::warn!(%error, "control socket: cannot accept");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

fn is_out_of_fds(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// A connected client; its permit goes with it.
#[derive(Debug)]
struct Client {
    stream: UnixStream,
    /// Dropped behind the stream, whose descriptor is free by then.
    _refill: Refill,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
