//! Orders: a queue starts, changes, stops or moves.
//!
//! ```text
//! order:  the queue holds a burst that it could send, and the order would end the burst?
//!         or a front-end caused the order, and its guest has had more time than the others?
//!         put the order off, and all later orders for this queue behind it
//!         else follow it now, and charge its time to the guest of the queue
//! before the turns of a round:  follow the orders that were put off and need not wait any more
//! after them:  a queue that ends has nothing in flight? it leaves the worker
//! ```
//! 1. **An order has its guest's share.** A front-end can send orders without end. If the worker
//!    followed them at once, other guests would have one turn between two of them. So an order
//!    waits while its guest has had more time than the others, as a turn does, and its guest pays
//!    for the time of the order (`policy/share.rs`). One order still must not take long: a
//!    transmitq sends a burst of several megabytes in turns, and drops the chains in the ring of a
//!    disabled queue in turns.
//! 2. **A burst ends within a few turns.** A queue whose port takes no more frames is not in a
//!    burst: an order gives the chains of such frames back at once.
//! 3. **A guest keeps its number** on a worker while it has had more time than the others, also
//!    when its last queue has left: a queue that starts again finds the lead of the one that was
//!    stopped.

use super::{Slot, Worker, index_of};
use crate::accounts::bind;
use crate::io::QueueIo;
use crate::policy::share::Shares;
use crate::running::life::Event;
use crate::running::orders::{Order, QueueId, Reply};
use crate::running::run::Run;
use crate::worker::mailbox::{Command, Lease};
use manyring_queue::Base;
use tokio::sync::mpsc;

/// The action that follows when a queue is drained.
#[derive(Debug)]
pub(super) enum DrainAction {
    Stop(Reply<Base>),
    /// The queue goes to another worker. The time: when it took its last requests here.
    Move(Lease, Reply<()>, u64),
}

/// A task for a queue.
#[derive(Debug)]
pub(super) enum QueueTask {
    /// An order of the queue's session or device.
    Order(Order),
    /// The balance moves the queue to the worker of this lease.
    Move(Lease, Reply<()>),
    /// The balance cancels the move.
    Stay,
}

impl QueueTask {
    /// True if the queue gives back, for this task, the chains of frames that it holds.
    fn ends_burst(&self) -> bool {
        matches!(self, Self::Order(order) if order.ends_burst())
    }

    /// True if a front-end can cause the task, and repeat it without end.
    fn is_of_front_end(&self) -> bool {
        matches!(self, Self::Order(_))
    }
}

/// The guests of a worker: all queues of a session have the same number.
#[derive(Debug, Default)]
pub(super) struct Guests(Vec<mpsc::WeakSender<Event>>);

impl Guests {
    /// Returns the number of `queue`'s guest. A new guest gets the lowest free number: no queue in
    /// `slots` has that number, and it did not belong to a session that still exists and has had
    /// more time than the others.
    fn number(
        &mut self,
        queue: &dyn Run,
        slots: &[Slot],
        shares: &mut Shares,
        now_ns: u64,
    ) -> usize {
        let is_same = |known: &mpsc::WeakSender<Event>| {
            known.upgrade().is_some_and(|known| queue.is_of_guest(&known))
        };
        if let Some(number) = self.0.iter().position(is_same) {
            return number;
        }
        let mut taken: Vec<bool> = (0..self.0.len())
            .map(|known| self.0[known].strong_count() > 0 && shares.is_ahead(known, now_ns))
            .collect();
        let with_queue = slots.iter().filter(|slot| slot.entry.is_some());
        with_queue.for_each(|slot| taken[slot.guest] = true);
        let number = taken.iter().position(|taken| !taken).unwrap_or(taken.len());
        shares.forget(number);
        let name = queue.guest().downgrade();
        match self.0.get_mut(number) {
            Some(known) => *known = name,
            None => self.0.push(name),
        }
        number
    }
}

impl Worker {
    /// Follows the commands that wait in the mailbox.
    pub(super) fn obey(&mut self) {
        for command in self.mailbox.take() {
            match command {
                Command::Start(id, queue, left_ns) => self.start(id, queue, left_ns),
                Command::Order(id, order) => self.heed(id, QueueTask::Order(order)),
                Command::Move(id, lease, reply) => self.heed(id, QueueTask::Move(lease, reply)),
                Command::Stay(id) => self.heed(id, QueueTask::Stay),
                Command::Bind(cpus) => {
                    if let Err(errno) = bind(&cpus) {
                        tracing::warn!(%errno, ?cpus, "the worker's CPUs are unchanged");
                    }
                }
                Command::Quit => self.quit = true,
            }
        }
        // Read the clock again, so that the first turn is not charged for the orders.
        self.now_ns = self.wait.now_ns();
    }

    /// Follows a task for a queue, if the queue is on this worker, or puts the task off. Makes the
    /// queue hot afterwards.
    fn heed(&mut self, id: QueueId, task: QueueTask) {
        let Some(&slot) = self.by_id.get(&id) else { return };
        let Slot { entry, put_off, guest, .. } = &mut self.slots[slot];
        let must_wait = task.ends_burst() && is_in_burst(entry.as_ref())
            || task.is_of_front_end() && !self.shares.may_order(*guest, self.now_ns);
        match (put_off.is_empty(), must_wait) {
            (true, false) => self.carry_out(slot, task),
            (is_first, _) => {
                put_off.push_back(task);
                self.put_off.extend(is_first.then_some(slot));
            }
        }
        self.make_listed(slot);
    }

    /// Follows a task for the queue in `slot`, in the time of its guest.
    fn carry_out(&mut self, slot: usize, task: QueueTask) {
        let began_ns = self.wait.now_ns();
        if let Some((id, _)) = &self.slots[slot].entry {
            self.lot.post.serve(id.0);
        }
        match task {
            QueueTask::Order(Order::Stop(reply)) => self.end(slot, DrainAction::Stop(reply)),
            QueueTask::Move(lease, reply) => {
                self.end(slot, DrainAction::Move(lease, reply, self.now_ns))
            }
            QueueTask::Stay => self.stay(slot),
            QueueTask::Order(order) => {
                let Slot { entry, generation, .. } = &mut self.slots[slot];
                if let Some((_, queue)) = entry {
                    let (slot, now_ns) = (index_of(slot), self.now_ns);
                    queue.heed(order, &mut QueueIo::new(&mut self.wait, slot, *generation, now_ns));
                }
            }
        }
        self.charge_order(slot, began_ns);
    }

    /// Charges the time since `began_ns` to the queue in `slot` and to its guest.
    fn charge_order(&mut self, slot: usize, began_ns: u64) {
        let now_ns = self.wait.now_ns();
        let took_ns = now_ns.saturating_sub(began_ns);
        let Slot { entry, guest, .. } = &self.slots[slot];
        self.shares.charge_order(*guest, took_ns, now_ns);
        self.bill.charge_order(took_ns);
        if let Some((_, queue)) = entry {
            queue.stats().busy_ns.add(took_ns);
        }
    }

    /// Follows the orders that were put off, as far as they need not wait any more.
    #[inline]
    pub(super) fn obey_put_off(&mut self) {
        if !self.put_off.is_empty() {
            self.go_on_with_orders();
        }
    }

    #[cold]
    fn go_on_with_orders(&mut self) {
        let mut put_off = std::mem::take(&mut self.put_off);
        put_off.retain(|&slot| {
            while !is_in_burst(self.slots[slot].entry.as_ref())
                && self.shares.may_order(self.slots[slot].guest, self.now_ns)
                && let Some(task) = self.slots[slot].put_off.pop_front()
            {
                self.carry_out(slot, task);
                // The queue may have settled since the order came, and nothing else would wake it.
                self.make_listed(slot);
            }
            !self.slots[slot].put_off.is_empty()
        });
        self.put_off = put_off;
        // Read the clock again, so that the first turn is not charged for the orders.
        self.now_ns = self.wait.now_ns();
    }

    /// Adds a queue to this worker; `left_ns`: when another worker took its last requests.
    pub(super) fn start(&mut self, id: QueueId, mut queue: Box<dyn Run>, left_ns: Option<u64>) {
        self.lot.post.serve(id.0);
        let free = self.slots.iter().position(|s| s.entry.is_none());
        let slot = free.unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let began_ns = self.wait.now_ns();
        let guest = self.guests.number(&*queue, &self.slots, &mut self.shares, began_ns);
        self.slots[slot].guest = guest;
        let generation = self.slots[slot].generation;
        queue.attach(&mut QueueIo::new(&mut self.wait, index_of(slot), generation, self.now_ns));
        self.slots[slot].entry = Some((id, queue));
        self.by_id.insert(id, slot);
        self.note_queues();
        self.arrivals.extend(left_ns.map(|left_ns| (slot, left_ns)));
        self.make_listed(slot);
        let now_ns = self.wait.now_ns();
        self.shares.charge_order(guest, now_ns.saturating_sub(began_ns), now_ns);
    }

    /// Drains a queue; `ending` says what happens when nothing is in flight. A queue that is to
    /// move and holds frames first takes turns until it holds none: a pause would drop them.
    pub(super) fn end(&mut self, slot: usize, ending: DrainAction) {
        if let Some((_, queue)) = &mut self.slots[slot].entry {
            match ending {
                DrainAction::Stop(_) => queue.drain(),
                DrainAction::Move(..) if queue.pauses_without_loss() => queue.pause(),
                DrainAction::Move(..) => {}
            }
        }
        self.slots[slot].ending = Some(ending);
    }

    /// Cancels a move: the queue pops again, and the mover gets a reply.
    fn stay(&mut self, slot: usize) {
        let now_ns = self.now_ns;
        if let Some(DrainAction::Move(..)) = self.slots[slot].ending
            && let Some((_, queue)) = &mut self.slots[slot].entry
        {
            queue.resume(now_ns);
            self.slots[slot].ending = None;
        }
    }

    /// Releases queues that stop or move, as soon as nothing of them is in flight.
    pub(super) fn finish_drained(&mut self) {
        if self.hot.is_empty() {
            return;
        }
        for at in 0..self.hot.len() {
            let slot = self.hot[at];
            if self.slots[slot].ending.is_none() {
                continue;
            }
            if let Slot {
                entry: Some((_, queue)),
                ending: Some(DrainAction::Move(_, _, left_ns)),
                ..
            } = &mut self.slots[slot]
                && queue.pauses_without_loss()
            {
                queue.pause();
                *left_ns = self.now_ns;
            }
            if self.slots[slot].entry.as_ref().is_some_and(|(_, queue)| queue.is_drained()) {
                self.release(slot);
            }
        }
    }

    /// Removes a drained queue from its slot, in the time of its guest.
    pub(super) fn release(&mut self, slot: usize) {
        let (began_ns, guest) = (self.wait.now_ns(), self.slots[slot].guest);
        self.let_out(slot);
        let now_ns = self.wait.now_ns();
        self.shares.charge_order(guest, now_ns.saturating_sub(began_ns), now_ns);
    }

    fn let_out(&mut self, slot: usize) {
        let generation = self.slots[slot].generation;
        self.slots[slot].generation = generation.wrapping_add(1);
        let Some((id, mut queue)) = self.slots[slot].entry.take() else { return };
        queue.detach(&mut QueueIo::new(&mut self.wait, index_of(slot), generation, self.now_ns));
        self.by_id.remove(&id);
        self.bill.strike(slot);
        // The replies of orders that come too late are dropped.
        self.slots[slot].put_off.clear();
        self.note_queues();
        match self.slots[slot].ending.take() {
            Some(DrainAction::Stop(reply)) => {
                let base = queue.base();
                // Close the queue's descriptors and release its memory before the reply is sent.
                drop(queue);
                let _ = reply.send(base);
            }
            Some(DrainAction::Move(lease, reply, left_ns)) => {
                lease.start(id, queue, Some(left_ns));
                let _ = reply.send(());
            }
            None => {}
        }
    }
}

/// True if the queue of a slot holds frames that it could send in its next turns.
fn is_in_burst(entry: Option<&(QueueId, Box<dyn Run>)>) -> bool {
    entry.is_some_and(|(_, queue)| queue.is_in_burst())
}
