//! A naive ring in plain Rust: the oracle. Queues of values, no indexes, no memory orders.

use std::collections::{BTreeMap, VecDeque};

/// The buffers of a chain, as its driver made it available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelChain {
    pub(crate) id: u16,
    /// (guest address, bytes) the device reads.
    pub(crate) readable: Vec<(u64, u32)>,
    /// (guest address, bytes) the device writes.
    pub(crate) writable: Vec<(u64, u32)>,
    /// The value of every readable byte.
    pub(crate) fill: u8,
    /// Descriptors of the ring that it takes.
    pub(crate) cost: u16,
}

/// A chain on its way from the driver to the device and back.
#[derive(Debug, Default)]
pub(crate) struct Model {
    pub(crate) size: u16,
    /// Chains come back in the order of their pops.
    pub(crate) in_order: bool,
    pub(crate) taken: u16,
    pub(crate) added: VecDeque<ModelChain>,
    pub(crate) available: VecDeque<ModelChain>,
    /// Oldest pop first.
    pub(crate) in_flight: Vec<ModelChain>,
    /// The place of each of them among all pops.
    places: Vec<u64>,
    /// Pushed before their turn.
    early: BTreeMap<u64, (ModelChain, u32)>,
    returned: u64,
    /// The tail of the pops that can be put back: none of them, or later, was pushed.
    pub(crate) put_back: usize,
    pub(crate) pushed: VecDeque<(ModelChain, u32)>,
    pub(crate) used: VecDeque<(ModelChain, u32)>,
    pub(crate) popped_total: u64,
    pub(crate) pushed_total: u64,
    pub(crate) put_back_total: u64,
}

impl Model {
    pub(crate) fn new(size: u16, in_order: bool) -> Self {
        Self { size, in_order, ..Self::default() }
    }

    /// True if a chain of `cost` descriptors fits.
    pub(crate) fn fits(&self, cost: u16) -> bool {
        cost > 0 && cost <= self.size - self.taken
    }

    pub(crate) fn add(&mut self, chain: ModelChain) {
        self.taken += chain.cost;
        self.added.push_back(chain);
    }

    /// Returns how many became available.
    pub(crate) fn publish(&mut self) -> usize {
        let count = self.added.len();
        self.available.append(&mut self.added);
        count
    }

    pub(crate) fn pop(&mut self) -> Option<ModelChain> {
        let chain = self.available.pop_front()?;
        self.in_flight.push(chain.clone());
        self.places.push(self.popped_total - self.put_back_total);
        self.put_back += 1;
        self.popped_total += 1;
        Some(chain)
    }

    /// The chain that would be put back, if one can.
    pub(crate) fn newest(&self) -> Option<&ModelChain> {
        if self.put_back > 0 { self.in_flight.last() } else { None }
    }

    pub(crate) fn unpop(&mut self) {
        let chain = self.in_flight.pop().unwrap();
        self.places.pop();
        self.put_back -= 1;
        self.put_back_total += 1;
        self.available.push_front(chain);
    }

    pub(crate) fn push(&mut self, at: usize, written: u32) {
        let from_end = self.in_flight.len() - 1 - at;
        let chain = self.in_flight.remove(at);
        // Chains that were popped before this one are no longer the newest pop.
        self.put_back = self.put_back.min(from_end);
        self.pushed_total += 1;
        let place = self.places.remove(at);
        if !self.in_order {
            self.pushed.push_back((chain, written));
            return;
        }
        self.early.insert(place, (chain, written));
        while let Some(next) = self.early.remove(&self.returned) {
            self.pushed.push_back(next);
            self.returned += 1;
        }
    }

    /// Returns how many became used.
    pub(crate) fn publish_used(&mut self) -> usize {
        let count = self.pushed.len();
        self.used.append(&mut self.pushed);
        count
    }

    pub(crate) fn take_used(&mut self) -> Option<(ModelChain, u32)> {
        let (chain, written) = self.used.pop_front()?;
        self.taken -= chain.cost;
        Some((chain, written))
    }

    /// popped == pushed + put back + in flight
    pub(crate) fn is_balanced(&self) -> bool {
        let in_flight = self.in_flight.len() as u64;
        self.popped_total == self.pushed_total + self.put_back_total + in_flight
    }
}
