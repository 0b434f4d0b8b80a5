//! `Endpoint`: how a device gets its front-end; `ClientSource`: accepts the clients that connect.

use super::saved_session::Client;
use super::{Listener, SocketPermissions};
use manyring_engine::FailureLines;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::future::poll_fn;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::time::sleep;

/// Delay before the next attempt to accept a client.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

/// How a device gets its front-end.
#[derive(Debug)]
pub enum Endpoint {
    /// The device listens (server mode). The socket's path appears when the device can be served.
    Listen {
        /// The path of the socket.
        path: PathBuf,
        /// The owner, group and mode of the socket: they decide who may connect.
        permissions: SocketPermissions,
    },
    /// A socket that listens already, at its path.
    Bound(Listener),
    /// The front-end listens (client mode). The device connects, and reconnects after each session.
    Connect {
        /// The path of the socket.
        path: PathBuf,
    },
    /// An inherited socket, which listens or is connected.
    Inherited {
        /// The inherited socket.
        socket: rustix::fd::OwnedFd,
    },
    /// Connected sockets, handed over by another process or task that accepts for this device.
    Handed(mpsc::Receiver<Client>),
}

/// Where a device's clients come from: a socket that listens, or another process or task.
#[derive(Debug)]
pub(super) enum ClientSource {
    Listens(UnixListener),
    Handed(Mutex<mpsc::Receiver<Client>>),
}

impl ClientSource {
    /// Accepts the next client. If the process or task that hands clients over has ended, this
    /// waits for ever. If the process has no fd left it pauses, instead of spinning on a socket
    /// that stays readable.
    pub(super) async fn accept(&self, device: &str) -> Client {
        let mut lines = FailureLines::default();
        loop {
            match poll_fn(|context| self.poll_accept(context)).await {
                Ok(client) => return client,
                Err(error) => {
                    if let Some(failures) = lines.count() {
                        tracing::warn!(device, failures, %error, "accept failed; retrying");
                    }
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    pub(super) fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<Client>> {
        match self {
            Self::Listens(listener) => {
                Poll::Ready(ready!(listener.poll_accept(context)).map(|(stream, _)| stream.into()))
            }
            Self::Handed(clients) => {
                let mut clients = clients.lock().unwrap_or_else(PoisonError::into_inner);
                match ready!(clients.poll_recv(context)) {
                    Some(stream) => Poll::Ready(Ok(stream)),
                    None => Poll::Pending,
                }
            }
        }
    }
}

/// Connects to the socket at `path`. Does not wait if the front-end is slow to accept, but may
/// block if the file system of the path does not respond.
///
/// # Errors
/// `ENOENT`, `ECONNREFUSED`: nobody listens. `EAGAIN`: the front-end does not accept now.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
