//! Tests of grants over a domain of the simulated Xen.

use super::*;
use crate::GuestSlice;
use crate::simgrant::{GrantEntry, GrantTable, PINS_MAX};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// Entries of the grant table of a test's domain: one page.
const ENTRIES: u32 = 512;
/// The domain as which the tests map.
pub(crate) const US: u16 = 0;

/// A domain that lends its pages: what a front-end's side does.
pub(crate) struct Domain {
    pub(crate) file: OwnedFd,
    pub(crate) table: GrantTable,
}

impl Domain {
    pub(crate) fn new(pages: u64) -> Self {
        let file = memfd_create("domain", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, pages * PAGE as u64).unwrap();
        let table = GrantTable::of_file(&file, ENTRIES).unwrap();
        Self { file, table }
    }

    pub(crate) fn grant(&self, gref: u32, page: u32, access: GrantAccess) {
        let entry = GrantEntry::new(US, page, access).unwrap();
        self.table.update(GrantRef(gref), |_| Ok(entry)).unwrap();
    }

    /// Ends access as a well-behaved domain does. False if the page is mapped.
    pub(crate) fn end(&self, gref: u32) -> bool {
        let busy = GrantError::NotGranted { gref };
        self.table.update(GrantRef(gref), |entry| entry.ended().ok_or(busy)).is_ok()
    }

    pub(crate) fn is_mapped(&self, gref: u32) -> bool {
        self.table.entry(GrantRef(gref)).unwrap().is_mapped()
    }

    pub(crate) fn mapper(&self, seat: u8) -> GrantMapper {
        let file = self.file.try_clone().unwrap();
        let grants = SimGrants::new(file, ENTRIES, US, seat).unwrap();
        GrantMapper::Simulated(Arc::new(grants))
    }

    fn byte(&self, page: u64) -> u8 {
        let mut byte = [0];
        rustix::io::pread(&self.file, &mut byte, page * PAGE as u64).unwrap();
        byte[0]
    }
}

fn map(
    pages: &mut GrantPages,
    page: u32,
    access: GrantAccess,
    grefs: &[u32],
) -> Vec<Result<(), GrantError>> {
    let grefs: Vec<_> = grefs.iter().copied().map(GrantRef).collect();
    let mut results = Vec::new();
    pages.map(std::iter::once(Lot { page, access, grefs: &grefs }), &mut results);
    results
}

fn byte(pages: &GrantPages, page: u32) -> u8 {
    let slice = pages.mapping().slice(page as usize * PAGE, 1).unwrap();
    slice.read_array::<1>().unwrap()[0]
}

#[test]
fn a_mapped_page_is_its_domains_until_it_is_unmapped() {
    let domain = Domain::new(8);
    for (gref, page) in [(3, 5), (4, 6), (5, 2)] {
        domain.grant(gref, page.into(), GrantAccess::Write);
        rustix::io::pwrite(&domain.file, &[b'0' + page], u64::from(page) * 4096).unwrap();
    }
    let mut pages = GrantPages::new(domain.mapper(0), 16).unwrap();
    assert_eq!(map(&mut pages, 7, GrantAccess::Write, &[3, 4, 5]), [Ok(()); 3]);
    let seen = [7, 8, 9].map(|page| byte(&pages, page));
    assert_eq!((&seen, pages.mapped_count()), (b"562", 3));
    pages.mapping().slice(8 * PAGE, 1).unwrap().write_byte(b'!');
    assert_eq!(domain.byte(6), b'!');
    assert!([3, 4, 5].iter().all(|gref| domain.is_mapped(*gref)));
    pages.unmap(std::iter::once(7..10));
    assert_eq!((byte(&pages, 8), pages.mapped_count()), (0, 0));
    assert!(![3, 4, 5].iter().any(|gref| domain.is_mapped(*gref)));
    // Whatever is written there now stays ours.
    pages.mapping().slice(8 * PAGE, 1).unwrap().write_byte(b'?');
    assert_eq!(domain.byte(6), b'!');
}

#[test]
fn each_bad_reference_is_its_own_failure_and_the_others_are_mapped() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    domain.grant(2, 3, GrantAccess::Read);
    domain.grant(3, 8, GrantAccess::Write);
    let other = GrantEntry::new(US + 1, 4, GrantAccess::Write).unwrap();
    domain.table.update(GrantRef(4), |_| Ok(other)).unwrap();
    domain.grant(5, 5, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(1), 8).unwrap();
    let grefs = [1, 2, 3, 4, 5, 6, ENTRIES, u32::MAX];
    let refused = |gref| Err(GrantError::NotGranted { gref });
    let wanted = [
        Ok(()),
        Err(GrantError::ReadOnly { gref: 2 }),
        refused(3),
        refused(4),
        Ok(()),
        refused(6),
        refused(ENTRIES),
        refused(u32::MAX),
    ];
    assert_eq!(map(&mut pages, 0, GrantAccess::Write, &grefs), wanted);
    let are_mapped = (0..7).map(|gref| domain.is_mapped(gref)).collect::<Vec<_>>();
    assert_eq!(are_mapped, [false, true, false, false, false, true, false]);
    pages.unmap(std::iter::once(0..8));
    assert_eq!(map(&mut pages, 0, GrantAccess::Read, &[2]), [Ok(())]);
}

#[test]
fn a_reference_is_mapped_as_often_as_its_entry_can_count() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(3), 40).unwrap();
    let results = map(&mut pages, 0, GrantAccess::Write, &[1; 40]);
    let full = Err(GrantError::Pinned { gref: 1, max: PINS_MAX });
    assert!(results[..31].iter().all(Result::is_ok) && results[31..].iter().all(|r| *r == full));
    // Another seat counts for itself, and what one unmaps is the other's still.
    let mut others = GrantPages::new(domain.mapper(2), 1).unwrap();
    assert_eq!(map(&mut others, 0, GrantAccess::Write, &[1]), [Ok(())]);
    drop(pages);
    assert!(domain.is_mapped(1) && !domain.end(1));
    drop(others);
    assert!(!domain.is_mapped(1) && domain.end(1));
}

#[test]
fn access_ends_when_the_page_is_unmapped_and_not_before() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(0), 2).unwrap();
    map(&mut pages, 0, GrantAccess::Write, &[1]);
    assert!(!domain.end(1), "the page is mapped");
    pages.mapping().slice(0, 1).unwrap().write_byte(7);
    assert_eq!(domain.byte(2), 7);
    pages.unmap(std::iter::once(0..1));
    assert!(domain.end(1));
    let gone = Err(GrantError::NotGranted { gref: 1 });
    assert_eq!(map(&mut pages, 0, GrantAccess::Write, &[1]), [gone]);
}

#[test]
fn an_entry_that_is_overwritten_while_mapped_keeps_the_page_that_was_mapped() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(0), 2).unwrap();
    map(&mut pages, 0, GrantAccess::Write, &[1]);
    // No well-behaved domain does this: it forgets the mark, and lends another page.
    domain.grant(1, 3, GrantAccess::Write);
    assert_eq!(map(&mut pages, 1, GrantAccess::Write, &[1]), [Ok(())]);
    for (page, value) in [(0, 10), (1, 11)] {
        pages.mapping().slice(page * PAGE, 1).unwrap().write_byte(value);
    }
    assert_eq!((domain.byte(2), domain.byte(3)), (10, 11));
    pages.unmap([0..1, 1..2].into_iter());
    assert_eq!(domain.table.entry(GrantRef(1)).unwrap().page(), 3);
    assert!(domain.end(1), "no mark is left, and none below zero");
}

#[test]
fn a_page_that_is_mapped_for_reading_is_not_given_out_to_be_written() {
    let domain = Domain::new(8);
    domain.grant(9, 2, GrantAccess::Read);
    let mut pages = GrantPages::new(domain.mapper(0), 4).unwrap();
    map(&mut pages, 1, GrantAccess::Read, &[9]);
    let (mut last, mut list) = (LastHit::default(), SliceList::new());
    list.restart(pages.memory());
    let mut resolve = |page, bytes, access| {
        let resolved = pages.resolve(page, bytes, access, &mut last, &mut list);
        resolved.map(|()| list.as_slices().last().map(GuestSlice::len))
    };
    let (read, write) = (GrantAccess::Read, GrantAccess::Write);
    assert_eq!(resolve(1, (512, 3584), read), Ok(Some(3584)));
    assert_eq!(resolve(1, (0, 1), write), Err(GrantError::ReadOnly { gref: 9 }));
    for (offset, len) in [(0, 4097), (4096, 1), (u32::MAX, 2)] {
        let outside = GrantError::Outside { offset, len };
        assert_eq!(resolve(1, (offset, len), read), Err(outside));
    }
    for page in [0, 2, 4, u32::MAX] {
        assert_eq!(resolve(page, (0, 1), read), Err(GrantError::NotMapped { page }));
    }
}

#[test]
fn a_slice_that_is_used_too_late_touches_nobodys_page() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(0), 1).unwrap();
    map(&mut pages, 0, GrantAccess::Write, &[1]);
    let mut list = SliceList::new();
    list.restart(pages.memory());
    let (access, last) = (GrantAccess::Write, &mut LastHit::default());
    pages.resolve(0, (0, 4096), access, last, &mut list).unwrap();
    drop(pages);
    // The list holds the snapshot: the address is ours still, and the page is the domain's alone.
    list.as_slices()[0].write_from(b"late");
    assert_eq!(list.as_slices()[0].read_array(), Some(*b"late"));
    assert_eq!((domain.byte(2), domain.is_mapped(1)), (0, false));
}

#[test]
fn a_ring_is_mapped_whole_or_not_at_all() {
    let domain = Domain::new(8);
    for (gref, page) in [(1, 4), (2, 6), (3, 5)] {
        domain.grant(gref, page, GrantAccess::Write);
    }
    let ring = |grefs: [u32; 3]| GrantPages::of_ring(domain.mapper(0), &grefs.map(GrantRef));
    let pages = ring([1, 2, 3]).unwrap();
    let words = crate::Words::new(pages.mapping().clone(), 0, 3 * PAGE, 4096).unwrap();
    words.store_u16(2 * PAGE, 77);
    assert_eq!(domain.byte(5), 77);
    drop(pages);
    assert_eq!(words.load_u16(2 * PAGE), 0, "whoever holds its words sees zeroes");
    assert_eq!(ring([1, 9, 3]).unwrap_err(), GrantError::NotGranted { gref: 9 });
    assert!((0..10).all(|gref| !domain.is_mapped(gref)));
}

#[test]
fn the_marks_of_a_process_that_is_gone_are_cleared_and_those_of_others_stay() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    domain.grant(ENTRIES - 1, 2, GrantAccess::Write);
    for seat in [1, 2] {
        let mut pages = GrantPages::new(domain.mapper(seat), 2).unwrap();
        map(&mut pages, 0, GrantAccess::Write, &[1, ENTRIES - 1]);
        pages.leak();
        drop(pages);
    }
    domain.table.clear_seat(1);
    assert!(domain.is_mapped(1) && domain.is_mapped(ENTRIES - 1));
    domain.table.clear_seat(2);
    assert!(domain.end(1) && domain.end(ENTRIES - 1));
}

#[test]
fn memory_that_a_domain_cuts_away_costs_its_own_queues_only() {
    crate::install_sigbus_handler();
    let (cut, whole) = (Domain::new(8), Domain::new(8));
    let queue = |domain: &Domain| {
        domain.grant(1, 2, GrantAccess::Write);
        let mut pages = GrantPages::new(domain.mapper(0), 2).unwrap();
        assert_eq!(map(&mut pages, 1, GrantAccess::Write, &[1]), [Ok(())]);
        pages
    };
    let (mut broken, fine) = (queue(&cut), queue(&whole));
    ftruncate(&cut.file, 0).unwrap();
    assert_eq!(byte(&broken, 1), 0);
    assert!(broken.is_broken() && broken.memory().is_broken());
    // The table lay in the same file.
    assert!(map(&mut broken, 0, GrantAccess::Write, &[1])[0].is_err());
    drop(broken);
    assert!(!fine.is_broken());
    fine.mapping().slice(PAGE, 1).unwrap().write_byte(9);
    assert_eq!(whole.byte(2), 9);
}

#[test]
fn a_page_that_is_taken_back_is_mapped_by_nobody_whoever_was_faster() {
    const ROUNDS: u8 = 20;
    let domain = Domain::new(8);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::Relaxed;
    /// Lets the other thread end, also where an assertion fails.
    struct Over<'a>(&'a std::sync::atomic::AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            let mut pages = GrantPages::new(domain.mapper(2), 1).unwrap();
            while !is_over.load(order) {
                if map(&mut pages, 0, GrantAccess::Write, &[1]) == [Ok(())] {
                    pages.mapping().slice(0, 1).unwrap().write_byte(u8::MAX);
                    pages.unmap(std::iter::once(0..1));
                }
            }
        });
        let (mut lent, mut written) = (0, 0);
        while written < ROUNDS && lent < 1_000_000 {
            domain.grant(1, 2, GrantAccess::Write);
            lent += 1;
            std::thread::yield_now();
            while !domain.end(1) {
                std::thread::yield_now();
            }
            // It is ours alone now: what we write there stays.
            written += u8::from(domain.byte(2) == u8::MAX);
            rustix::io::pwrite(&domain.file, &[written], 2 * 4096).unwrap();
            for _ in 0..10 {
                assert_eq!(domain.byte(2), written);
            }
        }
        assert!(written > 0, "the other side has mapped it now and then");
    });
    assert!(!domain.is_mapped(1));
}

#[test]
#[should_panic(expected = "two references for one page")]
fn a_page_has_one_reference() {
    let domain = Domain::new(8);
    domain.grant(1, 2, GrantAccess::Write);
    let mut pages = GrantPages::new(domain.mapper(0), 2).unwrap();
    map(&mut pages, 0, GrantAccess::Write, &[1]);
    map(&mut pages, 0, GrantAccess::Write, &[1]);
}
