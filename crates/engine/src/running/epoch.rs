//! `Epochs`: which snapshots of guest memory are still in use, and which fences wait for the end of
//! their use.
//!
//! ```text
//! begin():         a request of the present epoch is in flight
//! retire(memory):  a new epoch begins; the former one keeps its snapshot while requests use it
//! end(epoch):      a request of that epoch is done
//! acknowledge():   answers the fences of epochs that have no request left, the oldest first
//! ```
//! A request (or frame) in flight carries the epoch in which it began: its slices lie in the
//! snapshot of that epoch. The worker, the kernel or a thread of a disk may use these slices until
//! the request is done. Epochs are acknowledged in order, because a request of an older epoch may
//! use memory that only a later change removed.

use crate::running::orders::Fence;
use manyring_memory::GuestMemory;
use std::sync::Arc;

/// The time between two changes of a queue's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u32);

/// An epoch that has ended and is not acknowledged yet.
#[derive(Debug)]
struct Retiring {
    epoch: Epoch,
    /// How many of its requests are in flight.
    left: usize,
    memory: Arc<GuestMemory>,
    reply: Fence,
}

/// The epochs of a queue: the present one, and those that have ended and not been acknowledged.
#[derive(Debug)]
pub struct Epochs {
    current: Epoch,
    /// How many requests of the present epoch are in flight. A counter, since a front-end may ask
    /// for the end of an epoch again and again, and a walk over all slots takes long.
    begun: usize,
    memory: Arc<GuestMemory>,
    /// The oldest first.
    retiring: Vec<Retiring>,
}

impl Epochs {
    /// Begins the first epoch, in which `memory` is the queue's.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self { current: Epoch(0), begun: 0, memory, retiring: Vec::new() }
    }

    /// Counts a request that begins, and returns its epoch.
    #[inline]
    pub fn begin(&mut self) -> Epoch {
        self.begun += 1;
        self.current
    }

    /// Returns the epoch of requests that begin now.
    #[inline]
    pub fn current(&self) -> Epoch {
        self.current
    }

    /// Returns the snapshot of `epoch`, which is the present epoch or is not acknowledged.
    ///
    /// # Panics
    /// If `epoch` was acknowledged: its memory may be unmapped.
    #[inline]
    pub fn memory(&self, epoch: Epoch) -> &GuestMemory {
        if epoch == self.current { &self.memory } else { self.older(epoch) }
    }

    #[cold]
    fn older(&self, epoch: Epoch) -> &GuestMemory {
        let older = self.retiring.iter().find(|retiring| retiring.epoch == epoch);
        let Some(older) = older else { panic!("{epoch:?} is over, and something was in flight") };
        &older.memory
    }

    /// Counts a request of `epoch` that is done. The snapshot stays until [`Self::acknowledge`].
    #[inline]
    pub fn end(&mut self, epoch: Epoch) {
        if epoch == self.current {
            debug_assert!(self.begun > 0, "{epoch:?} has nothing in flight");
            self.begun -= 1;
        } else {
            self.end_older(epoch);
        }
    }

    #[cold]
    fn end_older(&mut self, epoch: Epoch) {
        let older = self.retiring.iter_mut().find(|retiring| retiring.epoch == epoch);
        debug_assert!(older.as_ref().is_some_and(|older| older.left > 0), "{epoch:?} is over");
        if let Some(older) = older {
            older.left -= 1;
        }
    }

    /// Begins a new epoch with `memory`; answers `reply` when no request of an older epoch is left.
    pub fn retire(&mut self, memory: Arc<GuestMemory>, reply: Fence) {
        let (epoch, left) = (self.current, std::mem::take(&mut self.begun));
        let memory = std::mem::replace(&mut self.memory, memory);
        self.retiring.push(Retiring { epoch, left, memory, reply });
        self.current = Epoch(epoch.0.wrapping_add(1));
        self.acknowledge();
    }

    /// Answers `reply` when no request is left that has begun until now. The memory stays the same.
    pub fn barrier(&mut self, reply: Fence) {
        self.retire(self.memory.clone(), reply);
    }

    /// True while a fence waits for the end of an epoch.
    #[must_use]
    #[inline]
    pub fn is_waited_for(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Leaves the memory of every epoch mapped for ever: the queue ends, and the kernel or a disk's
    /// thread may still use the memory of what is in flight. Fences are dropped, not answered.
    pub fn leak(self) {
        let older = self.retiring.into_iter().map(|retiring| retiring.memory);
        older.chain([self.memory]).for_each(std::mem::forget);
    }

    /// Answers the fences of epochs that have no request left, and releases their snapshots. Called
    /// when the driver can see the answers of all requests that are done.
    #[inline]
    pub fn acknowledge(&mut self) {
        if !self.retiring.is_empty() {
            self.acknowledge_older();
        }
    }

    #[cold]
    fn acknowledge_older(&mut self) {
        let done = self.retiring.iter().take_while(|retiring| retiring.left == 0).count();
        for Retiring { memory, reply, .. } in self.retiring.drain(..done) {
            // Before the reply: the control thread, which receives it, then has the last reference
            // and unmaps the memory. Unmapping may take long, so a worker must not do it.
            drop(memory);
            let _ = reply.send(Ok(()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, Weak};
    use std::task::{Context, Wake, Waker};
    use tokio::sync::oneshot;

    /// Counts the holders of a snapshot when it is woken.
    struct Holders {
        memory: Mutex<Weak<GuestMemory>>,
        seen: AtomicUsize,
    }

    impl Wake for Holders {
        fn wake(self: Arc<Self>) {
            let holders = self.memory.lock().unwrap().strong_count();
            self.seen.store(holders, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_snapshot_is_let_go_of_before_its_change_is_acknowledged() {
        // As the control thread holds it, until it hears the reply.
        let memory = Arc::new(GuestMemory::default());
        let mut epochs = Epochs::new(memory.clone());
        let (reply, mut heard) = oneshot::channel();
        let (held, seen) = (Mutex::new(Arc::downgrade(&memory)), AtomicUsize::new(usize::MAX));
        let holders = Arc::new(Holders { memory: held, seen });
        let waker = Waker::from(holders.clone());
        assert!(Pin::new(&mut heard).poll(&mut Context::from_waker(&waker)).is_pending());
        epochs.retire(Arc::default(), reply);
        assert_eq!(holders.seen.load(Ordering::Relaxed), 1, "the worker may unmap it");
    }

    #[test]
    fn epochs_are_acknowledged_in_order_when_nothing_of_an_older_one_is_left() {
        let mut epochs = Epochs::new(Arc::default());
        let (first, second) = (epochs.current(), Arc::new(GuestMemory::default()));
        let (reply, mut changed) = oneshot::channel();
        assert_eq!([epochs.begin(), epochs.begin()], [first; 2]);
        epochs.retire(second.clone(), reply);
        let (reply, mut passed) = oneshot::channel();
        let later = epochs.begin();
        epochs.barrier(reply);
        assert!(std::ptr::eq(epochs.memory(later), Arc::as_ptr(&second)));
        // The request that is done first began last: its fence waits for the older requests too.
        epochs.end(later);
        epochs.end(first);
        epochs.acknowledge();
        assert!(changed.try_recv().is_err() && passed.try_recv().is_err(), "one is left");
        let latest = epochs.begin();
        epochs.end(latest);
        epochs.end(first);
        assert!(changed.try_recv().is_err(), "the answers have not been written yet");
        epochs.acknowledge();
        assert!(changed.try_recv().is_ok() && passed.try_recv().is_ok());
    }

    #[test]
    #[should_panic(expected = "is over")]
    fn the_memory_of_an_epoch_that_was_acknowledged_is_not_lent() {
        let mut epochs = Epochs::new(Arc::default());
        let first = epochs.current();
        epochs.retire(Arc::default(), oneshot::channel().0);
        let _ = epochs.memory(first);
    }
}
