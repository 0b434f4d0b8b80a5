//! `Journal`: which requests of a Xen ring are taken and have no response that the front can see.
//!
//! The journal lies in a mapped file that outlives the process which serves the ring. The ring
//! alone does not say which requests were taken: requests are answered in any order, and responses
//! overwrite requests. With the journal a back-end that follows a killed one serves the requests
//! without a response again, and then goes on with the ring
//! ([`crate::blkif::BackRing::take_over`]).
//!
//! ```text
//! header:  magic, the ring's mark and shape;  taken, published: counts of 64 bits
//! record of each slot:  state: free | taken | answered by response k;  order;  the request
//!
//! take a request:    order, request;  state = taken        it is taken from here on
//! ..end of a batch:  taken = the count of the next request
//! put it back:       taken = one less;  state = free
//! answer it:         state = answered by k;                the response goes to its place
//! publish:           published = the next k;  rsp_prod = the same
//!
//! owed = the records that are taken, and those that are answered by a k from rsp_prod on
//! the next request to take = rsp_prod + the number of requests that are owed
//! ```
//! Why a kill between any two of these stores loses nothing, and answers nothing twice:
//! 1. **One store takes a request**: that of its record's state. Before that store neither the
//!    record nor the ring counts the request as taken: the next back-end takes it from the ring,
//!    where no response has overwritten it.
//! 2. **One store answers all requests of a burst**: that of `rsp_prod`, which the front reads too.
//!    A record says only which response answers it; whether that response was published is read
//!    from the ring. So journal and ring cannot disagree.
//! 3. **A slot is free again when its response is published**, not when it is written: until then
//!    its record may be needed. While a record is overwritten, its state is "answered by k" with a
//!    k before `rsp_prod`, up to the store that makes it "taken".
//! 4. **A request without a response is served from its start**, whatever step it had reached. Such
//!    requests are served in the order in which they were taken.
//!
//! A process is killed between two instructions, and the next process sees all that the executed
//! instructions have stored. Only the compiler could reorder two stores: `fence_compiler` forbids
//! it.

use manyring_memory::{Words, fence_compiler};
use manyring_wire::xen::blkif::{Abi, ENTRY_WORDS, RING_ENTRIES, RING_PAGE_ORDER_MAX, RawRequest};
use std::hash::{BuildHasher, Hasher};

/// Why a back-end cannot go on with the ring of a killed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum JournalError {
    #[error("no journal of the ring was kept")]
    Missing,
    #[error("{len} bytes, {needed} are needed")]
    Short { len: usize, needed: usize },
    #[error("not a journal of version {VERSION}")]
    Foreign,
    #[error("journal {journal:#x} of another ring, which is marked {ring:#x}")]
    OtherRing { journal: u32, ring: u32 },
    #[error("journal of a ring of {entries} entries of {entry_size} bytes")]
    OtherShape { entries: u32, entry_size: u32 },
    #[error("rsp_prod is {rsp_prod}, the last that was published is {published}")]
    Responses { rsp_prod: u32, published: u32 },
    #[error("damaged: the record of slot {slot}")]
    Record { slot: u16 },
    #[error("damaged: {taken} requests were taken, its records say {found}")]
    Taken { taken: u64, found: u64 },
}

/// Bytes of the journal for a ring of `1 << order` pages. An order above the largest that is served
/// counts as the largest.
#[must_use]
pub fn journal_size(abi: Abi, order: u32) -> usize {
    record(abi.ring_size(order.min(RING_PAGE_ORDER_MAX)))
}

/// Offset of the mark in the ring's first page: the last word of the padding behind the counts. A
/// front clears the padding when it makes a ring, and never reads it. So a new ring of the front is
/// not mistaken for the ring of an old journal.
const MARK: usize = RING_ENTRIES - 4;
/// The mark of a ring that no back-end has served.
const UNSERVED: u32 = 0;
/// The mark of a ring that a back-end without a journal has served.
const UNWRITTEN: u32 = 1;

const MAGIC: u32 = u32::from_le_bytes(*b"MrXJ");
const VERSION: u32 = 1;

/// Bytes of the header, and of each record: two cache lines.
const UNIT: usize = 128;

const HEAD: usize = 0;
const HEAD_VERSION: usize = 4;
const HEAD_MARK: usize = 8;
const HEAD_ENTRIES: usize = 12;
const HEAD_ENTRY_SIZE: usize = 16;
const HEAD_TAKEN: usize = 24;
const HEAD_PUBLISHED: usize = 32;

const STATE: usize = 0;
const ORDER: usize = 8;
const REQUEST: usize = 16;
const _: () = assert!(REQUEST + 4 * ENTRY_WORDS <= UNIT);

const FREE: u64 = 0;
const TAKEN: u64 = 1;
/// State of a record: answered by response 0. `ANSWERED + k` means: answered by response k.
const ANSWERED: u64 = 2;

/// The journal of a ring that this process serves.
#[derive(Debug)]
pub(crate) struct Journal {
    words: Words,
    abi: Abi,
    /// Count of the next request to take. Its low 32 bits are the ring's count.
    taken: u64,
    /// Count of the next response to write. Its low 32 bits are the ring's count.
    answered: u64,
}

/// The slots of the requests that a former back-end has taken and not answered, in the order in
/// which it took them.
pub(crate) type Owed = Vec<u16>;

/// The layout of a ring's entries, and their number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) abi: Abi,
    pub(crate) size: u16,
}

impl Journal {
    /// Begins a journal for a ring of `size` entries; `count` is the count of its next request and
    /// its next response. The ring is marked last, so that a marked ring has a complete journal.
    pub(crate) fn begin(
        words: Words,
        shape: Shape,
        ring: &Words,
        count: u32,
    ) -> Result<Self, JournalError> {
        let Shape { abi, size } = shape;
        check_size(&words, size)?;
        ring.store_u32(MARK, UNSERVED);
        words.store_u32(HEAD, 0);
        fence_compiler();
        let mark = new_mark();
        words.store_u32(HEAD_VERSION, VERSION);
        words.store_u32(HEAD_MARK, mark);
        words.store_u32(HEAD_ENTRIES, size.into());
        words.store_u32(HEAD_ENTRY_SIZE, entry_size(abi));
        words.store_u64(HEAD_TAKEN, count.into());
        words.store_u64(HEAD_PUBLISHED, count.into());
        (0..size).for_each(|slot| words.store_u64(record(slot) + STATE, FREE));
        fence_compiler();
        words.store_u32(HEAD, MAGIC);
        fence_compiler();
        ring.store_u32(MARK, mark);
        fence_compiler();
        Ok(Self { words, abi, taken: count.into(), answered: count.into() })
    }

    /// Goes on with the journal of a ring that a former back-end served; its published responses
    /// end at the count `rsp_prod`.
    pub(crate) fn resume(
        words: Words,
        shape: Shape,
        ring: &Words,
        rsp_prod: u32,
    ) -> Result<(Self, Owed), JournalError> {
        let Shape { abi, size } = shape;
        check_size(&words, size)?;
        let mark = ring.load_u32(MARK);
        if words.load_u32(HEAD) != MAGIC || words.load_u32(HEAD_VERSION) != VERSION {
            return Err(JournalError::Foreign);
        }
        let journal = words.load_u32(HEAD_MARK);
        if journal != mark {
            return Err(JournalError::OtherRing { journal, ring: mark });
        }
        let (entries, bytes) = (words.load_u32(HEAD_ENTRIES), words.load_u32(HEAD_ENTRY_SIZE));
        if (entries, bytes) != (size.into(), entry_size(abi)) {
            return Err(JournalError::OtherShape { entries, entry_size: bytes });
        }
        let answered = published(&words, size, rsp_prod)?;
        let mut owed = owed(&words, size, answered)?;
        let taken = answered + owed.len() as u64;
        let noted = words.load_u64_acquire(HEAD_TAKEN);
        // The noted count is stored at the end of a batch, so it may lag by one batch.
        if !(noted..=noted.saturating_add(size.into())).contains(&taken) {
            return Err(JournalError::Taken { taken: noted, found: taken });
        }
        owed.sort_unstable();
        let is_wrong = |pair: &[(u64, u16)]| pair[0].0 == pair[1].0;
        let wrong = owed.windows(2).find(|pair| is_wrong(pair)).map(|pair| pair[1].1);
        let beyond = owed.last().filter(|(order, _)| *order >= taken).map(|(_, slot)| *slot);
        if let Some(slot) = wrong.or(beyond) {
            return Err(JournalError::Record { slot });
        }
        let owed: Owed = owed.into_iter().map(|(_, slot)| slot).collect();
        // A request whose response was written and not published counts as taken: it is served
        // again, and its response may get another number.
        for slot in &owed {
            words.store_u64(record(*slot) + STATE, TAKEN);
        }
        fence_compiler();
        words.store_u64(HEAD_TAKEN, taken);
        Ok((Self { words, abi, taken, answered }, owed))
    }

    /// Records a request as taken: `head` are its words before the segments, `rest` the others.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "the first part has a constant length")]
    pub(crate) fn take(&mut self, slot: u16, head: &[u32], rest: &[u32]) {
        let record = self.words.part::<UNIT>(record(slot));
        record.store_u64(ORDER, self.taken);
        record.store_u32s(REQUEST, head);
        record.store_u32s(REQUEST + 4 * head.len(), rest);
        fence_compiler();
        record.store_u64(STATE, TAKEN);
        self.taken += 1;
    }

    /// Stores the count of taken requests, at the end of a batch.
    #[inline]
    pub(crate) fn end_batch(&mut self) {
        fence_compiler();
        self.words.store_u64(HEAD_TAKEN, self.taken);
    }

    /// Records that the request which was taken last is in the ring again.
    pub(crate) fn put_back(&mut self, slot: u16) {
        self.taken -= 1;
        self.words.store_u64(HEAD_TAKEN, self.taken);
        fence_compiler();
        self.words.store_u64(record(slot) + STATE, FREE);
    }

    /// Records that the next response answers the request in `slot`.
    #[inline]
    pub(crate) fn answer(&mut self, slot: u16) {
        self.words.store_u64(record(slot) + STATE, ANSWERED + self.answered);
        self.answered += 1;
    }

    /// Records that all written responses are published. The caller stores `rsp_prod` next, and
    /// then calls [`fence_compiler`], before the records of the freed slots are overwritten.
    #[inline]
    pub(crate) fn publish(&mut self) {
        self.words.store_u64(HEAD_PUBLISHED, self.answered);
        fence_compiler();
    }

    /// Copies the journal's copy of the request in `slot` to `request`.
    pub(crate) fn copy_to(&self, slot: u16, request: &mut RawRequest) {
        let (at, words) = (record(slot) + REQUEST, request.words_mut());
        words[0] = self.words.load_u32(at);
        let size = self.abi.layout().request_size(words[0]);
        self.words.load_u32s(at + 4, &mut words[1..size.div_ceil(4)]);
    }
}

/// True if no back-end has served the ring since its front made it.
pub(crate) fn is_unserved(ring: &Words) -> bool {
    ring.load_u32(MARK) == UNSERVED
}

/// Marks the ring as served without a journal. While requests of such a ring are unanswered, no
/// later back-end can take it over.
pub(crate) fn mark_unwritten(ring: &Words) {
    ring.store_u32(MARK, UNWRITTEN);
}

/// The count of published responses, in 64 bits. The journal's count is stored just before the
/// ring's `rsp_prod`, so the ring's count is equal, or one burst behind.
fn published(words: &Words, size: u16, rsp_prod: u32) -> Result<u64, JournalError> {
    let noted = words.load_u64_acquire(HEAD_PUBLISHED);
    #[allow(clippy::cast_possible_truncation, reason = "the ring's count is the low 32 bits")]
    let published = noted as u32;
    let behind = published.wrapping_sub(rsp_prod);
    match noted.checked_sub(behind.into()) {
        Some(count) if behind <= size.into() => Ok(count),
        _ => Err(JournalError::Responses { rsp_prod, published }),
    }
}

/// The order and the slot of each owed request: one that is taken, or answered by a response with a
/// count of `answered` or later.
fn owed(words: &Words, size: u16, answered: u64) -> Result<Vec<(u64, u16)>, JournalError> {
    let mut owed = Vec::new();
    for slot in 0..size {
        let at = record(slot);
        match words.load_u64_acquire(at + STATE) {
            FREE => {}
            TAKEN => owed.push((words.load_u64_acquire(at + ORDER), slot)),
            state if state - ANSWERED < answered => {}
            state if state - ANSWERED - answered < size.into() => {
                owed.push((words.load_u64_acquire(at + ORDER), slot));
            }
            _ => return Err(JournalError::Record { slot }),
        }
    }
    Ok(owed)
}

fn check_size(words: &Words, size: u16) -> Result<(), JournalError> {
    let (len, needed) = (words.size(), record(size));
    if len < needed { Err(JournalError::Short { len, needed }) } else { Ok(()) }
}

/// Byte offset of the record of a slot in the journal.
#[inline]
fn record(slot: u16) -> usize {
    UNIT + usize::from(slot) * UNIT
}

fn entry_size(abi: Abi) -> u32 {
    u32::try_from(abi.layout().entry_size).unwrap_or(u32::MAX)
}

/// A random number that marks a journal and its ring as belonging together.
fn new_mark() -> u32 {
    let random = std::hash::RandomState::new().build_hasher().finish();
    #[allow(clippy::cast_possible_truncation, reason = "half of it is random enough")]
    let mark = random as u32;
    mark.max(UNWRITTEN + 1)
}
