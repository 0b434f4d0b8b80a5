//! `XenCalls`: a connection for calls to the simulated Xen, as domain 0. `EventChannel`: an end of
//! one.

use crate::DriverError;
use manyring_memory::simgrant::SimGrants;
use manyring_wire::xen::hypercall::{CALL_SIZE, Hypercall, Outcome, SOCKET_SUFFIX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Most file descriptors that an answer brings.
const FDS_MAX: usize = 2;

/// A connection for calls. Its domain, seats and event channels end with it.
#[derive(Debug)]
pub struct XenCalls {
    /// Held from a call to its answer.
    stream: Mutex<UnixStream>,
}

/// The name of the socket for calls beside that of xenstore.
pub(super) fn call_socket(store_socket: &Path) -> PathBuf {
    let mut name = store_socket.as_os_str().to_owned();
    name.push(SOCKET_SUFFIX);
    name.into()
}

impl XenCalls {
    /// Connects to the simulated Xen whose xenstore socket is `store_socket`.
    ///
    /// # Errors
    /// [`DriverError::Io`].
    pub fn connect(store_socket: &Path) -> Result<Self, DriverError> {
        let stream = UnixStream::connect(call_socket(store_socket))?;
        Ok(Self { stream: Mutex::new(stream) })
    }

    /// Makes a call. Returns its outcome and the file descriptors that came with it.
    ///
    /// # Errors
    /// [`DriverError::System`]: the server's reason, or the socket's (`EPIPE`: the server has
    /// left).
    pub fn call(&self, call: Hypercall) -> Result<(Outcome, Vec<OwnedFd>), DriverError> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&call.emit())?;
        let mut bytes = [0; CALL_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&*stream, &mut slices, &mut control, flags)?;
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = fds.flatten().collect();
        if received.bytes != CALL_SIZE {
            return Err(Errno::PIPE.into());
        }
        let outcome = Outcome::parse(&bytes);
        match i32::try_from(outcome.errno) {
            Ok(0) => Ok((outcome, fds)),
            Ok(errno) => Err(Errno::from_raw_os_error(errno).into()),
            Err(_) => Err(Errno::PROTO.into()),
        }
    }

    /// Takes a seat from which the pages of `domain` are mapped: once for all of its devices.
    ///
    /// # Errors
    /// [`DriverError::System`]: `ESRCH` without the domain, `EBUSY` without a free seat.
    pub fn attach(&self, domain: u16) -> Result<SimGrants, DriverError> {
        let (outcome, fds) = self.call(Hypercall::Attach { domain })?;
        let file = fds.into_iter().next().ok_or(Errno::PROTO)?;
        let seat = u8::try_from(outcome.second).map_err(|_| Errno::PROTO)?;
        Ok(SimGrants::new(file, outcome.first, 0, seat)?)
    }

    /// Makes a port to which the domain `remote` may bind.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn alloc_unbound(&self, remote: u16) -> Result<EventChannel, DriverError> {
        EventChannel::of(self.call(Hypercall::AllocUnbound { remote })?)
    }

    /// Binds to a port that the domain `remote` has made for this one.
    ///
    /// # Errors
    /// [`DriverError::System`]: `EINVAL` if there is no such port, or if it is bound already.
    pub fn bind(&self, remote: u16, port: u32) -> Result<EventChannel, DriverError> {
        EventChannel::of(self.call(Hypercall::Bind { remote, port })?)
    }

    /// Closes a port of this domain.
    ///
    /// # Errors
    /// [`DriverError::System`].
    pub fn close(&self, channel: EventChannel) -> Result<(), DriverError> {
        self.call(Hypercall::Close { port: channel.port }).map(drop)
    }
}

/// One end of an event channel.
#[derive(Debug)]
pub struct EventChannel {
    port: u32,
    own: OwnedFd,
    other: OwnedFd,
}

impl EventChannel {
    fn of((outcome, fds): (Outcome, Vec<OwnedFd>)) -> Result<Self, DriverError> {
        let mut fds = fds.into_iter();
        let (own, other) = fds.next().zip(fds.next()).ok_or(Errno::PROTO)?;
        Ok(Self { port: outcome.first, own, other })
    }

    /// The port of this end. The other end learns it through xenstore.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// The eventfd that is signalled for this end: a kick, seen from the back-end.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.own.as_fd()
    }

    /// Its two eventfds: the one that is signalled for this end, a back-end's kick, and the one
    /// that this end signals, a back-end's call. The port stays bound until the connection ends on
    /// which it was bound.
    #[must_use]
    pub fn into_fds(self) -> (OwnedFd, OwnedFd) {
        (self.own, self.other)
    }

    /// Signals the other end of the channel.
    pub fn notify(&self) {
        // An eventfd whose count is full is signalled already.
        let _ = rustix::io::write(&self.other, &1_u64.to_ne_bytes());
    }

    /// Waits until this end is signalled, and clears it.
    ///
    /// # Errors
    /// [`DriverError::Timeout`], [`DriverError::System`].
    pub fn wait(&self, timeout: Duration) -> Result<(), DriverError> {
        let timeout = Timespec::try_from(timeout).map_err(|_| Errno::INVAL)?;
        poll(&mut [PollFd::new(&self.own, PollFlags::IN)], Some(&timeout))?;
        match rustix::io::read(&self.own, &mut [0; 8]) {
            Ok(_) => Ok(()),
            Err(Errno::AGAIN) => Err(DriverError::Timeout),
            Err(error) => Err(error.into()),
        }
    }
}
