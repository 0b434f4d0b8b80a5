//! `PackedInflight`: the chains of a packed ring that are taken and not returned.
//!
//! They lie in vhost-user's region ("Inflight I/O tracking"), as those of a split ring do. A used
//! descriptor is written where some other chain may lie, so the region keeps a copy of descriptors:
//!
//! ```text
//! header:  features u64, version u16, desc_num u16, free_head u16, old_free_head u16,
//!          used_idx u16, old_used_idx u16, used_wrap u8, old_used_wrap u8, padding
//! entry:   inflight u8, padding, next u16, last u16, num u16, counter u64,
//!          then a descriptor: id u16, flags u16, len u32, addr u64
//!
//! taken:      num entries off the free list get the descriptors; counter; inflight = 1
//!             | free_head | old_free_head
//! put back:   [last].next = free_head;  free_head | old_free_head = head;  inflight = 0
//! published:  of each chain of the burst: [last].next = free_head, free_head = head;
//!             used_idx, used_wrap | the first used descriptor of the burst, in the ring
//!             | inflight = 0 for the burst; old_free_head, old_used_idx, old_used_wrap
//!
//! resume:     ring[old_used_idx] is used? the burst was published: old := new.  Else new := old
//!             entries on the free list are not in flight; owed = the others that are, by counter
//!             the next descriptor to pop = used_idx + the descriptors of all that are owed
//! ```
//! 1. **One store returns a burst**: that of its first used descriptor, which the driver reads too.
//!    Entries go back to the free list with it, not when a chain is pushed as the specification has
//!    it: a chain that is taken between the two would commit a list of chains that nobody sees.
//! 2. **A chain whose entries are still on the list was not handed out**, whatever its flag says.
//! 3. **The two places are one word**, and only the flag `used` of `ring[old_used_idx]` is asked: a
//!    driver that has seen the burst may have made that descriptor available for the next lap.
//! 4. Used descriptors of a burst that was not published may stand in the ring behind its first.
//!    The next process makes them available again before the driver reads them.
//!
//! The front-end can write the region at any time. All that is read of it is checked, and nothing
//! is read of it after the start.

use super::inflight::InflightError;
use crate::place::Place;
use manyring_memory::{Words, fence_compiler};
use manyring_wire::virtqueue::DESCRIPTOR_SIZE;

/// Bytes of the in-flight region for a packed ring of `entries` descriptors.
#[must_use]
pub fn packed_inflight_size(entries: u16) -> usize {
    entry(entries)
}

const HEADER_SIZE: usize = 32;
const ENTRY_SIZE: usize = 32;

const HEAD_VERSION: usize = 8;
const HEAD_ENTRIES: usize = 10;
const HEAD_FREE: usize = 12;
const HEAD_OLD_FREE: usize = 14;
/// Offset of one word: `used_idx`, `old_used_idx`, and a byte for the wrap counter of each.
const HEAD_PLACES: usize = 16;

/// Offset of one word of an entry: `inflight`, `next`, `last`, `num`.
const STATE: usize = 0;
const NEXT: usize = 2;
const COUNTER: usize = 8;
const DESC_HIGH: usize = 16;
const DESC_ADDR: usize = 24;

const VERSION: u16 = 1;

/// A chain in the region: the numbers of its first and its last entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recorded {
    head: u16,
    last: u16,
}

/// What a record says: the next descriptor to use, and the owed chains, the oldest first.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub(crate) used: Place,
    pub(crate) owed: Vec<OwedChain>,
}

/// An owed chain, and its descriptors as two words each.
pub(crate) type OwedChain = (Recorded, Vec<(u64, u64)>);

/// The in-flight region of a packed ring that this process serves.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    words: Words,
    /// Nobody else writes the region: it is zero until a record begins.
    is_own: bool,
    counter: u64,
    /// A copy of each entry's `next` in the region: a free entry names the next free one.
    next: Vec<u16>,
    free: u16,
    /// Chains that are answered and not published.
    burst: Vec<Recorded>,
}

impl PackedInflight {
    /// A record in `words`, of [`packed_inflight_size`] bytes. Nothing is read before
    /// [`Self::resume`].
    pub(crate) fn new(words: Words) -> Self {
        let (next, burst) = (Vec::new(), Vec::new());
        Self { words, is_own: false, counter: 0, next, free: 0, burst }
    }

    /// As [`Inflight::in_own_region`](super::inflight::Inflight::in_own_region).
    pub(crate) fn in_own_region(self) -> Self {
        Self { is_own: true, ..self }
    }

    /// True if no record has begun in the region.
    pub(crate) fn is_new(&self) -> bool {
        self.words.load_u16(HEAD_VERSION) == 0
    }

    /// True if the front-end has truncated the region's file under our mapping.
    pub(crate) fn is_broken(&self) -> bool {
        self.words.is_broken()
    }

    /// Reads a former process's record for a ring of `size` descriptors, which are `desc`. `None`:
    /// there was no record, and a new one has begun at the place `used`.
    pub(crate) fn resume(
        &mut self,
        size: u16,
        used: Place,
        desc: &Words,
    ) -> Result<Option<Resumed>, InflightError> {
        let room = self.words.size().saturating_sub(HEADER_SIZE) / ENTRY_SIZE;
        let room = u16::try_from(room).unwrap_or(u16::MAX);
        let version = self.words.load_u16(HEAD_VERSION);
        let entries = match version {
            0 if self.is_own => room.min(size),
            0 => room,
            _ => self.words.load_u16(HEAD_ENTRIES),
        };
        if entries > room || entries < size {
            return Err(InflightError::Entries { entries: entries.min(room), size });
        }
        match version {
            0 => {
                self.begin(entries, used);
                Ok(None)
            }
            VERSION => {
                self.next = (0..entries).map(|n| self.words.load_u16(entry(n) + NEXT)).collect();
                let mut is_seen = vec![false; self.next.len()];
                let used = self.end_burst(size, desc, &mut is_seen)?;
                let owed = self.find_owed(size, &mut is_seen)?;
                Ok(Some(Resumed { used, owed }))
            }
            version => Err(InflightError::Version { version }),
        }
    }

    /// Begins a record. The version is stored last, so that a region which has one is complete.
    fn begin(&mut self, entries: u16, used: Place) {
        self.next = (1..=entries).collect();
        self.free = 0;
        for head in 0..entries {
            self.words.store_u64(entry(head) + STATE, state(self.next[usize::from(head)], 0, 0, 0));
        }
        self.words.store_u16(HEAD_ENTRIES, entries);
        self.words.store_u16(HEAD_FREE, 0);
        self.words.store_u16(HEAD_OLD_FREE, 0);
        self.words.store_u64(HEAD_PLACES, places(used, used));
        fence_compiler();
        self.words.store_u16(HEAD_VERSION, VERSION);
        fence_compiler();
    }

    /// Completes or undoes the burst that the former process published last. Returns the next
    /// descriptor to use. Marks the free entries in `is_seen`.
    fn end_burst(
        &mut self,
        size: u16,
        desc: &Words,
        is_seen: &mut [bool],
    ) -> Result<Place, InflightError> {
        let wraps = self.words.load_u16(HEAD_PLACES + 4);
        let new = Place { at: self.words.load_u16(HEAD_PLACES), wrap: wraps & 0xff != 0 };
        let old = Place { at: self.words.load_u16(HEAD_PLACES + 2), wrap: wraps >> 8 != 0 };
        if new.at >= size || old.at >= size {
            return Err(InflightError::Used { ring: new.at, region: old.at });
        }
        let is_published = old.was_used(flags_at(desc, old));
        let (used, from, to) = match is_published {
            true => (new, HEAD_FREE, HEAD_OLD_FREE),
            false => (old, HEAD_OLD_FREE, HEAD_FREE),
        };
        self.free = self.words.load_u16(from);
        self.words.store_u16(to, self.free);
        fence_compiler();
        // If the process is killed before the last store, the next process does the same again.
        self.clear_free(size, is_seen)?;
        self.words.store_u64(HEAD_PLACES, places(used, used));
        fence_compiler();
        Ok(used)
    }

    /// Clears the `inflight` flags of the entries on the free list, which are not in flight.
    fn clear_free(&self, size: u16, is_seen: &mut [bool]) -> Result<(), InflightError> {
        let mut at = self.free;
        while let Some(next) = self.next.get(usize::from(at)) {
            see(is_seen, at, at)?;
            if self.words.load_u16(entry(at) + STATE) & 0xff != 0 {
                self.words.store_u16(entry(at) + STATE, 0);
            }
            at = *next;
        }
        // The last entry of the list names the number behind the last entry.
        if usize::from(at) == self.next.len() {
            Ok(())
        } else {
            Err(InflightError::Head { head: at, size })
        }
    }

    /// Finds the chains in flight. Each entry must be free or belong to one chain: if an entry were
    /// lost, the free entries would not suffice for all chains that the ring can hold.
    fn find_owed(
        &mut self,
        size: u16,
        is_seen: &mut [bool],
    ) -> Result<Vec<OwedChain>, InflightError> {
        let mut heads = Vec::new();
        for (head, _) in (0u16..).zip(&self.next) {
            if self.words.load_u16(entry(head) + STATE) & 0xff != 0 {
                heads.push((self.words.load_u64_acquire(entry(head) + COUNTER), head));
            }
        }
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let (mut owed, mut all) = (Vec::new(), 0);
        for (_, head) in heads {
            let num = self.words.load_u16(entry(head) + STATE + 6);
            all += usize::from(num);
            if num == 0 || all > usize::from(size) {
                return Err(InflightError::Head { head, size });
            }
            let (mut at, mut last, mut descs) = (head, head, Vec::new());
            for _ in 0..num {
                see(is_seen, at, head)?;
                let high = self.words.load_u64_acquire(entry(at) + DESC_HIGH).to_le();
                let low = self.words.load_u64_acquire(entry(at) + DESC_ADDR).to_le();
                descs.push((low, high.rotate_left(32)));
                (last, at) = (at, self.next[usize::from(at)]);
            }
            owed.push((Recorded { head, last }, descs));
        }
        match (0..).zip(is_seen).find(|(_, seen)| !**seen) {
            Some((head, _)) => Err(InflightError::Lost { entry: head }),
            None => Ok(owed),
        }
    }

    /// Records that a chain of `num` descriptors is taken. At least `num` entries must be free.
    pub(crate) fn taken<'a>(
        &mut self,
        num: u16,
        descs: impl Iterator<Item = &'a (u64, u64)>,
    ) -> Recorded {
        let (head, mut last) = (self.free, self.free);
        for (low, high) in descs {
            let Some(next) = self.next.get(usize::from(self.free)) else { break };
            // The region has the second word's fields in another order: id, flags, len.
            self.words.store_u64(entry(self.free) + DESC_HIGH, high.rotate_right(32));
            self.words.store_u64(entry(self.free) + DESC_ADDR, *low);
            (last, self.free) = (self.free, *next);
        }
        self.words.store_u64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        fence_compiler();
        self.words
            .store_u64(entry(head) + STATE, state(self.next[usize::from(head)], last, num, 1));
        fence_compiler();
        self.words.store_u16(HEAD_FREE, self.free);
        fence_compiler();
        self.words.store_u16(HEAD_OLD_FREE, self.free);
        fence_compiler();
        Recorded { head, last }
    }

    /// Records that the chain which was popped last is in the ring again.
    pub(crate) fn put_back(&mut self, chain: Recorded) {
        self.free_chain(chain);
        fence_compiler();
        self.words.store_u16(HEAD_FREE, self.free);
        fence_compiler();
        self.words.store_u16(HEAD_OLD_FREE, self.free);
        fence_compiler();
        self.words.store_u16(entry(chain.head) + STATE, 0);
        fence_compiler();
    }

    /// Records that the chain is returned by the unpublished burst.
    #[inline]
    pub(crate) fn answered(&mut self, chain: Recorded) {
        self.burst.push(chain);
    }

    /// Prepares the publish of the burst, which begins at the place `old`; `used` is the next
    /// descriptor to use after it.
    pub(crate) fn publishing(&mut self, old: Place, used: Place) {
        let burst = std::mem::take(&mut self.burst);
        burst.iter().for_each(|chain| self.free_chain(*chain));
        fence_compiler();
        self.words.store_u16(HEAD_FREE, self.free);
        self.words.store_u64(HEAD_PLACES, places(used, old));
        fence_compiler();
        self.burst = burst;
    }

    /// Records that the burst is published; `used` is the next descriptor to use after it.
    pub(crate) fn published(&mut self, used: Place) {
        fence_compiler();
        for chain in self.burst.drain(..) {
            self.words.store_u16(entry(chain.head) + STATE, 0);
        }
        fence_compiler();
        self.words.store_u16(HEAD_OLD_FREE, self.free);
        fence_compiler();
        self.words.store_u64(HEAD_PLACES, places(used, used));
        fence_compiler();
    }

    fn free_chain(&mut self, Recorded { head, last }: Recorded) {
        if let Some(next) = self.next.get_mut(usize::from(last)) {
            *next = self.free;
            self.words.store_u16(entry(last) + NEXT, self.free);
            self.free = head;
        }
    }
}

/// Byte offset of an entry in the region.
#[inline]
fn entry(index: u16) -> usize {
    HEADER_SIZE + usize::from(index) * ENTRY_SIZE
}

/// Notes that entry `at` belongs to the list that begins at `head`. Fails if it is in a list
/// already.
fn see(is_seen: &mut [bool], at: u16, head: u16) -> Result<(), InflightError> {
    match is_seen.get_mut(usize::from(at)).map(|seen| std::mem::replace(seen, true)) {
        Some(false) => Ok(()),
        _ => Err(InflightError::Burst { head }),
    }
}

fn state(next: u16, last: u16, num: u16, inflight: u16) -> u64 {
    word([inflight, next, last, num])
}

/// The word of `HEAD_PLACES`: `used_idx`, `old_used_idx` and their wrap counters. One store writes
/// all of them, so that a kill cannot separate them.
fn places(used: Place, old: Place) -> u64 {
    word([used.at, old.at, u16::from(used.wrap) | u16::from(old.wrap) << 8, 0])
}

fn word(parts: [u16; 4]) -> u64 {
    parts.iter().rev().fold(0, |word, part| word << 16 | u64::from(*part)).to_le()
}

/// The flags of the descriptor at `place` of the ring.
#[allow(clippy::cast_possible_truncation, reason = "the highest 16 bits")]
fn flags_at(desc: &Words, place: Place) -> u16 {
    (desc.load_u64_acquire(usize::from(place.at) * DESCRIPTOR_SIZE + 8) >> 48) as u16
}
