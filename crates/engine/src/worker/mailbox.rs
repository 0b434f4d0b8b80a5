//! The mailbox of a worker holds the commands that are sent to it. A caller that is about to send a
//! worker a queue takes a lease, and the worker's thread does not end while there is a lease.
//!
//! A worker without queues ends, and is started again on demand. A queue that is sent to a worker
//! while it ends would be lost, with the requests of its guest. Therefore a worker ends only once
//! its mailbox is closed; the mailbox closes only while there is no lease and no command waits; and
//! a closed mailbox gives no leases.

use crate::running::orders::{Order, QueueId, Reply};
use crate::running::run::Run;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A command to a worker. The queue that it names may have ended by now.
#[derive(Debug)]
pub(crate) enum Command {
    /// Run this queue. The time: when another worker took the queue's last requests.
    Start(QueueId, Box<dyn Run>, Option<u64>),
    /// An order to a queue.
    Order(QueueId, Order),
    /// Move the queue to the worker of this lease, and reply when that is done.
    Move(QueueId, Lease, Reply<()>),
    /// Cancel a move: keep the queue, if it has not been moved yet.
    Stay(QueueId),
    /// Run on these CPUs.
    Bind(Vec<usize>),
    /// End the thread.
    Quit,
}

/// The commands for a worker, and the eventfd that wakes it.
#[derive(Debug)]
pub(crate) struct Mailbox {
    commands: Mutex<CommandList>,
    pending: AtomicBool,
    /// The leases of callers that are about to send the worker a queue.
    leases: Leases,
}

#[derive(Debug)]
struct CommandList {
    waiting: VecDeque<Command>,
    /// `None`: the worker has ended.
    event: Option<Arc<OwnedFd>>,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            commands: Mutex::new(CommandList {
                waiting: VecDeque::new(),
                event: Some(Arc::new(event)),
            }),
            pending: AtomicBool::new(false),
            leases: Leases::default(),
        })
    }

    /// Adds a command and wakes the worker. If the worker has ended, drops the command and its
    /// contents: doorbells of a front-end must not stay open until another worker starts.
    pub(crate) fn send(&self, command: Command) {
        let event = {
            let mut commands = self.lock();
            let Some(event) = commands.event.clone() else {
                drop(commands);
                return drop(command);
            };
            commands.waiting.push_back(command);
            event
        };
        self.pending.store(true, Ordering::Release);
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }

    fn lock(&self) -> MutexGuard<'_, CommandList> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the eventfd that wakes the worker; `None` once the worker has ended.
    pub(crate) fn event(&self) -> Option<Arc<OwnedFd>> {
        self.lock().event.clone()
    }

    /// Call when the worker has ended: closes its eventfd and drops the commands that wait. Other
    /// owners may keep the mailbox itself for longer.
    pub(crate) fn end(&self) {
        let (event, waiting) = {
            let mut commands = self.lock();
            (commands.event.take(), std::mem::take(&mut commands.waiting))
        };
        drop((event, waiting));
    }

    /// True if a command waits.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Removes and returns all commands that wait, the oldest first.
    pub(crate) fn take(&self) -> VecDeque<Command> {
        let mut commands = self.lock();
        self.pending.store(false, Ordering::Release);
        std::mem::take(&mut commands.waiting)
    }
}

/// The leases of one worker's mailbox.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    count: usize,
    is_closed: bool,
}

/// Keeps a worker from ending until it gets a queue, or until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease(Arc<Mailbox>);

impl Leases {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mailbox {
    /// Closes the mailbox for good, unless a queue or a command is about to arrive; returns true if
    /// it is closed. Only the worker itself may call this: if another thread did, the worker could
    /// have removed a command just before, and the mailbox would close while the worker follows the
    /// command.
    pub(crate) fn close(&self) -> bool {
        let mut taken = self.leases.lock();
        taken.is_closed = taken.count == 0 && !self.is_pending();
        taken.is_closed
    }

    /// True if the worker has ended, or is about to.
    pub(crate) fn is_closed(&self) -> bool {
        self.leases.lock().is_closed
    }
}

impl Lease {
    /// Takes a lease at the worker of `mailbox`; `None` if that worker ends.
    pub(crate) fn take(mailbox: &Arc<Mailbox>) -> Option<Self> {
        let mut taken = mailbox.leases.lock();
        if taken.is_closed {
            return None;
        }
        taken.count += 1;
        drop(taken);
        Some(Self(mailbox.clone()))
    }

    /// Sends the worker a queue. `left_ns`: when another worker took the queue's last requests.
    pub(crate) fn start(self, id: QueueId, queue: Box<dyn Run>, left_ns: Option<u64>) {
        // The lease is dropped only after this: from then on the waiting command keeps the worker.
        self.0.send(Command::Start(id, queue, left_ns));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.leases.lock().count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[test]
    fn mailbox_of_a_worker_that_has_ended_holds_nothing() {
        let mailbox = Mailbox::new().unwrap();
        let send = || {
            let (reply, answer) = oneshot::channel();
            mailbox.send(Command::Order(QueueId(1), Order::Stop(reply)));
            answer
        };
        let (event, mut before) = (Arc::downgrade(&mailbox.event().unwrap()), send());
        assert!(before.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        mailbox.end();
        assert_eq!(event.strong_count(), 0, "its eventfd is closed");
        let mut after = send();
        for answer in [&mut before, &mut after] {
            assert_eq!(answer.try_recv().unwrap_err(), oneshot::error::TryRecvError::Closed);
        }
        assert!(mailbox.take().is_empty());
    }

    #[test]
    fn a_mailbox_closes_only_when_nothing_is_on_its_way_and_then_for_good() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let lease = Lease::take(&mailbox).unwrap();
        assert!(!mailbox.close() && !mailbox.is_closed(), "a queue is to come");
        drop(lease);
        mailbox.send(Command::Quit);
        assert!(!mailbox.close(), "a command waits");
        let _ = mailbox.take();
        assert!(mailbox.close() && mailbox.is_closed());
        assert!(Lease::take(&mailbox).is_none());
    }
}
