//! Doorbells that are no eventfds: the janitor's thread stands between them and the workers.
//!
//! UML passes pipes and unix sockets. Who writes to a pipe or reads from it waits for a lock that
//! the front-end can hold, so a worker has an eventfd of ours instead:
//!
//! ```text
//! kick:  front-end -> pipe or socket -> (thread: drain) -> our eventfd -> worker
//! call:  worker -> our eventfd -> (thread: read) -> pipe or socket -> front-end
//! ```
//! Several calls may become one: a doorbell says "look", not how often. The thread only sleeps in
//! `poll`, which takes no lock of a pipe or unix socket that somebody could hold.

use crate::foreign::{ForeignFd, Janitor};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::sync::Arc;

/// Reads of one drain at most: a front-end that writes without end must not keep the thread.
const DRAIN_READS: usize = 1024;

/// The two kinds of doorbell that are no eventfds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OddKind {
    Pipe,
    Socket,
}

#[derive(Debug)]
enum Direction {
    /// From the front-end; `is_over` once nobody can ring it any more, and it is empty.
    Kick { is_over: bool },
    /// To the front-end: these bytes.
    Call(Vec<u8>),
}

/// A doorbell that is no eventfd, and ours that stands for it.
#[derive(Debug)]
struct OddBell {
    id: u64,
    kind: OddKind,
    theirs: ForeignFd,
    /// A pipe opened anew: its flags are ours.
    reopened: Option<OwnedFd>,
    ours: Arc<OwnedFd>,
    direction: Direction,
}

/// The odd doorbells of a session. Lives on the janitor's thread.
#[derive(Debug, Default)]
pub(crate) struct Bridge {
    last_id: u64,
    bells: Vec<OddBell>,
}

/// Our end of an odd doorbell, as its worker holds it; dropped, it ends the odd one too.
#[derive(Debug)]
pub(crate) struct OurEnd {
    pub(crate) event: Arc<OwnedFd>,
    id: u64,
    janitor: Arc<Janitor>,
}

impl Drop for OurEnd {
    fn drop(&mut self) {
        let id = self.id;
        self.janitor.push_removal(id);
    }
}

impl Bridge {
    pub(crate) fn is_empty(&self) -> bool {
        self.bells.is_empty()
    }

    /// Takes a kick.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub(crate) fn add_kick(&mut self, fd: ForeignFd, kind: OddKind) -> Result<OurEnd, Errno> {
        self.add(fd, kind, Direction::Kick { is_over: false })
    }

    /// Takes what `bytes` are written to whenever our end is rung.
    ///
    /// # Errors
    /// Those of [`Self::add`].
    pub(crate) fn add_call(
        &mut self,
        fd: ForeignFd,
        kind: OddKind,
        bytes: Vec<u8>,
    ) -> Result<OurEnd, Errno> {
        self.add(fd, kind, Direction::Call(bytes))
    }

    /// # Errors
    /// `EMFILE` and the like: no eventfd is to be had; the system's if a pipe can neither be opened
    /// anew nor be made non-blocking.
    fn add(
        &mut self,
        theirs: ForeignFd,
        kind: OddKind,
        direction: Direction,
    ) -> Result<OurEnd, Errno> {
        let access = match direction {
            Direction::Kick { .. } => OFlags::RDONLY,
            Direction::Call(_) => OFlags::WRONLY,
        };
        let reopened = if kind == OddKind::Pipe { reopen(&theirs, access)? } else { None };
        let ours = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        self.last_id += 1;
        let janitor = theirs.origin().janitor().clone();
        let end = OurEnd { event: ours.clone(), id: self.last_id, janitor };
        self.bells.push(OddBell { id: end.id, kind, theirs, reopened, ours, direction });
        Ok(end)
    }

    /// What was rung last has been passed on: the thread does that before each job.
    pub(crate) fn remove(&mut self, id: u64) {
        self.bells.retain(|bell| bell.id != id);
    }

    /// Passes on what has been rung.
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

    /// Sleeps until something is rung or `wake` is written to.
    pub(crate) fn wait(&self, wake: BorrowedFd<'_>) {
        let mut fds: Vec<_> = self.bells.iter().map(OddBell::watched).collect();
        fds.push(PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let _ = poll(&mut fds, None);
        let _ = rustix::io::read(wake, &mut [0; 8]);
    }
}

impl OddBell {
    fn fd(&self) -> BorrowedFd<'_> {
        self.reopened.as_ref().map_or_else(|| self.theirs.as_fd(), AsFd::as_fd)
    }

    /// What to poll. A kick that is over would be ready for ever: our eventfd, which is polled for
    /// an error that it never has, takes its place in the list.
    fn watched(&self) -> PollFd<'_> {
        match self.direction {
            Direction::Kick { is_over: false } => {
                PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)
            }
            Direction::Kick { is_over: true } => PollFd::new(&*self.ours, PollFlags::empty()),
            Direction::Call(_) => PollFd::new(&*self.ours, PollFlags::IN),
        }
    }

    fn pass_on(&mut self, events: PollFlags) {
        if let Direction::Call(bytes) = &self.direction {
            let _ = rustix::io::read(&self.ours, &mut [0; 8]);
            // A full pipe means that the front-end has been told already, an error that it has
            // gone.
            let _ = self.write(bytes);
            return;
        }
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let mut is_over = events.intersects(gone);
        if events.contains(PollFlags::IN) {
            let drained = self.drain();
            let _ = rustix::io::write(&self.ours, &1u64.to_ne_bytes());
            match drained {
                Drained::Nothing => is_over = true,
                Drained::All => {}
                Drained::Some => return,
            }
        }
        self.direction = Direction::Kick { is_over };
    }

    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self.kind {
            OddKind::Socket => {
                rustix::net::send(self.fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
            }
            OddKind::Pipe => rustix::io::write(self.fd(), bytes),
        }
    }

    /// Takes what is there.
    fn drain(&self) -> Drained {
        let mut bytes = [0; 512];
        for n in 0..DRAIN_READS {
            let read = match self.kind {
                OddKind::Pipe => rustix::io::read(self.fd(), &mut bytes),
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

/// What a kick that was ready had.
enum Drained {
    /// Nothing, and it will be ready for ever: a socket that was shut down, or that listens.
    Nothing,
    /// All that was there has been taken.
    All,
    /// There is more.
    Some,
}

/// A pipe opened anew, or `None` where that cannot be done (its other end is closed): then the
/// flag, which the front-end could clear again, has to do. That holds this thread only.
fn reopen(fd: &ForeignFd, access: OFlags) -> Result<Option<OwnedFd>, Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    if let Ok(ours) = rustix::fs::open(path, flags, Mode::empty()) {
        return Ok(Some(ours));
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    Ok(None)
}
