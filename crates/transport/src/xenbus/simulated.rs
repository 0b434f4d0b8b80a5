//! `SimulatedXen`: calls a simulated Xen for the services that the hypervisor gives a back-end:
//! access to the pages of domains, and event channels.
//!
//! The simulated Xen listens for these calls at a socket beside that of its xenstore
//! (`wire::xen::hypercall`). A call blocks until its answer, so the control thread must not make
//! it.

use manyring_memory::simgrant::SimGrants;
use manyring_wire::xen::hypercall::{CALL_SIZE, Hypercall, Outcome, SOCKET_SUFFIX};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::HashMap;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The most file descriptors of an answer.
const FDS_MAX: usize = 2;
/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A connection for calls. Its seats and event channels end with it.
#[derive(Debug)]
pub struct SimulatedXen {
    /// Locked from a call to its answer.
    stream: Mutex<UnixStream>,
    /// By domain: the seat of this process, and how many [`Seat`]s share it.
    seats: Mutex<HashMap<u16, (Arc<SimGrants>, usize)>>,
}

/// A share in the seat by which this process may map pages of a domain. Dropping the last share
/// returns the seat; no page of the domain may be mapped then.
#[derive(Debug)]
pub struct Seat {
    xen: Arc<SimulatedXen>,
    domain: u16,
    grants: Arc<SimGrants>,
}

/// The memory of a domain, for another process that maps pages of it by this process's seat.
#[derive(Debug)]
pub struct Lent {
    /// The domain's grant table and pages.
    pub file: OwnedFd,
    /// Number of entries of the grant table.
    pub entries: u32,
    /// The number of the seat. It is returned when the connection ends; the other process must have
    /// ended before.
    pub seat: u8,
}

/// This process's end of an event channel. Dropping it closes the port.
#[derive(Debug)]
pub struct Channel {
    xen: Arc<SimulatedXen>,
    port: u32,
}

impl SimulatedXen {
    /// Connects to the simulated Xen whose xenstore has this socket.
    ///
    /// # Errors
    /// Those of `connect`: no simulated Xen listens there (`ENOENT`, `ECONNREFUSED`).
    pub fn connect(store_socket: &Path) -> std::io::Result<Self> {
        let mut name = store_socket.as_os_str().to_owned();
        name.push(SOCKET_SUFFIX);
        let stream = UnixStream::connect(Path::new(&name))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { stream: Mutex::new(stream), seats: Mutex::default() })
    }

    /// Takes a share in the seat of `domain`.
    ///
    /// # Errors
    /// `ESRCH`: there is no such domain. `EBUSY`: it has no free seat. `EMFILE`: this process can
    /// have no further file descriptor. `ENOMEM`: the domain's pages cannot be mapped. Any other:
    /// the connection has failed.
    pub fn attach(self: &Arc<Self>, domain: u16) -> Result<Seat, Errno> {
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let grants = match seats.get_mut(&domain) {
            Some((grants, shares)) => {
                *shares += 1;
                grants.clone()
            }
            None => {
                let grants = self.seat(domain).inspect_err(|_| {
                    // The server may have assigned the seat, and its answer was lost: return it. No
                    // other share uses it, since this process has no share in that domain.
                    let _ = self.call(Hypercall::Detach { domain });
                })?;
                let grants = Arc::new(grants);
                seats.insert(domain, (grants.clone(), 1));
                grants
            }
        };
        Ok(Seat { xen: self.clone(), domain, grants })
    }

    fn seat(&self, domain: u16) -> Result<SimGrants, Errno> {
        let Lent { file, entries, seat } = self.lend(domain)?;
        SimGrants::new(file, entries, 0, seat).map_err(|_| Errno::NOMEM)
    }

    /// Takes the seat of `domain` for another process, and maps nothing. This connection must have
    /// no [`Seat`] of the domain.
    ///
    /// # Errors
    /// As for [`Self::attach`].
    pub fn lend(&self, domain: u16) -> Result<Lent, Errno> {
        let (outcome, fds) = self.call(Hypercall::Attach { domain })?;
        let file = fds.into_iter().next().ok_or(Errno::MFILE)?;
        let seat = u8::try_from(outcome.second).map_err(|_| Errno::PROTO)?;
        Ok(Lent { file, entries: outcome.first, seat })
    }

    /// Binds to the port `remote_port` that `domain` has created for this back-end. Returns the
    /// local end, and its two eventfds: one that signals this end, and one that signals the other.
    ///
    /// # Errors
    /// `EINVAL`: there is no such port, or it is bound already. `EMFILE`: this process can have no
    /// further file descriptor. Any other: the connection has failed.
    pub fn bind(
        self: &Arc<Self>,
        domain: u16,
        remote_port: u32,
    ) -> Result<(Channel, OwnedFd, OwnedFd), Errno> {
        let (outcome, fds) = self.call(Hypercall::Bind { remote: domain, port: remote_port })?;
        let channel = Channel { xen: self.clone(), port: outcome.first };
        let mut fds = fds.into_iter();
        let (own, other) = fds.next().zip(fds.next()).ok_or(Errno::MFILE)?;
        Ok((channel, own, other))
    }

    /// Makes a call. Returns its outcome and the received file descriptors: fewer than the server
    /// has sent, if `RLIMIT_NOFILE` is reached.
    fn call(&self, call: Hypercall) -> Result<(Outcome, Vec<OwnedFd>), Errno> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        stream.write_all(&call.emit()).map_err(failed)?;
        let mut bytes = [0; CALL_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
        let received = retry_on_intr(|| recvmsg(&*stream, &mut slices, &mut control, flags));
        let received = received.inspect_err(|_| {
            // The answer may still come, and the next call would take it for its own. So close the
            // connection.
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = fds.flatten().collect();
        if received.bytes != CALL_SIZE {
            return Err(Errno::PIPE);
        }
        let outcome = Outcome::parse(&bytes);
        match i32::try_from(outcome.errno) {
            Ok(0) => Ok((outcome, fds)),
            Ok(errno) => Err(Errno::from_raw_os_error(errno)),
            Err(_) => Err(Errno::PROTO),
        }
    }
}

impl Seat {
    /// Returns the pages to which the domain has granted access.
    #[must_use]
    pub fn grants(&self) -> &Arc<SimGrants> {
        &self.grants
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Keep the lock until the server has freed the seat. Otherwise another thread could attach
        // before that, and lose its seat by this call.
        let mut seats = self.xen.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, shares)) = seats.get_mut(&self.domain) else { return };
        *shares -= 1;
        if *shares == 0 {
            seats.remove(&self.domain);
            // An error means that the server is gone, and with it the seat.
            let _ = self.xen.call(Hypercall::Detach { domain: self.domain });
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // An error means that the server is gone, and with it the channel.
        let _ = self.xen.call(Hypercall::Close { port: self.port });
    }
}
