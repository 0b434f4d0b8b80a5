//! `join`: connects to the server and negotiates until transmission, for a limited time. Blocks.

use super::clock::now;
use super::tls::{Tls, TlsError};
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
use std::io::{self, ErrorKind};
use std::net::ToSocketAddrs;
use std::time::Duration;

/// Bytes of one receive while TLS is negotiated.
const RECEIVE: usize = 16 << 10;

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
    /// The server allows one connection alone (no `NBD_FLAG_CAN_MULTI_CONN`), and there is another.
    #[error("it allows one connection alone now")]
    Alone,
    /// One of the two sides does not trust the other, or has broken TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server's export cannot be served as a disk, or differs from the disk that the guest was
    /// told of when it began.
    #[error("{0}")]
    Disk(String),
}

impl JoinError {
    /// True if a server that takes no more connections looks like this: it lets the client wait, or
    /// ends the connection before it has served it.
    pub(super) fn is_limit(&self) -> bool {
        match self {
            Self::Connect(error) => {
                matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
            }
            Self::Silent(_) | Self::Nbd(NbdError::Refused(_)) => true,
            Self::Alone | Self::Tls(TlsError::Unanswered) => true,
            Self::Nbd(_) | Self::Tls(_) | Self::Disk(_) => false,
        }
    }
}

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) socket: OwnedFd,
    pub(super) export: Export,
    /// The TLS session of the connection, if it has one.
    pub(super) tls: Option<Box<Tls>>,
    /// The connection is one that other queues use as well.
    pub(super) is_shared: bool,
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
    let mut talk = Talk { socket, deadline, tls: None, is_answered: false };
    let wish = Wish { name: uri.export.clone(), tls: uri.tls };
    let export = negotiate(&mut talk, wish, uri)?;
    let Talk { socket, tls, .. } = talk;
    rustix::io::ioctl_fionbio(&socket, false).map_err(refused)?;
    Ok(Joined { socket, export, tls, is_shared: false })
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
    match connect(socket, &SocketAddrAny::from(address)) {
        Err(Errno::INPROGRESS) => {
            wait(socket, PollFlags::OUT, deadline)?;
            socket_error(socket)?.map_err(io::Error::from)
        }
        other => other.map_err(io::Error::from),
    }
}

/// Negotiates with the server until transmission begins.
fn negotiate(talk: &mut Talk, wish: Wish, uri: &Uri) -> Result<Export, JoinError> {
    let mut handshake = Handshake::new(wish)?;
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    loop {
        bytes.resize(handshake.needs(), 0);
        talk.read(&mut bytes)?;
        let progress = handshake.take(&bytes, &mut out)?;
        if progress == Progress::StartTls {
            talk.start_tls(Tls::connect(uri)?)?;
        }
        talk.write(&mut out)?;
        if let Progress::Done(export) = progress {
            return Ok(export);
        }
    }
}

/// A socket whose calls wait no longer than until a deadline.
struct Talk {
    socket: OwnedFd,
    deadline: Duration,
    tls: Option<Box<Tls>>,
    /// The server has sent data under TLS, so it has accepted our certificate.
    is_answered: bool,
}

/// Waits until `fd` is ready for `events`, or it is past `deadline`.
fn wait(fd: impl AsFd, events: PollFlags, deadline: Duration) -> io::Result<()> {
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

impl Talk {
    /// Completes the TLS handshake. A server that refuses our certificate reports so only later, in
    /// the place of its first answer, because with TLS 1.3 the client's handshake ends before.
    fn start_tls(&mut self, mut tls: Tls) -> Result<(), JoinError> {
        let (mut out, mut came) = (Vec::new(), vec![0; RECEIVE]);
        let mut shaken = tls.shake(&mut out);
        loop {
            // Also after a fault: the alert in `out` tells the server's log of it.
            let sent = self.send_all(&out);
            if shaken? {
                break;
            }
            sent?;
            out.clear();
            let n = self.receive(&mut came)?;
            shaken = tls.open(&came[..n], &mut out).and_then(|()| tls.shake(&mut out));
        }
        self.tls = Some(Box::new(tls));
        Ok(())
    }

    /// Fills `bytes`.
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), JoinError> {
        let mut got = 0;
        while got < bytes.len() {
            let Some(tls) = &mut self.tls else {
                got += self.receive(&mut bytes[got..])?;
                continue;
            };
            let n = tls.plain().len().min(bytes.len() - got);
            bytes[got..got + n].copy_from_slice(&tls.plain()[..n]);
            tls.consume(n);
            got += n;
            self.is_answered |= n > 0;
            if got < bytes.len() {
                self.open_more()?;
            }
        }
        Ok(())
    }

    /// Receives once, and decrypts the received bytes.
    fn open_more(&mut self) -> Result<(), JoinError> {
        let (mut came, mut out) = (vec![0; RECEIVE], Vec::new());
        let n = self.receive(&mut came).map_err(|error| self.explained(error))?;
        if let Some(tls) = &mut self.tls {
            tls.open(&came[..n], &mut out)?;
        }
        self.send_all(&out)
    }

    /// Sends all of `out`, and empties it.
    fn write(&mut self, out: &mut Vec<u8>) -> Result<(), JoinError> {
        if let Some(tls) = &mut self.tls {
            tls.unsealed().append(out);
            tls.seal(out)?;
        }
        self.send_all(out).map_err(|error| self.explained(error))?;
        out.clear();
        Ok(())
    }

    /// Turns `error` into `TlsError::Unanswered` if the server has ended a TLS connection before
    /// its first answer. Any other error is returned as it is.
    fn explained(&self, error: JoinError) -> JoinError {
        match error {
            JoinError::Silent(error)
                if has_ended(&error) && self.tls.is_some() && !self.is_answered =>
            {
                JoinError::Tls(TlsError::Unanswered)
            }
            error => error,
        }
    }

    /// Receives once into `bytes`, after waiting until the socket is readable.
    fn receive(&self, bytes: &mut [u8]) -> Result<usize, JoinError> {
        loop {
            wait(&self.socket, PollFlags::IN, self.deadline).map_err(JoinError::Silent)?;
            match recv(&self.socket, &mut *bytes, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Ok((0, _)) => return Err(JoinError::Silent(ErrorKind::UnexpectedEof.into())),
                other => return other.map(|(n, _)| n).map_err(silent),
            }
        }
    }

    fn send_all(&self, mut bytes: &[u8]) -> Result<(), JoinError> {
        while !bytes.is_empty() {
            wait(&self.socket, PollFlags::OUT, self.deadline).map_err(JoinError::Silent)?;
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => bytes = &bytes[other.map_err(silent)?..],
            }
        }
        Ok(())
    }
}

/// True for the error of a connection that its peer has ended.
fn has_ended(error: &io::Error) -> bool {
    let kinds = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    kinds.contains(&error.kind())
}

fn silent(errno: Errno) -> JoinError {
    JoinError::Silent(errno.into())
}
