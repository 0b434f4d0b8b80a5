//! `PersistentGrants`: the grant references of a queue, which stay mapped, and those that do not.
//!
//! A front-end with the feature `persistent` uses the same pages again and again, so mapping one
//! is worth keeping. For a burst of requests the queue does this:
//!
//! ```text
//! grants.ask(&mut asks, gref, ..)  each reference of a request: found if it is mapped already
//! asks.end_request()               after its last one
//! grants.acquire(&mut asks, now)   maps the other references: one call for the whole burst
//! asks.page(n)                     the page of the n-th reference, or why it has none
//! grants.release(pages, now)       when requests are done: before their responses are published
//! ```
//! Each reference is looked up. (1) A reference of the table is a *hit*. (2) Another one is a
//! *miss*: while the table has room, it is mapped, writable, and enters the table. (3) Without
//! room, or if the front-end lacks the feature, or if its guest already keeps all references that
//! it may (`kept.rs`), it goes into its request's *lot*: pages that follow each other, mapped
//! together and unmapped together, when `release` has seen the last of them. Table and lots have
//! pages of their own, taken from free lists: a request allocates nothing.
//!
//! `purge` makes room. It looks once in [`PURGE_INTERVAL_NS`]. If references found no room since it
//! looked last, it unmaps those used longest ago, [`PURGE_PERCENT`] of the limit. It unmaps what
//! its guest has to give up for others, and in any case the references that nobody has used for
//! [`UNUSED_NS`]. References in use are never purged.

mod asks;
mod table;

pub use asks::GrantAsks;

use crate::grant::{GrantMapper, GrantPages};
use crate::guest::LastHit;
use crate::kept::{Kept, SLEEP_NS};
use crate::list::SliceList;
use crate::lot::{GrantAccess, GrantError, GrantRef, Lot};
use asks::Ask;
use std::ops::Range;
use table::Table;

/// The interval between two purges, in nanoseconds.
const PURGE_INTERVAL_NS: u64 = 100_000_000;
/// When the table is full, a purge unmaps this percentage of the limit.
const PURGE_PERCENT: u32 = 5;
/// A reference that was unused for this many nanoseconds is unmapped.
const UNUSED_NS: u64 = 60_000_000_000;

/// The pieces that a queue can map for requests, even if other queues use all others. A request of
/// 256 segments takes eight lots. A request of 11 segments takes at most one piece for each
/// reference.
const PROMISED_PIECES: usize = 12;

/// The most references that a queue may have mapped, by their kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantLimits {
    /// The most references that stay mapped; 0 for a front-end without the feature.
    pub persistent: u32,
    /// The most references in one lot.
    pub lot_pages: u32,
    /// The most lots in use at a time. A request that has read-only references beside writable ones
    /// takes two lots.
    pub lots: u32,
}

/// A page to which a reference is mapped, in use until it is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantPage(u32);

impl GrantPage {
    /// Returns the page's index in the snapshot of [`PersistentGrants::pages`].
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// The numbers of hits, misses and purges of a queue's references, counted by the queue's worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantCounters {
    /// The number of references that are in the table now.
    pub persistent: u64,
    /// How many references were found in the table.
    pub hits: u64,
    /// How many references were not found in the table.
    pub misses: u64,
    /// How many of the misses were mapped for their request alone.
    pub transient: u64,
    /// How many of the misses could not be mapped.
    pub refused: u64,
    /// How many references were unmapped to make space for others, or because no request used them.
    pub purged: u64,
}

/// References that one call of `acquire` maps together.
#[derive(Debug)]
struct NewLot {
    page: u32,
    access: GrantAccess,
    /// The references of this lot: a range of the list `grefs` of [`PersistentGrants`].
    grefs: Range<usize>,
    /// The lot's number; `None` for a reference of the table.
    lot: Option<u32>,
}

/// The mapped references of a queue. The queue's worker owns them.
#[derive(Debug)]
pub struct PersistentGrants {
    pages: GrantPages,
    limits: GrantLimits,
    table: Table,
    /// The count of kept references; `None` for a front-end without the feature.
    kept: Option<Kept>,
    /// For each lot, how many of its references are in use.
    lots: Vec<u32>,
    free_lots: Vec<u32>,
    /// True if a reference has found the table full since the last purge.
    is_short: bool,
    purge_at_ns: u64,
    counters: GrantCounters,
    // These lists are used only during `acquire` and `release`. They are kept to reuse allocations.
    new: Vec<NewLot>,
    grefs: Vec<GrantRef>,
    /// For each of `grefs`, the number of the ask that it belongs to.
    owners: Vec<usize>,
    results: Vec<Result<(), GrantError>>,
    failed: Vec<(u32, GrantError)>,
    ended: Vec<Range<u32>>,
}

impl PersistentGrants {
    /// Reserves the pages that `limits` allow; nothing is mapped yet.
    ///
    /// # Errors
    /// [`GrantError::Memory`]; of these `MemoryError::Pieces`: the queues of the process hold all
    /// pieces that may be promised.
    pub fn new(mapper: GrantMapper, limits: GrantLimits) -> Result<Self, GrantError> {
        let kept = (limits.persistent > 0).then(|| Kept::new(mapper.lends()));
        let pages = limits.persistent as usize + limits.lot_pages as usize * limits.lots as usize;
        Ok(Self {
            pages: GrantPages::with_promise(mapper, pages, PROMISED_PIECES)?,
            limits,
            table: Table::new(limits.persistent),
            kept,
            lots: vec![0; limits.lots as usize],
            free_lots: (0..limits.lots).rev().collect(),
            is_short: false,
            purge_at_ns: 0,
            counters: GrantCounters::default(),
            new: Vec::new(),
            grefs: Vec::new(),
            owners: Vec::new(),
            results: Vec::new(),
            failed: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Returns the pages, with their snapshot of guest memory.
    #[must_use]
    pub fn pages(&self) -> &GrantPages {
        &self.pages
    }

    /// Returns the counters, with the present number of references in the table.
    #[must_use]
    #[inline]
    pub fn counters(&self) -> GrantCounters {
        GrantCounters { persistent: self.table.len().into(), ..self.counters }
    }

    /// Adds the slice of `len` bytes at `offset` of a page in use to `list`.
    ///
    /// # Errors
    /// [`GrantError::ReadOnly`], [`GrantError::Outside`].
    #[inline]
    pub fn resolve(
        &self,
        page: GrantPage,
        bytes: (u32, u32),
        access: GrantAccess,
        last: &mut LastHit,
        list: &mut SliceList,
    ) -> Result<(), GrantError> {
        self.pages.resolve(page.0, bytes, access, last, list)
    }

    /// Adds a reference of the present request to `asks`, with its page if the reference is mapped
    /// already. Otherwise [`Self::acquire`] maps it later.
    #[inline]
    pub fn ask(&mut self, asks: &mut GrantAsks, gref: GrantRef, access: GrantAccess) {
        match self.table.find(gref) {
            Some(page) => {
                self.counters.hits += 1;
                asks.pages.push(GrantPage(page));
            }
            None => {
                asks.push(gref, access);
            }
        }
    }

    /// Finds a page for each reference of `asks` without one. Maps new references by one call.
    pub fn acquire(&mut self, asks: &mut GrantAsks, now_ns: u64) {
        if asks.missing.is_empty() {
            return;
        }
        let missing = std::mem::take(&mut asks.missing);
        // The lot of the present request, as an index of `new`.
        let (mut lot, mut may_keep, mut request) = (None, true, 0);
        for ask in &missing {
            if ask.request != request {
                (lot, request) = (None, ask.request);
            }
            match self.place(*ask, (&mut lot, &mut may_keep), now_ns) {
                Ok(page) => asks.pages[ask.number] = page,
                Err(error) => asks.refuse(ask.number, error),
            }
        }
        if !self.new.is_empty() {
            self.map_new(asks, &missing);
        }
        asks.refused.sort_unstable_by_key(|(number, _)| *number);
        asks.missing = missing;
        asks.missing.clear();
    }

    /// The request with these references is given up: those that have a page are released, and the
    /// others are not mapped when it is time for the other requests of `asks`.
    ///
    /// # Panics
    /// If a page is released more often than it was acquired.
    pub fn give_up(&mut self, asks: &mut GrantAsks, numbers: Range<usize>, now_ns: u64) {
        asks.missing.retain(|ask| !numbers.contains(&ask.number));
        self.release(asks.acquired(numbers), now_ns);
    }

    /// Returns the page of one reference: from the table, or one to which it will be mapped.
    fn place(
        &mut self,
        ask: Ask,
        (lot, may_keep): (&mut Option<usize>, &mut bool),
        now_ns: u64,
    ) -> Result<GrantPage, GrantError> {
        if let Some(page) = self.table.find(ask.gref) {
            self.counters.hits += 1;
            return Ok(GrantPage(page));
        }
        self.counters.misses += 1;
        let access = GrantAccess::Write;
        // Other queues may release space during this call. But once a reference has found none, no
        // later reference of the call checks again: a lot can grow only while it is the newest of
        // `new`.
        *may_keep = *may_keep && self.has_room_to_keep();
        let kept = may_keep.then(|| self.table.insert(ask.gref, now_ns)).flatten();
        if let Some(page) = kept {
            self.kept.iter_mut().for_each(Kept::add);
            self.plan(NewLot { page, access, grefs: 0..0, lot: None });
            return Ok(self.add(ask.gref, ask.number));
        }
        self.is_short |= self.limits.persistent > 0;
        let has_room = |at: &usize| {
            let NewLot { access, grefs, .. } = &self.new[*at];
            *access == ask.access && grefs.len() < self.limits.lot_pages as usize
        };
        if lot.filter(has_room).is_none() {
            let refused = GrantError::NoRoom { pages: self.pages.len() };
            let Some(free) = self.free_lots.pop().filter(|_| self.limits.lot_pages > 0) else {
                self.counters.refused += 1;
                return Err(refused);
            };
            let page = self.limits.persistent + free * self.limits.lot_pages;
            self.plan(NewLot { page, access: ask.access, grefs: 0..0, lot: Some(free) });
            *lot = Some(self.new.len() - 1);
        }
        Ok(self.add(ask.gref, ask.number))
    }

    /// True if the table has a free entry, and the guest may keep one more reference.
    fn has_room_to_keep(&self) -> bool {
        let has_room = |kept: &Kept| kept.has_room(self.grefs.len());
        !self.table.is_full() && self.kept.as_ref().is_some_and(has_room)
    }

    fn plan(&mut self, new: NewLot) {
        let end = self.grefs.len();
        self.new.push(NewLot { grefs: end..end, ..new });
    }

    /// Adds a reference to the newest lot. Returns the page to which it will be mapped.
    #[allow(clippy::cast_possible_truncation, reason = "a lot has some pages")]
    fn add(&mut self, gref: GrantRef, number: usize) -> GrantPage {
        self.grefs.push(gref);
        self.owners.push(number);
        let Some(new) = self.new.last_mut() else { return GrantPage(0) };
        new.grefs.end = self.grefs.len();
        GrantPage(new.page + (new.grefs.len() - 1) as u32)
    }
}

impl PersistentGrants {
    /// Maps the lots that `acquire` has planned. If a reference cannot be mapped, the asks with
    /// that reference are refused.
    fn map_new(&mut self, asks: &mut GrantAsks, missing: &[Ask]) {
        let Self { pages, new, grefs, results, .. } = self;
        results.clear();
        let lot = |new: &NewLot| {
            let grefs = &grefs[new.grefs.clone()];
            Lot { page: new.page, access: new.access, grefs }
        };
        // The closure `lot` borrows only the list of references.
        pages.map(new.iter().map(lot), results);
        let mut planned = std::mem::take(&mut self.new);
        for new in planned.drain(..) {
            let mut mapped = 0;
            for (page, number) in (new.page..).zip(new.grefs.clone()) {
                match self.results[number] {
                    Ok(()) => mapped += 1,
                    Err(error) if new.lot.is_some() => {
                        asks.refuse(self.owners[number], error);
                        self.counters.refused += 1;
                    }
                    Err(error) => {
                        self.table.remove(page);
                        self.failed.push((page, error));
                    }
                }
            }
            if let Some(lot) = new.lot {
                self.counters.transient += u64::from(mapped);
                self.lots[lot as usize] = mapped;
                if mapped == 0 {
                    self.free_lots.push(lot);
                }
            }
        }
        self.new = planned;
        self.refuse_failed(asks, missing);
        self.grefs.clear();
        self.owners.clear();
    }

    /// Refuses all asks for references of the table that could not be mapped, in one pass.
    fn refuse_failed(&mut self, asks: &mut GrantAsks, missing: &[Ask]) {
        if self.failed.is_empty() {
            return;
        }
        self.kept.iter_mut().for_each(|kept| kept.remove(self.failed.len()));
        self.failed.sort_unstable_by_key(|(page, _)| *page);
        for Ask { number, .. } in missing {
            let GrantPage(page) = asks.pages[*number];
            if let Ok(at) = self.failed.binary_search_by_key(&page, |(page, _)| *page) {
                asks.refuse(*number, self.failed[at].1);
                self.counters.refused += 1;
            }
        }
        self.failed.clear();
    }

    /// Pages of requests that are done are not in use any more. Those that do not stay mapped are
    /// unmapped, together, so that a response may be published after this call.
    ///
    /// # Panics
    /// If a page is released more often than it was acquired.
    pub fn release(&mut self, pages: impl Iterator<Item = GrantPage>, now_ns: u64) {
        pages.for_each(|page| self.let_go(page, now_ns));
        self.unmap_released();
    }

    /// A page is not in use any more. [`Self::unmap_released`] comes after the last one, before
    /// anything is acquired or published.
    ///
    /// # Panics
    /// If a page is released more often than it was acquired.
    #[inline]
    pub fn let_go(&mut self, page: GrantPage, now_ns: u64) {
        if page.0 < self.limits.persistent {
            self.table.release(page.0, now_ns);
        } else {
            self.let_go_of_lot(page);
        }
    }

    fn let_go_of_lot(&mut self, GrantPage(page): GrantPage) {
        let GrantLimits { persistent, lot_pages, .. } = self.limits;
        let lot = (page - persistent) / lot_pages;
        let users = &mut self.lots[lot as usize];
        assert!(*users > 0, "page {page} was released more often than acquired");
        *users -= 1;
        if *users == 0 {
            let first = persistent + lot * lot_pages;
            // All pages of the lot, used or not: lots that end together are unmapped together.
            self.ended.push(first..first + lot_pages);
            self.free_lots.push(lot);
        }
    }

    /// Unmaps the pages that were released and do not stay mapped.
    #[inline]
    pub fn unmap_released(&mut self) {
        if !self.ended.is_empty() {
            self.unmap_ended();
        }
    }

    /// Unmaps references that no request uses, if a purge is due. Returns their number.
    #[inline]
    pub fn purge(&mut self, now_ns: u64) -> u64 {
        if now_ns < self.purge_at_ns { 0 } else { self.look(now_ns) }
    }

    fn look(&mut self, now_ns: u64) -> u64 {
        self.purge_at_ns = now_ns + PURGE_INTERVAL_NS;
        let share = (self.limits.persistent * PURGE_PERCENT / 100).max(1);
        let wanted = if std::mem::take(&mut self.is_short) { share } else { 0 };
        let due_to_others = self.kept.as_mut().map_or(0, Kept::look);
        let wanted = wanted.max(u32::try_from(due_to_others).unwrap_or(u32::MAX));
        let (ended, mut purged) = (&mut self.ended, 0_u32);
        self.table.take_unused(wanted, now_ns.checked_sub(UNUSED_NS), |page| {
            ended.push(page..page + 1);
            purged += 1;
        });
        self.counters.purged += u64::from(purged);
        self.unmap_released();
        self.kept.iter_mut().for_each(|kept| kept.remove(purged as usize));
        purged.into()
    }

    /// Returns when the next purge is due; `None`: not before the next `acquire`. To be called
    /// before the queue sleeps, since it skips all references in use.
    #[must_use]
    pub fn purge_due_ns(&self) -> Option<u64> {
        let unused = self.table.unused_since_ns().map(|since| since.saturating_add(UNUSED_NS));
        let due = if self.is_short { Some(0) } else { unused };
        let due = due.map(|due| due.max(self.purge_at_ns));
        // Other guests may lack room while this queue sleeps.
        let is_much = self.kept.as_ref().is_some_and(Kept::is_much);
        let next = is_much.then(|| self.purge_at_ns.saturating_add(SLEEP_NS));
        [due, next].into_iter().flatten().min()
    }

    #[cold]
    fn unmap_ended(&mut self) {
        self.ended.sort_unstable_by_key(|range| range.start);
        self.pages.unmap(self.ended.drain(..));
    }

    /// Leaves all pages mapped for ever, because the kernel or a thread may still use them.
    pub fn leak(&mut self) {
        self.pages.leak();
    }
}

#[cfg(test)]
mod tests;
