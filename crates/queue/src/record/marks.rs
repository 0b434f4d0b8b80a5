//! `DirtyMarks`: marks the pages that a device half writes in the migration log.
//!
//! A snapshot of guest memory may have a migration log (`GuestMemory::log`). A ring in such a
//! snapshot marks the pages that are written, at the points of `record/mod.rs`:
//!
//! ```text
//! taken       the pages of all writable bytes of the chain are noted
//! put back    they are marked: who had the chain may have written to it
//! answered    they wait for the burst to be published
//! published   full fence, they are marked | the ring's index | full fence, the ring's own pages
//! ```
//! 1. **The data is marked before the driver can see the answer.** If a process is killed between
//!    the two, the next process serves the chain again. The ring's own pages are marked after the
//!    store. If a process is killed before it marks them, the next process marks all of the ring
//!    when it begins, as every ring with a log does.
//! 2. **All writable bytes count**, not only those that the answer names: a read that fails has
//!    written, and so has a frame that was dropped. They are mostly the same pages.
//! 3. **A chain that was taken before the log was set is not noted.** A new log comes as a change
//!    of memory (`Ring::relocate`), which is answered only when no such chain is left. A chain that
//!    was taken while an earlier log was set is marked in the present one.
//!
//! The notes hold guest addresses of pages, so they stay valid in a later snapshot. A handler
//! bounds the slices that it has in flight, and thereby the size of the notes.

use crate::chain::Batch;
use manyring_memory::{DirtyLog, DirtyPages, GuestMemory, fence_full};
use std::collections::HashMap;
use std::sync::Arc;

/// A ring's migration log, and the pages of its chains that are to be marked in it.
#[derive(Debug)]
pub(crate) struct DirtyMarks {
    log: Arc<DirtyLog>,
    /// The area of the ring that the device writes: its guest address and its size in bytes.
    area: (u64, u64),
    /// The writable pages of each chain in flight, by its slot.
    noted: HashMap<u16, Vec<DirtyPages>>,
    /// The writable pages of the chains that are answered and not published.
    burst: Vec<DirtyPages>,
}

impl DirtyMarks {
    /// Marks for a ring in `memory` whose device writes `len` bytes of the ring, at the front-end's
    /// address `addr`. `former`: the marks of this ring in an earlier snapshot. `None`: no log.
    pub(crate) fn new(
        memory: &GuestMemory,
        addr: u64,
        len: usize,
        former: Option<Box<Self>>,
    ) -> Option<Box<Self>> {
        let log = memory.log()?.clone();
        let area = (memory.guest_address(addr)?, len as u64);
        let (noted, burst) = former.map(|former| (former.noted, former.burst)).unwrap_or_default();
        Some(Box::new(Self { log, area, noted, burst }))
    }

    /// Notes the writable pages of the chains of a batch, which were just popped.
    pub(crate) fn taken(&mut self, batch: &Batch) {
        for entry in &batch.entries {
            if let Some(chain) = &entry.chain {
                let mut pages = Vec::new();
                let writable = batch.slices.pieces(entry.writable());
                batch.slices.memory().dirty_pages(&writable, &mut pages);
                if !pages.is_empty() {
                    self.noted.insert(chain.slot(), pages);
                }
            }
        }
    }

    /// Marks the pages of a chain that is in the ring again, or will never be returned.
    pub(crate) fn put_back(&mut self, slot: u16) {
        if let Some(pages) = self.noted.remove(&slot) {
            fence_full();
            pages.into_iter().for_each(|pages| self.log.mark(pages));
        }
    }

    /// Keeps the pages of a chain until the burst is published: the chain is answered.
    pub(crate) fn answered(&mut self, slot: u16) {
        self.burst.extend(self.noted.remove(&slot).into_iter().flatten());
    }

    /// Marks the pages of all answered chains, just before they are published.
    pub(crate) fn publishes(&mut self) {
        if !self.burst.is_empty() {
            // Full fence: the front-end takes the bits and then copies the pages; we have written
            // the pages and now look at the bits. One of us must see the other.
            fence_full();
            self.burst.drain(..).for_each(|pages| self.log.mark(pages));
        }
    }

    /// Marks the `len` bytes at `offset` of the device's area of the ring, which were just written.
    pub(crate) fn wrote(&self, offset: usize, len: usize) {
        // Full fence: as in `publishes`.
        fence_full();
        self.mark_area(offset as u64, len as u64);
    }

    /// Marks all of the device's area: this process or a former one may have written any part of
    /// it.
    pub(crate) fn wrote_all(&self) {
        fence_full();
        self.mark_area(0, self.area.1);
    }

    fn mark_area(&self, offset: u64, len: u64) {
        let len = len.min(self.area.1.saturating_sub(offset));
        if let Some(pages) = self.area.0.checked_add(offset).and_then(|a| DirtyPages::of(a, len)) {
            self.log.mark(pages);
        }
    }
}
