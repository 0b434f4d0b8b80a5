//! controlq: a task of the control thread that takes commands off the ring, one after the other.
//!
//! The status byte of a command is written when all workers and the host follow the command, or
//! after a second: a Linux guest spins until then.

use super::Inner;
use super::control::{Commands, Reply};
use manyring_engine::Activation;
use manyring_engine::Order;
use manyring_engine::QueueHandle;
use manyring_engine::stats::QueueStats;
use manyring_engine::{Call, Kick};
use manyring_engine::{Event, EventKind};
use manyring_memory::{SliceList, copy_from_slices, copy_to_slices, total_len};
use manyring_queue::{Batch, DeviceQueue, QueueError};
use manyring_wire::net::{Command, CommandError, CtrlStatus};
use rustix::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::sync::mpsc;

/// Longest command that is read: a MAC table of ten thousand addresses.
const COMMAND_SIZE_MAX: u64 = 64 << 10;
/// How often a ring without a kick is looked at.
const POLL_PERIOD: Duration = Duration::from_millis(5);
/// Refusals that are logged, for each start of the queue: a guest must not fill the log.
const REFUSALS_TOLD: u32 = 10;

/// A kick that the control thread watches.
#[derive(Debug)]
struct Watched(Kick);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

pub(super) struct Task {
    device: String,
    commands: Commands,
    index: usize,
    queue: DeviceQueue,
    batch: Batch,
    kick: Option<AsyncFd<Watched>>,
    call: Option<Arc<Call>>,
    err: Option<Arc<Call>>,
    enabled: bool,
    events: mpsc::Sender<Event>,
    stats: Arc<QueueStats>,
    fault_told: bool,
    memory_lost: bool,
    refusals: u32,
}

/// Starts the task of the control queue.
pub(super) async fn start(inner: &Arc<Inner>, activation: Activation) -> QueueHandle {
    let commands = Commands::begin(inner.clone()).await;
    let (sender, orders) = mpsc::unbounded_channel();
    tokio::spawn(Task::new(inner, commands, activation).run(orders));
    QueueHandle::of_task(sender)
}

#[allow(
    deprecated,
    reason = "its replacement is unsafe; `Watched` owns its fd and never changes it"
)]
fn watched(kick: Kick) -> Option<AsyncFd<Watched>> {
    AsyncFd::with_interest(Watched(kick), Interest::READABLE).ok()
}

/// Returns when the driver may have kicked.
async fn kicked(kick: Option<&AsyncFd<Watched>>, stats: &QueueStats) {
    let Some(kick) = kick else { return tokio::time::sleep(POLL_PERIOD).await };
    match kick.readable().await {
        Ok(mut guard) => {
            // The other end is closed, which is reported for ever: nobody can kick any more.
            if guard.ready() & Ready::READABLE == Ready::EMPTY {
                return std::future::pending().await;
            }
            guard.clear_ready();
            stats.kicks.add(1);
        }
        Err(_) => tokio::time::sleep(POLL_PERIOD).await,
    }
}

impl Task {
    pub(super) fn new(inner: &Inner, commands: Commands, activation: Activation) -> Self {
        let stats = inner.stats[activation.index].clone();
        stats.running.set(1);
        Self {
            device: inner.options.name.clone(),
            commands,
            index: activation.index,
            queue: activation.queue,
            batch: Batch::new(),
            kick: activation.kick.and_then(watched),
            call: activation.call,
            err: activation.err,
            enabled: activation.enabled,
            events: activation.events,
            stats,
            fault_told: false,
            memory_lost: false,
            refusals: 0,
        }
    }

    #[cfg(fuzzing)]
    pub(super) fn queue(&self) -> &DeviceQueue {
        &self.queue
    }

    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        loop {
            // One command, then the other tasks of this thread: a driver that never stops must not
            // keep the thread.
            let has_more = self.serve_next().await;
            self.check_memory();
            let looks = self.enabled && !self.memory_lost && self.queue.fault().is_none();
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    Some(order) => if self.heed(order) { return },
                    None => return,
                },
                () = tokio::task::yield_now(), if has_more => {}
                () = kicked(self.kick.as_ref(), &self.stats), if looks && !has_more => {}
            }
        }
    }

    /// True if the task is to end.
    fn heed(&mut self, order: Order) -> bool {
        match order {
            Order::Stop(reply) => {
                let _ = reply.send(self.queue.base());
                return true;
            }
            Order::Memory(memory, addresses, reply) => {
                self.batch.release();
                let _ = reply.send(self.queue.relocate(addresses, memory));
            }
            // A command is served to its end before the next order is heard.
            Order::Enable(enabled, fence) => {
                self.enabled = enabled;
                let _ = fence.send(Ok(()));
            }
            Order::Fence(fence) => drop(fence.send(Ok(()))),
            // Only queues of workers have rules, are moderated, or move.
            Order::Refresh(_) | Order::Moderate(..) | Order::Move(..) | Order::Stay => {}
            Order::Kick(kick, reply) => {
                self.kick = kick.and_then(watched);
                let _ = reply.send(());
            }
            Order::Call(call, reply) => {
                self.call = call;
                self.ring();
                let _ = reply.send(());
            }
            Order::Err(err, reply) => {
                self.err = err;
                let _ = reply.send(());
            }
        }
        false
    }

    fn ring(&self) {
        if let Some(call) = &self.call {
            call.ring();
        }
    }

    /// Serves the next command. False: there is none, and a kick was asked for.
    pub(super) async fn serve_next(&mut self) -> bool {
        if !self.enabled || self.memory_lost {
            return false;
        }
        if self.queue.pop_batch(&mut self.batch, 1) == 0 {
            self.tell_fault();
            return self.queue.enable_notifications();
        }
        self.queue.disable_notifications();
        self.serve_one().await;
        self.queue.publish();
        if self.queue.needs_notification() {
            self.stats.calls.add(1);
            self.ring();
        } else {
            self.stats.calls_suppressed.add(1);
        }
        true
    }

    async fn serve_one(&mut self) {
        let Some((chain, readable, writable)) = self.batch.take(0) else { return };
        let (size, room) = (total_len(&readable), total_len(&writable));
        let Some(size) = usize::try_from(size.min(COMMAND_SIZE_MAX)).ok().filter(|_| room > 0)
        else {
            self.queue.latch_fault(QueueError::Request("command without a status byte"));
            self.queue.discard(chain);
            return;
        };
        let mut bytes = vec![0; size];
        copy_from_slices(&readable, &mut bytes);
        // Memory that was cut away reads as zeroes, which no driver has written.
        if self.queue.memory().is_broken() {
            self.queue.discard(chain);
            return;
        }
        // The command may take a while: this keeps the room for its answer mapped until then.
        let mut room = SliceList::new();
        room.extend(writable);
        let reply = self.obey(&bytes).await;
        let answer = [&[reply.status as u8][..], &reply.result].concat();
        let written = copy_to_slices(room.as_slices(), &answer);
        self.stats.packets.add(1);
        self.queue.push_used(chain, u32::try_from(written).unwrap_or(0));
    }

    async fn obey(&mut self, bytes: &[u8]) -> Reply {
        let device = &self.device;
        let refusal: &dyn std::fmt::Display = match Command::parse(bytes) {
            Ok(command) => {
                tracing::debug!(device, ?command, "command");
                match self.commands.obey(command).await {
                    Ok(reply) => return reply,
                    Err(refusal) => &{ refusal },
                }
            }
            Err(error) => &{ error } as &CommandError,
        };
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals <= REFUSALS_TOLD {
            tracing::warn!(device, %refusal, "command of the control queue refused");
        }
        Reply::status(CtrlStatus::Err)
    }

    /// Ends the session if a region of its memory was cut away: this task may be the only one that
    /// touches the region, which reads as zeroes now.
    fn check_memory(&mut self) {
        if !self.memory_lost && self.queue.memory().is_broken() {
            self.memory_lost = true;
            self.stats.faults.add(1);
            let _ = self.events.try_send(Event { index: self.index, kind: EventKind::MemoryLost });
        }
    }

    fn tell_fault(&mut self) {
        if self.queue.memory().is_broken() {
            return;
        }
        if let Some(fault) = self.queue.fault().filter(|_| !self.fault_told) {
            self.fault_told = true;
            self.stats.faults.add(1);
            let kind = EventKind::Fault(fault);
            let _ = self.events.try_send(Event { index: self.index, kind });
            if let Some(err) = &self.err {
                err.ring();
            }
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.stats.running.set(0);
    }
}
