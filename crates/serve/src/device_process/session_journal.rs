//! `SupervisorJournal`: the journal of a session. It outlives this process, since the supervisor
//! holds its memory.
//!
//! The entries lie in a sealed memfd ([`manyring_protocol::journal_layout`]), which the supervisor
//! made and of which it reads no byte. Only descriptors are sent to the supervisor, each group of
//! them under a number, its *name*. The entry that belongs to the descriptors has the same name in
//! it. An update is made in this order:
//!
//! ```text
//! send      the descriptors of the update, under a new name
//! store     the update in the memfd, as one record with an entry of that name
//! send      the names that no entry has any more, so that the supervisor closes their descriptors
//! ```
//! If this process dies between any two of these steps, the journal has the state before the update
//! or the state after it:
//! 1. **Descriptors are sent before an entry names them.** A message in the channel outlives this
//!    process, so the supervisor has the descriptors for each name in the memfd. If this process
//!    dies before the store, the former state holds. The front-end's message is still in its
//!    socket: the next process reads it again, and sends the descriptors under another name.
//! 2. **A store is one record with a checksum and the next sequence number.** If this process dies
//!    in the middle of the store, readers ignore the record. All changes of an update, and whether
//!    the front-end was answered, are in one record, so there is no state between.
//! 3. **Descriptors are released after the store that removes their name.** If this process dies
//!    before that, the supervisor passes them on with the others, and the next process releases
//!    those without an entry.
//! 4. **A name is used once.** The next process begins above the highest name that it received: no
//!    entry of a former state has the name of descriptors that came after it.
//!
//! The descriptors of a vring are not released at once, but with the next message that sends
//! descriptors: they hold no memory, and so a front-end that starts its device causes half as many
//! messages.

use crate::bucket::Bucket;
use crate::channel::{Channel, NO_FDS};
use crate::supervisor_client::Outgoing;
use manyring_device::PendingResult;
use manyring_protocol::journal_layout::{self, Answered, Change, Entry, Store, Writer};
use manyring_protocol::message::{self, Report};
use manyring_transport::vhost_user::{
    self, AnswerState, JournalUpdate, SavedEntry, SavedSession, SessionJournal, is_of_vring,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Mutex, mpsc};

/// Most names in one message.
const RELEASES_MAX: usize = 256;

/// Writes the journal of a session, for the next process that serves it.
#[derive(Debug)]
pub(super) struct SupervisorJournal {
    pub(super) device: String,
    /// The number by which the supervisor knows the client.
    pub(super) number: u64,
    pub(super) channel: Arc<Channel>,
    /// Limits the rate of reports of all sessions of this process.
    pub(super) bucket: Arc<Bucket>,
    pub(super) outgoing: mpsc::Sender<Outgoing>,
    /// True once this device process quiesces.
    pub(super) quiesces: Arc<AtomicBool>,
    /// Locked, because the session and the control queue of its device both write.
    pub(super) written: Mutex<Written>,
}

/// The memfd of a session's journal, and the names of the descriptors that the supervisor keeps for
/// it.
#[derive(Debug)]
pub struct Written {
    /// The sealed memfd that holds the entries.
    pub file: OwnedFd,
    /// Makes the bytes of each record of the journal.
    pub writer: Writer,
    /// Most entries that a session of the device can have.
    entries_max: usize,
    /// The name in each entry of the memfd, by the entry's key.
    pub names: BTreeMap<u32, u64>,
    /// The highest name that was used.
    last: u64,
    /// Names that no entry has, and whose descriptors the supervisor still keeps.
    pub unused: Vec<u64>,
    /// True after a failed write of the memfd. The memfd is marked as lost, and no other process
    /// can resume the session.
    pub is_lost: bool,
}

/// A step of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sends the descriptors of the update under a name, and releases other names.
    Keep {
        /// The name of the update's descriptors.
        name: u64,
        /// The names whose descriptors the supervisor closes.
        release: Vec<u64>,
    },
    /// Stores the update in the memfd, as one record.
    Store(Change),
    /// Has the supervisor close the descriptors of these names.
    Release(Vec<u64>),
}

impl Written {
    /// Reads the journal of a session. `handed`: the descriptors that the supervisor kept, by name.
    /// Those that no entry names are left in `handed`.
    ///
    /// # Errors
    /// A text of one line: this is no journal of a session; `handed` is unchanged. The process that
    /// wrote it may have been compromised.
    pub fn resume(
        file: OwnedFd,
        entries_max: usize,
        handed: &mut BTreeMap<u64, Vec<OwnedFd>>,
    ) -> Result<(SavedSession, Self), String> {
        let bytes = content(&file).map_err(|errno| errno.to_string())?;
        let read = journal_layout::read(&bytes, entries_max);
        let (writer, state) = read.map_err(|error| error.to_string())?;
        let last = handed.last_key_value().map_or(0, |(name, _)| *name);
        let names = state.entries.iter().filter_map(|(key, entry)| Some((*key, entry.name?)));
        let names: BTreeMap<u32, u64> = names.collect();
        let known: BTreeSet<_> = names.values().filter(|name| handed.contains_key(name)).collect();
        if known.len() < names.len() {
            return Err("an entry names descriptors that are not there".to_owned());
        }
        let entry = |(key, Entry { bytes, name })| {
            let fds = name.and_then(|name| handed.remove(&name)).unwrap_or_default();
            SavedEntry { entry: vhost_user::Entry { key, bytes }, fds }
        };
        let entries = state.entries.into_iter().map(entry).collect();
        let unused = handed.keys().copied().collect();
        let written = Self { file, writer, entries_max, names, last, unused, is_lost: false };
        let saved = SavedSession { entries, answering: state.answering };
        Ok((saved, written))
    }

    /// Returns the steps of an update, in their order. `has_fds`: the first entry of the update has
    /// descriptors.
    pub fn steps(&mut self, update: JournalUpdate, has_fds: bool) -> Vec<Step> {
        let JournalUpdate { puts, drops, answer } = update;
        let mut steps = Vec::new();
        let mut name = has_fds.then(|| {
            self.last = self.last.saturating_add(1);
            self.last
        });
        let mut release = self.unused.clone();
        if let Some(name) = name {
            let rest = release.split_off(release.len().min(RELEASES_MAX));
            let release = std::mem::replace(&mut release, rest);
            steps.push(Step::Keep { name, release });
        }
        let former = drops.iter().chain(puts.iter().map(|entry| &entry.key));
        let former = former.filter_map(|key| self.names.get(key).map(|name| (*key, *name)));
        let former: Vec<_> = former.collect();
        let put =
            |entry: vhost_user::Entry| (entry.key, Entry { bytes: entry.bytes, name: name.take() });
        let puts = puts.into_iter().map(put).collect();
        let answer = match answer {
            AnswerState::Unchanged => Answered::Unchanged,
            AnswerState::UnderWay(message) => Answered::UnderWay(message),
            AnswerState::Sent => Answered::Sent,
        };
        steps.push(Step::Store(Change { drops, puts, answer }));
        if former.iter().any(|(key, _)| !is_of_vring(*key)) {
            release.extend(former.into_iter().map(|(_, name)| name));
            let parts = release.chunks(RELEASES_MAX).map(|part| Step::Release(part.to_vec()));
            steps.extend(parts);
        }
        steps
    }

    /// Records that a step was carried out.
    pub fn taken(&mut self, step: &Step) {
        match step {
            // No entry names the new descriptors until the store.
            Step::Keep { name, release } => {
                self.unused.retain(|unused| !release.contains(unused));
                self.unused.push(*name);
            }
            Step::Store(Change { drops, puts, .. }) => {
                for key in drops {
                    self.unused.extend(self.names.remove(key));
                }
                for (key, entry) in puts {
                    let former = match entry.name {
                        Some(name) => self.names.insert(*key, name),
                        None => self.names.remove(key),
                    };
                    self.unused.extend(former);
                    self.unused.retain(|unused| Some(*unused) != entry.name);
                }
            }
            Step::Release(release) => self.unused.retain(|unused| !release.contains(unused)),
        }
    }

    /// Returns the bytes that store a change, and their offset. If the record does not fit any
    /// more, they are a snapshot of the whole state.
    pub fn store(&mut self, change: &Change) -> Result<Store, String> {
        if let Some(store) = self.writer.append(change) {
            return Ok(store);
        }
        let bytes = content(&self.file).map_err(|errno| errno.to_string())?;
        let read = journal_layout::read(&bytes, self.entries_max);
        let (_, mut state) = read.map_err(|error| error.to_string())?;
        state.apply(change.clone());
        self.writer.snapshot(state).map_err(|error| error.to_string())
    }

    /// Stores a change. If that fails, marks the session in the memfd as lost: the state in it is
    /// outdated, and must not be resumed.
    pub fn write(&mut self, change: &Change) -> Result<(), String> {
        let store = self.store(change);
        let written =
            store.and_then(|store| write(&self.file, &store).map_err(|errno| errno.to_string()));
        if written.is_err() {
            self.is_lost = true;
            for lost in self.writer.lost() {
                let _ = write(&self.file, &lost);
            }
        }
        written
    }
}

/// Reads a session's memfd. Its sealed size tells where the two halves are: the device may have had
/// another number of queues when the session began, so the size cannot be computed.
fn content(file: impl AsFd) -> Result<Vec<u8>, Errno> {
    let size = rustix::fs::seek(&file, SeekFrom::End(0))?;
    let mut bytes = vec![0; usize::try_from(size).map_err(|_| Errno::FBIG)?];
    let mut read = 0;
    while read < bytes.len() {
        match rustix::io::pread(&file, &mut bytes[read..], read as u64)? {
            0 => return Err(Errno::NODATA),
            count => read += count,
        }
    }
    Ok(bytes)
}

/// Writes bytes into a session's memfd.
pub fn write(file: impl AsFd, Store { at, bytes }: &Store) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(&file, &bytes[done..], (at + done) as u64)? {
            0 => return Err(Errno::NOSPC),
            count => done += count,
        }
    }
    Ok(())
}

impl SupervisorJournal {
    async fn send(&self, keep: Option<u64>, release: Vec<u64>, fds: &[BorrowedFd<'_>]) {
        let (device, number) = (self.device.clone(), self.number);
        if let Ok(bytes) = message::emit(&Report::SessionFds { device, number, keep, release }) {
            self.bucket.pass(bytes.len()).await;
            // An error means that the supervisor is gone; then this process ends.
            let _ = match fds {
                [] => self.channel.send(&bytes, NO_FDS).await,
                fds => self.channel.send(&bytes, fds).await,
            };
        }
    }

    /// Carries out the steps of an update, in their order.
    async fn take(&self, update: JournalUpdate, fds: Vec<BorrowedFd<'_>>) {
        // Yield once, since a store never waits: else a front-end that sends without pause would
        // keep this thread for tens of messages in a row, while the messages of other sessions
        // wait.
        tokio::task::yield_now().await;
        let mut written = self.written.lock().await;
        if written.is_lost {
            return;
        }
        for step in written.steps(update, !fds.is_empty()) {
            match &step {
                Step::Keep { name, release } => {
                    self.send(Some(*name), release.clone(), &fds).await;
                }
                Step::Store(change) => {
                    if let Err(problem) = written.write(change) {
                        let device = &self.device;
                        tracing::warn!(
                            device,
                            problem,
                            "writing a session's journal failed; the front-end is disconnected \
                             if this process dies"
                        );
                        return;
                    }
                }
                Step::Release(release) => self.send(None, release.clone(), &[]).await,
            }
            written.taken(&step);
        }
    }

    /// Has the supervisor close the descriptors that no entry of the resumed session names.
    pub(super) async fn release_unused(&self) {
        let mut written = self.written.lock().await;
        for part in written.unused.clone().chunks(RELEASES_MAX) {
            self.send(None, part.to_vec(), &[]).await;
        }
        written.unused.clear();
    }
}

impl SessionJournal for SupervisorJournal {
    fn update<'a>(
        &'a self,
        update: JournalUpdate,
        fds: Vec<BorrowedFd<'a>>,
    ) -> PendingResult<'a, ()> {
        Box::pin(self.take(update, fds))
    }

    fn forget(&self) {
        let (device, number) = (self.device.clone(), self.number);
        let _ = self.outgoing.blocking_send(Outgoing::Gone { device, number });
    }

    fn quiesces(&self) -> bool {
        self.quiesces.load(Ordering::Relaxed)
    }
}
