//! `Pair`: the two ends of a queue pair's socket, as the halves reach them. The control thread, or
//! the replacer of a port that lends guests' pages, may replace both.
//!
//! Each end lies behind a lock, which its half takes once for a burst, and which only a replacement
//! contends for. While a socket is replaced there are no ends, and frames wait as if the host had
//! no memory. Workers watch an epoll instance of the pair: it stays while the socket, which must be
//! closed before its queue can be bound again, is replaced.

use super::socket::{RxEnd, TxEnd, TxWakeup, XdpSocket};
use crate::net::Token;
use manyring_memory::{copy_to_slices, in_own_memory};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The socket of a queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    tx: Mutex<XdpSender>,
    rx: Mutex<Inlet>,
    /// Readable while a frame has arrived at the socket.
    watched: OwnedFd,
}

/// The sending side.
#[derive(Debug, Default)]
pub(super) struct XdpSender {
    /// `None`: the socket is being replaced, or its interface was deleted.
    pub(super) end: Option<TxEnd>,
    pub(super) is_gone: bool,
    /// Frames that a closed socket had not sent, and of which the device has let go.
    pub(super) returned: Vec<Token>,
    /// Frames of a closed socket of which the device may not have let go yet.
    pub(super) limbo: usize,
    /// How many sockets there have been.
    pub(super) generation: u64,
    /// How many halves were made: frames of an earlier half are returned to nobody.
    pub(super) half: u64,
}

/// The receiving side.
#[derive(Debug, Default)]
pub(super) struct Inlet {
    pub(super) end: Option<RxEnd>,
    /// How many sockets there have been.
    pub(super) generation: u64,
    /// The kernel has said that the interface of the socket is gone.
    pub(super) is_broken: bool,
}

/// The frames that a closed socket had of one half, and its number.
#[derive(Debug, Default)]
pub(super) struct Left {
    tokens: Vec<Token>,
    half: u64,
}

impl Pair {
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the host has no file descriptor or memory for the epoll.
    pub(super) fn new(socket: XdpSocket) -> Result<Self, Errno> {
        let pair = Self::without_socket()?;
        pair.open(socket, Left::default())?;
        Ok(pair)
    }

    /// A pair whose frames wait until it has a socket.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub(super) fn without_socket() -> Result<Self, Errno> {
        let (tx, rx) = Default::default();
        Ok(Self { tx, rx, watched: epoll::create(CreateFlags::CLOEXEC)? })
    }

    pub(super) fn tx(&self) -> MutexGuard<'_, XdpSender> {
        self.tx.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn rx(&self) -> MutexGuard<'_, Inlet> {
        self.rx.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file descriptor that becomes readable when a frame arrives. It stays the same when the
    /// socket is replaced.
    pub(super) fn watched(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }

    /// Closes the socket. The device may still have the frames that are returned.
    pub(super) fn close(&self) -> Left {
        let mut inlet = self.rx();
        inlet.end = None;
        inlet.generation += 1;
        drop(inlet);
        let mut outlet = self.tx();
        let tokens = outlet.end.take().map_or_else(Vec::new, TxEnd::into_tokens);
        outlet.limbo += tokens.len();
        Left { tokens, half: outlet.half }
    }

    /// Uses a new socket. The device has let go of all frames in `left`.
    ///
    /// # Errors
    /// `ENOMEM`, `ENOSPC`: the host has no memory to watch the socket.
    pub(super) fn open(&self, socket: XdpSocket, left: Left) -> Result<(), Errno> {
        let fd = socket.tx.fd();
        epoll::add(&self.watched, fd, EventData::new_u64(0), EventFlags::IN)?;
        let mut inlet = self.rx();
        (inlet.end, inlet.is_broken) = (Some(socket.rx), false);
        inlet.generation += 1;
        drop(inlet);
        let mut outlet = self.tx();
        outlet.end = Some(socket.tx);
        outlet.generation += 1;
        drop(outlet);
        self.let_go(left, false);
        Ok(())
    }

    /// Sends a frame by the socket.
    ///
    /// # Errors
    /// `EMSGSIZE`: no chunk holds it. `ENOBUFS`: there is no room now. `ENETDOWN`: the interface is
    /// down or gone.
    pub(super) fn transmit(&self, frame: &[u8]) -> Result<(), Errno> {
        let mut outlet = self.tx();
        let end = outlet.end.as_mut().ok_or(Errno::NETDOWN)?;
        in_own_memory(|| {
            end.reap();
            if frame.len() > end.room {
                return Err(Errno::MSGSIZE);
            }
            if !end.put(frame.len(), |chunk| copy_to_slices(&[chunk], frame)) {
                return Err(Errno::NOBUFS);
            }
            match end.kick() {
                TxWakeup::Done => Ok(()),
                TxWakeup::Full => Err(Errno::NOBUFS),
                TxWakeup::Down => Err(Errno::NETDOWN),
            }
        })
    }

    /// Returns the frames of a closed socket, of which the device has let go, to their half.
    pub(super) fn let_go(&self, left: Left, is_gone: bool) {
        let mut outlet = self.tx();
        outlet.is_gone = is_gone;
        outlet.limbo = outlet.limbo.saturating_sub(left.tokens.len());
        if outlet.half == left.half {
            outlet.returned.extend(left.tokens);
        }
    }
}

impl XdpSender {
    /// Frames of the present half that the device has, or may have.
    pub(super) fn out(&self) -> usize {
        self.limbo + self.end.as_ref().map_or(0, TxEnd::out)
    }

    /// Ends a half: frames that it has sent are returned to nobody.
    pub(super) fn orphan(&mut self) {
        self.half += 1;
        self.limbo = 0;
        self.returned.clear();
        if let Some(end) = &mut self.end {
            end.orphan();
        }
    }
}
