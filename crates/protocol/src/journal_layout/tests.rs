//! A journal whose writer dies at any byte, and journals that a compromised process has written.

use super::*;

/// Entries of a session.
const ENTRIES: usize = 40;

/// Pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % end as u64).unwrap()
    }

    fn change(&mut self) -> Change {
        let mut keys = |most: usize| -> Vec<u32> {
            (0..self.below(most)).map(|_| short(self.below(ENTRIES))).collect()
        };
        let (drops, keys) = (keys(4), keys(4));
        let put = |key| {
            let size = if self.below(40) == 0 { ENTRY_SIZE_MAX } else { self.below(60) };
            let name = self.below(3) as u64;
            let bytes = (0..size).map(|at| at.to_le_bytes()[0]).collect();
            (key, Entry { bytes, name: (name != 0).then_some(name) })
        };
        let puts = keys.into_iter().map(put).collect();
        let answer = match self.below(3) {
            0 => Answered::Unchanged,
            1 => Answered::UnderWay(vec![7; self.below(ANSWERING_MAX + 1)]),
            _ => Answered::Sent,
        };
        Change { drops, puts, answer }
    }
}

/// A session that writes its journal.
struct Session {
    file: Vec<u8>,
    writer: Writer,
    state: State,
}

impl Session {
    fn new() -> Self {
        let file = vec![0; file_size(ENTRIES)];
        Self { writer: Writer::new(file.len()), file, state: State::default() }
    }

    /// The next store, and the state after it.
    fn store(&mut self, change: Change) -> (Store, State) {
        let mut after = self.state.clone();
        after.apply(change.clone());
        let store = self.writer.append(&change);
        (store.unwrap_or_else(|| self.writer.snapshot(after.clone()).unwrap()), after)
    }

    /// Writes some bytes of a store.
    fn write(&mut self, store: &Store, part: std::ops::Range<usize>) {
        let at = store.at + part.start..store.at + part.end;
        self.file[at].copy_from_slice(&store.bytes[part]);
    }

    fn read(&self) -> (Writer, State) {
        read(&self.file, ENTRIES).unwrap()
    }
}

#[test]
fn a_file_in_which_nothing_is_written_is_the_journal_of_a_session_that_begins() {
    assert_eq!(Session::new().read(), (Writer::new(file_size(ENTRIES)), State::default()));
    // A process that died in its first write has left nothing that counts.
    for size in [0, file_size(0), file_size(5000)] {
        let (_, state) = read(&vec![0; size], 1).unwrap();
        assert_eq!(state, State::default());
    }
}

#[test]
fn what_is_read_is_what_was_written_also_after_many_snapshots() {
    let (mut session, mut random, mut halves) = (Session::new(), Random(1), [0; 2]);
    for step in 0..1500 {
        let change = random.change();
        let (store, after) = session.store(change);
        session.write(&store, 0..store.bytes.len());
        session.state = after;
        halves[session.writer.half] += 1;
        let (writer, state) = session.read();
        assert_eq!(state, session.state, "step {step}");
        // The next process goes on at the same place.
        assert_eq!(writer, session.writer, "step {step}");
    }
    assert!(halves.iter().all(|count| *count > 300), "{halves:?}");
}

#[test]
fn a_death_in_the_middle_of_a_write_leaves_the_former_state_or_the_new_one() {
    let (mut session, mut random, mut snapshots) = (Session::new(), Random(2), 0);
    for step in 0..300 {
        let (store, after) = session.store(random.change());
        let size = store.bytes.len();
        snapshots += usize::from(store.at % session.writer.half_size == 0);
        let before = session.file.clone();
        // Long ones are cut at fewer places.
        for cut in (0..size).step_by(1 + size / 60) {
            for part in [0..cut, cut..size] {
                session.write(&store, part.clone());
                let (writer, state) = session.read();
                // A part that has changed no byte, or all that differ, counts.
                let is_new = state == after && writer == session.writer;
                let is_former = state == session.state;
                assert!(is_former || is_new, "step {step}: {part:?} of {size}");
                session.file.copy_from_slice(&before);
            }
        }
        session.write(&store, 0..size);
        session.state = after;
    }
    assert!(snapshots > 8, "{snapshots}");
}

/// A process that dies in a write and is followed by another one goes on from what is read.
#[test]
fn a_process_after_a_death_goes_on_with_the_log_and_what_was_cut_off_never_comes_back() {
    let (mut session, mut random) = (Session::new(), Random(3));
    for step in 0..1000 {
        let (store, after) = session.store(random.change());
        let size = store.bytes.len();
        let written = if random.below(3) == 0 { random.below(size) } else { size };
        session.write(&store, 0..written);
        let (writer, state) = session.read();
        // The bytes that were cut off may be those that the file has there.
        let is_whole = session.file[store.at..][..size] == store.bytes;
        let expected = if is_whole { &after } else { &session.state };
        assert_eq!(&state, expected, "step {step}");
        (session.writer, session.state) = (writer, state);
    }
}

#[test]
fn a_journal_that_could_not_be_written_on_is_none_and_says_so() {
    let mut session = Session::new();
    for step in 0..2 {
        for store in session.writer.lost() {
            session.write(&store, 0..HEAD);
        }
        assert_eq!(read(&session.file, ENTRIES), Err(JournalError::Lost), "{step}");
        session = Session::new();
        let (store, _) = session.store(Change::default());
        session.write(&store, 0..store.bytes.len());
    }
    session.file[0] = 2;
    assert_eq!(read(&session.file, ENTRIES), Err(JournalError::Version { found: 2 }));
    let said = JournalError::Version { found: 2 }.to_string();
    assert_eq!(said, "layout version 2 instead of 1");
    // No snapshot is whole, and not for want of time.
    for half in [0, session.writer.half_size] {
        session.file[half..half + 4].copy_from_slice(&VERSION.to_le_bytes());
        session.file[half + HEAD] ^= 1;
    }
    assert_eq!(read(&session.file, ENTRIES), Err(JournalError::NoSnapshot));
}

#[test]
fn a_state_of_no_session_is_refused_and_the_longest_of_one_is_not() {
    let mut writer = Writer::new(file_size(ENTRIES));
    let entry = |size| Entry { bytes: vec![1; size], name: Some(u64::MAX) };
    let state = |sizes: Vec<usize>| {
        let entries = sizes.into_iter().enumerate().map(|(key, size)| (short(key), entry(size)));
        State { entries: entries.collect(), answering: Some(vec![3; ANSWERING_MAX]) }
    };
    assert!(writer.snapshot(state(vec![ENTRY_SIZE_MAX; ENTRIES])).is_err());
    let mut longest = vec![ENTRY_SIZE_MEAN; ENTRIES];
    longest[0] = ENTRY_SIZE_MAX;
    // Configuration: a write from each offset of 256 bytes to its end.
    longest.extend(1..ENTRIES);
    writer.snapshot(state(longest)).unwrap();
}

/// Spoils a journal, and gives it checksums that fit, as a compromised process does.
#[test]
fn a_spoiled_journal_is_read_as_another_one_or_refused_and_keeps_its_bounds() {
    let (mut random, mut refused, mut read_anyway) = (Random(4), 0, 0);
    for round in 0..1000 {
        let mut session = Session::new();
        for _ in 0..1 + random.below(12) {
            let (store, after) = session.store(random.change());
            session.write(&store, 0..store.bytes.len());
            session.state = after;
        }
        // Some bytes of the log, mostly of a count or of a size.
        let (half, used) = (session.writer.half * session.writer.half_size, session.writer.end);
        for _ in 0..1 + random.below(3) {
            let at = half + random.below(used);
            session.file[at] = match random.below(3) {
                0 => u8::MAX,
                1 => session.file[at] ^ (1 << random.below(8)),
                _ => random.below(256).to_le_bytes()[0],
            };
        }
        mend(&mut session.file[half..]);
        match read(&session.file, ENTRIES) {
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 80, "round {round}: {error}");
            }
            Ok((writer, state)) => {
                read_anyway += 1;
                assert!(state.entries.len() <= ENTRIES, "round {round}");
                assert!(writer.end <= writer.half_size, "round {round}");
                let sizes = state.entries.values().map(|entry| entry.bytes.len());
                assert!(sizes.max().unwrap_or(0) <= ENTRY_SIZE_MAX, "round {round}");
                let answering = state.answering.map_or(0, |known| known.len());
                assert!(answering <= ANSWERING_MAX, "round {round}");
            }
        }
    }
    assert!(refused > 100 && read_anyway > 100, "{refused} {read_anyway}");
}

/// Makes the checksums of a log fit its bytes, as far as its sizes lead.
fn mend(mut log: &mut [u8]) {
    while let Some(Head { size, sequence, .. }) = Head::of(log) {
        let Some(rest) = log.get(HEAD..size as usize) else { return };
        let checksum = checksum(size, sequence, rest);
        log[16..HEAD].copy_from_slice(&checksum.to_le_bytes());
        log = &mut log[size as usize..];
    }
}
