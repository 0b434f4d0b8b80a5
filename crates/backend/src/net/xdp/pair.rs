//! `Pair`: the socket of a queue pair as its halves reach it: both ends, which the control thread,
//! or the keeper of a port that sends guests' pages, replaces.
//!
//! Each end lies behind a lock, which one half takes once for a burst, and nobody else but whoever
//! replaces the ends. While a socket is replaced there are no ends for a moment: frames wait, as if
//! the host had no memory. The pair's own epoll instance is what workers watch: they may hold on to
//! it while the socket, which must be closed before its queue can be taken anew, comes and goes.

use super::socket::{RxEnd, Socket, TxEnd};
use crate::net::Token;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The socket of a queue pair.
#[derive(Debug)]
pub(super) struct Pair {
    tx: Mutex<Outlet>,
    rx: Mutex<Inlet>,
    /// Readable while a frame has arrived at the socket.
    watched: OwnedFd,
}

/// The sending side.
#[derive(Debug, Default)]
pub(super) struct Outlet {
    /// `None`: the socket is being replaced, or its interface was deleted.
    pub(super) end: Option<TxEnd>,
    pub(super) is_gone: bool,
    /// Frames of the half that a former socket had and has not sent; the device has let go of them.
    pub(super) returned: Vec<Token>,
    /// Frames of the half that a former socket had: it is not certain that the device has let go.
    pub(super) limbo: usize,
    /// How many sockets there have been.
    pub(super) generation: u64,
    /// How many halves there have been: frames of a former one have nobody to return to.
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

/// Frames of a socket that was closed, of one half.
#[derive(Debug, Default)]
pub(super) struct Left {
    tokens: Vec<Token>,
    half: u64,
}

impl Pair {
    /// # Errors
    /// The system has no file descriptor.
    pub(super) fn new(socket: Socket) -> Result<Self, Errno> {
        let (tx, rx) = Default::default();
        let watched = epoll::create(CreateFlags::CLOEXEC)?;
        let pair = Self { tx, rx, watched };
        pair.open(socket, Left::default())?;
        Ok(pair)
    }

    pub(super) fn tx(&self) -> MutexGuard<'_, Outlet> {
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

    /// Closes the socket. The frames that it had may still be with the device.
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

    /// Uses another socket. The device has let go of what is left of the former one.
    ///
    /// # Errors
    /// The system has no memory to watch it.
    pub(super) fn open(&self, socket: Socket, left: Left) -> Result<(), Errno> {
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

    /// The device has let go of what is left of a socket that was closed.
    pub(super) fn let_go(&self, left: Left, is_gone: bool) {
        let mut outlet = self.tx();
        outlet.is_gone = is_gone;
        outlet.limbo = outlet.limbo.saturating_sub(left.tokens.len());
        if outlet.half == left.half {
            outlet.returned.extend(left.tokens);
        }
    }
}

impl Outlet {
    /// Frames of the half that are not back.
    pub(super) fn out(&self) -> usize {
        self.limbo + self.end.as_ref().map_or(0, TxEnd::out)
    }

    /// A half has ended: nobody waits for its frames.
    pub(super) fn orphan(&mut self) {
        self.half += 1;
        self.limbo = 0;
        self.returned.clear();
        if let Some(end) = &mut self.end {
            end.orphan();
        }
    }
}
