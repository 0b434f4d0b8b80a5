//! controlq: its worker pops commands, one at a time, and a task of the control thread carries them
//! out (`commands.rs`).
//!
//! ```text
//! worker:           pop a chain; copy the command out; send it to the task     -> Clerk
//! control thread:   carry it out: tell the workers of other queues, call the host;
//!                   store the answer, wake the worker                          -> Desk
//! worker:           write the answer; push the chain; pop the next one
//! ```
//! 1. The ring and the bytes of a command lie in guest memory, where a page fault can take as long
//!    as the front-end chooses. So only the worker touches them: if the control thread waited, all
//!    sessions would.
//! 2. A command changes the state of the control thread, and calls of the host may be slow. So no
//!    worker carries it out: the queue has one command under way, and sleeps until its answer.
//! 3. The status byte is written when all workers and the host have applied the command, or after a
//!    second at the latest, because a Linux guest spins until then.

use super::Inner;
use super::commands::{Commands, Reply};
use crate::StartError;
use manyring_engine::stats::QueueStats;
use manyring_engine::{
    Activation, Done, Epoch, Epochs, Fence, Handler, Home, Moderation, QueueHandle, QueueIo, Turn,
    TurnMode, Waits,
};
use manyring_memory::{GuestMemory, SliceList, copy_from_slices, copy_to_slices, total_len};
use manyring_queue::{Batch, Chain, Chains, QueueError};
use manyring_wire::net::{Command, CommandError, CtrlStatus};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// Longest command that is read: a MAC table of ten thousand addresses.
const COMMAND_SIZE_MAX: u64 = 64 << 10;
/// The most refusals that are logged for each start of the queue, so that a guest cannot fill the
/// log.
const REFUSALS_TOLD: u32 = 10;

/// Passes the answer to a command from the task to the worker.
#[derive(Debug)]
struct Desk {
    answer: Mutex<Option<Reply>>,
    /// Eventfd that is written when there is an answer. The worker watches it edge-triggered, and
    /// never reads it.
    event: OwnedFd,
}

impl Desk {
    fn new() -> Result<Self, Errno> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { answer: Mutex::default(), event })
    }

    fn leave(&self, answer: Reply) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn take(&self) -> Option<Reply> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A command that was sent to the task and is not answered yet.
#[derive(Debug)]
struct UnderWay {
    chain: Chain,
    epoch: Epoch,
    /// The guest memory for the answer; the list keeps it mapped until the answer is written.
    room: SliceList,
}

/// The part of a control queue that the worker runs: serves its ring.
#[derive(Debug)]
pub(super) struct ControlQueue {
    batch: Batch,
    under_way: Option<UnderWay>,
    epochs: Epochs,
    desk: Arc<Desk>,
    /// The channel to the task that carries commands out; it holds one command at a time.
    commands: mpsc::Sender<Vec<u8>>,
}

/// The part of a control queue that the control thread runs, as a task: carries out its commands.
#[derive(Debug)]
pub(super) struct Clerk {
    device: String,
    commands: Commands,
    refusals: u32,
    desk: Arc<Desk>,
    inbox: mpsc::Receiver<Vec<u8>>,
}

/// Starts the control queue of `activation`.
///
/// # Errors
/// [`StartError::Backend`]: no eventfd can be made. [`StartError::NoWorker`]: no worker can be
/// started.
pub(super) async fn start(
    inner: &Arc<Inner>,
    activation: Activation,
) -> Result<QueueHandle, StartError> {
    let commands = Commands::begin(inner.clone(), inner.goes_on(&activation)).await;
    let (queue, clerk) = halves(inner, commands, activation.queue.memory().clone())?;
    tokio::spawn(clerk.run());
    let stats = inner.stats.to_run(activation.index);
    // Run the queue on the worker of the first pair, which the operator or the balancer chooses.
    let home = Home { device: inner.options.name.clone(), unit: 0 };
    let queue = activation.running(queue, stats, Moderation::Off);
    inner.pool.start(queue, home).ok_or(StartError::NoWorker)
}

/// Makes the two parts of a control queue: the worker's and the control thread's.
pub(super) fn halves(
    inner: &Inner,
    commands: Commands,
    memory: Arc<GuestMemory>,
) -> Result<(ControlQueue, Clerk), Errno> {
    let desk = Arc::new(Desk::new()?);
    let (sender, inbox) = mpsc::channel(1);
    let queue = ControlQueue {
        batch: Batch::new(),
        under_way: None,
        epochs: Epochs::new(memory),
        desk: desk.clone(),
        commands: sender,
    };
    let device = inner.options.name.clone();
    Ok((queue, Clerk { device, commands, refusals: 0, desk, inbox }))
}

impl ControlQueue {
    /// Writes the task's answer to the guest, and pushes the chain. Returns false if there is no
    /// answer yet.
    #[allow(clippy::cast_possible_truncation, reason = "at most the answer, of some bytes")]
    pub(super) fn answer(&mut self, queue: &mut impl Chains, stats: &QueueStats) -> bool {
        if self.under_way.is_none() {
            return false;
        }
        let Some(reply) = self.desk.take() else { return false };
        let Some(UnderWay { chain, epoch, room }) = self.under_way.take() else { return false };
        let answer = [&[reply.status as u8][..], &reply.result].concat();
        let written = copy_to_slices(room.as_slices(), &answer);
        stats.packets.add(1);
        queue.push_used(chain, written as u32);
        self.epochs.end(epoch);
        true
    }

    /// Pops the next command and sends it to the task, unless one is under way. Returns false if
    /// none was popped.
    pub(super) fn take(&mut self, queue: &mut impl Chains) -> bool {
        if self.under_way.is_some() || queue.pop_batch(&mut self.batch, 1) == 0 {
            return false;
        }
        let Some((chain, readable, writable)) = self.batch.take(0) else { return false };
        let (size, room) = (total_len(&readable), total_len(&writable));
        let Some(size) = usize::try_from(size.min(COMMAND_SIZE_MAX)).ok().filter(|_| room > 0)
        else {
            queue.latch_fault(QueueError::Request("command without a status byte"));
            queue.discard(chain);
            return true;
        };
        let mut bytes = vec![0; size];
        copy_from_slices(&readable, &mut bytes);
        // The command may take long: this list keeps the memory for its answer mapped.
        let mut room = SliceList::new();
        room.extend(writable);
        // If guest memory was truncated, the bytes may be zeroes that no driver has written:
        // discard the command. Sending to the task fails only while the daemon ends.
        if queue.is_broken() || self.commands.try_send(bytes).is_err() {
            queue.discard(chain);
            return true;
        }
        self.under_way = Some(UnderWay { chain, epoch: self.epochs.begin(), room });
        true
    }
}

impl<R: Chains> Handler<R> for ControlQueue {
    fn detach(&mut self, io: &mut QueueIo<'_>) {
        io.unwatch_offload(self.desk.event.as_fd());
    }

    fn watch(&mut self, io: &mut QueueIo<'_>) {
        io.watch_offload(self.desk.event.as_fd());
    }

    fn turn(&mut self, queue: &mut R, turn: &mut Turn<'_, '_>) -> Done {
        let used = usize::from(self.answer(queue, turn.stats));
        let popped = usize::from(turn.mode == TurnMode::Serve && self.take(queue));
        let memory_lost = popped > 0 && queue.is_broken();
        Done { popped, used, told: used, memory_lost, has_more: false }
    }

    fn published(&mut self) {
        self.epochs.acknowledge();
    }

    fn waits(&self, _queue: &R) -> Waits {
        Waits { driver: self.under_way.is_none(), ..Waits::default() }
    }

    fn retire_memory(&mut self, memory: Arc<GuestMemory>, fence: Fence) {
        self.batch.release();
        self.epochs.retire(memory, fence);
    }

    fn fence(&mut self, fence: Fence) {
        self.epochs.barrier(fence);
    }

    fn abandon(&mut self, queue: &mut R) {
        if let Some(UnderWay { chain, .. }) = self.under_way.take() {
            queue.discard(chain);
        }
    }
}

impl Clerk {
    /// Carries out commands until the queue has ended.
    async fn run(mut self) {
        while let Some(bytes) = self.inbox.recv().await {
            self.serve(&bytes).await;
        }
    }

    /// Carries out the next command, if one waits. Returns false if none waits.
    #[cfg(fuzzing)]
    pub(super) async fn serve_next(&mut self) -> bool {
        let Ok(bytes) = self.inbox.try_recv() else { return false };
        self.serve(&bytes).await;
        true
    }

    async fn serve(&mut self, bytes: &[u8]) {
        let reply = self.obey(bytes).await;
        // Write the journal before the answer: if this process is killed in between, the next
        // process serves the command again, which then changes nothing.
        self.commands.keep_state().await;
        self.desk.leave(reply);
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
}
