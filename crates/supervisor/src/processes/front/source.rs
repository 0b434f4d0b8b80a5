//! `Source`: the socket from which the front-ends of a device come. The supervisor listens or
//! connects, and hands each connection to the device process.

use super::io_error;
use crate::processes::journal_store::JournalStore;
use manyring_engine::{FailureLines, ForeignFd, aside, aside_for};
use manyring_serve::times::{FRONT_CONNECT, FRONT_RETRY};
use manyring_transport::vhost_user::{Endpoint, ListenError, Listener, SocketName, connect_now};
use rustix::fd::OwnedFd;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::sleep;

/// The socket from which the front-ends of a device come.
pub(super) enum Source {
    /// A socket that listens, and the log lines about clients that could not be accepted.
    Listens(UnixListener, FailureLines),
    /// The front-end listens at this path, and the supervisor connects. The time is the pause
    /// before the next attempt.
    Connects(PathBuf, Duration),
    /// An inherited socket that was connected already; `None` once [`Self::next`] has returned it.
    Connected(Option<OwnedFd>),
}

impl Source {
    /// Makes the source of an endpoint. Returns also the path of a socket that listens, which the
    /// caller removes at the end.
    ///
    /// # Errors
    /// [`ListenError`].
    pub(super) async fn of(
        endpoint: Endpoint,
        device: &str,
        process: &str,
    ) -> Result<(Self, Option<SocketName>), ListenError> {
        let mut listener = match endpoint {
            Endpoint::Listen { path, permissions } => {
                Listener::bind_aside(device, path, permissions).await?
            }
            Endpoint::Bound(listener) => listener,
            Endpoint::Connect { path } => {
                return Ok((Self::Connects(path, Duration::ZERO), None));
            }
            Endpoint::Inherited { socket } => {
                return Self::inherited(socket).map(|source| (source, None)).map_err(io_error);
            }
            Endpoint::Handed(_) => return Err(io_error(io::ErrorKind::InvalidInput.into())),
        };
        tracing::info!(device, process, path = %listener.path(), "listening");
        let name = listener.take_name();
        Ok((Self::Listens(listener.into_socket(), FailureLines::default()), name))
    }

    fn inherited(socket: OwnedFd) -> io::Result<Self> {
        if !rustix::net::sockopt::socket_acceptconn(&socket)? {
            return Ok(Self::Connected(Some(socket)));
        }
        let listener = StdListener::from(socket);
        listener.set_nonblocking(true)?;
        Ok(Self::Listens(UnixListener::from_std(listener)?, FailureLines::default()))
    }

    /// True if the device ends with its first session.
    pub(super) fn is_single(&self) -> bool {
        matches!(self, Self::Connected(_))
    }

    /// True if the supervisor connects to the front-end: there is one front-end at a time, to
    /// which the supervisor connects again after each session.
    pub(super) fn is_exclusive(&self) -> bool {
        matches!(self, Self::Connects(..))
    }

    /// Waits for the next client, and returns its socket.
    pub(super) async fn next(&mut self, device: &str, journals: &JournalStore) -> Arc<ForeignFd> {
        match self {
            Self::Listens(socket, lines) => accept((socket, lines), device, journals).await,
            // The future is on the heap: most devices listen, and their tasks stay small.
            Self::Connects(path, pause) => Box::pin(connect(path, pause, device, journals)).await,
            Self::Connected(socket) => match socket.take() {
                Some(socket) => journals.hold(socket),
                None => std::future::pending().await,
            },
        }
    }

    /// Closes the socket on another thread. The close may block, since the kernel also closes the
    /// descriptors that unaccepted clients have sent.
    pub(super) async fn close(self) {
        aside(move || match self {
            Self::Listens(socket, _) => drop(socket.into_std()),
            Self::Connects(..) => {}
            Self::Connected(socket) => drop(socket),
        })
        .await;
    }
}

async fn accept(
    (socket, lines): (&UnixListener, &mut FailureLines),
    device: &str,
    journals: &JournalStore,
) -> Arc<ForeignFd> {
    loop {
        let accepted = socket.accept().await;
        match accepted.and_then(|(stream, _)| stream.into_std()) {
            Ok(stream) => return journals.hold(stream.into()),
            Err(error) => {
                if let Some(failures) = lines.count() {
                    tracing::warn!(device, failures, %error, "accept failed; retrying");
                }
                sleep(FRONT_RETRY).await;
            }
        }
    }
}

/// Connects to a front-end that listens, after pauses that grow while it does not.
async fn connect(
    path: &Path,
    pause: &mut Duration,
    device: &str,
    journals: &JournalStore,
) -> Arc<ForeignFd> {
    let (first, longest) = FRONT_CONNECT;
    loop {
        sleep(*pause).await;
        *pause = (*pause * 2).clamp(first, longest);
        let at = path.to_owned();
        // The file system of the path may not respond.
        let stream = aside_for(device, move || connect_now(&at)).await;
        match stream.unwrap_or_else(|| Err(io::ErrorKind::Interrupted.into())) {
            Ok(stream) => {
                *pause = first;
                return journals.hold(stream.into());
            }
            Err(error) => {
                let path = path.display();
                tracing::debug!(device, %path, %error, "connect failed");
            }
        }
    }
}
