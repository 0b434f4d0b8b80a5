//! `Server`: connects to the server of a disk, and provides the certificates for TLS.
//!
//! A process that has the rights to connect does so itself ([`Address`]). A sandboxed device
//! process asks the supervisor, and gets a connected socket with the certificates: so the process
//! that parses the server's bytes needs no address, no file and no right to connect.

use super::clock::now;
use super::credentials::Credentials;
use super::error::JoinError;
use super::tls::TlsError;
use manyring_wire::nbd::{Host, Uri};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay, socket_error};
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, socket_with,
};
use rustix::time::Timespec;
use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::Duration;

/// The folder of the certificates if the URI names none: the one that QEMU uses.
const FOLDER: &str = "/etc/pki/qemu";
/// Connects to the server of a disk.
pub trait Server: Debug + Send + Sync {
    /// Connects to the server, and gives up after `limit`. Blocks.
    ///
    /// # Errors
    /// [`JoinError::Connect`], [`JoinError::Elsewhere`], or [`JoinError::Tls`] if a file with
    /// certificates cannot be read.
    fn connect(&self, limit: Duration) -> Result<Connected, JoinError>;
}

/// A connected socket, on which nothing was sent or received.
#[derive(Debug)]
pub struct Connected {
    /// The socket.
    pub socket: OwnedFd,
    /// The certificates for TLS on the socket; `None`: the disk does not use TLS.
    pub credentials: Option<Credentials>,
}

/// The export that a disk asks its server for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name of the export.
    pub export: String,
    /// The name in the server's certificate; `None`: without TLS.
    pub tls: Option<String>,
}

impl Target {
    /// The export that a URI names.
    #[must_use]
    pub fn of(uri: &Uri) -> Self {
        let host = match &uri.host {
            Host::Unix(_) => "",
            Host::Tcp(host, _) => host,
        };
        let name = || uri.hostname.as_deref().unwrap_or(host).to_owned();
        Self { export: uri.export.clone(), tls: uri.tls.then(name) }
    }
}

/// The address of a server, to which this process connects itself.
#[derive(Clone, Debug)]
pub struct Address {
    host: Host,
    /// The folder with the certificates; `None`: without TLS.
    certificates: Option<PathBuf>,
}

impl Address {
    /// The address in a URI.
    #[must_use]
    pub fn of(uri: &Uri) -> Self {
        let folder = || uri.certificates.as_deref().unwrap_or(FOLDER).into();
        Self { host: uri.host.clone(), certificates: uri.tls.then(folder) }
    }
}

impl Server for Address {
    fn connect(&self, limit: Duration) -> Result<Connected, JoinError> {
        let socket = connect(&self.host, now() + limit)?;
        let read = |folder: &PathBuf| {
            let failed = |(path, problem)| TlsError::File { path, problem };
            Credentials::read(folder).map_err(failed)
        };
        let credentials = self.certificates.as_ref().map(read).transpose()?;
        Ok(Connected { socket, credentials })
    }
}

/// Connects a socket to `host`; fails with `TimedOut` at `deadline`.
fn connect(host: &Host, deadline: Duration) -> Result<OwnedFd, JoinError> {
    match host {
        Host::Unix(path) => {
            let address = SocketAddrUnix::new(path.as_str()).map_err(refused)?;
            let socket = opened(AddressFamily::UNIX)?;
            // If the listener's backlog is full, connect(2) fails with EAGAIN. That is handled like
            // a server that does not listen yet: the reconnector tries again.
            rustix::net::connect(&socket, &address).map_err(refused)?;
            Ok(socket)
        }
        Host::Tcp(host, port) => over_tcp(host, *port, deadline),
    }
}

fn refused(errno: Errno) -> JoinError {
    JoinError::Connect(errno.into())
}

fn opened(family: AddressFamily) -> Result<OwnedFd, JoinError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None).map_err(refused)
}

fn over_tcp(host: &str, port: u16, deadline: Duration) -> Result<OwnedFd, JoinError> {
    let addresses = (host, port).to_socket_addrs().map_err(JoinError::Connect)?;
    let mut last = JoinError::Connect(io::Error::from(ErrorKind::NotFound));
    for address in addresses {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = opened(family)?;
        match to(&socket, address, deadline) {
            Ok(()) => {
                // Without Nagle's algorithm: each send has whole commands, so waiting for more
                // bytes would only delay them.
                let _ = set_tcp_nodelay(&socket, true);
                let _ = set_socket_keepalive(&socket, true);
                return Ok(socket);
            }
            Err(error) => last = JoinError::Connect(error),
        }
    }
    Err(last)
}

fn to(socket: &OwnedFd, address: std::net::SocketAddr, deadline: Duration) -> io::Result<()> {
    match rustix::net::connect(socket, &SocketAddrAny::from(address)) {
        Err(Errno::INPROGRESS) => {
            wait(socket, PollFlags::OUT, deadline)?;
            socket_error(socket)?.map_err(io::Error::from)
        }
        other => other.map_err(io::Error::from),
    }
}

/// Waits until `fd` is ready for `events`, or it is past `deadline`.
pub(super) fn wait(fd: impl AsFd, events: PollFlags, deadline: Duration) -> io::Result<()> {
    loop {
        let left = deadline.saturating_sub(now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).map_err(|_| ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&fd, events)], Some(&left)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}
