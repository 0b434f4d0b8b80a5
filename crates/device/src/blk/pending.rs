//! `PendingRequests`: the table of requests that were popped and are not answered, indexed by the
//! slot of their chain.
//!
//! A queue can end with requests in flight, when its worker quits at the end of the daemon. Then
//! the kernel or a thread may still use their memory. So the disk's queue keeps the slices of its
//! requests, which keep the memory snapshot mapped; a disk's queue with io_uring never unmaps it.

use manyring_engine::Epochs;
use manyring_engine::Fence;
use manyring_engine::Table;
use manyring_engine::stats::ServedOp;
use manyring_memory::GuestMemory;
use manyring_queue::Chain;
use std::sync::Arc;

/// The kind of a request, which decides in which counters it is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    #[default]
    Read,
    Write,
    Flush,
    Range,
    /// A write barrier of a Xen ring: it is served after all requests before it.
    OrderedWrite,
    Other,
}

impl Kind {
    /// Returns the histogram for the request's service time.
    pub(super) const fn served(self) -> ServedOp {
        match self {
            Self::Read => ServedOp::Read,
            Self::Write | Self::OrderedWrite => ServedOp::Write,
            Self::Flush => ServedOp::Flush,
            Self::Range => ServedOp::Discard,
            Self::Other => ServedOp::Other,
        }
    }
}

/// A request in flight. `R` has the fields that the answer in its ring's format needs.
#[derive(Debug)]
pub(super) struct InFlight<R> {
    pub(super) chain: Chain,
    pub(super) reply: R,
    pub(super) kind: Kind,
    /// Bytes of guest memory that the request reads or writes.
    pub(super) len: u32,
    pub(super) popped_at_ns: u64,
    /// First byte on the disk.
    pub(super) offset: u64,
}

#[derive(Debug)]
pub(super) struct PendingRequests<R> {
    /// The requests in flight. Each has a number, in the order in which they were added.
    requests: Table<(u32, InFlight<R>)>,
    /// The number of the last request that was added and not put back.
    last: u32,
    epochs: Epochs,
    /// The sum of all requests' `len`.
    bytes: u64,
}

impl<R> PendingRequests<R> {
    pub(super) fn new(memory: Arc<GuestMemory>) -> Self {
        Self { requests: Table::new(), last: 0, epochs: Epochs::new(memory), bytes: 0 }
    }

    /// Returns the snapshot in which the slices of new requests lie.
    pub(super) fn memory(&self) -> &GuestMemory {
        self.epochs.memory(self.epochs.current())
    }

    /// Returns the sum of the lengths of all requests, in bytes.
    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a request. Returns its token, which is the slot of its chain, and which its completion
    /// will have.
    #[inline]
    pub(super) fn add(&mut self, request: InFlight<R>) -> u32 {
        let slot = request.chain.slot();
        self.bytes += u64::from(request.len);
        self.last = self.last.wrapping_add(1);
        self.requests.insert(slot, self.epochs.begin(), (self.last, request));
        slot.into()
    }

    /// Returns the last `count` requests, none of which may be finished.
    pub(super) fn newest(&self, count: usize) -> impl Iterator<Item = &InFlight<R>> {
        let last = self.last;
        let is_new = move |n: u32| (last.wrapping_sub(n) as usize) < count;
        self.requests.iter().filter(move |(_, (n, _))| is_new(*n)).map(|(_, (_, one))| one)
    }

    /// Returns the request of `token`.
    pub(super) fn get(&self, token: u32) -> Option<&InFlight<R>> {
        self.requests.get(token).map(|(_, request)| request)
    }

    /// Removes the request of `token`. Returns it with the memory snapshot in which its slices lie,
    /// which stays mapped until [`Self::acknowledge`]. `None`: there is no such request, which is a
    /// bug of the backend and not of the guest.
    #[inline]
    pub(super) fn finish(&mut self, token: u32) -> Option<(InFlight<R>, &GuestMemory)> {
        let (epoch, (_, request)) = self.requests.take(token)?;
        self.bytes -= u64::from(request.len);
        self.epochs.end(epoch);
        Some((request, self.epochs.memory(epoch)))
    }

    /// Returns the tokens of the requests that can be put back into the ring, the last one first:
    /// those after which no request was added that is finished by now.
    pub(super) fn last_added(&self) -> Vec<u32> {
        let mut found: Vec<_> =
            self.requests.iter().map(|(slot, (n, _))| (self.last.wrapping_sub(*n), slot)).collect();
        found.sort_unstable();
        let are_last = (0..).zip(&found).take_while(|(at, (age, _))| at == age).count();
        found[..are_last].iter().rev().map(|(_, slot)| *slot).collect()
    }

    /// Marks all requests added until now as impossible to put back.
    pub(super) fn end_run(&mut self) {
        self.last = self.last.wrapping_add(1);
    }

    /// Removes the request that was added last, to be put back into the ring.
    pub(super) fn take_last(&mut self, token: u32) -> Option<InFlight<R>> {
        let (request, _) = self.finish(token)?;
        self.last = self.last.wrapping_sub(1);
        Some(request)
    }

    /// Acknowledges changes of memory for which no request is in flight any more. The caller must
    /// have published the answers of all finished requests.
    #[inline]
    pub(super) fn acknowledge(&mut self) {
        self.epochs.acknowledge();
    }

    /// Begins a new epoch with `memory`; `reply` is sent when no request uses older memory.
    pub(super) fn retire(&mut self, memory: Arc<GuestMemory>, reply: Fence) {
        self.epochs.retire(memory, reply);
    }

    /// Sends `reply` when every request that was added until now is done.
    pub(super) fn barrier(&mut self, reply: Fence) {
        self.epochs.barrier(reply);
    }

    /// Removes all requests when the queue ends. The disk's queue keeps the memory that the disk
    /// may still write to.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = InFlight<R>> {
        self.requests.drain().map(|(_, request)| request)
    }
}
