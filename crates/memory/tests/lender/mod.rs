//! A simulated domain that lends pages, as few of which as possible can be mapped together.

use manyring_memory::simgrant::{GrantEntry, GrantTable, SimGrants};
use manyring_memory::{GrantAccess, GrantMapper, GrantRef};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::Arc;

/// Maps the pages of a domain whose table has `grefs` references, all of them granted. They lie
/// backwards, so that no two of them are one mapping.
pub(crate) fn mapper(grefs: u32) -> GrantMapper {
    let table_pages = grefs * 8 / 4096 + 1;
    let file = memfd_create("domain", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, u64::from(table_pages + grefs) * 4096).unwrap();
    let table = GrantTable::of_file(&file, grefs).unwrap();
    for gref in 0..grefs {
        let page = table_pages + grefs - 1 - gref;
        let entry = GrantEntry::new(0, page, GrantAccess::Write).unwrap();
        table.update(GrantRef(gref), |_| Ok(entry)).unwrap();
    }
    GrantMapper::Simulated(Arc::new(SimGrants::new(file, grefs, 0, 0).unwrap()))
}
