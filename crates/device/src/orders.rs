//! What the control thread asks of a worker, and the mailbox through which it does.

use crate::doorbell::{Call, Kick};
use crate::queue::{Change, MemoryReply, RunningQueue, StopReply};
use manyring_memory::GuestMemory;
use manyring_queue::RingAddresses;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

/// Names a running queue, in all workers and for all time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueueId(pub(crate) u64);

/// What the control thread asks of a worker.
#[derive(Debug)]
pub(crate) enum Command {
    Start(QueueId, Box<RunningQueue>),
    Stop(QueueId, StopReply),
    /// Give the queue back, to move it.
    Detach(QueueId, oneshot::Sender<Box<RunningQueue>>),
    /// Keep the queue, if it has not been given back yet.
    Stay(QueueId),
    Memory(QueueId, Arc<GuestMemory>, RingAddresses, MemoryReply),
    /// Tell when every request that was popped until now is done.
    Barrier(QueueId, MemoryReply),
    Enable(QueueId, bool, oneshot::Sender<()>),
    Change(QueueId, Change, oneshot::Sender<()>),
    Kick(QueueId, Option<Kick>),
    Call(QueueId, Option<Arc<Call>>),
    Err(QueueId, Option<Arc<Call>>),
    Quit,
}

/// Commands on their way to a worker, and the eventfd that wakes it.
#[derive(Debug)]
pub(crate) struct Mailbox {
    commands: Mutex<VecDeque<Command>>,
    pending: AtomicBool,
    event: OwnedFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Self {
            commands: Mutex::default(),
            pending: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Puts a command in and wakes the worker.
    pub(crate) fn send(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        self.pending.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// True if a command waits.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes all commands that wait, the oldest first.
    pub(crate) fn take(&self) -> VecDeque<Command> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        self.pending.store(false, Ordering::Release);
        std::mem::take(&mut *commands)
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
