//! A session whose process dies between any two steps of an update, and in each store: the next
//! process has the state before the update or after it, with the descriptors of that state.

use crate::processes::journal_store::JournalStore;
use manyring_engine::Surplus;
use manyring_protocol::journal_layout::{self, Change, Entry, Writer};
use manyring_protocol::message::Command;
use manyring_serve::device_process::session_journal::{Step, Written, write};
use manyring_serve::outgoing::by_name;
use manyring_transport::vhost_user::{self, AnswerState, JournalUpdate, SavedEntry, entries_max};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Entries, with the inodes of their descriptors.
type Entries = BTreeMap<u32, (Vec<u8>, Vec<u64>)>;

const QUEUES: usize = 2;
/// A key of a memory region, of the features, and of the kick and call of a ring.
const REGION: u32 = 7 << 16;
const FEATURES: u32 = 2 << 16;
const CALL: u32 = 15 << 16;
const KICK: u32 = 18 << 16;

/// A descriptor by which it is known again.
fn fd() -> (OwnedFd, u64) {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let inode = inode(&file);
    (file, inode)
}

fn inode(file: impl AsFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_ino
}

/// A supervisor with a front-end, and what a process has of it.
struct Session {
    store: Arc<JournalStore>,
    number: u64,
    written: Written,
    /// The entries as they should be, with the inodes of their descriptors.
    state: Entries,
}

/// An update, and the state after it.
struct Update {
    update: JournalUpdate,
    fds: Vec<OwnedFd>,
    after: Entries,
}

impl Session {
    fn new() -> Self {
        let store = JournalStore::new("d", QUEUES);
        let number = store.add(store.hold(fd().0), &Surplus::default()).unwrap();
        let (written, state) = Self::resumed(&store).unwrap();
        assert!(state.is_empty());
        Self { store, number, written, state }
    }

    /// The journal and its entries, as the next device process reads them from what it is handed.
    fn resumed(store: &JournalStore) -> Result<(Written, Entries), String> {
        let (mut handed, mut journal) = (BTreeMap::new(), None);
        for (command, fds) in store.handings() {
            let copy = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().unwrap();
            let mut fds: Vec<_> = fds.iter().map(|fd| copy(fd)).collect();
            match command {
                Command::SavedFds { named, .. } => handed.extend(by_name(named, fds)),
                Command::Client { .. } => journal = fds.pop(),
                other => panic!("{other:?}"),
            }
        }
        let journal = journal.unwrap();
        let (saved, written) = Written::resume(journal, entries_max(QUEUES), &mut handed)?;
        let entry = |SavedEntry { entry, fds }: SavedEntry| {
            (entry.key, (entry.bytes, fds.iter().map(inode).collect()))
        };
        Ok((written, saved.entries.into_iter().map(entry).collect()))
    }

    /// An update that puts and drops these entries; the first one that it puts has this number of
    /// descriptors.
    fn update(&self, keys: &[u32], drops: &[u32], count: usize, byte: u8) -> Update {
        let mut after = self.state.clone();
        let mut known: Vec<_> = (0..count).map(|_| fd()).collect();
        for key in drops {
            after.remove(key);
        }
        let mut inodes: Vec<_> = known.iter().map(|(_, inode)| *inode).collect();
        let mut puts = Vec::new();
        for key in keys {
            let bytes = vec![byte; usize::from(byte)];
            after.insert(*key, (bytes.clone(), std::mem::take(&mut inodes)));
            puts.push(vhost_user::Entry { key: *key, bytes });
        }
        let answer = match byte % 3 {
            0 => AnswerState::Unchanged,
            1 => AnswerState::UnderWay(vec![byte; 20]),
            _ => AnswerState::Sent,
        };
        let fds = known.drain(..).map(|(fd, _)| fd).collect();
        Update { update: JournalUpdate { puts, drops: drops.to_vec(), answer }, fds, after }
    }

    /// Takes a step, or a part of the store that it is.
    fn take(&mut self, step: &Step, fds: &[OwnedFd], cut: Option<usize>) {
        let copies = || fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let (surplus, number) = (Surplus::default(), self.number);
        match step {
            Step::Keep { name, release } => {
                self.store.keep(number, (Some(*name), release), copies(), &surplus).unwrap();
            }
            Step::Store(change) => {
                let mut store = self.written.store(change).unwrap();
                store.bytes.truncate(cut.unwrap_or(usize::MAX));
                write(&self.written.file, &store).unwrap();
            }
            Step::Release(release) => {
                self.store.keep(number, (None, release), Vec::new(), &surplus).unwrap();
            }
        }
        if cut.is_none() {
            self.written.taken(step);
        }
    }

    /// The process dies after this number of steps of the update; of a store that comes next, after
    /// half of it. The next one goes on.
    fn dies(&mut self, steps: &[Step], fds: &[OwnedFd], at: usize, is_cut: bool) {
        for step in &steps[..at] {
            self.take(step, fds, None);
        }
        if let Some(step @ Step::Store(change)) = steps.get(at).filter(|_| is_cut) {
            let size = writer_of(&self.written).append(change).map_or(40, |s| s.bytes.len());
            self.take(step, fds, Some(size / 2));
        }
        let (written, state) = Self::resumed(&self.store).unwrap();
        (self.written, self.state) = (written, state);
    }

    /// The inodes of the descriptors that the supervisor keeps.
    fn kept(&self) -> Vec<u64> {
        let handings = self.store.handings();
        let saved = handings.iter().filter(|(it, _)| matches!(it, Command::SavedFds { .. }));
        let mut kept: Vec<_> = saved.flat_map(|(_, fds)| fds.iter().map(inode)).collect();
        kept.sort_unstable();
        kept
    }

    /// The inodes of those that entries have.
    fn named(&self) -> Vec<u64> {
        let mut named: Vec<_> = self.state.values().flat_map(|(_, fds)| fds.clone()).collect();
        named.sort_unstable();
        named
    }
}

fn writer_of(written: &Written) -> Writer {
    written.writer.clone()
}

/// The updates of a session that begins, runs, gets memory and gives it back, and begins anew.
const UPDATES: [(&[u32], &[u32], usize); 12] = [
    (&[FEATURES], &[], 0),
    (&[REGION], &[], 1),
    (&[CALL], &[], 1),
    (&[KICK], &[], 1),
    (&[REGION + 1, FEATURES], &[], 2),
    (&[CALL], &[], 1),
    (&[CALL], &[], 0),
    (&[REGION], &[REGION + 1], 1),
    (&[FEATURES], &[KICK], 0),
    (&[KICK], &[], 1),
    (&[], &[REGION], 0),
    (&[], &[KICK, CALL, FEATURES], 0),
];

fn session_after(count: usize) -> Session {
    let mut session = Session::new();
    for (byte, (puts, drops, fds)) in UPDATES.iter().take(count).enumerate() {
        let Update { update, fds, after } =
            session.update(puts, drops, *fds, u8::try_from(byte).unwrap());
        for step in session.written.steps(update, !fds.is_empty()) {
            session.take(&step, &fds, None);
        }
        session.state = after;
    }
    session
}

#[test]
fn a_death_between_any_two_steps_leaves_the_state_before_the_update_or_after_it() {
    let (mut points, mut unnamed) = (0, 0);
    for (index, (puts, drops, count)) in UPDATES.iter().enumerate() {
        let mut at = 0;
        loop {
            let is_over = [false, true].map(|is_cut| {
                let mut session = session_after(index);
                let before = session.state.clone();
                let Update { update, fds, after } = session.update(puts, drops, *count, 99);
                let steps = session.written.steps(update.clone(), !fds.is_empty());
                session.dies(&steps, &fds, at, is_cut);
                let stored = steps.iter().position(|step| matches!(step, Step::Store(_))).unwrap();
                let expected = if at > stored { &after } else { &before };
                assert_eq!(&session.state, expected, "update {index}, {at} steps, {is_cut}");
                points += 1;
                unnamed += usize::from(session.kept() != session.named());
                // The message is still in its socket: the next process does it again.
                let again = session.written.steps(update, !fds.is_empty());
                session.dies(&again, &fds, again.len(), false);
                assert_eq!(session.state, after, "update {index}, {at} steps, again");
                at == steps.len()
            });
            if is_over[0] {
                break;
            }
            at += 1;
        }
    }
    assert!(points > 60 && unnamed > 10, "{points} {unnamed}");
}

#[test]
fn descriptors_without_an_entry_are_released_at_once_or_with_those_that_follow() {
    let mut unnamed = Vec::new();
    for count in 0..=UPDATES.len() {
        let session = session_after(count);
        let (kept, named) = (session.kept(), session.named());
        assert!(named.iter().all(|inode| kept.contains(inode)));
        unnamed.push(kept.len() - named.len());
    }
    // The call that was replaced goes with the region that follows, or stays until then; memory
    // goes at once.
    assert_eq!(unnamed, [0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 0, 0, 1]);
    // The next process releases all that nobody names.
    let mut session = session_after(7);
    let (written, _) = Session::resumed(&session.store).unwrap();
    session.take(&Step::Release(written.unused), &[], None);
    assert_eq!(session.kept(), session.named());
}

#[test]
fn a_journal_that_names_descriptors_which_are_not_there_is_refused() {
    let session = session_after(5);
    let name = session.written.names[&KICK];
    session.store.keep(session.number, (None, &[name]), Vec::new(), &Surplus::default()).unwrap();
    let problem = Session::resumed(&session.store).err().unwrap();
    assert_eq!(problem, "an entry names descriptors that are not there");
    // Two entries with the same name.
    let session = session_after(5);
    let mut written = session.written;
    let entry = Entry { bytes: Vec::new(), name: Some(written.names[&KICK]) };
    written.write(&Change { puts: vec![(CALL, entry)], ..Change::default() }).unwrap();
    assert!(Session::resumed(&session.store).is_err());
}

/// A takeover by a daemon in whose configuration the device has more queues, or fewer.
#[test]
fn a_device_with_other_queues_gets_the_last_state_and_not_the_one_of_the_other_half() {
    let mut session = session_after(5);
    let half_size = journal_layout::file_size(entries_max(QUEUES)) / 2;
    let mut halves = [0; 2];
    for round in 0..600_u32 {
        let entry = Entry { bytes: [&round.to_ne_bytes()[..], &[0; 60]].concat(), name: None };
        let puts = vec![(FEATURES, entry)];
        session.written.write(&Change { puts, ..Change::default() }).unwrap();
        if !round.is_multiple_of(10) {
            continue;
        }
        let next = writer_of(&session.written).append(&Change::default());
        halves[usize::from(next.is_none_or(|next| next.at >= half_size))] += 1;
        for queues in [1, QUEUES, 8, 256] {
            let handed = session.written.names.values().map(|name| (*name, vec![fd().0]));
            let file = session.written.file.try_clone().unwrap();
            let resumed = Written::resume(file, entries_max(queues), &mut handed.collect());
            let (saved, written) = resumed.unwrap();
            let features = saved.entries.iter().find(|saved| saved.entry.key == FEATURES);
            let bytes = &features.unwrap().entry.bytes;
            assert_eq!(bytes[..4], round.to_ne_bytes(), "{queues} queues");
            assert_eq!(written.writer, session.written.writer, "{queues} queues");
        }
    }
    assert!(halves.iter().all(|count| *count > 10), "{halves:?}");
}

#[test]
fn a_session_that_is_too_large_for_its_memfd_is_lost_and_never_an_earlier_one() {
    let mut session = session_after(5);
    let long = |key| (key, Entry { bytes: vec![1; journal_layout::ENTRY_SIZE_MAX], name: None });
    let puts = (0..200).map(long).collect();
    let problem = session.written.write(&Change { puts, ..Change::default() }).unwrap_err();
    assert!(problem.contains("the maximum is"), "{problem}");
    assert!(session.written.is_lost);
    let problem = Session::resumed(&session.store).err().unwrap();
    assert_eq!(problem, "its device process failed to write a later state");
}

/// What QEMU sends of a disk with eight queues: the updates of each message, as the session makes
/// them.
#[test]
fn a_session_of_eight_queues_begins_with_less_than_half_a_report_for_each_message() {
    const ENABLE: u32 = 17 << 16;
    let mut session = Session::new();
    let (mut messages, mut reports) = (0, 0);
    let mut sent = |session: &mut Session, key: Option<u32>, count: usize, has_answer: bool| {
        let mut updates = Vec::new();
        updates.extend(key.map(|key| session.update(&[key], &[], count, 20)));
        if has_answer {
            updates.push(session.update(&[], &[], 0, 1));
            updates.push(session.update(&[], &[], 0, 2));
        }
        messages += 1;
        for Update { update, fds, after } in updates {
            for step in session.written.steps(update, !fds.is_empty()) {
                reports += usize::from(!matches!(step, Step::Store(_)));
                session.take(&step, &fds, None);
            }
            session.state = after;
        }
    };
    // Features, protocol features, owner, configuration, queues.
    for key in [None, None, Some(0), None, Some(1 << 16), Some(FEATURES), None, None, None] {
        sent(&mut session, key, 0, key.is_none());
    }
    for ring in 0..8 {
        sent(&mut session, Some(CALL + ring), 1, false);
    }
    for region in 0..3 {
        sent(&mut session, Some(REGION + region), 1, true);
    }
    sent(&mut session, Some(9 << 16), 1, true);
    for ring in 0..8 {
        for key in [12 << 16, 13 << 16, 14 << 16, ENABLE] {
            sent(&mut session, Some(key + ring), 0, false);
        }
        sent(&mut session, Some(KICK + ring), 1, false);
        sent(&mut session, Some(CALL + ring), 1, false);
    }
    assert_eq!((messages, reports), (69, 28));
}
