//! The layout of a session's journal in a file of fixed size. A device process writes the journal
//! (`serve/src/device_process/session_journal.rs`); after its death, the next process of its domain
//! reads it and resumes the session.
//!
//! The file has two halves. One of them holds the state: a snapshot at its start, and behind it a
//! log of the changes since then. A change is appended as one record; earlier bytes stay as they
//! are:
//!
//! ```text
//! half     snapshot, change, change, ..   with consecutive sequence numbers
//! record   version, size, sequence, checksum; then whether an answer is under way, the keys of
//!          entries that are removed, and the entries that are added, each with its key and the
//!          name of its descriptors
//! ```
//! When the log is full, a snapshot with the next sequence number is written to the other half. The
//! half whose snapshot has the higher sequence number holds the state: its snapshot, and the
//! changes behind that.
//!
//! **A writer that dies in the middle of a write leaves the former state or the new one**, never a
//! mixture:
//! * A record that was written in part does not match its checksum: the log ends before it.
//! * Whole records of an earlier log may lie behind the last record: their sequence numbers are not
//!   consecutive with it, so they are not read.
//! * A snapshot that was written in part is ignored: the other half still holds the state. The
//!   first snapshot goes to the first half; before it is whole, the state is empty.
//!
//! File descriptors cannot lie in the file: the supervisor keeps them under the names that entries
//! have. `session_journal.rs` explains in which order descriptors and records are written.
//!
//! The process that wrote the file may have been compromised by its guest. So the reader trusts
//! nothing in it: each size and count is checked against the bytes that are left in the file.

use std::collections::BTreeMap;

/// The version of the layout.
const VERSION: u32 = 1;
/// The version field of a journal whose writer failed to write a later state. The file lacks the
/// last state, so the session cannot be resumed.
const LOST: u32 = u32::MAX;
/// Size of the head of a record, in bytes.
const HEAD: usize = 24;
/// Size in bytes of the three counts behind the head: answer's bytes, dropped keys, entries.
const COUNTS: usize = 12;
/// Size of an entry without its contents, in bytes.
const ENTRY_HEAD: usize = 16;
/// Longest entry in bytes: the state of a network device with full tables.
pub const ENTRY_SIZE_MAX: usize = 7168;
/// The most bytes that are kept of the beginning of a message whose answer is under way. The next
/// process compares them with the unread bytes of the socket: if they differ, the message was
/// consumed, so its answer was sent.
pub const ANSWERING_MAX: usize = 256;
/// The space of the file for each entry, in bytes, on average: nearly all entries are short
/// messages.
const ENTRY_SIZE_MEAN: usize = 128;
/// The further space of the file for long entries, in bytes: the state of a network device, and the
/// longest writes to the configuration space.
const LONG_SIZE_MAX: usize = 64 << 10;
/// The least space of a log behind its snapshot, in bytes.
const LOG_MIN: usize = 8 << 10;
/// Each half of the file is a multiple of this size.
const PAGE: usize = 4096;

/// Returns the size of the journal's file, in bytes, for a session with at most this many entries.
#[must_use]
pub const fn file_size(entries: usize) -> usize {
    let state = entries * (ENTRY_SIZE_MEAN + ENTRY_HEAD) + LONG_SIZE_MAX;
    2 * (state + LOG_MIN).next_multiple_of(PAGE)
}

/// An entry of a session's journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The message of the front-end, or the state of the device.
    pub bytes: Vec<u8>,
    /// The name under which the supervisor keeps the entry's descriptors; `None`: no descriptors.
    pub name: Option<u64>,
}

/// What a change records about the answer to a front-end's message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Answered {
    /// Whether an answer is under way stays as it was.
    #[default]
    Unchanged,
    /// The message that begins with these bytes was applied, and its answer may not be sent yet.
    UnderWay(Vec<u8>),
    /// The answer was sent.
    Sent,
}

/// A change of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The keys of entries that are removed, before the new ones are added.
    pub drops: Vec<u32>,
    /// Entries that are added. An entry replaces one with the same key.
    pub puts: Vec<(u32, Entry)>,
    /// What changes about the answer that is under way.
    pub answer: Answered,
}

/// The state of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The entries, by their keys.
    pub entries: BTreeMap<u32, Entry>,
    /// The beginning of the message whose answer is under way.
    pub answering: Option<Vec<u8>>,
}

impl State {
    /// Applies a change to the state.
    pub fn apply(&mut self, change: Change) {
        let Change { drops, puts, answer } = change;
        for key in drops {
            self.entries.remove(&key);
        }
        self.entries.extend(puts);
        match answer {
            Answered::Unchanged => {}
            Answered::UnderWay(message) => self.answering = Some(message),
            Answered::Sent => self.answering = None,
        }
    }

    /// Returns the change that turns an empty state into this one: a snapshot is written as such a
    /// change.
    fn into_change(self) -> Change {
        let answer = self.answering.map_or(Answered::Sent, Answered::UnderWay);
        Change { drops: Vec::new(), puts: self.entries.into_iter().collect(), answer }
    }
}

/// Bytes to write into the file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// The offset in the file, in bytes.
    pub at: usize,
    /// The bytes to write there.
    pub bytes: Vec<u8>,
}

/// The state does not fit a half of the file: it has more entries, or longer ones, than a session
/// of the device can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a journal of {size} bytes; the maximum is {size_max}")]
pub struct Full {
    size: usize,
    size_max: usize,
}

/// Why the session of a file cannot be resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum JournalError {
    #[error("its device process failed to write a later state")]
    Lost,
    #[error("layout version {found} instead of {VERSION}")]
    Version { found: u32 },
    #[error("no snapshot is whole")]
    NoSnapshot,
    #[error("a list is longer than its record")]
    Short,
    #[error("an entry of {size} bytes")]
    Long { size: usize },
    #[error("{count} entries")]
    Many { count: usize },
    #[error("an answer of the unknown kind {kind} to {size} bytes")]
    Answer { kind: u8, size: usize },
}

/// Makes the records of a journal, with the offset at which each is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    half_size: usize,
    /// The half of the file that holds the present state: 0 or 1.
    half: usize,
    /// The end of the last record, as a byte offset in the half.
    end: usize,
    /// The size in bytes of the snapshot with which the half begins.
    snapshot: usize,
    /// The sequence number of the last record.
    sequence: u64,
}

impl Writer {
    /// Makes the writer of an empty file of this size. The first record must be a snapshot.
    #[must_use]
    pub fn new(file_size: usize) -> Self {
        let half_size = file_size / 2;
        // Half 1 counts as full: `append` fails, and the first snapshot goes to half 0.
        Self { half_size, half: 1, end: half_size, snapshot: 0, sequence: 0 }
    }

    /// Makes the record of a change. `None`: the log is full, and the caller must write a snapshot
    /// instead.
    #[must_use]
    pub fn append(&mut self, change: &Change) -> Option<Store> {
        let bytes = record(self.sequence.wrapping_add(1), change);
        // The log may grow as long as its snapshot, or LOG_MIN: so the next snapshot costs about as
        // many bytes as the changes since the last one.
        let log = self.snapshot.max(LOG_MIN);
        if self.end + bytes.len() > self.half_size.min(self.snapshot + log) {
            return None;
        }
        let store = Store { at: self.half * self.half_size + self.end, bytes };
        self.end += store.bytes.len();
        self.sequence = self.sequence.wrapping_add(1);
        Some(store)
    }

    /// Makes the record of a snapshot, which begins the log of the other half.
    ///
    /// # Errors
    /// [`Full`]: the state does not fit. The journal stays as it is.
    pub fn snapshot(&mut self, state: State) -> Result<Store, Full> {
        let sequence = self.sequence.wrapping_add(1);
        let bytes = record(sequence, &state.into_change());
        if bytes.len() > self.half_size {
            return Err(Full { size: bytes.len(), size_max: self.half_size });
        }
        self.half = 1 - self.half;
        (self.end, self.snapshot, self.sequence) = (bytes.len(), bytes.len(), sequence);
        Ok(Store { at: self.half * self.half_size, bytes })
    }

    /// Makes the bytes that mark both halves as lost: [`read`] then fails with
    /// [`JournalError::Lost`].
    #[must_use]
    pub fn lost(&self) -> [Store; 2] {
        [0, 1].map(|half| Store { at: half * self.half_size, bytes: vec![u8::MAX; HEAD] })
    }
}

/// Reads the state in the bytes of a file, and makes the writer that continues the file. If the
/// first snapshot was never written whole, the state is empty. `entries_max` is the most entries
/// that a session of the device can have.
///
/// # Errors
/// [`JournalError`]: the session of the file cannot be resumed.
pub fn read(bytes: &[u8], entries_max: usize) -> Result<(Writer, State), JournalError> {
    let half_size = bytes.len() / 2;
    let halves = [&bytes[..half_size], &bytes[half_size..2 * half_size]];
    let heads = halves.map(Head::of);
    let begin = |half: usize| {
        let head = heads[half]?;
        head.is_whole(halves[half]).then_some((head.sequence, half))
    };
    let Some((_, half)) = begin(0).max(begin(1)) else {
        let versions = heads.map(|head| head.map_or(0, |head| head.version));
        return match versions.into_iter().find(|version| ![0, VERSION].contains(version)) {
            Some(LOST) => Err(JournalError::Lost),
            Some(found) => Err(JournalError::Version { found }),
            // The second half was never written: the first snapshot was not written whole.
            None if versions[1] == 0 => Ok((Writer::new(bytes.len()), State::default())),
            None => Err(JournalError::NoSnapshot),
        };
    };
    // Apply the snapshot, then each change, until a record is not whole or not the next one.
    let (log, mut state) = (halves[half], State::default());
    let mut writer = Writer { half_size, half, end: 0, snapshot: 0, sequence: 0 };
    while let Some(head) = Head::of(&log[writer.end..]) {
        let rest = &log[writer.end..];
        let follows = writer.end == 0 || head.sequence == writer.sequence.wrapping_add(1);
        if !follows || !head.is_whole(rest) {
            break;
        }
        state.apply(parse(&rest[HEAD..head.size as usize])?);
        if state.entries.len() > entries_max {
            return Err(JournalError::Many { count: state.entries.len() });
        }
        writer.end += head.size as usize;
        writer.sequence = head.sequence;
        writer.snapshot = if writer.snapshot == 0 { writer.end } else { writer.snapshot };
    }
    Ok((writer, state))
}

/// The head of a record.
#[derive(Clone, Copy)]
struct Head {
    version: u32,
    size: u32,
    sequence: u64,
    checksum: u64,
}

impl Head {
    /// Reads the head at the start of these bytes; `None`: there are too few bytes.
    fn of(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        Some(Self {
            version: u32::from_le_bytes(take(&mut rest)?),
            size: u32::from_le_bytes(take(&mut rest)?),
            sequence: u64::from_le_bytes(take(&mut rest)?),
            checksum: u64::from_le_bytes(take(&mut rest)?),
        })
    }

    /// True if the record that begins with these bytes was written whole.
    fn is_whole(self, bytes: &[u8]) -> bool {
        let whole = bytes.get(HEAD..self.size as usize);
        self.version == VERSION
            && whole.is_some_and(|rest| checksum(self.size, self.sequence, rest) == self.checksum)
    }
}

/// FNV-1a over size, sequence and contents of a record. It finds records that were written in part;
/// it is no defence against a process that forges records.
fn checksum(size: u32, sequence: u64, rest: &[u8]) -> u64 {
    let head = size.to_le_bytes().into_iter().chain(sequence.to_le_bytes());
    head.chain(rest.iter().copied()).fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Converts a size in a record to 32 bits. It always fits: a record is shorter than the file.
fn short(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

/// Encodes a change as a record with its head.
fn record(sequence: u64, change: &Change) -> Vec<u8> {
    let Change { drops, puts, answer } = change;
    let (kind, known): (u8, &[u8]) = match answer {
        Answered::Unchanged => (0, &[]),
        Answered::UnderWay(message) => (1, message),
        Answered::Sent => (2, &[]),
    };
    let known = &known[..known.len().min(ANSWERING_MAX)];
    let mut bytes = vec![0; HEAD];
    bytes.extend((short(known.len()) << 8 | u32::from(kind)).to_le_bytes());
    bytes.extend(short(drops.len()).to_le_bytes());
    bytes.extend(short(puts.len()).to_le_bytes());
    bytes.extend_from_slice(known);
    bytes.extend(drops.iter().flat_map(|key| key.to_le_bytes()));
    for (key, Entry { bytes: content, name }) in puts {
        bytes.extend(key.to_le_bytes());
        bytes.extend(short(content.len()).to_le_bytes());
        bytes.extend(name.unwrap_or_default().to_le_bytes());
        bytes.extend_from_slice(content);
    }
    let size = short(bytes.len());
    let checksum = checksum(size, sequence, &bytes[HEAD..]);
    bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
    bytes[4..8].copy_from_slice(&size.to_le_bytes());
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    bytes[16..HEAD].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Decodes the change of a record from the bytes behind the record's head.
fn parse(bytes: &[u8]) -> Result<Change, JournalError> {
    fn word(rest: &mut &[u8]) -> Result<u32, JournalError> {
        take(rest).map(u32::from_le_bytes).ok_or(JournalError::Short)
    }
    fn some<'a>(rest: &mut &'a [u8], size: u32) -> Result<&'a [u8], JournalError> {
        let (found, after) = rest.split_at_checked(size as usize).ok_or(JournalError::Short)?;
        *rest = after;
        Ok(found)
    }
    let rest = &mut &bytes[..];
    let (answer, drops, puts) = (word(rest)?, word(rest)?, word(rest)?);
    let [kind, ..] = answer.to_le_bytes();
    let known = some(rest, answer >> 8)?;
    let answer = match kind {
        0 if known.is_empty() => Answered::Unchanged,
        1 if known.len() <= ANSWERING_MAX => Answered::UnderWay(known.to_vec()),
        2 if known.is_empty() => Answered::Sent,
        _ => return Err(JournalError::Answer { kind, size: known.len() }),
    };
    // The lists grow with what is read: a forged count must not allocate memory in advance.
    let mut change = Change { answer, ..Change::default() };
    for _ in 0..drops {
        change.drops.push(word(rest)?);
    }
    for _ in 0..puts {
        let (key, size) = (word(rest)?, word(rest)?);
        let name = take(rest).map(u64::from_le_bytes).ok_or(JournalError::Short)?;
        if size as usize > ENTRY_SIZE_MAX {
            return Err(JournalError::Long { size: size as usize });
        }
        let bytes = some(rest, size)?.to_vec();
        change.puts.push((key, Entry { bytes, name: (name != 0).then_some(name) }));
    }
    Ok(change)
}

/// Takes the next `N` bytes; `None`: there are fewer.
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (found, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*found)
}

const _: () = assert!(file_size(0) / 2 > HEAD + COUNTS + ENTRY_HEAD + ENTRY_SIZE_MAX);

#[cfg(test)]
mod tests;
