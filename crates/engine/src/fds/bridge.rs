//! Doorbells that no worker touches: the janitor's thread forwards their kicks and calls. Such a
//! doorbell is a pipe or a socket; or the kick of a front-end whose eventfds have cost a worker too
//! much CPU time; or an eventfd that is the kick of another ring as well (`foreign.rs`).
//!
//! UML passes pipes and unix sockets as kick and call. A thread that reads or writes a pipe waits
//! for the pipe's lock, which the front-end can hold; so a worker gets an eventfd of the engine
//! instead:
//!
//! ```text
//! kick:  front-end -> pipe or socket -> (thread: drain) -> our eventfd -> worker
//! call:  worker -> our eventfd -> (thread: read) -> pipe or socket -> front-end
//! ```
//! A call by a unix socket needs the thread only before Linux 6.9: from then on a worker sends the
//! call itself ([`sends_never_wait`]).
//!
//! Several calls may become one, since a notification carries no count. The thread sleeps in `poll`
//! only, and `poll` takes no lock of a pipe or unix socket that a front-end could hold.
//!
//! The thread does not read a front-end's eventfd: several rings may have it as their kick, and
//! each must notice every write. An epoll set for each ring reports a write once (`EPOLLET`).

use crate::accounts::cpu_time;
use crate::fds::budget::StandIns;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The maximum of reads from one kick in a row: a front-end that writes without end must not keep
/// the thread from its other work.
const DRAIN_READS: usize = 1024;

/// A file descriptor that a front-end sent, with access to the rules of its session (`foreign.rs`).
pub(crate) trait Sent: AsFd {
    /// True if the session ends because one of its eventfds has blocked or held up a thread.
    fn is_blocked(&self) -> bool;

    /// Records the CPU time that it took to begin to watch the file descriptor.
    fn note_watch(&self, took: Duration);
}

/// The kinds of doorbell that no worker touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OddKind {
    /// An eventfd that is a kick, but that no worker may watch.
    Event,
    Pipe,
    Socket,
}

#[derive(Debug)]
enum BridgeDirection {
    /// The front-end kicks. `is_over`: the other end is closed, so no further kick can come.
    Kick { is_over: bool },
    /// The back-end calls: the thread writes these bytes for each call.
    Call(Vec<u8>),
}

/// A doorbell that no worker touches, with the eventfd that a worker uses instead.
#[derive(Debug)]
struct OddBell<F> {
    id: u64,
    kind: OddKind,
    /// An epoll set that reports writes to `theirs`, an eventfd. The set must be dropped first.
    set: Option<OwnedFd>,
    theirs: F,
    ours: Arc<OwnedFd>,
    direction: BridgeDirection,
    /// The permits for the descriptors `ours` and `set`.
    _stand_ins: StandIns,
}

/// The odd doorbells of a device's sessions. The janitor's thread owns it.
#[derive(Debug)]
pub(crate) struct Bridge<F> {
    last_id: u64,
    bells: Vec<OddBell<F>>,
}

/// The back-end's end of an odd doorbell.
#[derive(Debug)]
pub(crate) struct OurSide {
    /// The eventfd that a worker watches for a kick, or writes to for a call.
    pub(crate) event: Arc<OwnedFd>,
    /// The number of the odd doorbell for [`Bridge::remove`].
    pub(crate) id: u64,
}

impl<F> Default for Bridge<F> {
    fn default() -> Self {
        Self { last_id: 0, bells: Vec::new() }
    }
}

impl<F: Sent> Bridge<F> {
    pub(crate) fn is_empty(&self) -> bool {
        self.bells.is_empty()
    }

    /// Adds an odd doorbell that the front-end rings as its kick.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub(crate) fn add_kick(&mut self, fd: F, kind: OddKind) -> Result<OurSide, Errno> {
        self.add(fd, kind, BridgeDirection::Kick { is_over: false })
    }

    /// Adds a pipe or socket. The thread writes `bytes` to it whenever a worker rings our end.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub(crate) fn add_call(
        &mut self,
        fd: F,
        kind: OddKind,
        bytes: Vec<u8>,
    ) -> Result<OurSide, Errno> {
        self.add(fd, kind, BridgeDirection::Call(bytes))
    }

    /// Adds an odd doorbell.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the system has no eventfd to spare, or front-ends have all
    /// the descriptors that the budget allows. `ENOBUFS`: the front-end has put more into a call
    /// than it should hold. The error of `fcntl` or `shutdown`.
    fn add(
        &mut self,
        theirs: F,
        kind: OddKind,
        direction: BridgeDirection,
    ) -> Result<OurSide, Errno> {
        let stand_ins = StandIns::take(if kind == OddKind::Event { 2 } else { 1 })?;
        let mut set = None;
        match (kind, &direction) {
            (OddKind::Event, _) => set = Some(set_of(&theirs)?),
            (OddKind::Pipe, _) => {
                let flags = rustix::fs::fcntl_getfl(&theirs)?;
                rustix::fs::fcntl_setfl(&theirs, flags | OFlags::NONBLOCK)?;
            }
            (OddKind::Socket, BridgeDirection::Call(_)) => refuse_input(&theirs)?,
            (OddKind::Socket, BridgeDirection::Kick { .. }) => {}
        }
        let ours = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        self.last_id += 1;
        let side = OurSide { event: ours.clone(), id: self.last_id };
        self.bells.push(OddBell {
            id: side.id,
            kind,
            set,
            theirs,
            ours,
            direction,
            _stand_ins: stand_ins,
        });
        Ok(side)
    }

    /// Removes an odd doorbell. Its last call is not lost: the thread forwards calls before each of
    /// its jobs, and the removal is a job.
    pub(crate) fn remove(&mut self, id: u64) {
        self.bells.retain(|bell| bell.id != id);
    }

    /// Forwards the kicks and calls that have arrived, without waiting.
    pub(crate) fn pass_on(&mut self) {
        if self.bells.is_empty() {
            return;
        }
        let ready: Vec<_> = {
            let mut fds: Vec<_> = self.bells.iter().map(OddBell::watched).collect();
            if !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..)) {
                return;
            }
            fds.iter().map(PollFd::revents).collect()
        };
        for (bell, events) in self.bells.iter_mut().zip(ready) {
            if !events.is_empty() {
                bell.pass_on(events);
            }
        }
    }

    /// Sleeps until a kick or call arrives, another thread writes to `wake`, or `most` is over.
    pub(crate) fn wait(&self, wake: BorrowedFd<'_>, most: Option<Duration>) {
        let mut fds: Vec<_> = self.bells.iter().map(OddBell::watched).collect();
        fds.push(PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let most = most.and_then(|most| Timespec::try_from(most).ok());
        let _ = poll(&mut fds, most.as_ref());
        let _ = rustix::io::read(wake, &mut [0; 8]);
    }
}

impl<F: Sent> OddBell<F> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.theirs.as_fd()
    }

    /// Returns the file descriptor that becomes readable when the front-end has kicked.
    fn kicked(&self) -> BorrowedFd<'_> {
        self.set.as_ref().map_or_else(|| self.fd(), AsFd::as_fd)
    }

    /// Returns the descriptor to poll. A kick that is over would be ready for ever: in that case
    /// the engine's eventfd is polled for nothing but errors, which it never has, so that the list
    /// keeps its order.
    fn watched(&self) -> PollFd<'_> {
        let is_costly = self.kind == OddKind::Event && self.theirs.is_blocked();
        match self.direction {
            BridgeDirection::Kick { is_over: false } if !is_costly => {
                PollFd::from_borrowed_fd(self.kicked(), PollFlags::IN)
            }
            BridgeDirection::Kick { .. } => PollFd::new(&*self.ours, PollFlags::empty()),
            BridgeDirection::Call(_) => PollFd::new(&*self.ours, PollFlags::IN),
        }
    }

    fn pass_on(&mut self, events: PollFlags) {
        if let BridgeDirection::Call(bytes) = &self.direction {
            let _ = rustix::io::read(&self.ours, &mut [0; 8]);
            // EAGAIN: the pipe is full, so the front-end has a call to read already. EPIPE: the
            // front-end has closed its end.
            let _ = self.write(bytes);
            return;
        }
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        // Read while there is something to read, also after the front-end has closed its end: a
        // socket that holds unread messages keeps the files open that were sent with them.
        let mut is_over = events.intersects(gone) && !events.contains(PollFlags::IN);
        if events.contains(PollFlags::IN) {
            let drained = self.drain();
            let _ = rustix::io::write(&self.ours, &1u64.to_ne_bytes());
            match drained {
                Drained::Nothing => is_over = true,
                Drained::All => {}
                Drained::Some => return,
            }
        }
        self.direction = BridgeDirection::Kick { is_over };
    }

    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self.kind {
            OddKind::Socket => {
                rustix::net::send(self.fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            }
            OddKind::Pipe | OddKind::Event => write_pipe(self.fd(), bytes),
        }
    }

    /// Reads the bytes that the front-end has written, and discards them.
    fn drain(&self) -> Drained {
        if let Some(set) = &self.set {
            let mut event = [MaybeUninit::uninit()];
            let _ = epoll::wait(set, &mut event, Some(&Timespec::default()));
            return Drained::All;
        }
        let mut bytes = [0; 512];
        for n in 0..DRAIN_READS {
            let read = match self.kind {
                OddKind::Pipe | OddKind::Event => read_pipe(self.fd(), &mut bytes),
                OddKind::Socket => {
                    rustix::net::recv(self.fd(), &mut bytes, RecvFlags::DONTWAIT).map(|(n, _)| n)
                }
            };
            match read {
                Ok(len) if len == bytes.len() => {}
                Ok(1..) | Err(Errno::INTR) => return Drained::All,
                _ if n > 0 => return Drained::All,
                _ => return Drained::Nothing,
            }
        }
        Drained::Some
    }
}

/// Makes an epoll set that reports each write to the eventfd once. Adding the eventfd waits for the
/// lock under which other threads walk the eventfd's waiters: if that takes far too long, the
/// session ends.
fn set_of(eventfd: &impl Sent) -> Result<OwnedFd, Errno> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    let before = cpu_time();
    epoll::add(&set, eventfd, epoll::EventData::new_u64(0), flags)?;
    eventfd.note_watch(cpu_time().saturating_sub(before));
    Ok(set)
}

/// How much was read from a kick that `poll` had reported as readable.
enum Drained {
    /// Nothing: a socket that was shut down, or that listens, is readable for ever.
    Nothing,
    /// Everything that the front-end had written.
    All,
    /// [`DRAIN_READS`] times a full buffer: there may be more.
    Some,
}

/// Shuts the receiving direction of a socket to which the back-end only writes, and discards what
/// was sent before: an unread message with file descriptors keeps these open, which may include the
/// front-end's end of the session's socket.
pub(crate) fn refuse_input(socket: &impl Sent) -> Result<(), Errno> {
    match rustix::net::shutdown(socket, Shutdown::Read) {
        // The other end is closed.
        Ok(()) | Err(Errno::NOTCONN) => {}
        Err(errno) => return Err(errno),
    }
    let mut bytes = [0; 512];
    for _ in 0..DRAIN_READS {
        match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::AGAIN) => return Ok(()),
            Ok(_) | Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::NOBUFS)
}

/// From this release of Linux on, a sender to a unix socket does not collect sockets in flight.
const SENDS_NEVER_WAIT: [u32; 2] = [6, 9];

/// True if sending a message without file descriptors to a unix socket never waits; if the socket
/// is full, the kernel refuses the message. Before Linux 6.9 a sender waits while the kernel
/// collects the garbage of sockets that are sent in messages, and a front-end can make that
/// collection last long.
pub(crate) fn sends_never_wait() -> bool {
    static NEVER: OnceLock<bool> = OnceLock::new();
    *NEVER.get_or_init(|| {
        let uname = rustix::system::uname();
        since(&uname.release().to_string_lossy(), SENDS_NEVER_WAIT)
    })
}

/// True if this release of the kernel is `least` or later.
fn since(release: &str, least: [u32; 2]) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    let version: [u32; 2] = [numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)];
    version >= least
}

/// The offset for a read or write without an offset.
const NO_OFFSET: u64 = u64::MAX;

/// Reads from a pipe without waiting, even if the front-end has cleared `O_NONBLOCK`.
///
/// The pipe is not opened anew for an `O_NONBLOCK` of its own: that would use this process's rights
/// to open a pipe that the front-end may be unable to open. Before Linux 6.4 the kernel has no
/// `RWF_NOWAIT` for pipes: there a front-end that clears the flag can block this thread, the
/// janitor's of its own device, and no other thread, until the janitor is interrupted.
fn read_pipe(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    let mut buffers = [IoSliceMut::new(bytes)];
    match rustix::io::preadv2(fd, &mut buffers, NO_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => rustix::io::read(fd, bytes),
        read => read,
    }
}

/// Writes to a pipe without waiting, as [`read_pipe`] reads.
fn write_pipe(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    let buffers = [IoSlice::new(bytes)];
    match rustix::io::pwritev2(fd, &buffers, NO_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) => rustix::io::write(fd, bytes),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_compared_by_its_first_two_numbers() {
        for (release, is_since) in [
            ("6.9.0", true),
            ("6.18.44-fc-v657", true),
            ("7.0", true),
            ("6.9-rc1", true),
            ("6.8.12-generic", false),
            ("6.1.0-56-cloud-amd64", false),
            ("5.15", false),
            ("", false),
        ] {
            assert_eq!(since(release, SENDS_NEVER_WAIT), is_since, "{release}");
        }
    }
}
