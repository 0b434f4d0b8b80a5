//! The service of a guest while another one has all mappings of granted pages that a process may
//! have. One test only, since these mappings belong to the whole process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::cast_possible_truncation, reason = "small counts, and seeds of patterns")]

#[allow(dead_code, reason = "the guest of other tests")]
#[path = "xenblk/guest.rs"]
mod guest;
#[path = "../../memory/tests/lender/mod.rs"]
mod lender;

use guest::{World, memory};
use lender::mapper;
use manyring_driver::{BlkfrontOptions, XenOp};
use manyring_memory::{
    GrantAccess, GrantAsks, GrantLimits, GrantPages, GrantRef, PersistentGrants,
};
use std::time::Duration;

const GREFS: u32 = 40_000;
/// The limits of a queue with the largest ring and the usual options (`XenBlkDevice::handler`).
const USUAL: GrantLimits = GrantLimits { persistent: 1056, lot_pages: 32, lots: 512 };
const QUEUES: u32 = 20;

fn acquire(grants: &mut PersistentGrants, asks: &mut GrantAsks, first: u32, count: u32) {
    asks.clear();
    for gref in first..first + count {
        asks.push(GrantRef(gref), GrantAccess::Write);
        asks.end_request();
    }
    grants.acquire(asks, 0);
}

#[test]
fn a_guest_goes_on_while_another_one_has_all_its_queues_full_on_a_disk_that_hangs() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let max: u32 = text.trim().parse().unwrap();
    if max / 8 * 3 > QUEUES * (USUAL.persistent + USUAL.lots) {
        println!("vm.max_map_count is too large to be reached: {max}");
        return;
    }
    let world = World::new();
    let front = BlkfrontOptions { persistent: false, ..Default::default() };
    let mut good = world.guest(1, memory(), &front);
    good.queue.write(0, &[1; 512]).unwrap();
    // The grants of its queues, as their workers hold them.
    let (mapper, mut asks) = (mapper(GREFS), GrantAsks::new());
    let mut bad: Vec<_> =
        (0..QUEUES).map(|_| PersistentGrants::new(mapper.clone(), USUAL).unwrap()).collect();
    // The grants that its queues keep, which its requests have used before.
    for (queue, grants) in (0..).zip(&mut bad) {
        acquire(grants, &mut asks, queue * USUAL.persistent, USUAL.persistent);
        grants.release(asks.acquired(0..asks.len()), 0);
    }
    // As many requests of one other reference as a ring has entries, none of which is answered.
    let mut taken = Vec::new();
    for (queue, grants) in (0..).zip(&mut bad) {
        let first = QUEUES * USUAL.persistent + queue * USUAL.lots;
        acquire(grants, &mut asks, first, USUAL.lots);
        taken.push(asks.acquired(0..asks.len()).collect::<Vec<_>>());
    }
    let total: usize = taken.iter().map(Vec::len).sum();
    let ring = GrantPages::of_ring(mapper.clone(), &[GrantRef(GREFS - 1)]);
    good.queue.submit(XenOp::Write { sector: 0, data: &[2; 512] }).unwrap();
    good.queue.publish();
    let answer = good.queue.wait(Duration::from_secs(2));
    let (ring, answer) = (ring.err(), answer.err());
    assert_eq!((ring, answer.map(|error| error.to_string())), (None, None), "{total} pages");
}
