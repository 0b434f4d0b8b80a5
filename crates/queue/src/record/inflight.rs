//! `Inflight`: vhost-user's in-flight region of a split ring: the chains that are taken, not
//! returned.
//!
//! The front-end keeps the region while no process serves its ring (vhost-user, "Inflight I/O
//! tracking"). It has a header and an entry for each head of a chain:
//!
//! ```text
//! header:  features u64, version u16, desc_num u16, last_batch_head u16, used_idx u16
//! entry:   inflight u8, padding, next u16, counter u64
//!
//! taken:      entry.counter = n;  entry.inflight = 1            it is taken from here on
//! put back:   entry.inflight = 0                                the chain that was taken last
//! answered:   entry.next = last_batch_head;  last_batch_head = head
//! published:  used.idx of the ring;  entries of the burst: inflight = 0;  used_idx = used.idx
//!
//! resume:     the burst that was published last has used.idx - used_idx chains, from
//!             last_batch_head along `next`:  their inflight = 0;  used_idx = used.idx
//!             owed = the entries in flight, in the order of their counters
//!             the next available index = used.idx + the number of chains that are owed
//! ```
//! Why a kill between any two of these stores loses nothing, and returns nothing twice:
//! 1. **One store takes a chain.** Before it the chain lies in the available ring still: those that
//!    are taken there are the first ones, for they are taken and put back in order.
//! 2. **One store returns all chains of a burst**, that of `used.idx`, which the driver reads too.
//!    The steps that are left for the burst after it are done again by the next process, any number
//!    of times: the list is not changed before `used_idx` says that the burst is done.
//! 3. **A chain that was taken and not returned is served from its start.** Whatever it writes, its
//!    driver has not seen it yet.
//!
//! As for a Xen ring, only the compiler could exchange two stores (`journal.rs`).
//!
//! The front-end can write the region at any time. All that is read of it is checked, and nothing
//! is read of it after the start. A running process knows by itself which chains it has taken.

use manyring_memory::{Words, fence_compiler};

/// Why a split ring cannot go on as its in-flight region says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum InflightError {
    #[error("it has {entries} entries, the ring {size}")]
    Entries { entries: u16, size: u16 },
    #[error("it says that it has {entries} entries, and has room for {room}")]
    Room { entries: u16, room: u16 },
    #[error("version {version}, where {VERSION} is known")]
    Version { version: u16 },
    #[error("the used index is {ring}, it was {region} at the last burst: of another ring")]
    Used { ring: u16, region: u16 },
    #[error("its last burst has chain {head} twice, or outside of the ring")]
    Burst { head: u16 },
    #[error("chain {head} in flight, in a ring of {size}")]
    Head { head: u16, size: u16 },
    #[error("entry {entry} is neither free nor part of a chain in flight")]
    Lost { entry: u16 },
}

/// Bytes of the in-flight region for a split ring of `entries` entries.
#[must_use]
pub fn inflight_size(entries: u16) -> usize {
    entry(entries)
}

/// Empties the region of a ring, split or packed, so that no later ring goes on from its record.
pub(crate) fn clear_inflight(region: &Words) {
    if region.size() < HEADER_SIZE || region.load_u16(HEAD_VERSION) == 0 {
        return;
    }
    // A region without a version is never read further: if the process is killed after this store,
    // the region is empty all the same.
    region.store_u16(HEAD_VERSION, 0);
    fence_compiler();
    for at in (0..region.size()).step_by(size_of::<u64>()) {
        if region.load_u64_acquire(at) != 0 {
            region.store_u64(at, 0);
        }
    }
}

const HEADER_SIZE: usize = 16;
const ENTRY_SIZE: usize = 16;

const HEAD_VERSION: usize = 8;
const HEAD_ENTRIES: usize = 10;
const HEAD_LAST: usize = 12;
const HEAD_USED: usize = 14;

/// Offset of the word whose first byte is the flag `inflight`; its other bytes are padding.
const FLAG: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

const VERSION: u16 = 1;

/// The in-flight region of a split ring that this process serves.
#[derive(Debug)]
pub(crate) struct Inflight {
    words: Words,
    /// Nobody else writes the region: it is zero until a record begins.
    is_own: bool,
    /// The counter for the chain that is taken next.
    counter: u64,
    /// Head of the chain that was answered last; at first any head, since a burst ends at its first
    /// chain.
    last: u16,
    /// Heads of the chains that are answered and not published.
    burst: Vec<u16>,
    /// Heads of the owed chains, the oldest last: a former process has taken them, not returned
    /// them.
    owed: Vec<u16>,
    /// Heads of the owed chains that were popped again and are not answered, the oldest first.
    again: Vec<u16>,
}

impl Inflight {
    /// A record in `words`, of [`inflight_size`] bytes. Nothing is read before [`Self::resume`].
    pub(crate) fn new(words: Words) -> Self {
        let (burst, owed, again) = (Vec::new(), Vec::new(), Vec::new());
        Self { words, is_own: false, counter: 0, last: 0, burst, owed, again }
    }

    /// Says that nobody else writes the region, and that it may have space for the largest ring. A
    /// new record has only the entries of its ring, so that no page is touched before it is needed.
    pub(crate) fn in_own_region(self) -> Self {
        Self { is_own: true, ..self }
    }

    /// Reads a former process's record for a ring of `size` entries whose used index is `used_idx`.
    /// Returns the next available index to pop. `None`: there was no record, and a new one has
    /// begun.
    pub(crate) fn resume(
        &mut self,
        size: u16,
        used_idx: u16,
    ) -> Result<Option<u16>, InflightError> {
        let room = (self.words.size().saturating_sub(HEADER_SIZE)) / ENTRY_SIZE;
        let room = u16::try_from(room).unwrap_or(u16::MAX);
        let version = self.words.load_u16(HEAD_VERSION);
        let entries = match version {
            0 if self.is_own => room.min(size),
            0 => room,
            _ => self.words.load_u16(HEAD_ENTRIES),
        };
        if version > VERSION {
            return Err(InflightError::Version { version });
        }
        if entries > room {
            return Err(InflightError::Room { entries, room });
        }
        if entries < size {
            return Err(InflightError::Entries { entries, size });
        }
        if version == 0 {
            self.begin(entries, used_idx);
        } else {
            self.end_burst(size, used_idx)?;
            self.find_owed(entries, size)?;
        }
        let count = u16::try_from(self.owed.len()).unwrap_or(u16::MAX);
        Ok((version != 0).then(|| used_idx.wrapping_add(count)))
    }

    /// Begins a record. The version is stored last, so that a region which has one is complete.
    fn begin(&mut self, entries: u16, used_idx: u16) {
        // Reading a page of a memfd allocates it, so a region of our own is not searched for flags.
        let foreign = if self.is_own { 0 } else { entries };
        for head in 0..foreign {
            if self.words.load_u16(entry(head) + FLAG) != 0 {
                self.words.store_u16(entry(head) + FLAG, 0);
            }
        }
        self.words.store_u16(HEAD_ENTRIES, entries);
        self.words.store_u16(HEAD_USED, used_idx);
        fence_compiler();
        self.words.store_u16(HEAD_VERSION, VERSION);
        fence_compiler();
    }

    /// Completes the steps that a killed process left undone for the burst that it published last.
    fn end_burst(&mut self, size: u16, used_idx: u16) -> Result<(), InflightError> {
        let region = self.words.load_u16(HEAD_USED);
        let count = used_idx.wrapping_sub(region);
        if count > size {
            return Err(InflightError::Used { ring: used_idx, region });
        }
        let mut burst = vec![false; usize::from(size)];
        let mut head = self.words.load_u16(HEAD_LAST);
        for _ in 0..count {
            let was_in =
                burst.get_mut(usize::from(head)).map(|is_in| std::mem::replace(is_in, true));
            if was_in != Some(false) {
                return Err(InflightError::Burst { head });
            }
            head = self.words.load_u16(entry(head) + NEXT);
        }
        for (head, _) in (0..).zip(burst).filter(|(_, is_in)| *is_in) {
            self.words.store_u16(entry(head) + FLAG, 0);
        }
        fence_compiler();
        self.words.store_u16(HEAD_USED, used_idx);
        fence_compiler();
        Ok(())
    }

    /// Fills `owed` with the chains that are in flight.
    fn find_owed(&mut self, entries: u16, size: u16) -> Result<(), InflightError> {
        let mut owed = Vec::new();
        for head in 0..entries {
            if self.words.load_u16(entry(head) + FLAG) & 0xff == 0 {
                continue;
            }
            if head >= size {
                return Err(InflightError::Head { head, size });
            }
            owed.push((self.words.load_u64_acquire(entry(head) + COUNTER), head));
        }
        owed.sort_unstable();
        self.counter = owed.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        self.owed = owed.into_iter().rev().map(|(_, head)| head).collect();
        Ok(())
    }

    /// True if no record has begun in the region.
    pub(crate) fn is_new(&self) -> bool {
        self.words.load_u16(HEAD_VERSION) == 0
    }

    /// True if the front-end has truncated the region's file under our mapping.
    pub(crate) fn is_broken(&self) -> bool {
        self.words.is_broken()
    }

    /// How many owed chains were not popped again yet.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "at most the ring's size")]
    pub(crate) fn owed_count(&self) -> u16 {
        self.owed.len() as u16
    }

    /// True if an owed chain is not answered yet, whether it was popped again or not.
    pub(crate) fn owes(&self) -> bool {
        !self.owed.is_empty() || !self.again.is_empty()
    }

    /// The head of the owed chain that is popped next.
    pub(crate) fn first_owed(&self) -> Option<u16> {
        self.owed.last().copied()
    }

    /// The heads of all owed chains that were not popped again, in any order.
    pub(crate) fn all_owed(&self) -> &[u16] {
        &self.owed
    }

    /// Records that the owed chains are in the ring again. `newest_first`: their heads in this
    /// order, so that the oldest chains are the ones still owed if the process is killed in
    /// between.
    pub(crate) fn put_back_owed(&mut self, newest_first: impl Iterator<Item = u16>) {
        for head in newest_first {
            self.words.store_u16(entry(head) + FLAG, 0);
            fence_compiler();
        }
        self.owed.clear();
    }

    /// Counts the owed chain that is next as popped.
    pub(crate) fn pop_owed(&mut self) {
        self.again.extend(self.owed.pop());
    }

    /// Records that the chain of `head` was popped from the ring.
    #[inline]
    pub(crate) fn taken(&mut self, head: u16) {
        self.words.store_u64(entry(head) + COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        fence_compiler();
        self.words.store_u16(entry(head) + FLAG, 1);
        fence_compiler();
    }

    /// Records that the chain which was popped last is in the ring again. False: the chain was
    /// owed; it is owed again, and does not lie in the ring.
    pub(crate) fn put_back(&mut self, head: u16) -> bool {
        if self.again.last() == Some(&head) {
            self.owed.extend(self.again.pop());
            return false;
        }
        self.words.store_u16(entry(head) + FLAG, 0);
        fence_compiler();
        true
    }

    /// Records that the chain of `head` is returned by the next used entry.
    #[inline]
    pub(crate) fn answered(&mut self, head: u16) {
        if !self.again.is_empty() {
            self.forget(head);
        }
        self.words.store_u16(entry(head) + NEXT, self.last);
        fence_compiler();
        self.words.store_u16(HEAD_LAST, head);
        fence_compiler();
        self.last = head;
        self.burst.push(head);
    }

    /// Records that the burst was published: `used_idx` is now the ring's used index, with which
    /// the driver sees all answered chains.
    #[inline]
    pub(crate) fn published(&mut self, used_idx: u16) {
        fence_compiler();
        for head in self.burst.drain(..) {
            self.words.store_u16(entry(head) + FLAG, 0);
        }
        fence_compiler();
        self.words.store_u16(HEAD_USED, used_idx);
        fence_compiler();
    }

    /// Notes that a chain which was owed and popped again can no longer be put back.
    #[cold]
    pub(crate) fn forget(&mut self, head: u16) {
        // Chains are answered in about the order in which they were popped: the search is short.
        if let Some(at) = self.again.iter().position(|again| *again == head) {
            self.again.remove(at);
        }
    }
}

/// Byte offset of the entry of a head in the region.
#[inline]
fn entry(head: u16) -> usize {
    HEADER_SIZE + usize::from(head) * ENTRY_SIZE
}
