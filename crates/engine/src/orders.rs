//! The orders that the control thread gives to running queues, and the mailbox by which a worker
//! gets them.

use crate::doorbell::{Call, Kick};
use crate::policy::moderation::Limits;
use crate::run::Run;
use crate::seats::{Seat, Seats};
use manyring_memory::GuestMemory;
use manyring_queue::{Base, QueueError, RingAddresses};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Names a running queue, in all workers and for all time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QueueId(pub(crate) u64);

/// A reply to an order.
pub type Reply<T> = oneshot::Sender<T>;
/// A reply to an order that takes guest memory away: sent once nothing uses that memory any more.
/// An error says that the order was refused, and nothing has changed.
pub type Fence = Reply<Result<(), QueueError>>;

/// What a session or a device asks of a running queue. If the reply is dropped instead of sent, the
/// queue runs no more.
#[derive(Debug)]
pub enum Order {
    /// End, once nothing is in flight; the reply is the base.
    Stop(Reply<Base>),
    /// Give the queue to the worker of this seat, and reply when that is done.
    Move(Seat, Reply<()>),
    /// Take a move back: keep the queue, if it has not been given away yet.
    Stay,
    /// Serve the ring at these addresses of this memory.
    Memory(Arc<GuestMemory>, RingAddresses, Fence),
    /// Reply when everything that was taken until now is done.
    Fence(Fence),
    /// The session ends, and its front-end is not told a base: leave what is set aside to the next
    /// one, if the ring has a record.
    LeaveAside(Reply<()>),
    /// Enable or disable the queue (`SET_VRING_ENABLE`).
    Enable(bool, Fence),
    /// Take the new rules of the queue (link, offloads, filter).
    Refresh(Reply<()>),
    /// Hold notifications back within the limits that the driver has set (virtio 1.3 §5.1.6.5.9);
    /// `None`: as the operator has configured.
    Moderate(Option<Limits>, Reply<()>),
    /// Replace the kick.
    Kick(Option<Kick>, Reply<()>),
    /// Replace the call.
    Call(Option<Arc<Call>>, Reply<()>),
    /// Replace the err.
    Err(Option<Arc<Call>>, Reply<()>),
}

impl Order {
    /// True if a front-end can cause the order, as often as it likes.
    pub(crate) fn is_of_front_end(&self) -> bool {
        !matches!(self, Self::Move(..) | Self::Stay)
    }

    /// True if the queue gives back, for this order, the chains of frames that it holds.
    pub(crate) fn ends_burst(&self) -> bool {
        matches!(self, Self::Stop(_) | Self::Memory(..) | Self::Enable(false, _))
    }
}

/// A command to a worker.
#[derive(Debug)]
pub(crate) enum Command {
    /// Run this queue. The time is when another worker took the queue's last requests.
    Start(QueueId, Box<dyn Run>, Option<u64>),
    /// An order to a queue, which may have ended by now.
    Order(QueueId, Order),
    /// End the thread.
    Quit,
}

/// Commands on their way to a worker, and the eventfd that wakes it.
#[derive(Debug)]
pub(crate) struct Mailbox {
    commands: Mutex<Commands>,
    pending: AtomicBool,
    /// The seats of those who are about to give the worker a queue.
    pub(crate) seats: Seats,
}

#[derive(Debug)]
struct Commands {
    waiting: VecDeque<Command>,
    /// None: the worker has ended.
    event: Option<Arc<OwnedFd>>,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            commands: Mutex::new(Commands {
                waiting: VecDeque::new(),
                event: Some(Arc::new(event)),
            }),
            pending: AtomicBool::new(false),
            seats: Seats::default(),
        })
    }

    /// Puts a command in and wakes the worker. Where the worker has ended the command is dropped,
    /// with what it carries: doorbells of a front-end must not stay until another worker comes.
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

    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What wakes the worker; none once it has ended.
    pub(crate) fn event(&self) -> Option<Arc<OwnedFd>> {
        self.lock().event.clone()
    }

    /// The worker has ended: its eventfd is closed, and what waits is dropped, however long its
    /// mailbox is still known.
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

    /// Takes all commands that wait, the oldest first.
    pub(crate) fn take(&self) -> VecDeque<Command> {
        let mut commands = self.lock();
        self.pending.store(false, Ordering::Release);
        std::mem::take(&mut commands.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
