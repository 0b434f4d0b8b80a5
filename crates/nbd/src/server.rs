//! `Server`: where the connections of a disk come from, and the certificates for TLS on them.
//!
//! A process that may connect makes its sockets itself ([`Address`]). One that may not has another
//! process connect, and gets the socket and the certificates of it: then no path is known to the
//! process that reads what the server sends.

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
/// Where the connections of a disk come from.
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
    /// What TLS on it needs; `None`: the disk has no TLS.
    pub credentials: Option<Credentials>,
}

/// What a disk asks a server for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name of the export.
    pub export: String,
    /// The name in the server's certificate; `None`: without TLS.
    pub tls: Option<String>,
}

impl Target {
    /// What a URI asks for.
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

/// A socket that is connected to `host`; gives up at `deadline`.
fn connect(host: &Host, deadline: Duration) -> Result<OwnedFd, JoinError> {
    match host {
        Host::Unix(path) => {
            let address = SocketAddrUnix::new(path.as_str()).map_err(refused)?;
            let socket = opened(AddressFamily::UNIX)?;
            // A listener whose backlog is full answers EAGAIN: as if it did not listen yet.
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
                // Commands are written whole; waiting for more would only delay them.
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
