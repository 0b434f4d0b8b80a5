//! `Receiving`: keeps the order of the frames of a flow that moves to another pair, when the host
//! delivers to more or fewer pairs (docs/design/0033).
//!
//! ```text
//! begin    hold the pairs that get flows: their receiveqs take no frame
//!          (the caller waits until each receiveq has begun a new turn)
//! turn     change the table, and wait until the host has put away every frame whose queue it chose
//!          by the old one. What stands in the old queues then is all that must come first
//! unread   the old queues that were not read yet until they were empty, or for as many frames as
//!          they hold (once there is none, the caller waits until each has begun a new turn)
//! end      release the pairs that were held
//! ```
//! With more pairs only the new ones get flows; with fewer, only those that stay. So no pair is
//! held until it is read itself.

use manyring_backend::net::tap::Flows;
use rustix::thread::{MembarrierCommand, membarrier};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Frames that a queue of unknown length holds at most: as a rule it is read until it is empty.
const LENGTH_UNKNOWN: u32 = 1 << 16;
/// Time in which the host puts a frame away, where it cannot be asked (`nohz_full`).
const GRACE: Duration = Duration::from_millis(50);
const HELD: u32 = u32::MAX;

/// Whether a receiveq takes frames. `u32::MAX`: it takes none. 0: it takes frames. Any other value:
/// it takes frames, and so many of the next ones may be older than a change.
#[derive(Debug, Default)]
pub struct Gate(AtomicU32);

impl Gate {
    /// Returns the state at the beginning of a turn: how many frames may be older than a change;
    /// `None`: the turn must take no frame.
    #[inline]
    pub fn look(&self) -> Option<u32> {
        Some(self.0.load(Ordering::Acquire)).filter(|older| *older != HELD)
    }

    /// Notes at the end of a turn that of the `before` older frames `left` are left. Has no effect
    /// if the state is another one by now: the turn says nothing about it.
    pub fn note(&self, before: u32, left: u32) {
        if before != left {
            let _ = self.0.compare_exchange(before, left, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The receiveqs of a device, and a change of the pairs to which the host delivers.
#[derive(Debug)]
pub struct Receiving {
    gates: Vec<Arc<Gate>>,
    /// The pairs that give flows to others.
    give: Mutex<Vec<usize>>,
}

impl Receiving {
    /// Makes the gates of so many receiveqs, all of them open.
    #[must_use]
    pub fn new(pairs: usize) -> Self {
        Self { gates: (0..pairs).map(|_| Arc::default()).collect(), give: Mutex::default() }
    }

    /// Returns the gate of a pair's receiveq.
    #[must_use]
    pub fn gate(&self, pair: usize) -> Arc<Gate> {
        self.gates.get(pair).cloned().unwrap_or_default()
    }

    /// Begins to deliver to the first `pairs` in use, 1 or more; `None`: to all. `order`: the pairs
    /// that the host uses, in its order. Returns false if no flow moves, and so it is done. A
    /// change between all and several moves flows from any pair to any other, so the caller must
    /// change to one first.
    pub fn begin(&self, flows: &Flows, order: &[usize], pairs: Option<usize>) -> bool {
        let used = order.len();
        let count = |pairs: Option<usize>| pairs.unwrap_or(used).clamp(1, used.max(1));
        let (now, next) = (count(flows.receiving()), count(pairs));
        self.end();
        if now == next {
            flows.deliver(order, pairs);
            return false;
        }
        let (stay, others) = order.split_at(now.min(next));
        let go = &others[..now.abs_diff(next)];
        let (give, get) = if next > now { (stay, go) } else { (go, stay) };
        self.set(get, HELD);
        *self.give.lock().unwrap_or_else(PoisonError::into_inner) = give.to_vec();
        true
    }

    /// Changes the table. Blocks for some milliseconds.
    pub fn turn(&self, flows: &Flows, order: &[usize], pairs: Option<usize>) {
        flows.deliver(order, pairs);
        // The host chooses a frame's queue and puts the frame there in one section of RCU.
        if membarrier(MembarrierCommand::Global).is_err() {
            std::thread::sleep(GRACE);
        }
        let [length, _] = flows.length_and_changes();
        let length = Some(length).filter(|length| *length > 0);
        self.set(&self.given(), length.unwrap_or(LENGTH_UNKNOWN).min(HELD - 1));
    }

    /// Returns the pairs whose queues still hold frames from before the change of the table.
    #[must_use]
    pub fn unread(&self) -> Vec<usize> {
        let mut given = self.given();
        given.retain(|pair| self.gate(*pair).look() != Some(0));
        given
    }

    /// Releases the pairs that were held.
    pub fn end(&self) {
        self.give.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.gates.iter().for_each(|gate| gate.0.store(0, Ordering::Release));
    }

    fn given(&self) -> Vec<usize> {
        self.give.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, pairs: &[usize], state: u32) {
        let gates = pairs.iter().filter_map(|pair| self.gates.get(*pair));
        gates.for_each(|gate| gate.0.store(state, Ordering::Release));
    }
}
