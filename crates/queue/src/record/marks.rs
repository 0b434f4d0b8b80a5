//! `DirtyMarks`: marks the pages that a device half writes in the migration log.
//!
//! A snapshot of guest memory that has a log says so (`GuestMemory::log`), and its rings mark what
//! is written, at the points of `record/mod.rs`:
//!
//! ```text
//! taken       the pages of all writable bytes of the chain are noted
//! put back    they are marked: who had the chain may have written to it
//! answered    they wait for the burst to be published
//! published   full fence, they are marked | the ring's index | full fence, the ring's own pages
//! ```
//! 1. **The data is marked before the driver can see the answer.** Of a process that is killed
//!    between the two, the next one serves the chain again. The ring's own pages are marked after
//!    the store; if a process is killed before it has marked them, the next one does it when it
//!    begins, as each ring does that gets a log.
//! 2. **All writable bytes count**, not only those that the answer names: a read that fails has
//!    written, and so has a frame that was dropped. They are mostly the same pages.
//! 3. **A chain that was taken before the log came is not noted.** The change of the log is a
//!    change of memory (`Ring::relocate`), which is answered when no such chain is left. A chain
//!    that was taken while another log was there is marked in the present one.
//!
//! The notes have guest addresses of pages, so they are as good in a later snapshot. A handler
//! bounds the slices that it has in flight, and thereby the notes.

use crate::chain::Batch;
use manyring_memory::{DirtyLog, DirtyPages, GuestMemory, fence_full};
use std::collections::HashMap;
use std::sync::Arc;

/// The log of a ring, and the pages that are noted for it.
#[derive(Debug)]
pub(crate) struct DirtyMarks {
    log: Arc<DirtyLog>,
    /// Where the area of the ring lies that the device writes, as a guest address, and its bytes.
    area: (u64, u64),
    /// The pages of each chain in flight, by its slot.
    noted: HashMap<u16, Vec<DirtyPages>>,
    /// Those of the chains that are answered and not published.
    burst: Vec<DirtyPages>,
}

impl DirtyMarks {
    /// For a ring in `memory` whose device writes the `len` bytes at the front-end's address
    /// `addr`; `former`: its marks in a former snapshot. `None`: the snapshot has no log.
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

    /// The chains of a batch are taken.
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

    /// A chain is in the ring again, or will never be returned.
    pub(crate) fn put_back(&mut self, slot: u16) {
        if let Some(pages) = self.noted.remove(&slot) {
            fence_full();
            pages.into_iter().for_each(|pages| self.log.mark(pages));
        }
    }

    /// A chain is answered: its data is written.
    pub(crate) fn answered(&mut self, slot: u16) {
        self.burst.extend(self.noted.remove(&slot).into_iter().flatten());
    }

    /// The chains that are answered are about to be published.
    pub(crate) fn publishes(&mut self) {
        if !self.burst.is_empty() {
            // Full fence: the front-end takes the bits and then copies the pages; we have written
            // the pages and now look at the bits. One of us must see the other.
            fence_full();
            self.burst.drain(..).for_each(|pages| self.log.mark(pages));
        }
    }

    /// The device has written `len` bytes at `offset` of its area of the ring.
    pub(crate) fn wrote(&self, offset: usize, len: usize) {
        // Full fence: as above.
        fence_full();
        self.mark_area(offset as u64, len as u64);
    }

    /// The device may have written all of its area, in this process or in a former one.
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
