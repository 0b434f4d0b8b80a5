//! `RunningQueue`: a queue as its worker owns it: ring, doorbells, what serves it, its state.

mod blk;
mod kick;
mod net;

use crate::blk::BlkQueue;
use crate::doorbell::{Call, Kick};
use crate::net::{NetRx, NetTx, Rules};
use crate::policy::moderation::{Decision as Telling, Moderation};
use crate::policy::polling::{Decision, Polling};
use crate::stats::QueueStats;
use crate::wait::{Source, Wait};
use crate::{Activation, StartError};
use manyring_memory::GuestMemory;
use manyring_queue::{DeviceQueue, QueueError, RingAddresses};
use manyring_wire::net::Coalescing;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// What a session hears from a running queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of the virtqueue in its device.
    pub index: usize,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a running queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The driver broke the ring's rules: the queue has stopped, the session goes on.
    Fault(QueueError),
    /// Guest memory was cut away: the session must end.
    MemoryLost,
    /// The port is down or gone: nothing is received until the driver enables the queue again.
    PortGone,
}

/// What serves the chains. One match per turn.
#[derive(Debug)]
pub(crate) enum Handler {
    Blk(BlkQueue),
    Tx(NetTx),
    Rx(NetRx),
}

/// What a running network queue goes by, changed.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// How its notifications are held back.
    Coalescing(Coalescing),
    /// What it passes on.
    Rules(Arc<Rules>),
}

/// Whether the worker looks at the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Every turn.
    Hot,
    /// The driver was asked to kick.
    Armed,
}

/// What a disabled transmitq does with its ring. A driver may have taken the memory back: it is
/// only looked at after a kick, and written only if that kick had brought something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discard {
    /// Leaves it alone.
    No,
    /// The driver kicked: takes what is there and drops it.
    Kicked,
    /// There was something.
    Found,
}

/// A reply to "stop": the base, once nothing is in flight.
pub(crate) type StopReply = oneshot::Sender<u16>;
/// A reply to new memory, once no request uses the old.
pub(crate) type MemoryReply = oneshot::Sender<Result<(), QueueError>>;

/// How long a queue without work still takes turns of a worker that is busy with others. Longer
/// than a worker looks that has nothing else to do: a look costs such a worker little, and a kick
/// costs the guest much.
const BUSY_REST_NS: u64 = 1_000_000;

#[derive(Debug)]
pub(crate) struct RunningQueue {
    index: usize,
    queue: DeviceQueue,
    kick: Option<Kick>,
    /// The number under which the worker watches the kick.
    kick_watch: u32,
    /// An eventfd that is never read reports its old count when it is watched anew: the next
    /// event of the kick is that report, and not a kick.
    is_kick_stale: bool,
    call: Option<Arc<Call>>,
    err: Option<Arc<Call>>,
    enabled: bool,
    discard: Discard,
    handler: Handler,
    stats: Arc<QueueStats>,
    events: mpsc::Sender<Event>,
    look: Look,
    fault_told: bool,
    is_port_told: bool,
    memory_lost: bool,
    /// No more pops: the queue stops or moves when nothing is in flight.
    draining: bool,
    worked_at_ns: u64,
    looked_at_ns: u64,
    kicked: bool,
    moderation: Moderation,
    held: Option<Held>,
    /// Its port is watched, and has not reported yet.
    watches_port: bool,
    /// Its disk has more to do on this thread in the next turn.
    has_more: bool,
}

/// A used buffer notification that is held back.
#[derive(Clone, Copy, Debug)]
struct Held {
    since_ns: u64,
    packets: u64,
    due_ns: u64,
}

impl RunningQueue {
    pub(crate) fn new(activation: Activation, handler: Handler, stats: Arc<QueueStats>) -> Self {
        stats.running.set(1);
        Self {
            index: activation.index,
            queue: activation.queue,
            kick: activation.kick,
            kick_watch: 0,
            is_kick_stale: false,
            call: activation.call,
            err: activation.err,
            enabled: activation.enabled,
            discard: Discard::No,
            handler,
            stats,
            events: activation.events,
            look: Look::Hot,
            fault_told: false,
            is_port_told: false,
            memory_lost: false,
            draining: false,
            worked_at_ns: 0,
            looked_at_ns: 0,
            kicked: false,
            moderation: Moderation::default(),
            held: None,
            watches_port: false,
            has_more: false,
        }
    }

    /// Gets ready on a worker: opens what belongs to its ring, watches the kick.
    pub(crate) fn attach(&mut self, wait: &mut Wait, slot: u32, generation: u32, now_ns: u64) {
        if let Handler::Blk(blk) = &mut self.handler {
            blk.attach(wait.ring(), Source::Disk { slot, token: 0 }.pack());
        }
        self.watch_disk(wait, slot, generation);
        self.watch_kick(wait, slot);
        self.looked_at_ns = now_ns;
        self.make_hot(now_ns);
        self.draining = false;
    }

    /// Lets go of the worker, when nothing is in flight.
    pub(crate) fn detach(&mut self, wait: &mut Wait, slot: u32, generation: u32) {
        if let Handler::Blk(blk) = &mut self.handler {
            blk.detach(wait.ring());
            if let Some(fd) = blk.readiness() {
                wait.unwatch(fd, Source::Offload { slot, generation });
            }
        }
        self.unwatch_port(wait, slot, generation);
        self.unwatch_kick(wait, slot);
    }

    fn make_hot(&mut self, now_ns: u64) {
        if self.look != Look::Hot {
            self.look = Look::Hot;
            // The ring of a disabled queue may be the driver's again.
            if self.enabled {
                self.queue.disable_notifications();
            }
        }
        self.worked_at_ns = now_ns;
    }

    /// True if the worker should look at this queue every turn.
    #[inline]
    pub(crate) fn is_hot(&self) -> bool {
        self.look == Look::Hot
    }

    fn may_pop(&self) -> bool {
        self.enabled && !self.draining && !self.memory_lost
    }

    /// One turn: pop a batch, serve it, complete what is done, notify. True if there was work.
    #[inline]
    pub(crate) fn turn(&mut self, wait: &mut Wait, now_ns: u64) -> bool {
        let worked = match &self.handler {
            Handler::Blk(_) => self.turn_blk(wait, now_ns),
            Handler::Tx(_) | Handler::Rx(_) => self.turn_net(now_ns),
        };
        if self.queue.fault().is_some() && !self.fault_told {
            self.tell_fault();
        }
        if worked {
            self.worked_at_ns = now_ns;
        }
        worked
    }

    fn count_batch(&mut self, popped: usize, now_ns: u64) {
        let popped = popped as u64;
        self.stats.batch_size.record(popped, 1);
        self.stats.wait_ns.record(now_ns.saturating_sub(self.looked_at_ns), 1);
        self.stats.ring_occupancy.set(popped + u64::from(self.queue.available_count()));
        if !std::mem::take(&mut self.kicked) {
            self.stats.kicks_suppressed.add(1);
        }
    }

    #[inline]
    fn ring_call(&self) {
        self.stats.calls.add(1);
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    fn tell_fault(&mut self) {
        self.fault_told = true;
        // A ring that was cut away reads as zeroes: that is no fault of its words.
        if self.queue.memory().is_broken() {
            self.lose_memory();
            return;
        }
        self.stats.faults.add(1);
        if let Some(fault) = self.queue.fault() {
            // A full mailbox drops the line, not the fault: counter and err fd tell it.
            let _ =
                self.events.try_send(Event { index: self.index, kind: EventKind::Fault(fault) });
        }
        // Last: a driver that hears it may end the session at once.
        if let Some(err) = &self.err {
            err.ring();
        }
    }

    /// Guest memory was cut away: stop popping and end the session.
    fn lose_memory(&mut self) {
        if !self.memory_lost {
            self.memory_lost = true;
            self.stats.faults.add(1);
            let _ = self.events.try_send(Event { index: self.index, kind: EventKind::MemoryLost });
        }
    }

    /// A region of some guest was cut away: was it ours?
    pub(crate) fn check_memory(&mut self) {
        if self.queue.memory().is_broken() {
            self.lose_memory();
        }
    }

    /// True if the queue should leave the list of those that take turns although its worker is
    /// busy with others: it has had nothing for a while, or waits for its port, which nobody
    /// watches until the queue settles.
    #[inline]
    pub(crate) fn is_overdue(&self, now_ns: u64) -> bool {
        let idle_ns = now_ns.saturating_sub(self.worked_at_ns);
        self.look == Look::Armed || idle_ns >= BUSY_REST_NS || self.is_port_blocked()
    }

    fn may_look(&self, polling: Polling, now_ns: u64) -> bool {
        polling.decide(now_ns, self.worked_at_ns) == Decision::Look
    }

    /// True if the ring is worth a further look: it costs a read.
    pub(crate) fn looks_at_ring(&self, polling: Polling, now_ns: u64) -> bool {
        self.asks_driver() && self.may_look(polling, now_ns)
    }

    /// Nothing to do since a while: ask for notifications. False: keep looking. A look at a port
    /// is a system call and most often in vain: that is done only while the worker `looks_on`
    /// anyway, at the ring of some other queue.
    pub(crate) fn settle(
        &mut self,
        (polling, looks_on): (Polling, bool),
        wait: &mut Wait,
        slot: u32,
        generation: u32,
        now_ns: u64,
    ) -> bool {
        self.tell_port();
        if self.has_more {
            return false;
        }
        let asks_driver = self.asks_driver();
        if asks_driver && self.kick.is_none() && self.queue.fault().is_none() {
            return false;
        }
        if (asks_driver || looks_on) && self.may_look(polling, now_ns) {
            return false;
        }
        let writes = self.enabled || self.discard == Discard::Found;
        if asks_driver && writes && self.queue.enable_notifications() {
            return false;
        }
        self.discard = Discard::No;
        if !asks_driver && !self.watch_port(wait, slot, generation) {
            return false;
        }
        self.look = Look::Armed;
        true
    }

    /// True if the next work is the driver's to bring.
    fn asks_driver(&self) -> bool {
        match &self.handler {
            Handler::Blk(_) => self.may_pop() && !self.is_full(),
            Handler::Tx(tx) => self.may_take() && !tx.waits_for_port(),
            Handler::Rx(rx) => self.may_pop() && !rx.is_broken() && !rx.has_room(),
        }
    }

    /// Serves the ring from now on, or lets it be: a driver that has no other word for "stop" takes
    /// the memory back as soon as this is answered.
    pub(crate) fn set_enabled(&mut self, enabled: bool, wait: &mut Wait, now_ns: u64) {
        if !enabled && std::mem::replace(&mut self.enabled, false) {
            self.let_go();
            self.discard_all(wait, now_ns);
        }
        if enabled {
            self.enabled = true;
            self.is_kick_stale = false;
            self.discard = Discard::No;
            if let Handler::Rx(rx) = &mut self.handler {
                // It may have been detached from its port meanwhile.
                rx.revive();
                self.is_port_told = false;
            }
            // What arrived before is served now: a kick that came early is not lost.
            self.make_hot(now_ns);
        }
    }

    pub(crate) fn set_call(&mut self, call: Option<Arc<Call>>) {
        self.call = call;
        // The driver may wait for a call that went to the former fd: one too many is harmless.
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    pub(crate) fn set_err(&mut self, err: Option<Arc<Call>>) {
        self.err = err;
    }

    pub(crate) fn set_memory(
        &mut self,
        memory: Arc<GuestMemory>,
        addresses: RingAddresses,
        reply: MemoryReply,
        now_ns: u64,
    ) {
        self.let_go();
        if let Err(error) = self.queue.relocate(addresses, memory.clone()) {
            let _ = reply.send(Err(error));
            return;
        }
        match &mut self.handler {
            Handler::Blk(blk) => blk.retire_memory(memory, reply),
            // What they held of the former memory they have just let go.
            Handler::Tx(_) | Handler::Rx(_) => drop(reply.send(Ok(()))),
        }
        self.check_memory();
        self.make_hot(now_ns);
    }

    /// No more pops from now on.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
        self.let_go();
    }

    /// Pops again after [`Self::drain`]; what arrived since is served now.
    pub(crate) fn resume(&mut self, now_ns: u64) {
        self.draining = false;
        self.make_hot(now_ns);
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.draining && self.queue.in_flight() == 0
    }

    /// The next available index.
    pub(crate) fn base(&self) -> u16 {
        self.queue.base()
    }

    /// True if both belong to one session, as far as a worker can tell guests apart.
    pub(crate) fn is_of_same_guest(&self, other: &Self) -> bool {
        self.events.same_channel(&other.events)
    }

    pub(crate) fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }
}

impl Drop for RunningQueue {
    fn drop(&mut self) {
        self.stats.running.set(0);
        self.stats.in_flight.set(0);
        match &mut self.handler {
            Handler::Blk(blk) => blk.abandon(&mut self.queue),
            Handler::Tx(_) | Handler::Rx(_) => self.let_go(),
        }
    }
}

impl From<rustix::io::Errno> for StartError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Backend(errno)
    }
}
