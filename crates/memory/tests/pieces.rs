//! Granted pages leave room for the other mappings of the process. One test: the count is of all.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod lender;

use manyring_memory::{
    GrantAccess, GrantAsks, GrantError, GrantLimits, GrantPage, GrantRef, Mapping, MemoryError,
    PersistentGrants,
};

/// The guest's references: more than there can be mappings of three of eight.
const GREFS: u32 = 60_000;

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// A burst of references, which its requests use at the same time.
fn acquire(grants: &mut PersistentGrants, grefs: std::ops::Range<u32>) -> Vec<Page> {
    let mut asks = GrantAsks::new();
    for gref in grefs {
        asks.push(GrantRef(gref), GrantAccess::Write);
        asks.end_request();
    }
    grants.acquire(&mut asks, 0);
    (0..asks.len()).map(|number| asks.page(number)).collect()
}

type Page = Result<GrantPage, GrantError>;

#[test]
fn a_guest_that_lends_more_pages_than_can_be_mapped_is_served_and_costs_nobody_else() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let max: usize = text.trim().parse().unwrap();
    if max / 8 * 3 + 100 >= GREFS as usize {
        println!("vm.max_map_count is too large to be reached: {max}");
        return;
    }
    let mapper = lender::mapper(GREFS);
    let limits = GrantLimits { persistent: GREFS, lot_pages: 1, lots: GREFS };
    let mut grants = PersistentGrants::new(mapper.clone(), limits).unwrap();
    for first in (0..GREFS).step_by(100) {
        let pages = acquire(&mut grants, first..first + 100);
        assert!(pages.iter().all(Result::is_ok), "{first}");
        grants.release(pages.into_iter().flatten(), 0);
    }
    let kept = grants.counters().persistent;
    assert!((20..26).contains(&(kept * 100 / max as u64)), "{kept} of {max}");
    // Only references in use at the same time meet the bound.
    let pages = acquire(&mut grants, 20_000..GREFS);
    let full: Page = Err(GrantError::Memory(MemoryError::Pieces { max: max / 8 * 3 }));
    assert!(pages.iter().any(Result::is_ok) && pages.contains(&full));
    assert!(mappings() < max / 8 * 7, "{} of {max}", mappings());
    assert!(Mapping::anonymous(4096).is_ok());
    grants.release(pages.into_iter().flatten(), 0);
    assert!(acquire(&mut grants, GREFS - 1..GREFS)[0].is_ok());
    // A guest that is turned away makes room by the purge.
    assert!(grants.purge(1_000_000_000) > 0);
    drop(grants);
    assert!(mappings() < 200, "{}", mappings());
    // Each queue is promised some, so that there is a last one; its end makes room for another.
    let limits = GrantLimits { persistent: 1, lot_pages: 1, lots: 1 };
    let queue = || PersistentGrants::new(mapper.clone(), limits);
    let mut queues: Vec<_> = std::iter::from_fn(|| queue().ok()).take(1000).collect();
    assert!((256..1000).contains(&queues.len()), "{}", queues.len());
    assert_eq!(queue().err(), full.err());
    queues.pop();
    assert!(queue().is_ok());
}
