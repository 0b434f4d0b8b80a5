//! `Order`: gives chains back in the order in which the driver made them available.
//!
//! A driver that has negotiated `VIRTIO_F_IN_ORDER` gets its chains back in the order in which it
//! made them available (virtio 1.3 §2.7.9), so it needs no list of them. Devices and ports may
//! still finish chains in any order. The ring gives each chain its position when it is popped; a
//! chain that is pushed too early waits here until all chains before it have been pushed:
//! ```text
//! pop:       position = used_idx + chains in flight + chains that wait here
//! push:      position = used_idx?  its used entry is written, used_idx += 1
//!            else                  the chain waits at its position
//! publish:   while a chain waits at used_idx: its used entry is written, used_idx += 1
//! ```
//! Every used entry is written, although §2.7.9 allows to write only the last one of a batch: not
//! every driver handles entries that are left out well.

use crate::chain::Batch;

/// A chain to return: its head (split) or slot (packed), and the bytes that were written to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UsedEntry {
    pub(crate) slot: u16,
    pub(crate) written: u32,
}

/// The positions of the chains in flight, and the pushed chains that wait for earlier ones.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// The position of each chain in flight, by its head or slot. Its length is the ring's size.
    positions: Vec<u16>,
    /// The waiting chains by their positions. Empty until the first chain waits.
    waiting: Vec<Option<UsedEntry>>,
    count: u16,
}

impl Order {
    /// For a ring of `size` entries; 0 if chains may be returned in any order.
    pub(crate) fn new(size: u16) -> Self {
        Self { positions: vec![0; usize::from(size)], ..Self::default() }
    }

    /// How many chains wait for earlier ones.
    #[inline]
    pub(crate) fn count(&self) -> u16 {
        self.count
    }

    /// Gives the chains of a batch their positions, behind the `others`, which were in flight
    /// before, and behind the waiting chains. Not inlined, so that queues which need no order
    /// reserve no registers for it.
    #[inline(never)]
    pub(crate) fn note(&mut self, batch: &Batch, used_idx: u16, others: u16) {
        let mut position = used_idx.wrapping_add(others).wrapping_add(self.count);
        for chain in batch.entries.iter().filter_map(|entry| entry.chain.as_ref()) {
            if let Some(known) = self.positions.get_mut(usize::from(chain.slot())) {
                *known = position;
            }
            position = position.wrapping_add(1);
        }
    }

    /// True if the chain `used` may be returned now, as used entry `used_idx`. Otherwise it waits
    /// here.
    #[inline]
    pub(crate) fn is_due(&mut self, used: UsedEntry, used_idx: u16) -> bool {
        let position = self.positions.get(usize::from(used.slot));
        match position {
            Some(&position) if position != used_idx => {
                self.keep(position, used);
                false
            }
            _ => true,
        }
    }

    #[cold]
    fn keep(&mut self, position: u16, used: UsedEntry) {
        let size = self.positions.len();
        self.waiting.resize(size, None);
        let place = &mut self.waiting[usize::from(position) & (size - 1)];
        debug_assert!(place.is_none(), "two chains of one position");
        *place = Some(used);
        self.count += 1;
    }

    /// Takes the chain that waits for entry `used_idx`, the next one to be written.
    #[inline]
    pub(crate) fn take(&mut self, used_idx: u16) -> Option<UsedEntry> {
        if self.count == 0 { None } else { self.take_one(used_idx) }
    }

    #[cold]
    fn take_one(&mut self, used_idx: u16) -> Option<UsedEntry> {
        let mask = self.positions.len().checked_sub(1)?;
        let used = self.waiting.get_mut(usize::from(used_idx) & mask)?.take()?;
        self.count -= 1;
        Some(used)
    }
}
