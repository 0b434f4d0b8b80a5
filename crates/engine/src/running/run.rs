//! `Run`: the interface of a running queue to its worker, the same for every ring and handler.

use crate::io::QueueIo;
use crate::policy::polling::Decision;
use crate::running::life::Event;
use crate::running::orders::Order;
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Base;
use std::fmt::Debug;
use std::sync::Arc;
use tokio::sync::mpsc;

/// An event of a queue, which its worker got.
#[derive(Clone, Copy, Debug)]
pub enum Happened {
    /// The kick that is watched under this number has an event.
    Kick(u32),
    /// The worker's io_uring has completed the entry with this token.
    Disk(u32),
    /// The watched port has signalled.
    Port,
    /// A disk or port has finished work outside the worker's io_uring.
    Offload,
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turned {
    /// True if the queue had work.
    pub worked: bool,
    /// The number of requests or frames that the queue took.
    pub taken: usize,
    /// True if the queue had no work, and should settle although its worker is busy with others.
    pub is_overdue: bool,
}

/// A running queue, as its worker calls it.
pub trait Run: Send + Debug {
    /// Prepares the queue on a worker: reads the ring's positions, attaches the handler, watches
    /// the kick, and makes the queue hot.
    fn attach(&mut self, io: &mut QueueIo<'_>);

    /// Detaches the queue from its worker, when nothing is in flight: ends its watches.
    fn detach(&mut self, io: &mut QueueIo<'_>);

    /// Takes one turn: takes a batch, serves it, returns what is done, notifies the driver.
    fn turn(&mut self, io: &mut QueueIo<'_>) -> Turned;

    /// Tries to stop taking turns: asks for a kick if the queue waits for its driver, and watches
    /// the port if it waits for that. Returns false if the queue must still take turns.
    ///
    /// `decision`: the decision of the polling policy. `looks_on`: the worker still polls the ring
    /// of some queue. A queue that waits for its port alone takes turns only in that case: reading
    /// the port is a system call, which finds nothing most of the time.
    fn settle(&mut self, decision: Decision, looks_on: bool, io: &mut QueueIo<'_>) -> bool;

    /// Handles an event of the queue.
    fn on_event(&mut self, happened: Happened, event: Woken, io: &mut QueueIo<'_>);

    /// True if the queue holds frames that the port can take: its next turns send them.
    fn is_in_burst(&self) -> bool;

    /// Follows an order of the control thread. The worker itself follows [`Order::Stop`].
    fn heed(&mut self, order: Order, io: &mut QueueIo<'_>);

    /// Called at the time that [`Self::deadline_ns`] returned.
    fn wake(&mut self, now_ns: u64);

    /// Called when some guest's memory was truncated: checks whether this queue uses it.
    fn check_memory(&mut self);

    /// Stops popping, for good, and takes back the frames that its port has not begun to send.
    fn drain(&mut self);

    /// Stops popping until [`Self::resume`], on this worker or another. The queue waits for the
    /// frames that its port has; unlike [`Self::drain`] it takes none of them back.
    fn pause(&mut self);

    /// True if [`Self::pause`] would drop nothing: the queue does not drain, is not being emptied,
    /// and holds no frames.
    fn pauses_without_loss(&self) -> bool;

    /// Pops again after [`Self::pause`], beginning with the chains that were added in the pause.
    fn resume(&mut self, now_ns: u64);

    /// True if the queue takes a turn in every round.
    fn is_hot(&self) -> bool;

    /// True if the queue should settle although its worker is busy with others.
    fn is_overdue(&self, now_ns: u64) -> bool;

    /// True if `decision` lets the worker poll this queue's ring for new chains.
    fn looks_at_ring(&self, decision: Decision, now_ns: u64) -> bool;

    /// True if requests of the queue are in flight at a disk.
    fn awaits_disk(&self) -> bool;

    /// Returns when the queue wants a turn without an event: to retry, or to send a held call.
    fn deadline_ns(&self) -> Option<u64>;

    /// Called when the worker would otherwise sleep until [`Self::deadline_ns`], which is too near
    /// for a sleep: sends the call that is held back.
    fn prepare_sleep(&mut self);

    /// True if the queue pops nothing more and nothing is in flight.
    fn is_drained(&self) -> bool;

    /// Returns the base (`GET_VRING_BASE`): the position from which the ring is to be served next.
    fn base(&self) -> Base;

    /// Returns the session's mailbox, which tells queues of one guest from those of another.
    fn guest(&self) -> &mpsc::Sender<Event>;

    /// True if `guest` is the mailbox of this queue's session.
    fn is_of_guest(&self, guest: &mpsc::Sender<Event>) -> bool;

    /// Returns the queue's counters.
    fn stats(&self) -> &Arc<QueueStats>;
}

#[cfg(test)]
pub(crate) mod still;
