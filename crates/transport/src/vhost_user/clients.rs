//! `Endpoint`: where the front-end of a device comes from; `ClientSource`: the clients that connect
//! there.

use super::saved_session::Client;
use super::{Listener, SocketPermissions};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::future::poll_fn;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::net::UnixListener;
use tokio::sync::mpsc;

/// Where the front-end comes from.
#[derive(Debug)]
pub enum Endpoint {
    /// We listen (server mode); the socket's name appears when the device can serve.
    Listen {
        /// The socket's name.
        path: PathBuf,
        /// Who may connect.
        permissions: SocketPermissions,
    },
    /// A socket that listens already, under its name.
    Bound(Listener),
    /// The front-end listens (client mode); we connect, and again after each session.
    Connect {
        /// The socket's name.
        path: PathBuf,
    },
    /// A socket that was handed in: it listens, or is connected already.
    Inherited {
        /// The socket.
        socket: rustix::fd::OwnedFd,
    },
    /// Connected sockets, handed over by another process or task that accepts for this device.
    Handed(mpsc::Receiver<Client>),
}

/// The source of clients: a socket that listens, or the other process or task that accepts.
#[derive(Debug)]
pub(super) enum ClientSource {
    Listens(UnixListener),
    Handed(Mutex<mpsc::Receiver<Client>>),
}

impl ClientSource {
    /// The next client. If those who hand clients over are gone, this waits for ever.
    pub(super) async fn accept(&self) -> io::Result<Client> {
        poll_fn(|context| self.poll_accept(context)).await
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

/// Connects to the socket at `path`, or fails: a front-end that is slow to accept is not waited
/// for, only the file system in which the name is looked up.
///
/// # Errors
/// `ENOENT`, `ECONNREFUSED`: nobody listens. `EAGAIN`: the front-end does not accept now.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
