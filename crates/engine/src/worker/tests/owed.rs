//! Queues of which a former process has taken chains and not returned them: some handlers return
//! them whatever happens, and a receiveq's only when a frame comes.

use super::*;
use crate::running::handler::{Done, Handler, Turn, TurnMode, Waits};
use crate::{Activation, RunningQueue};
use manyring_memory::GuestMemory;
use manyring_queue::{Base, QueueError, Ring, RingAddresses};
use std::sync::atomic::AtomicU16;
use tokio::sync::oneshot::error::TryRecvError;

/// Chains that are owed at first.
const OWED: u16 = 3;

/// A ring without memory, of which the test sees how many chains are owed.
#[derive(Debug)]
struct Owing {
    owed: Arc<AtomicU16>,
    /// The chains lie in the ring still, so that they can go back.
    lie_in_ring: bool,
    memory: Arc<GuestMemory>,
}

impl Ring for Owing {
    fn has_available(&mut self) -> bool {
        false
    }

    fn available_count(&self) -> u16 {
        0
    }

    fn in_flight(&self) -> u16 {
        0
    }

    fn owed(&self) -> u16 {
        self.owed.load(Ordering::Relaxed)
    }

    fn owes(&self) -> bool {
        self.owed() > 0
    }

    fn put_back_owed(&mut self) -> bool {
        if self.lie_in_ring {
            self.owed.store(0, Ordering::Relaxed);
        }
        self.lie_in_ring
    }

    fn size(&self) -> u16 {
        16
    }

    fn base(&self) -> Base {
        Base::default()
    }

    fn publish(&mut self) -> u16 {
        0
    }

    fn needs_notification(&mut self) -> bool {
        false
    }

    fn enable_notifications(&mut self) -> bool {
        false
    }

    fn disable_notifications(&mut self) {}

    fn fault(&self) -> Option<QueueError> {
        None
    }

    fn latch_fault(&mut self, fault: QueueError) {
        unreachable!("{fault}");
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn relocate(&mut self, _: RingAddresses, memory: Arc<GuestMemory>) -> Result<(), QueueError> {
        self.memory = memory;
        Ok(())
    }
}

/// Returns all owed chains in each turn that may take some, if its input has come.
#[derive(Debug)]
struct Serves<const WAITS: bool> {
    has_input: bool,
}

impl<const WAITS: bool> Handler<Owing> for Serves<WAITS> {
    const WAITS_FOR_INPUT: bool = WAITS;

    fn turn(&mut self, ring: &mut Owing, turn: &mut Turn<'_, '_>) -> Done {
        if turn.mode == TurnMode::Serve && self.has_input {
            ring.owed.store(0, Ordering::Relaxed);
        }
        Done::default()
    }

    fn waits(&self, _: &Owing) -> Waits {
        Waits { driver: true, ..Waits::default() }
    }

    fn abandon(&mut self, _: &mut Owing) {}
}

/// A worker with such a queue as its first, and how many chains it owes.
struct Served {
    worker: Worker,
    owed: Arc<AtomicU16>,
}

impl Served {
    fn by<const WAITS: bool>(handler: Serves<WAITS>) -> Self {
        Self::with(handler, false, true)
    }

    fn with<const WAITS: bool>(handler: Serves<WAITS>, lie_in_ring: bool, enabled: bool) -> Self {
        let owed = Arc::new(AtomicU16::new(OWED));
        let ring = Owing { owed: owed.clone(), lie_in_ring, memory: Arc::default() };
        let (addresses, events) = (
            RingAddresses { descriptor: 0, available: 0, used: 0 },
            tokio::sync::mpsc::channel(1).0,
        );
        let activation = Activation {
            index: 0,
            queue: ring,
            addresses,
            kick: None,
            call: None,
            err: None,
            enabled,
            features: 0,
            events,
        };
        let queue = RunningQueue::new(activation, handler, Arc::default());
        let mut worker = new_worker();
        worker.start(QueueId(1), Box::new(queue), None);
        Self { worker, owed }
    }

    /// Stops the queue as `GET_VRING_BASE` does, and returns where the answer arrives.
    fn stop(&mut self) -> tokio::sync::oneshot::Receiver<Base> {
        let (reply, base) = tokio::sync::oneshot::channel();
        self.worker.end(self.worker.by_id[&QueueId(1)], DrainAction::Stop(reply));
        self.worker.finish_drained();
        base
    }

    /// Disables the queue, and returns where the answer arrives.
    fn disable(&mut self) -> tokio::sync::oneshot::Receiver<Result<(), QueueError>> {
        let (fence, answer) = tokio::sync::oneshot::channel();
        self.worker.mailbox.send(Command::Order(QueueId(1), Order::Enable(false, fence)));
        self.worker.obey();
        answer
    }

    fn turn(&mut self) {
        self.worker.turn_hot();
        self.worker.finish_drained();
    }

    fn owed(&self) -> u16 {
        self.owed.load(Ordering::Relaxed)
    }
}

#[test]
fn owed_chains_are_served_before_a_stop_or_a_disable_is_answered() {
    let mut served = Served::by(Serves::<false> { has_input: true });
    let mut base = served.stop();
    assert_eq!(base.try_recv(), Err(TryRecvError::Empty), "it owes {} chains", served.owed());
    served.turn();
    assert!(base.try_recv().is_ok());
    assert_eq!(served.owed(), 0);

    let mut served = Served::by(Serves::<false> { has_input: true });
    served.disable();
    served.turn();
    assert_eq!(served.owed(), 0);
}

#[test]
fn a_stop_or_a_disable_waits_for_no_owed_buffer_that_only_input_would_return() {
    let mut served = Served::by(Serves::<true> { has_input: false });
    assert!(served.stop().try_recv().is_ok(), "it waits for a frame that may never come");
    assert_eq!(served.owed(), OWED, "they are left to the next process");

    // The queue has input again: nothing of the ring is touched after "disable" was answered.
    let mut served = Served::by(Serves::<true> { has_input: true });
    assert!(served.disable().try_recv().is_ok());
    served.turn();
    assert_eq!(served.owed(), OWED);
}

#[test]
fn owed_chains_that_lie_in_the_ring_go_back_before_a_stop_or_a_disable_is_answered() {
    let lie = |enabled| Served::with(Serves::<false> { has_input: false }, true, enabled);
    for enabled in [true, false] {
        let mut served = lie(enabled);
        assert!(served.stop().try_recv().is_ok(), "nobody serves them here");
        assert_eq!(served.owed(), 0);
        let mut served = lie(enabled);
        assert!(served.disable().try_recv().is_ok());
        assert_eq!(served.owed(), 0);
    }
    let mut served = Served::with(Serves::<true> { has_input: false }, true, true);
    assert!(served.stop().try_recv().is_ok());
    assert_eq!(served.owed(), 0, "the base tells of a receiveq's too");
}

/// As when the process before this one died while it disabled the queue.
#[test]
fn a_queue_that_comes_disabled_serves_what_it_owes_before_a_stop_or_a_disable_is_answered() {
    let comes = || Served::with(Serves::<false> { has_input: true }, false, false);
    let mut served = comes();
    served.turn();
    assert_eq!(served.owed(), OWED, "it serves nothing unasked");
    let mut base = served.stop();
    assert_eq!(base.try_recv(), Err(TryRecvError::Empty));
    served.turn();
    assert!(base.try_recv().is_ok());
    assert_eq!(served.owed(), 0);

    let mut served = comes();
    served.turn();
    let mut answer = served.disable();
    assert_eq!(answer.try_recv(), Err(TryRecvError::Empty));
    served.turn();
    assert!(answer.try_recv().is_ok());
    assert_eq!(served.owed(), 0);
}
