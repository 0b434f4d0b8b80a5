//! THE LOOP: one thread and the queues it owns: wait, pop, process, complete, notify.
//!
//! ```text
//! loop:    read the clock, once for the whole round
//!          orders wait in the mailbox? follow them: a queue starts, changes, stops or moves
//!          events: each goes to its queue, which is hot from then on
//!          a queue's own time has come (a call that was held back, a retry)? it is hot
//!          orders that were put off need not wait any more? follow them
//!          every hot queue takes a turn, another one first each time, while its guest has time
//!          submit to the kernel the work that the turns placed, in the time of its guest (where
//!          guests share the worker, as soon as it is much)
//!          guest memory was truncated (SIGBUS)? each queue checks whether it uses that memory
//!          a queue that ends has nothing in flight any more? it leaves: to its session, or to
//!          another worker
//!          some queue had work, or an event came?
//!              queues without work for a millisecond settle, though the worker is busy
//!              no sleep for 50 ms, with several hot queues? report to the balance
//!              begin the next round
//!          else ask policy/polling.rs; every queue settles that need not be polled any more
//!          no hot queue and no order? sleep until an event, or the next time of a queue
//! settle:  ask the driver for a kick and read the ring once more, or watch the port
//! ```
//! Reasons:
//! 1. **Only hot queues cost anything.** A queue that has settled takes no turn, is not polled and
//!    has no timer; its kick, its disk, its port, an order or its own time makes it hot again. A
//!    worker without hot queues sleeps. That sleep has a timeout only while a queue waits for a
//!    time, or while the worker has no queue at all and may end soon (`load_reports.rs`).
//! 2. **A queue settles by itself**, whatever the others do. A transmitq whose port is full settles
//!    at once, even beside a neighbour that always has work; a queue without work settles after a
//!    millisecond. If queues settled only when all of them were idle, one busy queue would keep
//!    every other one hot for ever, and each would cost a read of its ring in every round.
//! 3. **An event between two turns of a queue is not lost.** It makes the slot due until the next
//!    turn, and a slot that is due does not settle. That turn may be put off, because the guest of
//!    the queue has used up its time.
//! 4. **The turns begin with another queue each round**, and a guest that has had more time than
//!    the others waits (`round.rs`, `policy/share.rs`), so that no guest starves behind another.
//! 5. **Events of a kick name their watch; those of a port or a disk's thread name the generation
//!    of the slot.** The kernel may report a watch that has ended, or whose slot has another queue
//!    by now: such an event is dropped.

mod load_reports;
pub(crate) mod mailbox;
mod orders;
pub(crate) mod reports;
mod round;

use crate::io::QueueIo;
use crate::policy::moderation::SLEEP_NS_MIN;
use crate::policy::polling::{Decision, Policy};
use crate::policy::share::Shares;
use crate::running::orders::QueueId;
use crate::running::run::{Happened, Run};
use crate::stats::WorkerStats;
use crate::wait::{EventSource, SLOTS_MAX, Wait, Woken};
use crate::watch::Post;
use crate::worker::mailbox::Mailbox;
use crate::worker::reports::Reports;
use load_reports::Rest;
use manyring_backend::sys::denied;
use orders::{DrainAction, Guests, QueueTask};
use round::{Bill, Round};
use rustix::fd::AsFd;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// What a worker shares with its pool, and the pool's rules for the worker's end.
#[derive(Debug)]
pub(crate) struct WorkerContext {
    /// By these the worker reports to the balance that it is saturated or mostly sleeps.
    pub(crate) reports: Arc<Reports>,
    /// True if the thread does not end when it has had no queue for a minute.
    pub(crate) stays: bool,
    /// True if the process can make no io_uring for another thread in this thread's place: then the
    /// thread never ends by itself.
    pub(crate) is_irreplaceable: bool,
    /// Shows that the worker makes progress, and for which queue it works.
    pub(crate) post: Arc<Post>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    entry: Option<(QueueId, Box<dyn Run>)>,
    ending: Option<DrainAction>,
    /// The tasks that were put off (`orders.rs`), the oldest first.
    put_off: VecDeque<QueueTask>,
    /// The number of the queue's guest, which all queues of a session share.
    guest: usize,
    /// True if the slot is in the list of hot slots.
    is_listed: bool,
    /// True if the queue has had an event since its last turn, which may have been put off.
    is_due: bool,
}

/// Pauses between two polls that find nothing. Each poll takes the cache line of the available
/// index from the driver's CPU, which must get it back to write to it; and where both CPUs are
/// threads of one core, a poll takes that core's time. With one pause between polls a polling
/// driver lost a third of its requests per second, at every depth; more than eight begin to cost a
/// driver that waits for each answer.
const LOOK_PAUSES: u32 = 4;

/// The result of a request that the io_uring refuses (`uring/bounds.rs`).
const REFUSED: i32 = -Errno::ACCESS.raw_os_error();
/// The number of `io_uring_enter`, which is the same on all machines.
const IO_URING_ENTER: u32 = 426;

/// A worker: its thread runs [`Worker::run`] to the end.
#[derive(Debug)]
pub(crate) struct Worker {
    wait: Wait,
    mailbox: Arc<Mailbox>,
    policy: Policy,
    stats: Arc<WorkerStats>,
    slots: Vec<Slot>,
    by_id: HashMap<QueueId, usize>,
    /// Slots of hot queues.
    hot: Vec<usize>,
    /// The index in `hot` of the queue that takes the first turn of a round.
    first: usize,
    /// How the guests share a round.
    shares: Shares,
    guests: Guests,
    /// The time of the present round, to be charged to the queues that work in it.
    bill: Bill,
    /// Slots with orders that were put off.
    put_off: Vec<usize>,
    /// Queues that came from another worker and have not had their first turn, each with the time
    /// at which it took its last requests there.
    arrivals: Vec<(usize, u64)>,
    /// Slots of queues that are not hot and have work at a certain time.
    timed: Vec<(usize, u64)>,
    woken: Vec<Woken>,
    faults_seen: u64,
    /// How often a device has made this thread wait, as counted in the statistics so far.
    device_waits: u64,
    now_ns: u64,
    /// When the worker's last sleep ended, or when it last reported that it is saturated.
    awake_since_ns: u64,
    lot: WorkerContext,
    rest: Rest,
    quit: bool,
}

impl Worker {
    /// Prepares the calling thread.
    pub(crate) fn new(
        uring: bool,
        policy: Policy,
        mailbox: Arc<Mailbox>,
        stats: Arc<WorkerStats>,
        lot: WorkerContext,
    ) -> Result<Self, Errno> {
        let mut wait = Wait::new(uring)?;
        if let Some(event) = mailbox.event() {
            wait.watch(event.as_fd(), EventSource::Mailbox);
        }
        wait.submit();
        let now_ns = wait.now_ns();
        Ok(Self {
            wait,
            mailbox,
            policy: policy.counted(&stats.policy.counts()),
            rest: Rest::new(now_ns, stats.slept_ns.value()),
            stats,
            slots: Vec::new(),
            by_id: HashMap::new(),
            hot: Vec::new(),
            first: 0,
            shares: Shares::default(),
            guests: Guests::default(),
            bill: Bill::default(),
            put_off: Vec::new(),
            arrivals: Vec::new(),
            timed: Vec::new(),
            woken: Vec::new(),
            faults_seen: manyring_memory::fault_count(),
            now_ns,
            awake_since_ns: now_ns,
            lot,
            device_waits: 0,
            quit: false,
        })
    }

    pub(crate) fn has_ring(&self) -> bool {
        self.wait.has_ring()
    }

    /// Runs the loop.
    pub(crate) fn run(mut self) {
        self.lot.post.enter();
        self.lot.post.at_work();
        loop {
            self.lot.post.beat();
            let turn_began_ns = self.now_ns;
            self.now_ns = self.wait.now_ns();
            self.settle_bill();
            if self.mailbox.is_pending() {
                self.obey();
            }
            if self.quit {
                self.lot.post.at_rest();
                break;
            }
            self.wait.reap(&mut self.woken, self.now_ns);
            let woken = self.dispatch();
            self.wake_timed();
            let Round { worked, taken, overdue } = self.turn_hot();
            self.submit();
            self.check_faults();
            // After the turns, which may have returned a queue's last chain in flight.
            self.finish_drained();
            if worked || woken {
                if worked && self.policy.on_burst(self.now_ns, taken) {
                    self.policy.end_epoch(self.now_ns, self.wait.ran_ns());
                    self.stats.policy.publish(&self.policy.numbers());
                }
                if overdue {
                    self.settle_overdue();
                }
                self.tell_if_saturated();
                continue;
            }
            self.stats.looked_ns.add(self.now_ns.saturating_sub(turn_began_ns));
            self.settle_hot();
            if self.hot.is_empty() && self.put_off.is_empty() && !self.mailbox.is_pending() {
                self.sleep();
            } else {
                (0..LOOK_PAUSES).for_each(|_| std::hint::spin_loop());
            }
        }
    }

    fn sleep(&mut self) {
        self.stats.sleeps.add(1);
        self.count_device_waits();
        self.stats.policy.publish(&self.policy.numbers());
        let slept_at = self.wait.now_ns();
        self.send_before(slept_at + SLEEP_NS_MIN);
        let deadline_ns = self.timed.iter().map(|(_, at)| *at).chain(self.leaves_at_ns()).min();
        let timeout = deadline_ns.map(|at| Duration::from_nanos(at.saturating_sub(slept_at)));
        self.lot.post.at_rest();
        self.wait.sleep(&mut self.woken, timeout);
        self.lot.post.at_work();
        self.now_ns = self.wait.now_ns();
        let slept_ns = self.now_ns.saturating_sub(slept_at);
        self.stats.slept_ns.add(slept_ns);
        self.policy.on_slept(self.now_ns, slept_ns);
        self.awake_since_ns = self.now_ns;
        self.dispatch();
        self.tell_if_resting();
    }

    /// Has the queues whose time comes before `end_ns` send the calls that they hold back: a sleep
    /// until then would be so short that it would end too late.
    fn send_before(&mut self, end_ns: u64) {
        let slots = &mut self.slots;
        self.timed.retain_mut(|(slot, at)| {
            if *at >= end_ns {
                return true;
            }
            let Some((_, queue)) = &mut slots[*slot].entry else { return false };
            queue.prepare_sleep();
            let next_ns = queue.deadline_ns();
            *at = next_ns.unwrap_or(*at);
            next_ns.is_some()
        });
    }

    /// Makes queues hot whose time has come.
    #[inline]
    fn wake_timed(&mut self) {
        if self.timed.is_empty() {
            return;
        }
        let now_ns = self.now_ns;
        let mut timed = std::mem::take(&mut self.timed);
        timed.retain(|&(slot, at)| {
            if at <= now_ns
                && let Some((_, queue)) = self.slots[slot].entry.as_mut()
            {
                queue.wake(now_ns);
                self.make_listed(slot);
            }
            // A queue that is hot for another reason is asked for its time when it settles.
            !self.slots[slot].is_listed
        });
        self.timed = timed;
    }

    /// Passes every event to its queue. Returns true if there was one.
    fn dispatch(&mut self) -> bool {
        let mut woken = std::mem::take(&mut self.woken);
        let any = !woken.is_empty();
        for event in woken.drain(..) {
            match event.source {
                EventSource::Kick { slot, watch } => {
                    self.on_event(slot, None, Happened::Kick(watch), event);
                }
                EventSource::Disk { slot, token } => {
                    self.on_event(slot, None, Happened::Disk(token), event);
                }
                EventSource::Port { slot, generation } => {
                    self.on_event(slot, Some(generation), Happened::Port, event);
                }
                EventSource::Offload { slot, generation } => {
                    self.on_event(slot, Some(generation), Happened::Offload, event);
                }
                EventSource::Mailbox if event.ended => {
                    if let Some(event) = self.mailbox.event() {
                        self.wait.watch(event.as_fd(), EventSource::Mailbox);
                    }
                }
                // The io_uring refuses no entry of this program: foreign code runs in this thread.
                EventSource::Ended if event.result == REFUSED => denied::note(IO_URING_ENTER),
                EventSource::Mailbox | EventSource::Ended => {}
            }
        }
        self.woken = woken;
        any
    }

    /// Passes an event to the queue in `slot`; with a generation, only to the queue of that one.
    fn on_event(&mut self, slot: u32, generation: Option<u32>, happened: Happened, event: Woken) {
        let index = slot as usize;
        let Some(found) = self.slots.get_mut(index) else { return };
        if generation.is_some_and(|generation| generation != found.generation) {
            return;
        }
        if let Some((id, queue)) = &mut found.entry {
            self.lot.post.serve(id.0);
            let mut io = QueueIo::new(&mut self.wait, slot, found.generation, self.now_ns);
            queue.on_event(happened, event, &mut io);
            self.make_listed(index);
        }
    }

    /// Adds a slot to the list of those that take turns.
    fn make_listed(&mut self, slot: usize) {
        self.slots[slot].is_due = true;
        if !std::mem::replace(&mut self.slots[slot].is_listed, true) {
            self.hot.push(slot);
        }
    }

    /// Called after a round without work: settles every hot queue that need not be polled any more.
    fn settle_hot(&mut self) {
        let now_ns = self.now_ns;
        let hot = || self.hot.iter().filter_map(|&slot| self.slots[slot].entry.as_ref());
        let awaits_disk = hot().any(|(_, queue)| queue.awaits_disk());
        let decision = self.policy.on_idle(now_ns, awaits_disk);
        let looks_on = hot().any(|(_, queue)| queue.looks_at_ring(decision, now_ns));
        self.settle(|_| true, decision, looks_on);
    }

    /// Settles the queues that a busy worker should not poll any more.
    #[cold]
    fn settle_overdue(&mut self) {
        let now_ns = self.now_ns;
        self.settle(|queue| queue.is_overdue(now_ns), Decision::Sleep, false);
    }

    /// Removes the queues that `should` settle, and can, from the list of hot ones.
    fn settle(&mut self, should: impl Fn(&dyn Run) -> bool, decision: Decision, looks_on: bool) {
        let (slots, wait, timed) = (&mut self.slots, &mut self.wait, &mut self.timed);
        let post = &self.lot.post;
        let now_ns = self.now_ns;
        self.hot.retain(|&slot| {
            let Slot { generation, entry, is_listed, is_due, .. } = &mut slots[slot];
            *is_listed = entry.as_mut().is_some_and(|(id, queue)| {
                if *is_due || !should(&**queue) {
                    return true;
                }
                post.serve(id.0);
                let mut io = QueueIo::new(wait, index_of(slot), *generation, now_ns);
                queue.is_hot() && !queue.settle(decision, looks_on, &mut io)
            });
            if !*is_listed && let Some(at) = entry.as_ref().and_then(|(_, q)| q.deadline_ns()) {
                timed.push((slot, at));
            }
            *is_listed
        });
    }

    /// Checks whether guest memory was truncated since the last turn.
    #[inline]
    fn check_faults(&mut self) {
        let faults = manyring_memory::fault_count();
        if faults != self.faults_seen {
            self.faults_seen = faults;
            for (_, queue) in self.slots.iter_mut().filter_map(|s| s.entry.as_mut()) {
                queue.check_memory();
            }
        }
    }
}

/// Returns the number of a slot, as events carry it.
fn index_of(slot: usize) -> u32 {
    assert!(slot < SLOTS_MAX, "more queues than a worker has slots");
    u32::try_from(slot).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
