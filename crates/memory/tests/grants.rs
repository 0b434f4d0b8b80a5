//! Grants give back what they take: fds, mappings and marks. One test: nobody else opens any.

use manyring_memory::simgrant::{GrantEntry, GrantTable, SimGrants};
use manyring_memory::{
    GrantAccess, GrantAsks, GrantLimits, GrantMapper, GrantPages, GrantRef, PersistentGrants,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;

const ENTRIES: u32 = 512;

/// How many fds are open, and how many pieces of memory are mapped where windows lie.
#[allow(clippy::unwrap_used, reason = "a test")]
fn taken() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // Addresses from 32 to 40 TiB have twelve digits and begin with 2 and another one.
    let is_window = |line: &&str| line.find('-') == Some(12) && line.starts_with('2');
    (fds, maps.lines().filter(is_window).count())
}

#[test]
fn fds_mappings_and_marks_go_with_their_owner_in_every_path() {
    let file = memfd_create("domain", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 64 * 4096).unwrap();
    let table = GrantTable::of_file(&file, ENTRIES).unwrap();
    for gref in 0..20 {
        let entry = GrantEntry::new(0, gref + 1, GrantAccess::Write).unwrap();
        table.update(GrantRef(gref), |_| Ok(entry)).unwrap();
    }
    let before = taken();
    for round in 0..20 {
        let grants = SimGrants::new(file.try_clone().unwrap(), ENTRIES, 0, 1).unwrap();
        let mapper = GrantMapper::Simulated(Arc::new(grants));
        let ring = GrantPages::of_ring(mapper.clone(), &[GrantRef(1), GrantRef(3)]).unwrap();
        let bad = GrantPages::of_ring(mapper.clone(), &[GrantRef(2), GrantRef(99)]);
        assert!(bad.is_err());
        let limits = GrantLimits { persistent: 4, lot_pages: 8, lots: 2 };
        let mut grants = PersistentGrants::new(mapper, limits).unwrap();
        let mut asks = GrantAsks::new();
        for gref in 0..12 {
            asks.push(GrantRef(gref * 2), GrantAccess::Write);
        }
        grants.acquire(&mut asks, round);
        assert_ne!(taken(), before);
        // In odd rounds the requests are done, in even ones their queue ends under them.
        if round % 2 == 1 {
            let pages: Vec<_> = asks.acquired(0..12).collect();
            grants.release(pages.into_iter(), round);
        }
        drop((ring, grants));
        assert_eq!(taken(), before, "round {round}");
        let is_mapped = |gref| table.entry(GrantRef(gref)).unwrap().is_mapped();
        assert!(!(0..20).any(is_mapped), "round {round}");
    }
}
