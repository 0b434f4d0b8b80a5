//! THE LOOP: one thread and the queues it owns: wait, pop, process, complete, notify.
//!
//! ```text
//! loop:  commands, if there are some
//!        events: kicks make queues hot, disk events complete requests
//!        every hot queue takes a turn
//!        submit what the turns queued
//!        worked? again.   recently? look again.
//!        settle every hot queue (ask for notifications, look once more)
//!        none hot? sleep
//! ```
//! A worker with no hot queue makes no system call and no timer: it sleeps until a kick, a disk
//! completion or a command.

use crate::doorbell::{Call, Kick};
use crate::policy::polling::Polling;
use crate::queue::{Change, MemoryReply, RunningQueue, StopReply};
use crate::stats::WorkerStats;
use crate::wait::{SLOTS_MAX, Source, Wait, Woken};
use manyring_memory::GuestMemory;
use manyring_queue::RingAddresses;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

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

    #[inline]
    fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    fn take(&self) -> VecDeque<Command> {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        self.pending.store(false, Ordering::Release);
        std::mem::take(&mut *commands)
    }
}

/// What becomes of a queue when it is drained.
#[derive(Debug)]
enum Ending {
    Stop(StopReply),
    Detach(oneshot::Sender<Box<RunningQueue>>),
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    entry: Option<(QueueId, Box<RunningQueue>)>,
    ending: Option<Ending>,
    /// In the list of hot slots.
    is_listed: bool,
}

/// A worker: its thread runs [`Worker::run`] to the end.
#[derive(Debug)]
pub(crate) struct Worker {
    wait: Wait,
    mailbox: Arc<Mailbox>,
    polling: Polling,
    stats: Arc<WorkerStats>,
    slots: Vec<Slot>,
    by_id: HashMap<QueueId, usize>,
    /// Slots of hot queues.
    hot: Vec<usize>,
    /// Slots of queues that are not hot and have something to do at a certain time.
    timed: Vec<(usize, u64)>,
    woken: Vec<Woken>,
    faults_seen: u64,
    now_ns: u64,
    /// When it last slept, or last said that it is saturated.
    awake_since_ns: u64,
    saturated: Arc<Notify>,
    quit: bool,
}

/// A worker that has not slept for this long, with several hot queues, says so.
const SATURATED_NS: u64 = 50_000_000;

impl Worker {
    /// Prepares the calling thread.
    pub(crate) fn new(
        uring: bool,
        polling: Polling,
        mailbox: Arc<Mailbox>,
        stats: Arc<WorkerStats>,
        saturated: Arc<Notify>,
    ) -> Result<Self, Errno> {
        let mut wait = Wait::new(uring)?;
        wait.watch(mailbox.event.as_fd(), Source::Mailbox);
        wait.submit();
        Ok(Self {
            wait,
            mailbox,
            polling,
            stats,
            slots: Vec::new(),
            by_id: HashMap::new(),
            hot: Vec::new(),
            timed: Vec::new(),
            woken: Vec::new(),
            faults_seen: manyring_memory::fault_count(),
            now_ns: 0,
            awake_since_ns: 0,
            saturated,
            quit: false,
        })
    }

    pub(crate) fn has_ring(&self) -> bool {
        self.wait.has_ring()
    }

    /// The loop.
    pub(crate) fn run(mut self) {
        loop {
            let turn_began_ns = self.now_ns;
            self.now_ns = self.wait.now_ns();
            if self.mailbox.is_pending() {
                self.obey();
                if self.quit {
                    break;
                }
            }
            self.wait.reap(&mut self.woken);
            let woken = self.dispatch();
            self.wake_timed();
            let worked = self.turn_hot();
            self.wait.submit();
            self.check_faults();
            self.finish_drained();
            if worked || woken {
                self.tell_if_saturated();
                continue;
            }
            self.stats.looked_ns.add(self.now_ns.saturating_sub(turn_began_ns));
            self.settle_hot();
            if self.hot.is_empty() && !self.mailbox.is_pending() {
                self.sleep();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn sleep(&mut self) {
        self.stats.sleeps.add(1);
        let slept_at = self.wait.now_ns();
        let deadline_ns = self.timed.iter().map(|(_, at)| *at).min();
        let timeout = deadline_ns.map(|at| Duration::from_nanos(at.saturating_sub(slept_at)));
        self.wait.sleep(&mut self.woken, timeout);
        self.now_ns = self.wait.now_ns();
        self.stats.slept_ns.add(self.now_ns.saturating_sub(slept_at));
        self.awake_since_ns = self.now_ns;
        self.dispatch();
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
            // One that is hot for another reason is asked again when it settles.
            !self.slots[slot].is_listed
        });
        self.timed = timed;
    }

    /// Tells the balance when there is more than this thread can do.
    #[inline]
    fn tell_if_saturated(&mut self) {
        if self.now_ns.saturating_sub(self.awake_since_ns) > SATURATED_NS {
            self.awake_since_ns = self.now_ns;
            if self.hot.len() > 1 {
                self.saturated.notify_one();
            }
        }
    }

    /// Hands every event to its queue. True if there was one.
    fn dispatch(&mut self) -> bool {
        let mut woken = std::mem::take(&mut self.woken);
        let any = !woken.is_empty();
        for event in woken.drain(..) {
            match event.source {
                Source::Kick { slot, generation } => self.on_kick(slot, generation, event),
                Source::Disk { slot, token } => {
                    let slots = self.slots.get_mut(slot as usize);
                    if let Some((_, queue)) = slots.and_then(|s| s.entry.as_mut()) {
                        queue.on_disk(token, event.result, &mut self.wait);
                        self.make_listed(slot as usize);
                    }
                }
                Source::Port { slot, generation } => self.on_port(slot, generation, event.result),
                Source::Mailbox if event.ended => {
                    self.wait.watch(self.mailbox.event.as_fd(), Source::Mailbox);
                }
                Source::Mailbox | Source::Ended => {}
            }
        }
        self.woken = woken;
        any
    }

    fn on_kick(&mut self, slot: u32, generation: u32, event: Woken) {
        let now_ns = self.now_ns;
        let current = self.slots.get(slot as usize).is_some_and(|s| s.generation == generation);
        // The end of the watch of a former kick is none.
        let is_cancelled = event.result == -Errno::CANCELED.raw_os_error();
        if !current || is_cancelled {
            return;
        }
        if let Some((_, queue)) = self.slots[slot as usize].entry.as_mut() {
            queue.on_kick(now_ns);
            if event.ended {
                queue.rewatch(&mut self.wait, slot, generation);
            }
            self.make_listed(slot as usize);
        }
    }

    fn on_port(&mut self, slot: u32, generation: u32, result: i32) {
        let now_ns = self.now_ns;
        let slots = self.slots.get_mut(slot as usize).filter(|s| s.generation == generation);
        if let Some((_, queue)) = slots.and_then(|s| s.entry.as_mut()) {
            queue.on_port(result, now_ns);
            self.make_listed(slot as usize);
        }
    }

    /// Puts a slot into the list of those that take turns.
    fn make_listed(&mut self, slot: usize) {
        if !std::mem::replace(&mut self.slots[slot].is_listed, true) {
            self.hot.push(slot);
        }
    }

    #[inline]
    fn turn_hot(&mut self) -> bool {
        let mut worked = false;
        for &slot in &self.hot {
            if let Some((_, queue)) = &mut self.slots[slot].entry {
                worked |= queue.turn(&mut self.wait, self.now_ns);
            }
        }
        worked
    }

    /// Lets queues that have had nothing for a while ask for notifications.
    fn settle_hot(&mut self) {
        let (slots, wait, timed) = (&mut self.slots, &mut self.wait, &mut self.timed);
        let (polling, now_ns) = (self.polling, self.now_ns);
        let looks_on = self.hot.iter().any(|&slot| {
            let queue = slots[slot].entry.as_ref();
            queue.is_some_and(|(_, queue)| queue.looks_at_ring(polling, now_ns))
        });
        self.hot.retain(|&slot| {
            let Slot { generation, entry, is_listed, .. } = &mut slots[slot];
            let index = u32::try_from(slot).unwrap_or(0);
            *is_listed = entry.as_mut().is_some_and(|(_, queue)| {
                let how = (polling, looks_on);
                queue.is_hot() && !queue.settle(how, wait, index, *generation, now_ns)
            });
            if !*is_listed && let Some(at) = entry.as_ref().and_then(|(_, q)| q.deadline_ns()) {
                timed.push((slot, at));
            }
            *is_listed
        });
    }

    /// Looks whether guest memory was cut away since the last turn.
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

    fn obey(&mut self) {
        for command in self.mailbox.take() {
            match command {
                Command::Start(id, queue) => self.start(id, queue),
                Command::Stop(id, reply) => self.end(id, Ending::Stop(reply)),
                Command::Detach(id, reply) => self.end(id, Ending::Detach(reply)),
                Command::Stay(id) => self.stay(id),
                Command::Memory(id, memory, addresses, reply) => {
                    let now_ns = self.now_ns;
                    self.with(id, |queue, _, _, _| {
                        queue.set_memory(memory, addresses, reply, now_ns);
                    });
                }
                Command::Enable(id, enabled, reply) => {
                    let now_ns = self.now_ns;
                    self.with(id, |queue, wait, _, _| queue.set_enabled(enabled, wait, now_ns));
                    let _ = reply.send(());
                }
                Command::Change(id, change, reply) => {
                    let now_ns = self.now_ns;
                    self.with(id, |queue, _, _, _| queue.change(change, now_ns));
                    let _ = reply.send(());
                }
                Command::Kick(id, kick) => {
                    let now_ns = self.now_ns;
                    self.with(id, |queue, wait, slot, generation| {
                        queue.set_kick(kick, wait, slot, generation, now_ns);
                    });
                }
                Command::Call(id, call) => self.with(id, |queue, _, _, _| queue.set_call(call)),
                Command::Err(id, err) => self.with(id, |queue, _, _, _| queue.set_err(err)),
                Command::Quit => self.quit = true,
            }
        }
    }

    /// Does something with a queue, if it is here, and looks at it afterwards.
    fn with(&mut self, id: QueueId, act: impl FnOnce(&mut RunningQueue, &mut Wait, u32, u32)) {
        let Some(&slot) = self.by_id.get(&id) else { return };
        let generation = self.slots[slot].generation;
        if let Some((_, queue)) = &mut self.slots[slot].entry {
            act(queue, &mut self.wait, u32::try_from(slot).unwrap_or(0), generation);
        }
        self.make_listed(slot);
    }

    fn start(&mut self, id: QueueId, mut queue: Box<RunningQueue>) {
        let free = self.slots.iter().position(|s| s.entry.is_none());
        let slot = free.unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, entry: None, ending: None, is_listed: false });
            self.slots.len() - 1
        });
        debug_assert!(slot < SLOTS_MAX);
        let generation = self.slots[slot].generation;
        let index = u32::try_from(slot).unwrap_or(0);
        queue.attach(&mut self.wait, index, generation, self.now_ns);
        // It may have been cut away before it came here: the count has moved on already.
        queue.check_memory();
        self.slots[slot].entry = Some((id, queue));
        self.by_id.insert(id, slot);
        self.stats.queues.set(self.by_id.len() as u64);
        self.make_listed(slot);
    }

    /// Drains a queue; what then happens is `ending`.
    fn end(&mut self, id: QueueId, ending: Ending) {
        let Some(&slot) = self.by_id.get(&id) else { return };
        if let Some((_, queue)) = &mut self.slots[slot].entry {
            queue.drain();
        }
        self.slots[slot].ending = Some(ending);
        self.make_listed(slot);
    }

    /// Takes a detach back: the queue pops again, and whoever waits for it is told so.
    fn stay(&mut self, id: QueueId) {
        let Some(&slot) = self.by_id.get(&id) else { return };
        let now_ns = self.now_ns;
        if let Some(Ending::Detach(_)) = self.slots[slot].ending
            && let Some((_, queue)) = &mut self.slots[slot].entry
        {
            queue.resume(now_ns);
            self.slots[slot].ending = None;
            self.make_listed(slot);
        }
    }

    fn finish_drained(&mut self) {
        if self.hot.is_empty() {
            return;
        }
        for at in 0..self.hot.len() {
            let slot = self.hot[at];
            let drained =
                |s: &Slot| s.ending.is_some() && s.entry.as_ref().is_some_and(|e| e.1.is_drained());
            if drained(&self.slots[slot]) {
                self.release(slot);
            }
        }
    }

    /// Takes a drained queue out of its slot.
    fn release(&mut self, slot: usize) {
        let generation = self.slots[slot].generation;
        self.slots[slot].generation = generation.wrapping_add(1);
        let Some((id, mut queue)) = self.slots[slot].entry.take() else { return };
        queue.detach(&mut self.wait, u32::try_from(slot).unwrap_or(0), generation);
        self.by_id.remove(&id);
        self.stats.queues.set(self.by_id.len() as u64);
        match self.slots[slot].ending.take() {
            Some(Ending::Stop(reply)) => {
                let base = queue.base();
                // The queue's fds and memory are gone before the reply is sent.
                drop(queue);
                let _ = reply.send(base);
            }
            Some(Ending::Detach(reply)) => drop(reply.send(queue)),
            None => {}
        }
    }
}
