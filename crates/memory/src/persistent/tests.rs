//! Tests of the table of references: a scripted clock, and a naive twin.

use super::*;
use crate::grant::tests::Domain;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The results of the asks of one burst, in order.
type Pages = Vec<Result<GrantPage, GrantError>>;

const SECOND: u64 = 1_000_000_000;

/// A domain with references 0..400, all to pages of their own, and a queue that maps them.
struct Bed {
    domain: Domain,
    grants: PersistentGrants,
    asks: GrantAsks,
}

fn bed(persistent: u32, lot_pages: u32, lots: u32) -> Bed {
    let domain = Domain::new(402);
    (0..400).for_each(|gref| domain.grant(gref, gref + 1, GrantAccess::Write));
    let limits = GrantLimits { persistent, lot_pages, lots };
    let grants = PersistentGrants::new(domain.mapper(0), limits).unwrap();
    Bed { domain, grants, asks: GrantAsks::new() }
}

impl Bed {
    /// One burst of requests that write to the pages of their references.
    fn acquire(&mut self, now: u64, requests: &[&[u32]]) -> Vec<Result<GrantPage, GrantError>> {
        self.asks.clear();
        for request in requests {
            for gref in *request {
                self.asks.push(GrantRef(*gref), GrantAccess::Write);
            }
            self.asks.end_request();
        }
        self.grants.acquire(&mut self.asks, now);
        (0..requests.concat().len()).map(|number| self.asks.page(number)).collect()
    }

    fn release(&mut self, now: u64, pages: &[Result<GrantPage, GrantError>]) {
        self.grants.release(pages.iter().flatten().copied(), now);
    }

    /// Uses references for a moment.
    fn touch(&mut self, now: u64, grefs: &[u32]) {
        let pages = self.acquire(now, &[grefs]);
        self.release(now, &pages);
    }

    fn mapped(&self) -> Vec<u32> {
        (0..400).filter(|gref| self.domain.is_mapped(*gref)).collect()
    }
}

#[test]
fn a_reference_is_mapped_once_and_found_from_then_on() {
    let mut bed = bed(10, 4, 4);
    let first = bed.acquire(0, &[&[1, 2], &[3, 2]]);
    assert_eq!(first[1], first[3], "one page for one reference, in the same burst too");
    bed.release(1, &first);
    let again = bed.acquire(2, &[&[3, 1]]);
    assert_eq!(again, [first[2], first[0]]);
    let counters = bed.grants.counters();
    assert_eq!((counters.persistent, counters.hits, counters.misses), (3, 3, 3));
    assert_eq!(bed.mapped(), [1, 2, 3]);
    // A slice of the page holds the bytes that the domain writes.
    rustix::io::pwrite(&bed.domain.file, b"data", 4 * 4096).unwrap();
    let (mut last, mut list) = (LastHit::default(), SliceList::new());
    list.restart(bed.grants.pages().memory());
    let (page, access) = (again[0].unwrap(), GrantAccess::Read);
    bed.grants.resolve(page, (0, 4), access, &mut last, &mut list).unwrap();
    assert_eq!(list.as_slices()[0].read_array(), Some(*b"data"));
}

#[test]
fn a_request_that_is_given_up_keeps_no_page_and_has_none_mapped() {
    let mut bed = bed(10, 4, 4);
    bed.touch(0, &[1]);
    bed.asks.clear();
    for gref in [1, 2, 1, 3] {
        bed.grants.ask(&mut bed.asks, GrantRef(gref), GrantAccess::Write);
    }
    assert!(!bed.asks.are_found());
    // The request of the last two references goes, of which one has its page.
    bed.grants.give_up(&mut bed.asks, 2..4, 1);
    bed.grants.acquire(&mut bed.asks, 1);
    assert_eq!(bed.mapped(), [1, 2]);
    let users = |bed: &Bed, gref| bed.grants.table.has(GrantRef(gref));
    assert_eq!((users(&bed, 1), users(&bed, 2), users(&bed, 3)), (Some(1), Some(1), None));
    bed.grants.give_up(&mut bed.asks, 0..2, 2);
    assert_eq!((users(&bed, 1), users(&bed, 2)), (Some(0), Some(0)));
}

#[test]
fn a_bad_reference_costs_the_requests_that_name_it_and_nobody_else() {
    let mut bed = bed(10, 4, 4);
    assert!(bed.domain.end(7));
    let pages = bed.acquire(0, &[&[6, 7], &[7], &[8]]);
    let bad = Err(GrantError::NotGranted { gref: 7 });
    assert!(pages[0].is_ok() && pages[3].is_ok());
    assert_eq!((pages[1], pages[2]), (bad, bad));
    assert_eq!(bed.grants.counters().persistent, 2);
    bed.release(0, &pages);
    // It is not remembered: granted again, it is mapped.
    bed.domain.grant(7, 8, GrantAccess::Write);
    assert!(bed.acquire(0, &[&[7]])[0].is_ok());
}

#[test]
fn without_the_feature_pages_are_unmapped_when_their_request_is_done() {
    let mut bed = bed(0, 4, 3);
    let pages = bed.acquire(0, &[&[1, 2, 3], &[1], &[400, 4]]);
    assert!(pages[4].is_err() && pages[5].is_ok());
    assert_eq!((bed.mapped(), bed.grants.counters().transient), (vec![1, 2, 3, 4], 5));
    // A lot stays until the last of its pages is released, and the others with it.
    bed.release(1, &pages[..2]);
    assert_eq!(bed.mapped(), [1, 2, 3, 4]);
    bed.release(1, &pages[2..3]);
    assert_eq!(bed.mapped(), [1, 4]);
    bed.release(2, &pages[3..]);
    assert!(bed.mapped().is_empty());
    assert_eq!((bed.grants.counters().hits, bed.grants.purge_due_ns()), (0, None));
}

#[test]
fn requests_beyond_what_may_be_in_flight_are_refused_until_others_are_done() {
    let mut bed = bed(2, 2, 2);
    let pages = bed.acquire(0, &[&[0, 1], &[2], &[3, 4, 5], &[6]]);
    let full = Err(GrantError::NoRoom { pages: 6 });
    // The third request has more references than a lot; the lot of the second is its own.
    assert_eq!(pages[5..], [full, full]);
    assert!(pages[..5].iter().all(Result::is_ok));
    bed.release(0, &pages[2..3]);
    assert!(bed.acquire(0, &[&[7, 8]]).iter().all(Result::is_ok));
    assert_eq!(bed.grants.counters().refused, 2);
}

#[test]
fn a_request_that_reads_one_page_and_writes_another_takes_two_lots() {
    let mut bed = bed(0, 4, 2);
    bed.domain.grant(1, 5, GrantAccess::Read);
    let (read, write) = (GrantAccess::Read, GrantAccess::Write);
    for (gref, access) in [(1, read), (2, write), (1, write)] {
        bed.asks.push(GrantRef(gref), access);
    }
    bed.grants.acquire(&mut bed.asks, 0);
    assert!(bed.asks.page(0).is_ok() && bed.asks.page(1).is_ok());
    assert_eq!(bed.asks.page(2), Err(GrantError::ReadOnly { gref: 1 }));
    let all: Vec<_> = bed.asks.acquired(0..3).collect();
    bed.grants.release(all.into_iter(), 0);
    assert!(bed.mapped().is_empty());
}

/// One line of the script: when, what happens, and what is mapped afterwards.
enum Step {
    /// References are used and released.
    Use(&'static [u32]),
    /// References are used and stay in use.
    Hold(&'static [u32]),
    /// The references that are held are released.
    Let,
    /// The worker looks; this many references are purged.
    Purge(u64),
}

#[test]
fn the_least_recently_used_references_make_room_when_time_has_come() {
    use Step::{Hold, Let, Purge, Use};
    const MS: u64 = 1_000_000;
    // 40 references: 5 % are two of them.
    let mut bed = bed(40, 8, 8);
    let all: Vec<u32> = (0..40).collect();
    all.iter().for_each(|gref| bed.touch(u64::from(*gref), &[*gref]));
    let script: &[(u64, Step, &[u32])] = &[
        // Full, and nobody is turned away: nothing goes.
        (50 * MS, Purge(0), &[]),
        (60 * MS, Use(&[0]), &[]),
        // Another one finds no room. It is too early to look.
        (70 * MS, Use(&[100]), &[]),
        (149 * MS, Purge(0), &[]),
        (150 * MS, Purge(2), &[1, 2]),
        // The need is met: the next look takes none.
        (260 * MS, Purge(0), &[1, 2]),
        (270 * MS, Use(&[100, 101]), &[1, 2]),
        (280 * MS, Hold(&[3, 102]), &[1, 2]),
        // References in use are passed over.
        (370 * MS, Purge(2), &[1, 2, 4, 5]),
        (380 * MS, Let, &[1, 2, 4, 5]),
        // A minute after its last use everything goes, at the first look.
        (30 * SECOND, Use(&[0, 100]), &[1, 2, 4, 5]),
        (31 * SECOND, Hold(&[6]), &[1, 2, 4, 5]),
        (60 * SECOND - MS, Purge(0), &[1, 2, 4, 5]),
        (61 * SECOND, Purge(35), &[]),
        (89 * SECOND, Purge(0), &[]),
        (90 * SECOND, Purge(2), &[]),
        (99 * SECOND, Let, &[]),
        (158 * SECOND, Purge(0), &[]),
        (159 * SECOND, Purge(1), &[]),
    ];
    let mut held = Vec::new();
    for (now, step, gone) in script {
        let line = now / MS;
        match step {
            Use(grefs) => bed.touch(*now, grefs),
            Hold(grefs) => held = bed.acquire(*now, &[grefs]),
            Let => bed.release(*now, &std::mem::take(&mut held)),
            Purge(wanted) => assert_eq!(bed.grants.purge(*now), *wanted, "{line} ms"),
        }
        let mapped = bed.mapped();
        assert!(gone.iter().all(|gref| !mapped.contains(gref)), "{line} ms: {mapped:?}");
        // Of those that are held, 102 found no room and is mapped for its request alone.
        let transient = usize::from(held.len() == 2);
        let left = bed.grants.counters().persistent;
        assert_eq!(mapped.len() - transient, usize::try_from(left).unwrap(), "{line} ms");
    }
    assert_eq!(bed.grants.counters().purged, 42);
}

#[test]
fn the_worker_is_told_when_a_look_is_due() {
    let mut bed = bed(2, 1, 1);
    assert_eq!(bed.grants.purge_due_ns(), None);
    bed.touch(5, &[1, 2]);
    assert_eq!(bed.grants.purge_due_ns(), Some(5 + UNUSED_NS));
    bed.grants.purge(10);
    bed.touch(20, &[3]);
    assert_eq!(bed.grants.purge_due_ns(), Some(10 + PURGE_INTERVAL_NS));
    let held = bed.acquire(30, &[&[1, 2]]);
    bed.grants.purge(10 + PURGE_INTERVAL_NS);
    assert_eq!(bed.grants.purge_due_ns(), None, "everything is in use");
    bed.release(SECOND, &held);
    assert_eq!(bed.grants.purge_due_ns(), Some(SECOND + UNUSED_NS));
}

#[test]
fn a_queue_that_ends_unmaps_everything_in_use_or_not() {
    let mut bed = bed(2, 2, 2);
    bed.acquire(0, &[&[1, 2], &[3, 4]]);
    let Bed { domain, grants, .. } = bed;
    drop(grants);
    assert!((0..400).all(|gref| !domain.is_mapped(gref)));
}

#[test]
#[should_panic(expected = "released more often than acquired")]
fn a_page_is_released_once() {
    let mut bed = bed(2, 2, 2);
    let pages = bed.acquire(0, &[&[1]]);
    bed.release(0, &pages);
    bed.release(0, &pages);
}

/// The table in plain words.
#[derive(Default)]
struct Twin {
    /// By reference: its users, and the time of its last use, as exact as the table's.
    mapped: BTreeMap<u32, (u32, u64)>,
    is_short: bool,
    purge_at: u64,
}

impl Twin {
    /// Purges as the table does, given which references stayed: of those that were last used at the
    /// same time, any may go. Returns how many went.
    fn purge(&mut self, now: u64, stays: impl Fn(u32) -> bool) -> u64 {
        if now < self.purge_at {
            return 0;
        }
        self.purge_at = now + PURGE_INTERVAL_NS;
        let share = usize::from(std::mem::take(&mut self.is_short));
        let unused = self.mapped.iter().filter(|(_, (users, _))| *users == 0);
        let mut unused: Vec<_> = unused.map(|(gref, (_, used))| (*used, *gref)).collect();
        unused.sort_unstable();
        let old = unused.iter().filter(|(used, _)| used + UNUSED_NS <= now).count();
        let count = old.max(share.min(unused.len()));
        let (mut gone, last) = (unused.clone(), unused.get(count.wrapping_sub(1)));
        gone.retain(|(_, gref)| !stays(*gref));
        assert_eq!(gone.len(), count);
        for (used, gref) in gone {
            assert!(last.is_some_and(|(last, _)| used <= *last), "{gref} was used later");
            self.mapped.remove(&gref);
        }
        count as u64
    }
}

#[derive(Clone, Debug)]
enum Act {
    Acquire(Vec<u32>),
    Release(usize),
    Wait(u64),
    Purge,
}

/// Thirty references, of which each has the low bits of another: a table of twenty entries has
/// places for six bits.
fn refs() -> Vec<u32> {
    (0..15).flat_map(|gref| [gref, gref + 64]).collect()
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => prop::collection::vec(prop::sample::select(refs()), 1..6).prop_map(Act::Acquire),
        4 => any::<usize>().prop_map(Act::Release),
        2 => (0..70 * SECOND).prop_map(Act::Wait),
        1 => (0..2 * table::GRAIN_NS).prop_map(Act::Wait),
        2 => Just(Act::Purge),
    ]
}

proptest! {
    #[test]
    fn the_table_does_what_its_naive_twin_does(acts in prop::collection::vec(act(), 1..80)) {
        const LIMIT: usize = 20;
        let mut bed = bed(20, 6, 100);
        let (mut twin, mut now) = (Twin::default(), 0);
        let mut held: Vec<(Vec<u32>, Pages)> = Vec::new();
        for act in acts {
            now += 1;
            match act {
                Act::Acquire(grefs) => {
                    let pages = bed.acquire(now, &[&grefs]);
                    prop_assert!(pages.iter().all(Result::is_ok));
                    let mut kept = Vec::new();
                    for gref in &grefs {
                        let has_room = twin.mapped.len() < LIMIT || twin.mapped.contains_key(gref);
                        twin.is_short |= !has_room;
                        if has_room {
                            twin.mapped.entry(*gref).or_insert((0, now)).0 += 1;
                            kept.push(*gref);
                        }
                    }
                    held.push((kept, pages));
                }
                Act::Release(at) if !held.is_empty() => {
                    let (kept, pages) = held.swap_remove(at % held.len());
                    bed.release(now, &pages);
                    for gref in kept {
                        let (users, used) = twin.mapped.get_mut(&gref).unwrap();
                        *users -= 1;
                        if now - *used >= table::GRAIN_NS {
                            *used = now;
                        }
                    }
                }
                Act::Release(_) => {}
                Act::Wait(time) => now += time,
                Act::Purge => {
                    let purged = bed.grants.purge(now);
                    let stays = |gref| bed.grants.table.has(GrantRef(gref)).is_some();
                    assert_eq!(purged, twin.purge(now, stays));
                }
            }
            prop_assert_eq!(bed.grants.counters().persistent, twin.mapped.len() as u64);
            for (gref, (users, _)) in &twin.mapped {
                prop_assert_eq!(bed.grants.table.has(GrantRef(*gref)), Some(*users));
            }
        }
        held.iter().for_each(|(_, pages)| bed.release(now, pages));
        let wanted: Vec<u32> = twin.mapped.keys().copied().collect();
        prop_assert_eq!(bed.mapped(), wanted);
    }
}
