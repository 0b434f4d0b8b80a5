//! `WatchedSocket`: the one descriptor that a worker without io_uring watches for a queue, although
//! each connection of the queue has a new socket.

use manyring_backend::sys::uring::{Event, Inbox};
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::Arc;

/// An epoll of the queue's socket and inbox, which the worker watches.
#[derive(Debug)]
pub(super) struct WatchedSocket {
    epoll: OwnedFd,
    inbox: Arc<Inbox>,
    /// Reused for the events of the inbox.
    events: Vec<Event>,
}

impl WatchedSocket {
    /// # Errors
    /// `EMFILE`, `ENFILE` or `ENOMEM`: the host has no file descriptor or memory for it.
    pub(super) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let inbox = Arc::new(Inbox::new()?);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, inbox.readiness(), epoll::EventData::new_u64(0), flags)?;
        Ok(Self { epoll, inbox, events: Vec::new() })
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Adds a socket to the epoll: its events wake the worker from now on.
    pub(super) fn watch(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, socket, epoll::EventData::new_u64(1), flags)
    }

    /// Removes a socket from the epoll.
    pub(super) fn unwatch(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Empties the inbox. True if something was in it.
    pub(super) fn take(&mut self) -> bool {
        self.inbox.take(&mut self.events);
        !std::mem::take(&mut self.events).is_empty()
    }

    /// The epoll's descriptor. The worker must watch it edge-triggered, because an event that was
    /// reported once stays in the epoll's ready list.
    pub(super) fn readiness(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
