//! `Pair`: holds the two ends of a queue pair's socket for its two halves. The control thread, or
//! the replacer thread, may replace both ends.
//!
//! Each end lies behind a lock, which its half takes once for a burst. Only a replacement contends
//! for the lock. While a socket is being replaced there are no ends, and frames wait as if the host
//! had no memory. Workers watch an epoll instance of the pair, which is not replaced. A socket must
//! be closed before another one can be bound to its queue.

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
    /// Epoll instance that is readable while a frame has arrived at the socket.
    watched: OwnedFd,
}

/// The sending side.
#[derive(Debug, Default)]
pub(super) struct XdpSender {
    /// `None`: the socket is being replaced, or its interface was deleted.
    pub(super) end: Option<TxEnd>,
    pub(super) is_gone: bool,
    /// Frames that a closed socket did not send, and that the card no longer reads.
    pub(super) returned: Vec<Token>,
    /// The number of frames of a closed socket that the card may still read.
    pub(super) limbo: usize,
    /// How many sockets the pair has had.
    pub(super) generation: u64,
    /// How many sending halves were made. Frames of an earlier half are returned to nobody.
    pub(super) half: u64,
}

/// The receiving side.
#[derive(Debug, Default)]
pub(super) struct Inlet {
    pub(super) end: Option<RxEnd>,
    /// How many sockets the pair has had.
    pub(super) generation: u64,
    /// True if the kernel has reported that the interface of the socket is deleted.
    pub(super) is_broken: bool,
}

/// The frames of one half that a closed socket had, and the half's number.
#[derive(Debug, Default)]
pub(super) struct Left {
    tokens: Vec<Token>,
    half: u64,
}

impl Pair {
    /// Makes a pair on a socket.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the host has no descriptor or memory for the epoll instance.
    pub(super) fn new(socket: XdpSocket) -> Result<Self, Errno> {
        let pair = Self::without_socket()?;
        pair.open(socket, Left::default())?;
        Ok(pair)
    }

    /// Makes a pair whose frames wait until it gets a socket.
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

    /// Returns a descriptor that becomes readable when a frame arrives. It stays the same when the
    /// socket is replaced.
    pub(super) fn watched(&self) -> BorrowedFd<'_> {
        self.watched.as_fd()
    }

    /// Closes the socket. Returns its frames, which the card may still be reading.
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

    /// Uses a new socket. The card must no longer read the frames in `left`.
    ///
    /// # Errors
    /// `ENOMEM`, `ENOSPC`: the host has no memory to watch the socket.
    pub(super) fn open(&self, socket: XdpSocket, left: Left) -> Result<(), Errno> {
        self.watch(&socket)?;
        self.begin(socket, left);
        Ok(())
    }

    /// Watches a socket that is to be used next.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn watch(&self, socket: &XdpSocket) -> Result<(), Errno> {
        epoll::add(&self.watched, socket.tx.fd(), EventData::new_u64(0), EventFlags::IN)
    }

    /// Uses a new socket that is watched already, as [`Self::open`] does.
    pub(super) fn begin(&self, socket: XdpSocket, left: Left) {
        let mut inlet = self.rx();
        (inlet.end, inlet.is_broken) = (Some(socket.rx), false);
        inlet.generation += 1;
        drop(inlet);
        let mut outlet = self.tx();
        outlet.end = Some(socket.tx);
        outlet.generation += 1;
        drop(outlet);
        self.let_go(left, false);
    }

    /// Sends a frame by the socket.
    ///
    /// # Errors
    /// `EMSGSIZE`: the frame fits no chunk. `ENOBUFS`: there is no room now. `ENETDOWN`: the
    /// interface is down or deleted.
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

    /// Returns the frames of a closed socket to their half, when the card no longer reads them.
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
    /// Returns the number of frames of the present half that the card has, or may have.
    pub(super) fn out(&self) -> usize {
        self.limbo + self.end.as_ref().map_or(0, TxEnd::out)
    }

    /// Ends a half: its frames are returned to nobody.
    pub(super) fn orphan(&mut self) {
        self.half += 1;
        self.limbo = 0;
        self.returned.clear();
        if let Some(end) = &mut self.end {
            end.orphan();
        }
    }
}
