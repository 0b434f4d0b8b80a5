//! `join`: connects to the server and negotiates until the transmission phase begins, for a limited
//! time. Blocks, so only the reconnector thread and tests call it.

use super::channel::Channel;
use super::clock::now;
use super::credentials::Credentials;
use super::error::JoinError;
use super::server::{Connected, Server, Target, wait};
use super::tls::{Tls, TlsError};
use manyring_wire::nbd::{Export, ExportRequest, Handshake, Progress};
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use std::io::{self, ErrorKind};
use std::time::Duration;

/// Bytes of one receive while TLS is negotiated.
const RECEIVE: usize = 16 << 10;

/// A connection in the transmission phase.
#[derive(Debug)]
pub(super) struct JoinedConnection {
    pub(super) channel: Channel,
    pub(super) export: Export,
    /// The queue shares the connection with other queues (`reconnector/share.rs`).
    pub(super) is_shared: bool,
}

/// Connects and negotiates; gives up after `limit`.
pub(super) fn join(
    server: &dyn Server,
    target: &Target,
    limit: Duration,
) -> Result<JoinedConnection, JoinError> {
    let deadline = now() + limit;
    let connected = server.connect(limit)?;
    negotiated(connected, target, deadline)
}

/// Negotiates on a socket until `deadline`.
pub(super) fn negotiated(
    connected: Connected,
    target: &Target,
    deadline: Duration,
) -> Result<JoinedConnection, JoinError> {
    let Connected { socket, credentials } = connected;
    let mut talk = Talk { socket, deadline, tls: None, is_answered: false };
    let negotiated = negotiate(&mut talk, target, credentials.as_ref()).and_then(|export| {
        rustix::io::ioctl_fionbio(&talk.socket, false).map_err(|e| JoinError::Connect(e.into()))?;
        Ok(export)
    });
    // The process that has connected may have a copy of the socket, so closing ours alone would
    // leave the connection open.
    let negotiated = negotiated.inspect_err(|_| {
        let _ = shutdown(&talk.socket, Shutdown::Both);
    });
    let (export, Talk { socket, tls, .. }) = (negotiated?, talk);
    Ok(JoinedConnection { channel: Channel::new(socket, tls), export, is_shared: false })
}

/// Negotiates with the server until transmission begins.
fn negotiate(
    talk: &mut Talk,
    target: &Target,
    credentials: Option<&Credentials>,
) -> Result<Export, JoinError> {
    let Target { export, tls } = target;
    let wish = ExportRequest { name: export.clone(), tls: tls.is_some() };
    let mut handshake = Handshake::new(wish)?;
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    loop {
        bytes.resize(handshake.needs(), 0);
        talk.read(&mut bytes)?;
        let progress = handshake.take(&bytes, &mut out)?;
        if progress == Progress::StartTls {
            let (name, credentials) = tls.as_deref().zip(credentials).ok_or(TlsError::Ended)?;
            talk.start_tls(Tls::connect(name, credentials)?)?;
        }
        talk.write(&mut out)?;
        if let Progress::Done(export) = progress {
            return Ok(export);
        }
    }
}

/// A socket during the negotiation. Its methods block, and fail with `TimedOut` at the deadline.
struct Talk {
    socket: OwnedFd,
    deadline: Duration,
    tls: Option<Box<Tls>>,
    /// The server has sent data under TLS, so it has accepted our certificate.
    is_answered: bool,
}

impl Talk {
    /// Completes the TLS handshake. With TLS 1.3, the client's handshake ends before the server has
    /// seen the client's certificate: a server that refuses it reports that instead of its first
    /// answer.
    fn start_tls(&mut self, mut tls: Tls) -> Result<(), JoinError> {
        let (mut out, mut came) = (Vec::new(), vec![0; RECEIVE]);
        let mut shaken = tls.shake(&mut out);
        loop {
            // Sent also after an error: `out` then holds the alert that tells the server why.
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

    /// Fills `bytes` with received bytes, decrypted if TLS has begun.
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
