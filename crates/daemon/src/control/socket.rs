//! The listening half: a private socket, a bounded number of clients.

use super::{State, api};
use crate::config::plan::DaemonPlan;
use axum::serve::Listener;
use manyring_transport::vhost_user::{Listener as Named, SocketPermissions};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Clients at a time; more wait in the socket's backlog.
const CLIENTS_MAX: usize = 64;

/// Listens where the plan says, for the owner alone; not at all where it says nothing.
pub(crate) fn bind(plan: &DaemonPlan) -> Result<Option<Named>, String> {
    let permissions = SocketPermissions { mode: Some(0o600), ..SocketPermissions::default() };
    let bound = plan.control.as_deref().map(|path| Named::bind(path, permissions));
    bound.transpose().map_err(|error| format!("{}: {error}", plan.place.at("control")))
}

/// Answers for ever; without a socket only waits for ever.
pub(crate) async fn serve(socket: Option<Named>, state: State) {
    let Some(socket) = socket else { return std::future::pending().await };
    let clients = Clients { socket, permits: Arc::new(Semaphore::new(CLIENTS_MAX)) };
    if let Err(error) = axum::serve(clients, api::router(state)).await {
        tracing::error!(%error, "control socket");
    }
    std::future::pending().await
}

#[derive(Debug)]
struct Clients {
    socket: Named,
    permits: Arc<Semaphore>,
}

impl Listener for Clients {
    type Io = Client;
    type Addr = ();

    async fn accept(&mut self) -> (Client, ()) {
        loop {
            let permit = self.permits.clone().acquire_owned().await.ok();
            match self.socket.socket().accept().await {
                Ok((stream, _)) => return (Client { stream, _permit: permit }, ()),
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

/// A connected client; its permit goes with it.
#[derive(Debug)]
struct Client {
    stream: UnixStream,
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
