//! The journal of a session, as it lies in a file of fixed size: what a device process writes there
//! (`processes/session_journal.rs`), and what the next process of its domain reads.
//!
//! The file has two halves. One of them holds the state: a snapshot at its start, and behind it a
//! log of the changes since then. A change is one record, and changes nothing of what is written:
//!
//! ```text
//! half     snapshot, change, change, ..   of which the sequence numbers follow each other
//! record   version, size, sequence, checksum; then the change of the answer, the keys of entries
//!          that go, and the entries that come, each with its key and the name of its descriptors
//! ```
//! A log that is full ends with a snapshot in the other half, whose sequence number follows too.
//! The state is that of the half with the snapshot of the higher number, and of the changes behind
//! it.
//!
//! **A death in the middle of a write leaves the former state or the new one**, never a mixture:
//! * A record that is not written whole has not its checksum. The log ends before it.
//! * Bytes of an earlier log may lie behind the last record, also whole records: their numbers do
//!   not follow.
//! * A snapshot that is not written whole is none: the other half still holds the state. Before the
//!   first snapshot, which goes to the first half, the state is empty.
//!
//! Descriptors lie in no file. Their order with what is written here has four points, in
//! `session_journal.rs`.
//!
//! The process that wrote the file may have been compromised by its guest. So whoever reads it
//! believes nothing: each size and count is compared with what is left of the file.

use std::collections::BTreeMap;

/// The version of the layout.
const VERSION: u32 = 1;
/// In the place of a version: the writer could not go on, so nothing here is the last state.
const LOST: u32 = u32::MAX;
/// Size of the head of a record.
const HEAD: usize = 24;
/// Size of what is before the lists of a record.
const COUNTS: usize = 12;
/// Size of an entry without its bytes.
const ENTRY_HEAD: usize = 16;
/// Longest entry: the state of a network device with full tables.
pub const ENTRY_SIZE_MAX: usize = 7168;
/// Longest prefix of a message by which it is recognised.
pub const ANSWERING_MAX: usize = 256;
/// Bytes of a session's entries, for each that it may have: nearly all are short messages.
const ENTRY_SIZE_MEAN: usize = 128;
/// Bytes beside them: the state of a network device, and the longest writes to the configuration.
const LONG_SIZE_MAX: usize = 64 << 10;
/// Least space for the changes behind a snapshot.
const LOG_MIN: usize = 8 << 10;
/// The file is made of whole pages.
const PAGE: usize = 4096;

/// The size of the file of a session that has this many entries at most.
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
    /// The name under which the supervisor keeps the descriptors of the entry, if it has any.
    pub name: Option<u64>,
}

/// The change of the state of the answer to a front-end's message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Answered {
    /// Unchanged.
    #[default]
    Unchanged,
    /// The answer to the message that begins with these bytes is under way.
    UnderWay(Vec<u8>),
    /// The answer was sent.
    Sent,
}

/// A change of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The keys of entries that go. They go first.
    pub drops: Vec<u32>,
    /// Entries that come, each in the place of the one with its key.
    pub puts: Vec<(u32, Entry)>,
    /// The change of the answer.
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
    /// Changes the state.
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

    /// The change of an empty state into this one.
    fn into_change(self) -> Change {
        let answer = self.answering.map_or(Answered::Sent, Answered::UnderWay);
        Change { drops: Vec::new(), puts: self.entries.into_iter().collect(), answer }
    }
}

/// Bytes to write into the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Where they begin.
    pub at: usize,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// The state has no room in a half: it is that of no session of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a journal of {size} bytes; the maximum is {size_max}")]
pub struct Full {
    size: usize,
    size_max: usize,
}

/// Why the bytes of a file are the journal of no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum JournalError {
    #[error("its device process could not go on writing it")]
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

/// Where the next record of a journal goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    half_size: usize,
    /// The half that holds the state: 0 or 1.
    half: usize,
    /// The end of its last record.
    end: usize,
    /// The size of its snapshot.
    snapshot: usize,
    /// The number of its last record.
    sequence: u64,
}

impl Writer {
    /// The writer of a file of this size in which nothing is written. It begins with a snapshot.
    #[must_use]
    pub fn new(file_size: usize) -> Self {
        let half_size = file_size / 2;
        Self { half_size, half: 1, end: half_size, snapshot: 0, sequence: 0 }
    }

    /// The record of a change. `None`: the log is full, and a snapshot is due.
    #[must_use]
    pub fn append(&mut self, change: &Change) -> Option<Store> {
        let bytes = record(self.sequence.wrapping_add(1), change);
        // The longer the snapshot, the more changes pay for it.
        let log = self.snapshot.max(LOG_MIN);
        if self.end + bytes.len() > self.half_size.min(self.snapshot + log) {
            return None;
        }
        let store = Store { at: self.half * self.half_size + self.end, bytes };
        self.end += store.bytes.len();
        self.sequence = self.sequence.wrapping_add(1);
        Some(store)
    }

    /// The record of a snapshot, which begins the log of the other half.
    ///
    /// # Errors
    /// [`Full`]: the journal stays as it is.
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

    /// What says in both halves that the last state is not here.
    #[must_use]
    pub fn lost(&self) -> [Store; 2] {
        [0, 1].map(|half| Store { at: half * self.half_size, bytes: vec![u8::MAX; HEAD] })
    }
}

/// The state in the bytes of a file, and the writer that goes on with it. An empty state of a file
/// in which nothing was written whole. `entries_max`: of a session of the device.
///
/// # Errors
/// [`JournalError`], one for each reason: the session of the file cannot be resumed.
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
    /// The head at the start of these bytes; `None`: they are too few.
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

/// FNV-1a over all of a record but its version. It finds what was not written whole, and is no
/// defence against a process that writes what it likes.
fn checksum(size: u32, sequence: u64, rest: &[u8]) -> u64 {
    let head = size.to_le_bytes().into_iter().chain(sequence.to_le_bytes());
    head.chain(rest.iter().copied()).fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A size that is one of a record's, which is shorter than its file.
fn short(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

/// A change as a record.
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

/// The change of a record, whose bytes behind the head these are.
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
    // Nothing is set aside for a count that the record has no room for.
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

/// The next bytes; `None`: there are fewer.
fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (found, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*found)
}

const _: () = assert!(file_size(0) / 2 > HEAD + COUNTS + ENTRY_HEAD + ENTRY_SIZE_MAX);

#[cfg(test)]
mod tests;
