//! Kick, call, err and the back-end channel: descriptors of a front-end, checked before use.
//!
//! The event channel of a Xen queue is both its kick and its call: two eventfds of the simulated
//! Xen, or a port of the event device.
//!
//! QEMU passes eventfds. UML passes "pipes", each of which is a pair of unix sockets or a pipe. Any
//! other kind is refused. A worker only touches eventfds, and sockets that are calls: either the
//! front-end's own, guarded by the sentry (`sentry.rs`), or an eventfd of the engine that stands
//! for another doorbell (`bridge.rs`).
//!
//! The daemon may have rights that the front-end lacks. So the daemon never opens a front-end's
//! file again by its path, and a descriptor must carry the access for which it is used. A pipe or
//! socket must be anonymous: a name could lead to another program's socket, or to the session's own
//! (docs/design/0014).

use crate::accounts::cpu_time;
use crate::fds::bridge::{self, OddKind, OurSide};
use crate::fds::ends;
use crate::fds::foreign::{ForeignFd, Janitor, Write};
use crate::fds::sentry::{self, Odd};
use crate::io::QueueIo;
use manyring_memory::EventPort;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketType};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a doorbell is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DoorbellError {
    /// Neither an eventfd nor a pipe nor a unix socket.
    #[error("the file descriptor is neither an eventfd nor a pipe nor a unix socket")]
    Kind,
    /// The descriptor was opened with `O_PATH`, or without the right to read (a kick) or to write.
    #[error("the file descriptor does not carry the access that its use needs")]
    Access,
    /// A pipe or unix socket that has a name, or whose peer has one.
    #[error("the pipe or unix socket has a name: only pipe() and socketpair() make doorbells")]
    Named,
    /// The session's own socket, or its peer.
    #[error("the file descriptor is an end of the session's own socket")]
    Session,
    /// A system call that reads the descriptor's kind, or makes it non-blocking, failed.
    #[error("the file descriptor cannot be used: {0}")]
    System(Errno),
    /// The system had no thread to check the descriptor.
    #[error("no thread to check the file descriptor")]
    NoThread,
}

impl From<Errno> for DoorbellError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

/// The file of a doorbell, by who made the file.
#[derive(Debug)]
enum BellFile {
    /// An eventfd that this process has made.
    Own(OwnedFd),
    /// An eventfd that a domain of the simulated Xen may share; true once a write to it has
    /// blocked.
    Shared(OwnedFd, AtomicBool),
    /// The front-end's eventfd, or the unix socket that the front-end sent as a call.
    Foreign(Arc<Theirs>),
    /// The engine's eventfd that stands for a pipe or socket of the front-end (`bridge.rs`).
    Bridged(OurEnd),
    /// An event channel of Xen.
    Port(Arc<EventPort>),
}

impl AsFd for BellFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) | Self::Shared(fd, _) => fd.as_fd(),
            Self::Foreign(theirs) => theirs.fd.as_fd(),
            Self::Bridged(end) => end.side.event.as_fd(),
            Self::Port(port) => port.as_fd(),
        }
    }
}

/// A worker's end of an odd doorbell. Dropping it has the janitor close the odd doorbell.
#[derive(Debug)]
struct OurEnd {
    side: OurSide,
    janitor: Arc<Janitor>,
}

impl OurEnd {
    fn of(side: OurSide, janitor: Arc<Janitor>) -> Self {
        Self { side, janitor }
    }
}

impl Drop for OurEnd {
    fn drop(&mut self) {
        self.janitor.push_removal(self.side.id);
    }
}

/// The direction in which a doorbell is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// The back-end reads it.
    Kick,
    /// The back-end writes to it.
    Call,
}

/// `f_type` of the kernel's own mount of anonymous pipes. A FIFO lies on the mount of its name.
const PIPEFS: u64 = 0x5049_5045;

/// Returns the kind of a doorbell; `None` if it is an eventfd. May block, so only the janitor's
/// thread may call this for a descriptor of a front-end.
fn kind_of(fd: &impl AsFd, used: Use) -> Result<Option<OddKind>, DoorbellError> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    let other = if used == Use::Kick { OFlags::RDONLY } else { OFlags::WRONLY };
    let access = flags & OFlags::RWMODE;
    if flags.contains(OFlags::PATH) || (access != OFlags::RDWR && access != other) {
        return Err(DoorbellError::Access);
    }
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    // Only the kernel makes this name: the path of a file begins with a slash.
    if rustix::fs::readlink(path, Vec::new())?.as_bytes() == b"anon_inode:[eventfd]" {
        return Ok(None);
    }
    match FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) {
        FileType::Fifo => {
            let kind = u64::try_from(rustix::fs::fstatfs(fd)?.f_type).unwrap_or(0);
            if kind == PIPEFS { Ok(Some(OddKind::Pipe)) } else { Err(DoorbellError::Named) }
        }
        FileType::Socket if rustix::net::sockopt::socket_domain(fd)? == AddressFamily::UNIX => {
            check_socket(fd).map(|()| Some(OddKind::Socket))
        }
        _ => Err(DoorbellError::Kind),
    }
}

/// Returns the number by which the kernel tells eventfds apart. May block, as [`kind_of`] may.
fn eventfd_id(fd: &impl AsFd) -> Result<u64, DoorbellError> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let info = std::fs::read_to_string(path).map_err(|error| {
        let errno = Errno::from_io_error(&error);
        DoorbellError::System(errno.unwrap_or(Errno::IO))
    })?;
    let id = info.lines().find_map(|line| line.strip_prefix("eventfd-id:"));
    id.and_then(|id| id.trim().parse().ok()).ok_or(DoorbellError::Kind)
}

/// Checks that a unix socket was made by `socketpair`: neither the socket nor its peer has a name.
/// A client of a listening socket has a peer with a name, and a socket that `accept` returns has a
/// name itself.
fn check_socket(fd: &impl AsFd) -> Result<(), DoorbellError> {
    if rustix::net::sockopt::socket_type(fd)? != SocketType::STREAM {
        return Err(DoorbellError::Kind);
    }
    let is_unnamed = |address: SocketAddrAny| -> bool {
        // The address is `sun_family` alone: the socket has no name.
        usize::try_from(address.addr_len()).is_ok_and(|len| len <= size_of::<u16>())
    };
    let is_pair = match rustix::net::getpeername(fd) {
        Ok(peer) => peer.is_none_or(is_unnamed),
        // The socket is not connected: it may listen, or be connected to another program later.
        Err(Errno::NOTCONN) => false,
        Err(errno) => return Err(errno.into()),
    };
    if is_pair && is_unnamed(rustix::net::getsockname(fd)?) {
        return if ends::is_of_session(fd)? { Err(DoorbellError::Session) } else { Ok(()) };
    }
    Err(DoorbellError::Named)
}

/// Sets `O_NONBLOCK`. A front-end can clear it; then the sentry interrupts a write that blocks.
fn make_nonblocking(fd: &impl AsFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
}

/// The available buffer notifications of a queue. A worker watches the eventfd and never reads it,
/// but reads a port of Xen at each event (`hear`). A clone is the same doorbell.
#[derive(Clone, Debug)]
pub struct Kick(Arc<BellFile>);

impl Kick {
    /// Makes the kick of a queue without a front-end from an eventfd of this process.
    ///
    /// # Errors
    /// [`DoorbellError::Kind`] if the file descriptor is no eventfd.
    pub fn new(fd: OwnedFd) -> Result<Self, DoorbellError> {
        own(fd).map(Self::of)
    }

    fn of(bell: BellFile) -> Self {
        Self(Arc::new(bell))
    }

    /// Checks the file descriptor that a front-end sent as the kick of `ring`. A worker watches an
    /// eventfd for one ring of a session only: a front-end can make beginning or ending a watch
    /// slow, which must not be paid for each ring. The janitor watches it for the other rings.
    ///
    /// # Errors
    /// [`DoorbellError`].
    pub async fn of_front_end(fd: ForeignFd, ring: usize) -> Result<Self, DoorbellError> {
        let janitor = fd.origin().janitor().clone();
        let theirs = janitor.clone();
        let bell = janitor.with_bridge(move |bridge| {
            let side = match kind_of(&fd, Use::Kick)? {
                None if fd.origin().may_watch(ring, eventfd_id(&fd)?) => {
                    return Ok(Theirs::bell(fd, false));
                }
                None => bridge.add_kick(fd, OddKind::Event)?,
                Some(kind) => bridge.add_kick(fd, kind)?,
            };
            Ok(BellFile::Bridged(OurEnd::of(side, theirs)))
        });
        bell.await.unwrap_or(Err(DoorbellError::NoThread)).map(Self::of)
    }

    /// Makes a kick of the events of a Xen queue's channel.
    #[must_use]
    pub fn of_port(port: Arc<EventPort>) -> Self {
        Self::of(BellFile::Port(port))
    }

    /// Accepts an event that the worker has noticed: a Xen port is masked until then.
    #[inline]
    pub(crate) fn hear(&self) {
        if let BellFile::Port(port) = &*self.0 {
            port.hear();
        }
    }

    /// Makes `call`, in which a worker begins or ends to watch the kick. If that takes far too much
    /// CPU time, the session ends: the front-end has put very many waiters on the eventfd, and
    /// walks them all the time.
    pub(crate) fn touched<T>(
        &self,
        io: &mut QueueIo<'_>,
        call: impl FnOnce(&mut QueueIo<'_>) -> T,
    ) -> T {
        let BellFile::Foreign(theirs) = &*self.0 else { return call(io) };
        // Submit the entries of other queues first: their time is not this queue's.
        io.submit();
        let before = cpu_time();
        let result = call(io);
        io.submit();
        theirs.fd.origin().note_watch(cpu_time().saturating_sub(before));
        result
    }

    /// True if the driver has ever kicked: an eventfd that is never read stays readable.
    pub(crate) fn keeps(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The used buffer notifications of a queue, or its error notifications.
#[derive(Debug)]
pub struct Call(BellFile);

impl Call {
    /// Makes a call from an eventfd of this process, for a queue without a front-end, or from the
    /// eventfd of an event channel of the simulated Xen.
    ///
    /// # Errors
    /// [`DoorbellError::Kind`] if the file descriptor is no eventfd, [`DoorbellError::System`] if
    /// it cannot be made non-blocking.
    pub fn new(fd: OwnedFd) -> Result<Self, DoorbellError> {
        make_nonblocking(&fd)?;
        match kind_of(&fd, Use::Call)? {
            None => Ok(Self(BellFile::Shared(fd, AtomicBool::new(false)))),
            Some(_) => Err(DoorbellError::Kind),
        }
    }

    /// Makes a call that signals the other end of a Xen queue's channel.
    #[must_use]
    pub fn of_port(port: Arc<EventPort>) -> Self {
        Self(BellFile::Port(port))
    }

    /// Checks the call of a front-end, and makes it non-blocking.
    ///
    /// # Errors
    /// [`DoorbellError`].
    pub async fn of_front_end(fd: ForeignFd) -> Result<Self, DoorbellError> {
        let janitor = fd.origin().janitor().clone();
        let theirs = janitor.clone();
        let bell = janitor.with_bridge(move |bridge| match kind_of(&fd, Use::Call)? {
            None => {
                make_nonblocking(&fd)?;
                Ok(Theirs::bell(fd, false))
            }
            Some(OddKind::Socket) if bridge::sends_never_wait() => {
                bridge::refuse_input(&fd)?;
                Ok(Theirs::bell(fd, true))
            }
            Some(kind) => {
                let side = bridge.add_call(fd, kind, 1u64.to_ne_bytes().into())?;
                Ok(BellFile::Bridged(OurEnd::of(side, theirs)))
            }
        });
        bell.await.unwrap_or(Err(DoorbellError::NoThread)).map(Self)
    }

    /// Rings. If the eventfd is full, its reader has a notification to read already.
    ///
    /// A full eventfd that the front-end has made blocking blocks this thread for some
    /// milliseconds, once: then the session is told to end, and this process writes to none of its
    /// eventfds any more. If a domain of the simulated Xen does so, its event channel is not
    /// signalled any more.
    ///
    /// A write also walks all waiters that the front-end has put on the eventfd. Reading the clock
    /// at each write would cost too much: only after the sentry has seen a write under way, the CPU
    /// time of the next writes is measured. After a long write the janitor makes the further ones;
    /// a longer one ends the session ([`crate::Origin`]).
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "on the way of every turn that answers something")]
    pub fn ring(&self) {
        let (fd, is_odd) = match &self.0 {
            BellFile::Foreign(theirs) => (theirs.fd.as_fd(), theirs.is_odd()),
            BellFile::Shared(fd, is_blocked) => (fd.as_fd(), is_blocked.load(Ordering::Relaxed)),
            other => return other.ring(),
        };
        if is_odd {
            return self.0.ring_odd();
        }
        if let Err(odd) = sentry::write(fd, 1) {
            self.0.tell_odd(odd);
        }
    }

    /// True for a pipe or a socket: a front-end that is User Mode Linux can miss such a call.
    pub(crate) fn may_be_missed(&self) -> bool {
        matches!(&self.0, BellFile::Foreign(theirs) if theirs.is_socket)
            || matches!(&self.0, BellFile::Bridged(_))
    }

    /// Rings from a thread that must not pay for a front-end's waiters: the janitor writes.
    pub fn ring_aside(&self) {
        match &self.0 {
            BellFile::Foreign(theirs) if theirs.fd.origin().is_blocked() => {}
            BellFile::Foreign(theirs) => theirs.pass_on(),
            _ => self.ring(),
        }
    }
}

/// The eventfd of a front-end, or its unix socket.
#[derive(Debug)]
struct Theirs {
    fd: ForeignFd,
    is_socket: bool,
    /// True while the janitor has the job to write to this doorbell: one job serves all calls.
    is_passed_on: AtomicBool,
}

impl Theirs {
    fn bell(fd: ForeignFd, is_socket: bool) -> BellFile {
        let is_passed_on = AtomicBool::new(false);
        BellFile::Foreign(Arc::new(Self { fd, is_socket, is_passed_on }))
    }

    /// True if a plain write is not enough: for a socket, or after slow or blocked writes.
    #[inline]
    fn is_odd(&self) -> bool {
        self.is_socket || self.fd.origin().next_write().is_some()
    }

    fn write(&self) -> Result<(), Odd> {
        let fd = self.fd.as_fd();
        if self.is_socket { sentry::send(fd, 1) } else { sentry::write(fd, 1) }
    }

    /// Writes now, and records the CPU time of the write.
    fn write_measured(&self) {
        let origin = self.fd.origin();
        let before = cpu_time();
        let written = self.write();
        let took = cpu_time().saturating_sub(before);
        if written == Err(Odd::Blocked) {
            origin.tell_blocked();
        } else {
            origin.note_write(took);
        }
    }

    /// Has the janitor write to the front-end's doorbell.
    fn pass_on(self: &Arc<Self>) {
        if self.is_passed_on.swap(true, Ordering::AcqRel) {
            return;
        }
        let theirs = self.clone();
        self.fd.origin().janitor().push_write(move || {
            theirs.is_passed_on.store(false, Ordering::Release);
            if !theirs.fd.origin().is_blocked() {
                theirs.write_measured();
            }
        });
    }
}

impl BellFile {
    /// Rings a doorbell that no other process can make blocking: an eventfd of this process, or a
    /// port of Xen. A separate function, so that [`Call::ring`] stays small enough to be inlined.
    #[inline(never)]
    fn ring(&self) {
        match self {
            Self::Port(port) => port.notify(),
            ours => drop(rustix::io::write(ours, &1u64.to_ne_bytes())),
        }
    }

    /// Rings a doorbell that is a socket, or whose writes have been slow or blocked before.
    #[cold]
    #[inline(never)]
    fn ring_odd(&self) {
        let Self::Foreign(theirs) = self else { return };
        match theirs.fd.origin().next_write() {
            Some(Write::Never) => {}
            Some(Write::ByJanitor) => theirs.pass_on(),
            None if theirs.is_socket => {
                if let Err(odd) = theirs.write() {
                    self.tell_odd(odd);
                }
            }
            Some(Write::Measured) | None => theirs.write_measured(),
        }
    }

    /// Records that a write to the eventfd has blocked, or that the sentry saw it under way.
    #[cold]
    #[inline(never)]
    fn tell_odd(&self, odd: Odd) {
        match (self, odd) {
            (Self::Foreign(theirs), Odd::Seen) => {
                theirs.fd.origin().suspect(sentry::seen_for());
            }
            (Self::Foreign(theirs), Odd::Blocked) => theirs.fd.origin().tell_blocked(),
            (Self::Shared(_, is_blocked), Odd::Blocked)
                if !is_blocked.swap(true, Ordering::Relaxed) =>
            {
                tracing::warn!(
                    "an event channel is full and blocks writers; it is not signalled any more"
                );
            }
            _ => {}
        }
    }
}

/// The back-end request channel of a front-end, by which the back-end sends one fixed message.
#[derive(Debug)]
pub struct Channel(OurEnd);

impl Channel {
    /// Checks the back-end channel of a front-end.
    ///
    /// # Errors
    /// [`DoorbellError`]; [`DoorbellError::Kind`] for an eventfd too, which carries no messages.
    pub async fn of_front_end(fd: ForeignFd, message: Vec<u8>) -> Result<Self, DoorbellError> {
        let janitor = fd.origin().janitor().clone();
        let theirs = janitor.clone();
        let end = janitor.with_bridge(move |bridge| {
            let kind = kind_of(&fd, Use::Call)?.ok_or(DoorbellError::Kind)?;
            Ok(OurEnd::of(bridge.add_call(fd, kind, message)?, theirs))
        });
        end.await.unwrap_or(Err(DoorbellError::NoThread)).map(Self)
    }

    /// Sends the message without waiting. If the channel is full, it holds such a message already.
    pub fn send(&self) {
        let _ = rustix::io::write(&self.0.side.event, &1u64.to_ne_bytes());
    }
}

fn own(fd: OwnedFd) -> Result<BellFile, DoorbellError> {
    match kind_of(&fd, Use::Kick)? {
        None => Ok(BellFile::Own(fd)),
        Some(_) => Err(DoorbellError::Kind),
    }
}

#[cfg(test)]
mod tests;
