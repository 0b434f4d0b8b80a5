//! `join`: a connection to the server, as far as transmission. Blocks, but no longer than it may.

use super::clock::now;
use manyring_wire::nbd::{Export, Handshake, Host, NbdError, Progress, Uri, Wish};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_nodelay, socket_error};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
    connect, recv, send, socket_with,
};
use rustix::time::Timespec;
use std::io::{self, Read, Write};
use std::net::ToSocketAddrs;
use std::time::Duration;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nobody listens, or the network does not lead there.
    #[error("cannot be connected to: {0}")]
    Connect(io::Error),
    /// The connection has ended, or has been silent for too long, before transmission.
    #[error("has not negotiated: {0}")]
    Silent(io::Error),
    /// The server has sent something that the protocol does not allow, or has refused the export.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// The server's export cannot be served as a disk, or differs from the disk that the guest was
    /// told of when it began.
    #[error("{0}")]
    Disk(String),
}

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) socket: OwnedFd,
    pub(super) export: Export,
}

/// Connects and negotiates; gives up after `limit`.
pub(super) fn join(uri: &Uri, limit: Duration) -> Result<Joined, JoinError> {
    let deadline = now() + limit;
    let socket = match &uri.host {
        Host::Unix(path) => {
            let address = SocketAddrUnix::new(path.as_str()).map_err(refused)?;
            let socket = opened(AddressFamily::UNIX)?;
            // A listener whose backlog is full answers EAGAIN: as if it did not listen yet.
            connect(&socket, &address).map_err(refused)?;
            socket
        }
        Host::Tcp(host, port) => over_tcp(host, *port, deadline)?,
    };
    let mut talk = Talk { socket, deadline };
    let wish = Wish { name: uri.export.clone(), tls: uri.tls };
    let export = negotiate(&mut talk, wish)?;
    let Talk { socket, .. } = talk;
    rustix::io::ioctl_fionbio(&socket, false).map_err(refused)?;
    Ok(Joined { socket, export })
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
    let mut last = JoinError::Connect(io::Error::from(io::ErrorKind::NotFound));
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
    match connect(socket, &SocketAddrAny::from(address)) {
        Err(Errno::INPROGRESS) => {
            wait(socket, PollFlags::OUT, deadline)?;
            socket_error(socket)?.map_err(io::Error::from)
        }
        other => other.map_err(io::Error::from),
    }
}

/// Speaks with the server until transmission begins.
fn negotiate(talk: &mut Talk, wish: Wish) -> Result<Export, JoinError> {
    let mut handshake = Handshake::new(wish)?;
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    loop {
        bytes.resize(handshake.needs(), 0);
        talk.read_exact(&mut bytes).map_err(JoinError::Silent)?;
        let progress = handshake.take(&bytes, &mut out)?;
        if progress == Progress::StartTls {
            return Err(JoinError::Disk("TLS is not spoken here".to_owned()));
        }
        talk.write_all(&out).map_err(JoinError::Silent)?;
        out.clear();
        if let Progress::Done(export) = progress {
            return Ok(export);
        }
    }
}

/// A socket that waits no longer than until its deadline.
struct Talk {
    socket: OwnedFd,
    deadline: Duration,
}

/// Waits until `fd` is ready for `events`, or it is past `deadline`.
fn wait(fd: impl AsFd, events: PollFlags, deadline: Duration) -> io::Result<()> {
    loop {
        let left = deadline.saturating_sub(now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&fd, events)], Some(&left)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Read for Talk {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            wait(&self.socket, PollFlags::IN, self.deadline)?;
            match recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                other => return other.map(|(n, _)| n).map_err(io::Error::from),
            }
        }
    }
}

impl Write for Talk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            wait(&self.socket, PollFlags::OUT, self.deadline)?;
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::AGAIN) => {}
                other => return other.map_err(io::Error::from),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
