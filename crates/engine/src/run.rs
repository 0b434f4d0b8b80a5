//! `Run`: a queue that runs, as the loop sees it, whatever its ring is and whatever serves it.

use crate::io::QueueIo;
use crate::life::Event;
use crate::orders::Order;
use crate::policy::polling::Decision;
use crate::stats::QueueStats;
use crate::wait::Woken;
use manyring_queue::Base;
use std::fmt::Debug;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Something that happened to a queue, as its worker was told.
#[derive(Clone, Copy, Debug)]
pub enum Happened {
    /// Its kick, seen under this number of a watch.
    Kick(u32),
    /// A completion in the worker's ring, of this token.
    Disk(u32),
    /// Its port has reported.
    Port,
    /// Its disk has finished something aside from the ring.
    Offload,
}

/// What came of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turned {
    /// There was work.
    pub worked: bool,
    /// Requests or frames that it took.
    pub taken: usize,
    /// There was none, and it should leave the list of those that take turns although its worker
    /// is busy with others.
    pub is_overdue: bool,
}

/// A queue that runs, as the loop sees it.
pub trait Run: Send + Debug {
    /// Gets ready on a worker: opens what belongs to its ring, watches the kick.
    fn attach(&mut self, io: &mut QueueIo<'_>);

    /// Lets go of the worker, when nothing is in flight.
    fn detach(&mut self, io: &mut QueueIo<'_>);

    /// One turn: takes a batch, serves it, returns what is done, notifies.
    fn turn(&mut self, io: &mut QueueIo<'_>) -> Turned;

    /// Nothing to do since a while: asks whoever can bring work. False: keep looking. A look at a
    /// port is a system call and most often in vain: that is done only while the worker `looks_on`
    /// anyway, at the ring of some other queue.
    fn settle(&mut self, how: (Decision, bool), io: &mut QueueIo<'_>) -> bool;

    /// Something has happened.
    fn on_event(&mut self, happened: Happened, event: Woken, io: &mut QueueIo<'_>);

    /// True if it holds frames that it sends in its next turns, whatever its driver and its port
    /// do.
    fn is_in_burst(&self) -> bool;

    /// Does what the control thread asks.
    fn heed(&mut self, order: Order, io: &mut QueueIo<'_>);

    /// The time that [`Self::deadline_ns`] told has come.
    fn wake(&mut self, now_ns: u64);

    /// A region of some guest was cut away: was it of this one?
    fn check_memory(&mut self);

    /// No more pops from now on, for good: what its port has not begun with is taken back.
    fn drain(&mut self);

    /// No more pops until [`Self::resume`], here or on another worker. What its port has is waited
    /// for, and nothing is lost.
    fn pause(&mut self);

    /// True if it does not pause yet, and would lose nothing by it.
    fn pauses_without_loss(&self) -> bool;

    /// Pops again after [`Self::pause`]; what arrived since is served now.
    fn resume(&mut self, now_ns: u64);

    /// True if it takes a turn in every round.
    fn is_hot(&self) -> bool;

    /// True if it should leave the list of those that take turns although its worker is busy.
    fn is_overdue(&self, now_ns: u64) -> bool;

    /// True if the ring is worth a further look: it costs a read.
    fn looks_at_ring(&self, decision: Decision, now_ns: u64) -> bool;

    /// True if something that it took is in flight at a disk.
    fn awaits_disk(&self) -> bool;

    /// When there is something to do without anybody asking.
    fn deadline_ns(&self) -> Option<u64>;

    /// The time of [`Self::deadline_ns`] is near, and its worker would sleep until then: a call
    /// that is held back goes now.
    fn prepare_sleep(&mut self);

    /// Nothing is in flight any more, and nothing will be.
    fn is_drained(&self) -> bool;

    /// The next available index.
    fn base(&self) -> Base;

    /// Names the session among those whose queues a worker has.
    fn guest(&self) -> &mpsc::Sender<Event>;

    /// True if `guest` names the session of this queue.
    fn is_of_guest(&self, guest: &mpsc::Sender<Event>) -> bool;

    /// The queue's counters.
    fn stats(&self) -> &Arc<QueueStats>;
}

#[cfg(test)]
pub(crate) mod still;
