//! The front half of a Xen disk for the bench: a ring and pages in a file, which a back half maps
//! by grant references as those of a simulated domain.

use manyring_memory::simgrant::{GrantEntry, GrantTable, SimGrants};
use manyring_memory::{GrantAccess, GrantMapper, GrantRef, Mapping, Words};
use manyring_queue::blkif::{FrontRing, RingConfig};
use manyring_wire::xen::blkif::{Abi, OP_READ, PAGE_SIZE, RawRequest, Segment, ring_bytes};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;

/// References of the domain, whose table is the first page of its file; each lends the page of the
/// same number. The first one lends the ring, the others are lent for data.
const ENTRIES: u32 = 64;
/// The reference of the ring's page.
pub(crate) const RING: u32 = 1;
/// The grant reference of the first page of data.
const DATA: u32 = 2;
/// The domain that maps pages, and as which process of it.
const BACK: (u16, u8) = (0, 0);

/// The front half.
pub(crate) struct Front {
    ring: FrontRing,
    requests: u64,
}

impl Front {
    /// An empty ring of one page, and who maps what its domain lends.
    pub(crate) fn new() -> (Self, GrantMapper) {
        let file = memfd_create("domain", MemfdFlags::CLOEXEC).unwrap();
        let size = u64::from(ENTRIES) * PAGE_SIZE as u64;
        ftruncate(&file, size).unwrap();
        let memory = Arc::new(Mapping::of_file(&file, 0, size).unwrap());
        let table = GrantTable::of_file(&file, ENTRIES).unwrap();
        for page in RING..ENTRIES {
            let entry = GrantEntry::new(BACK.0, page, GrantAccess::Write).unwrap();
            table.update(GrantRef(page), |_| Ok(entry)).unwrap();
        }
        let at = RING as usize * PAGE_SIZE;
        let words = Words::new(memory, at, ring_bytes(0), PAGE_SIZE as u64).unwrap();
        let config = RingConfig { abi: Abi::Native, order: 0, addr: 0 };
        let ring = FrontRing::with_words(config, 0.into(), words).unwrap();
        let grants = SimGrants::new(file, ENTRIES, BACK.0, BACK.1).unwrap();
        (Self { ring, requests: 0 }, GrantMapper::Simulated(Arc::new(grants)))
    }

    /// Makes `batch` reads available, each of another block into a page of its own, and asks for a
    /// notification. True if the back half wants one.
    pub(crate) fn fill(&mut self, batch: u64) -> bool {
        self.ring.enable_notifications();
        for (n, gref) in (0..batch).zip(DATA..ENTRIES) {
            let (id, sector) = (self.requests, n * PAGE_SIZE as u64 / 512);
            let segments = [Segment::page(gref)];
            let request = RawRequest::data(Abi::Native, OP_READ, id, sector, &segments);
            assert!(self.ring.add(&request), "the ring is full");
            self.requests += 1;
        }
        self.ring.publish()
    }

    /// Takes all responses. Returns how many.
    pub(crate) fn take_all(&mut self) -> usize {
        std::iter::from_fn(|| self.ring.take_response()).count()
    }
}
