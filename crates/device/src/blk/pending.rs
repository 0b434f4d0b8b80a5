//! Requests submitted and not yet completed, by token; holds their memory snapshot.
//!
//! A request carries the epoch of the snapshot its slices came from. A new snapshot begins a new
//! epoch; the former one is kept, and its change not acknowledged, until its last request is done.
//! Whoever works on a request - the worker, the kernel, a thread of the disk - may use its slices
//! until its completion has come back here.
//!
//! A queue that ends with requests in flight (its worker quits) cannot know when the kernel or a
//! thread stops using their memory: it leaves those snapshots mapped for ever. That happens when
//! the daemon ends, and to nobody else.

use crate::orders::Fence;
use manyring_memory::{GuestMemory, KeptByte};
use manyring_queue::Chain;
use std::sync::Arc;

/// What is counted when a request completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    Range,
    Other,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) chain: Chain,
    /// Where the status byte goes.
    pub(super) status: KeptByte,
    pub(super) kind: Kind,
    /// Bytes of data; for reads they count as written to the guest.
    pub(super) len: u32,
    pub(super) popped_at_ns: u64,
}

#[derive(Debug)]
struct Retiring {
    epoch: u32,
    left: usize,
    memory: Arc<GuestMemory>,
    reply: Option<Fence>,
}

#[derive(Debug)]
pub(super) struct Pending {
    slots: Vec<Option<(u32, InFlight)>>,
    free: Vec<u32>,
    epoch: u32,
    memory: Arc<GuestMemory>,
    retiring: Vec<Retiring>,
}

impl Pending {
    /// Room for `size` requests: a ring cannot hold more.
    pub(super) fn new(memory: Arc<GuestMemory>, size: u16) -> Self {
        let _ = size;
        Self { slots: Vec::new(), free: Vec::new(), epoch: 0, memory, retiring: Vec::new() }
    }

    /// Remembers a request; the token comes back with its completion. Grows to the ring's size at
    /// most, then no longer allocates.
    #[inline]
    pub(super) fn add(&mut self, request: InFlight) -> u32 {
        let token = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        self.slots[token as usize] = Some((self.epoch, request));
        token
    }

    /// Takes the request of `token`. `None` if there is none: a backend's bug, not the guest's.
    /// Its snapshot stays until [`Self::acknowledge`]: the status byte is still to be written.
    #[inline]
    pub(super) fn take(&mut self, token: u32) -> Option<InFlight> {
        let (epoch, request) = self.slots.get_mut(token as usize)?.take()?;
        self.free.push(token);
        if epoch != self.epoch
            && let Some(older) = self.retiring.iter_mut().find(|r| r.epoch == epoch)
        {
            older.left -= 1;
        }
        Some(request)
    }

    /// Writes the status byte of a request that was taken, before [`Self::acknowledge`].
    #[inline]
    pub(super) fn write_status(&self, request: &InFlight, status: u8) {
        let byte = &request.status;
        if byte.is_in(&self.memory) {
            byte.write(&self.memory, status);
        } else if let Some(older) = self.retiring.iter().find(|r| byte.is_in(&r.memory)) {
            byte.write(&older.memory, status);
        }
    }

    /// Acknowledges the changes whose older snapshots are all out of use: in order, since a
    /// request of an older epoch may use what a later change removed. Called when all requests
    /// that were taken have been answered: it lets go of their snapshots.
    #[inline]
    pub(super) fn acknowledge(&mut self) {
        if self.retiring.is_empty() {
            return;
        }
        let done = self.retiring.iter().take_while(|r| r.left == 0).count();
        for Retiring { memory, reply, .. } in self.retiring.drain(..done) {
            // First: whoever hears the reply is then the last to hold it, and unmaps it where
            // that may take long.
            drop(memory);
            if let Some(reply) = reply {
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// Begins a new epoch with `memory`; `reply` is told when no request uses an older snapshot.
    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, reply: Fence) {
        let older: usize = self.retiring.iter().map(|r| r.left).sum();
        let in_flight = self.slots.len() - self.free.len();
        self.retiring.push(Retiring {
            epoch: self.epoch,
            left: in_flight - older,
            memory: std::mem::replace(&mut self.memory, memory),
            reply: Some(reply),
        });
        self.epoch = self.epoch.wrapping_add(1);
        self.acknowledge();
    }

    /// Begins a new epoch with the same memory; `reply` is told when no request of an older one is
    /// left.
    pub(super) fn barrier(&mut self, reply: Fence) {
        self.retire(self.memory.clone(), reply);
    }

    /// Takes all that is left, when the queue ends. Memory that a disk may still write to is kept
    /// by the disk's queue.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = InFlight> {
        self.slots.drain(..).flatten().map(|(_, request)| request)
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
        let mut pending = Pending::new(memory.clone(), 16);
        let (reply, mut heard) = oneshot::channel();
        let (held, seen) = (Mutex::new(Arc::downgrade(&memory)), AtomicUsize::new(usize::MAX));
        let holders = Arc::new(Holders { memory: held, seen });
        let waker = Waker::from(holders.clone());
        assert!(Pin::new(&mut heard).poll(&mut Context::from_waker(&waker)).is_pending());
        pending.retire(Arc::default(), reply);
        assert_eq!(holders.seen.load(Ordering::Relaxed), 1, "the worker may unmap it");
    }
}
