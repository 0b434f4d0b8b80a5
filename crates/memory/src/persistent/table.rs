//! `Table`: the references that stay mapped, by reference and in the order of their last use.
//!
//! A reference is looked up, and let go of, for each page of each request:
//! ```text
//! find:     the entry of the reference, out of a map;  users += 1
//! release:  users -= 1;  used_at = now;  moves to the end of the list that is in order of use
//! ```
//! 1. *Places before the map.* The references of a front-end most often follow each other. So the
//!    low bits of a reference choose one of [`PLACES_PER_ENTRY`] places for each entry, which
//!    holds the entry that was found by these bits last. It is right if the entry says so: then
//!    the map is not asked. References that meet in a place cost their queue the map.
//! 2. *The order of use has a grain.* A release moves an entry only if its last move is
//!    [`GRAIN_NS`] ago: a purge compares times that are at least ten times longer, and a move
//!    writes to both neighbours as well.

use crate::lot::GrantRef;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Stands for no entry.
const NONE: u32 = u32::MAX;
/// Places for each entry: with twice the number, few references that do not follow each other meet.
const PLACES_PER_ENTRY: usize = 2;
/// The most by which the stored time of an entry's last use may be too early, in nanoseconds.
pub(super) const GRAIN_NS: u64 = 10_000_000;

/// A mapped reference. Entry n belongs to page n.
#[derive(Clone, Copy, Debug)]
struct Entry {
    gref: GrantRef,
    /// How many requests in flight use the reference.
    users: u32,
    /// The time of the last use, too early by [`GRAIN_NS`] at most.
    used_at_ns: u64,
    /// The neighbours in the order of last use.
    older: u32,
    newer: u32,
}

/// The table of a queue. The references are a guest's choice, so they are hashed with keys that it
/// does not know ([`HashKeys`]).
#[derive(Debug)]
pub(super) struct Table {
    entries: Vec<Entry>,
    free: Vec<u32>,
    by_gref: HashMap<GrantRef, u32, HashKeys>,
    /// For the low bits of a reference, the entry that was last found by these bits.
    places: Box<[u32]>,
    oldest: u32,
    newest: u32,
}

impl Table {
    /// Makes an empty table for `size` references.
    pub(super) fn new(size: u32) -> Self {
        let gref = GrantRef(0);
        let entry = Entry { gref, users: 0, used_at_ns: 0, older: NONE, newer: NONE };
        let places = (size as usize * PLACES_PER_ENTRY).next_power_of_two();
        Self {
            entries: vec![entry; size as usize],
            free: (0..size).rev().collect(),
            by_gref: HashMap::with_capacity_and_hasher(size as usize, HashKeys::new()),
            places: vec![NONE; places].into(),
            oldest: NONE,
            newest: NONE,
        }
    }

    /// Returns the number of references.
    #[allow(clippy::cast_possible_truncation, reason = "as many as entries, counted in 32 bits")]
    #[inline]
    pub(super) fn len(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32
    }

    /// True if the table has no page for a further reference.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns the page of a reference, and adds a user to it; `None` if it is not in the table.
    #[inline]
    pub(super) fn find(&mut self, gref: GrantRef) -> Option<u32> {
        // The reference becomes the newest when it is released. Until then no purge removes it.
        let page = self.places[self.place(gref)];
        match self.entries.get_mut(page as usize) {
            Some(entry) if entry.gref == gref => {
                entry.users += 1;
                Some(page)
            }
            _ => self.find_in_map(gref),
        }
    }

    fn find_in_map(&mut self, gref: GrantRef) -> Option<u32> {
        let page = *self.by_gref.get(&gref)?;
        self.places[self.place(gref)] = page;
        self.entries[page as usize].users += 1;
        Some(page)
    }

    /// Returns the index in `places` for the low bits of a reference; `places` has 2^n entries.
    #[inline]
    fn place(&self, gref: GrantRef) -> usize {
        gref.0 as usize & (self.places.len() - 1)
    }

    /// Adds a reference with one user. Returns its page; `None` if the table is full.
    pub(super) fn insert(&mut self, gref: GrantRef, now_ns: u64) -> Option<u32> {
        let page = self.free.pop()?;
        self.by_gref.insert(gref, page);
        self.places[self.place(gref)] = page;
        let (older, newer) = (NONE, NONE);
        self.entries[page as usize] = Entry { gref, users: 1, used_at_ns: now_ns, older, newer };
        self.link_newest(page);
        Some(page)
    }

    /// Removes a reference, even while requests use it.
    pub(super) fn remove(&mut self, page: u32) {
        let gref = self.entries[page as usize].gref;
        self.by_gref.remove(&gref);
        let place = self.place(gref);
        if self.places[place] == page {
            self.places[place] = NONE;
        }
        self.unlink(page);
        self.free.push(page);
    }

    /// Removes a user from the reference of `page`.
    #[inline]
    pub(super) fn release(&mut self, page: u32, now_ns: u64) {
        let entry = &mut self.entries[page as usize];
        assert!(entry.users > 0, "page {page} was released more often than acquired");
        entry.users -= 1;
        if now_ns.saturating_sub(entry.used_at_ns) >= GRAIN_NS {
            self.touch(page, now_ns);
        }
    }

    /// Removes references without users, the one unused for the longest time first: `count` of
    /// them, and all that were last used at `before_ns` or earlier. Calls `each` with their pages.
    pub(super) fn take_unused(
        &mut self,
        count: u32,
        before_ns: Option<u64>,
        mut each: impl FnMut(u32),
    ) {
        let (mut page, mut taken) = (self.oldest, 0);
        while let Some(Entry { users, used_at_ns, newer, .. }) = self.entry(page) {
            if taken >= count && before_ns.is_none_or(|before| used_at_ns > before) {
                return;
            }
            if users == 0 {
                self.remove(page);
                each(page);
                taken += 1;
            }
            page = newer;
        }
    }

    /// Returns the earliest time of last use among the references without users.
    pub(super) fn unused_since_ns(&self) -> Option<u64> {
        let mut page = self.oldest;
        while let Some(entry) = self.entry(page) {
            if entry.users == 0 {
                return Some(entry.used_at_ns);
            }
            page = entry.newer;
        }
        None
    }

    /// Returns the number of users of a reference in the table.
    #[cfg(test)]
    pub(super) fn has(&self, gref: GrantRef) -> Option<u32> {
        self.by_gref.get(&gref).map(|page| self.entries[*page as usize].users)
    }

    fn entry(&self, page: u32) -> Option<Entry> {
        self.entries.get(page as usize).copied()
    }

    /// Makes the reference of `page` the newest in the order of use.
    fn touch(&mut self, page: u32, now_ns: u64) {
        self.entries[page as usize].used_at_ns = now_ns;
        if self.newest != page {
            self.unlink(page);
            self.link_newest(page);
        }
    }

    fn unlink(&mut self, page: u32) {
        let Entry { older, newer, .. } = self.entries[page as usize];
        match self.entries.get_mut(older as usize) {
            Some(neighbour) => neighbour.newer = newer,
            None => self.oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(neighbour) => neighbour.older = older,
            None => self.newest = older,
        }
    }

    fn link_newest(&mut self, page: u32) {
        let entry = &mut self.entries[page as usize];
        (entry.older, entry.newer) = (self.newest, NONE);
        match self.entries.get_mut(self.newest as usize) {
            Some(neighbour) => neighbour.newer = page,
            None => self.oldest = page,
        }
        self.newest = page;
    }
}

/// The keys by which a table hashes references: random, and its own. A reference is looked up for
/// each page of each request, so two multiplications have to do instead of the many steps of the
/// library's hash. A guest that finds references which meet in its table, by trial and the clock,
/// makes its own requests slower: the table is one queue's and has a bounded number of entries,
/// and the time of a turn is its guest's.
#[derive(Clone, Copy, Debug)]
struct HashKeys {
    added: u64,
    /// An odd factor, so that no two references have the same product.
    factor: u64,
}

impl HashKeys {
    fn new() -> Self {
        let random = RandomState::new();
        Self { added: random.hash_one(0), factor: random.hash_one(1) | 1 }
    }
}

impl BuildHasher for HashKeys {
    type Hasher = Product;

    #[inline]
    fn build_hasher(&self) -> Product {
        Product { keys: *self, hash: 0 }
    }
}

/// The hash of one reference, made of products: both halves depend on all bits of both factors.
#[derive(Clone, Copy, Debug)]
struct Product {
    keys: HashKeys,
    hash: u64,
}

impl Hasher for Product {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        let HashKeys { added, factor } = self.keys;
        let first = fold((self.hash ^ added).wrapping_add(number.into()), factor);
        // References at equal distances still have equal distances here, but not after the second
        // product.
        self.hash = fold(first ^ added, factor.rotate_left(32) | 1);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.hash
    }
}

/// Returns the product, with both halves combined in one word.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "a product is cut into its two halves")]
const fn fold(number: u64, factor: u64) -> u64 {
    let product = number as u128 * factor as u128;
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_of_any_pattern_are_spread_over_a_table_and_each_table_does_it_otherwise() {
        let keys = HashKeys::new();
        for step in [1, 2, 3, 64, 4096, 65_536, 1 << 20] {
            // As the map uses it: the low bits choose a place, the high ones tell entries apart.
            let hashes: Vec<u64> = (0..1024).map(|n| keys.hash_one(GrantRef(n * step))).collect();
            let mut places = [0_u32; 256];
            for hash in &hashes {
                places[usize::try_from(hash % 256).unwrap()] += 1;
            }
            let fullest = places.iter().max().unwrap();
            assert!(*fullest < 64, "step {step}: {fullest} of 1024 in one of 256 places");
            let mut tags: Vec<u64> = hashes.iter().map(|hash| hash >> 57).collect();
            tags.sort_unstable();
            tags.dedup();
            assert!(tags.len() > 16, "step {step}: {} tags", tags.len());
        }
        let other = HashKeys::new();
        assert!((0..16).any(|n| keys.hash_one(GrantRef(n)) != other.hash_one(GrantRef(n))));
    }
}
