//! The room for pieces that stay comes and goes while a burst is planned. One test: it is of all.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod lender;

use lender::mapper;
use manyring_memory::{GrantAccess, GrantAsks, GrantLimits, GrantRef, PersistentGrants};
use std::sync::atomic::{AtomicBool, Ordering};

const GREFS: u32 = 30_000;
/// References of a request: they fit into one lot.
const REQUEST: u32 = 32;

fn grants(persistent: u32, lot_pages: u32, lots: u32) -> PersistentGrants {
    PersistentGrants::new(mapper(GREFS), GrantLimits { persistent, lot_pages, lots }).unwrap()
}

fn acquire(grants: &mut PersistentGrants, grefs: std::ops::Range<u32>) -> GrantAsks {
    let mut asks = GrantAsks::new();
    for gref in grefs {
        asks.push(GrantRef(gref), GrantAccess::Write);
    }
    asks.end_request();
    grants.acquire(&mut asks, 0);
    asks
}

#[test]
fn references_of_a_request_have_pages_of_their_own_while_others_take_and_give_back_room() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let max: u32 = text.trim().parse().unwrap();
    let stay_max = max / 8 * 3 / 3 * 2;
    if stay_max > GREFS {
        println!("vm.max_map_count is too large to be reached: {max}");
        return;
    }
    // A guest that has nearly all of the room for pieces that stay.
    let mut first = grants(stay_max - 1, 1, 1);
    for gref in (0..stay_max - 1).step_by(100) {
        let asks = acquire(&mut first, gref..(gref + 100).min(stay_max - 1));
        first.release(asks.acquired(0..asks.len()), 0);
    }
    assert_eq!(first.counters().persistent, u64::from(stay_max - 1));
    let is_over = &AtomicBool::new(false);
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    std::thread::scope(|scope| {
        // Another one, whose requests each take the last of it and give it back.
        scope.spawn(move || {
            let mut second = grants(0, 1, 1);
            while !is_over.load(Ordering::Acquire) {
                let asks = acquire(&mut second, 0..1);
                second.release(asks.acquired(0..1), 0);
            }
        });
        let _over = Over(is_over);
        let mut third = grants(100, REQUEST, 4);
        for round in 0..5_000_u64 {
            let asks = acquire(&mut third, 0..REQUEST);
            let pages: Vec<_> = asks.acquired(0..asks.len()).map(|page| page.index()).collect();
            let distinct: std::collections::BTreeSet<_> = pages.iter().collect();
            assert_eq!(distinct.len(), REQUEST as usize, "round {round}: {pages:?}");
            third.release(asks.acquired(0..asks.len()), 0);
            third.purge((round + 1) * 100_000_000_000);
        }
    });
}
