//! The room for pieces that stay is shared by guests. One test: the room is of all.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod lender;

use manyring_memory::{
    GrantAccess, GrantAsks, GrantLimits, GrantMapper, GrantRef, PersistentGrants,
};

/// More references than can stay mapped.
const GREFS: u32 = 40_000;
/// References that the later guest uses.
const LATER: u32 = 1000;
/// A look of the purge, and the time between two.
const LOOK_NS: u64 = 100_000_000;

fn queue(mapper: &GrantMapper, persistent: u32) -> PersistentGrants {
    let limits = GrantLimits { persistent, lot_pages: 1, lots: 1000 };
    PersistentGrants::new(mapper.clone(), limits).unwrap()
}

/// Uses references for a moment.
fn touch(grants: &mut PersistentGrants, grefs: std::ops::Range<u32>, now_ns: u64) {
    let mut asks = GrantAsks::new();
    let end = grefs.end;
    for first in grefs.step_by(100) {
        asks.clear();
        (first..end.min(first + 100)).for_each(|gref| {
            asks.push(GrantRef(gref), GrantAccess::Write);
            asks.end_request();
        });
        grants.acquire(&mut asks, now_ns);
        grants.release(asks.acquired(0..asks.len()), now_ns);
    }
}

fn kept(grants: &PersistentGrants) -> u64 {
    grants.counters().persistent
}

#[test]
fn guest_that_keeps_all_makes_room_for_one_that_comes_later_down_to_its_own_share() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let max: u64 = text.trim().parse().unwrap();
    let room = max / 8 * 3 / 3 * 2;
    if room >= u64::from(GREFS) || room / 8 < u64::from(LATER) {
        println!("vm.max_map_count does not suit the test: {max}");
        return;
    }
    // One guest with two queues has all there is: nobody else wants it.
    let hoarder = lender::mapper(GREFS);
    let (mut first, mut second) = (queue(&hoarder, GREFS), queue(&hoarder, GREFS / 4));
    touch(&mut second, 0..GREFS / 4, 0);
    touch(&mut first, GREFS / 4..GREFS, 0);
    assert_eq!(kept(&first) + kept(&second), room);
    // Its queues sleep: they look again soon all the same, while they have so much.
    assert!(first.purge_due_ns().is_some_and(|due| due <= 10 * LOOK_NS));
    assert!(second.purge_due_ns().is_some_and(|due| due <= 10 * LOOK_NS));
    let mut later = queue(&lender::mapper(GREFS), LATER);
    let mut now_ns = LOOK_NS;
    let look = |queues: [&mut PersistentGrants; 3], now_ns: &mut u64| {
        for grants in queues {
            grants.purge(*now_ns);
        }
        *now_ns += LOOK_NS;
    };
    for _ in 0..20 {
        touch(&mut later, 0..LATER, now_ns);
        // It wants all of its references still, of which some are not mapped.
        touch(&mut first, GREFS - 1000..GREFS, now_ns);
        look([&mut first, &mut second, &mut later], &mut now_ns);
    }
    touch(&mut later, 0..LATER, now_ns);
    assert_eq!(kept(&later), u64::from(LATER), "the guest that came later has what it uses");
    let left = kept(&first) + kept(&second);
    assert!(left >= room / 2, "{left} of {room}: more was taken than is due to the others");
    assert!(left + u64::from(LATER) <= room, "{left} of {room}");
    // Both keep all they can now: each has its half, whatever its number of queues.
    drop(later);
    let mut third = queue(&lender::mapper(GREFS), GREFS);
    for _ in 0..20 {
        touch(&mut third, 0..GREFS / 4, now_ns);
        touch(&mut first, GREFS - 1000..GREFS, now_ns);
        look([&mut first, &mut second, &mut third], &mut now_ns);
    }
    touch(&mut third, 0..GREFS / 4, now_ns);
    let (one, other) = (kept(&first) + kept(&second), kept(&third));
    assert!(other >= room / 2 && one + other <= room, "{one} and {other} of {room}");
    assert!(one >= room * 2 / 5, "{one} and {other} of {room}");
    // When one of them goes, the other one has all again.
    drop((first, second));
    look([&mut third, &mut queue(&hoarder, 1), &mut queue(&hoarder, 1)], &mut now_ns);
    touch(&mut third, 0..GREFS, now_ns);
    assert_eq!(kept(&third), room);
}
