//! `SupervisorJournal`: the journal of a session, which outlives this process in memory of the
//! supervisor.
//!
//! The entries lie in a sealed memfd ([`manyring_protocol::journal_layout`]): the supervisor has
//! made it and reads no byte of it. Only descriptors are sent to the supervisor, each group under a
//! name. An entry of the journal has the name of its descriptors. An update is made in this order:
//!
//! ```text
//! send      the descriptors of the update, under a new name
//! store     the update, as one record, in which an entry has that name
//! send      the names that no entry has any more, so that the supervisor closes the descriptors
//! ```
//! A death between any two of these steps leaves the state before the update or the one after it:
//! 1. **Descriptors are sent before they are named.** What is in the channel outlives this process,
//!    so each name in the memfd is one that the supervisor knows. If this process dies before the
//!    store, the former state holds. The front-end's message is still in its socket: the next
//!    process reads it again, and sends the descriptors under another name.
//! 2. **A store is one record with a checksum and the next sequence number.** If this process dies
//!    in the middle of it, the record does not count. What an update puts, drops and says of the
//!    answer is in one record, so there is no state between.
//! 3. **Descriptors are released after the store that drops their name.** If this process dies
//!    before that, the supervisor hands them on with the others, and the next process releases
//!    those without an entry.
//! 4. **A name is used once.** The next process begins behind the highest name that it was handed:
//!    no entry of a former state has the name of descriptors that came after it.
//!
//! The descriptors of a vring are released together with the next descriptors that are sent: they
//! keep no memory, and a front-end that starts its device then causes half as many reports.

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

/// Most names in one report.
const RELEASES_MAX: usize = 256;

/// Writes the journal of a session for the process after this one.
#[derive(Debug)]
pub(super) struct SupervisorJournal {
    pub(super) device: String,
    /// The number by which the supervisor knows the client.
    pub(super) number: u64,
    pub(super) channel: Arc<Channel>,
    /// Limits the rate of reports of all sessions of this process.
    pub(super) bucket: Arc<Bucket>,
    pub(super) outgoing: mpsc::Sender<Outgoing>,
    /// Set when this device process quiesces.
    pub(super) quiesces: Arc<AtomicBool>,
    /// Locked, because the session and the control queue of its device both write.
    pub(super) written: Mutex<Written>,
}

/// The memfd of a session, and the descriptors that the supervisor keeps for it.
#[derive(Debug)]
pub struct Written {
    /// The memfd.
    pub file: OwnedFd,
    /// Makes the bytes of each store.
    pub writer: Writer,
    /// Most entries of a session of the device.
    entries_max: usize,
    /// The names in the memfd, by the keys of their entries.
    pub names: BTreeMap<u32, u64>,
    /// The last name that was used.
    last: u64,
    /// Names of descriptors that no entry has.
    pub unused: Vec<u64>,
    /// Writing the memfd failed: the memfd says so, and the session ends with this process.
    pub is_lost: bool,
}

/// A step of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sends the descriptors of the update, and releases others.
    Keep {
        /// The name of the descriptors of the update.
        name: u64,
        /// The names of the descriptors that are released.
        release: Vec<u64>,
    },
    /// Stores the update in the memfd.
    Store(Change),
    /// Releases descriptors.
    Release(Vec<u64>),
}

impl Written {
    /// Reads the memfd of a session. `handed`: the descriptors that the supervisor kept, by name.
    /// Descriptors that no entry names stay in `handed`.
    ///
    /// # Errors
    /// One line: this is the journal of no session, and `handed` is as it was. The process that
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

    /// The steps of an update, in their order. `has_fds`: the first entry that it puts has
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

    /// Notes that a step was taken.
    pub fn taken(&mut self, step: &Step) {
        match step {
            // No entry has them yet.
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

    /// The bytes by which a change is stored.
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

    /// Stores a change. If that fails, marks the session as lost in the memfd: the former state is
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

/// The bytes of a session's memfd. The supervisor has sealed the size of the memfd, which says
/// where its halves are: the device may have had another number of queues when the session began.
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
            // If the supervisor is gone, this process ends.
            let _ = match fds {
                [] => self.channel.send(&bytes, NO_FDS).await,
                fds => self.channel.send(&bytes, fds).await,
            };
        }
    }

    /// Takes the steps of an update.
    async fn take(&self, update: JournalUpdate, fds: Vec<BorrowedFd<'_>>) {
        // A store never waits. Without this yield a front-end that sends without end would keep
        // the thread for tens of messages in a row, while the messages of other sessions wait.
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

    /// Releases the descriptors that no entry of the resumed session names.
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
