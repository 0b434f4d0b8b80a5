//! `JournalStore`: the sockets and journals of a device's front-ends, by which they outlive the
//! device process that serves them.
//!
//! The supervisor keeps a copy of each connected socket, the sealed memfd in which the device
//! process writes the journal of its session (`session_journal.rs`), and the descriptors that the
//! journal names. It reads no byte of the memfd, and only hands the descriptors on. A front-end
//! chose these descriptors, and a close may block, so a janitor thread closes them. When the
//! device process dies, the next one of the domain gets the socket, the journal and the
//! descriptors.

use super::handoff::{AdoptedSession, DeviceHandoff, HandoffMessage};
use manyring_engine::{FdReservation as FdRoom, ForeignFd, Janitor, Origin, Reserve, Surplus};
use manyring_protocol::journal_layout;
use manyring_protocol::message::{Command, FDS_MAX, NamedFds};
use manyring_serve::counts::sealed;
use manyring_serve::outgoing::MessageFd;
use manyring_serve::times::PROCESS_BRIEF;
use manyring_transport::vhost_user::{ENTRY_FDS_MAX, entries_max};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tokio::time::Instant;

/// The most sessions of a device whose descriptors are stored at a time: one begins while earlier
/// ones still end.
const SESSIONS_MAX: usize = 4;
/// Most front-ends of a device, each with a journal: one is served, some wait in the device
/// process, and some have left while their end is not reported yet. A further front-end is not
/// handed over until one of these is gone.
const CLIENTS_MAX: usize = 8;
/// How many device processes in a row may die, each within [`PROCESS_BRIEF`](PROCESS_BRIEF) after
/// it got a front-end, before that front-end is disconnected.
const BRIEF_LIVES_MAX: u32 = 8;

/// Descriptors that are reserved for a session, beside three for each queue: its socket, its
/// journal, those of three memory regions and of two in-flight regions, and one that is replaced.
/// A guest with more regions, a guest that migrates, and a VMM with a back-end channel take more,
/// from the surplus of the domain.
const SESSION_FDS: usize = 8;

/// The number of the next front-end, of any device.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The front-ends of one device, with their sockets and journals.
#[derive(Debug)]
pub(super) struct JournalStore {
    device: String,
    queues: usize,
    origin: Arc<Origin>,
    /// Reserves the descriptors that a session of the device needs.
    reserve: Reserve,
    kept: Mutex<Kept>,
    /// The number of front-ends in this store, as a channel that others can wait on.
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Kept {
    clients: BTreeMap<u64, Client>,
    /// Number of descriptors that the journals of all clients name.
    fds: usize,
}

impl Kept {
    fn remove(&mut self, number: u64) {
        // Dropping the client passes its descriptors to the janitor, which closes them.
        if let Some(client) = self.clients.remove(&number) {
            self.fds -= client.fds();
        }
    }
}

#[derive(Debug)]
struct Client {
    socket: Arc<ForeignFd>,
    journal: Arc<ForeignFd>,
    /// The descriptors of the client's journal, by the names that its entries have.
    named: BTreeMap<u64, Vec<Arc<ForeignFd>>>,
    /// True if the budget had no room for descriptors of the journal: the session cannot be resumed
    /// if the device process dies.
    is_lost: bool,
    /// How many device processes in a row died soon after they got this front-end.
    brief_lives: u32,
    handed_at: Instant,
}

impl Client {
    fn fds(&self) -> usize {
        self.named.values().map(Vec::len).sum()
    }
}

/// The messages that hand front-ends to a device process, with the file descriptors of each
/// message.
pub(super) type Handing = Vec<(Command, Vec<MessageFd>)>;

impl JournalStore {
    pub(super) fn new(device: &str, queues: usize) -> Arc<Self> {
        let origin = Origin::new(Arc::new(Janitor::of(device)));
        let (kept, count) = (Mutex::default(), watch::Sender::new(0));
        // A disk of a Xen guest has no queues here, and no session.
        let reserve = Reserve::of(if queues > 0 { SESSION_FDS + 3 * queues } else { 0 });
        Arc::new(Self { device: device.to_owned(), queues, origin, reserve, kept, count })
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wraps a descriptor so that the device's janitor closes it, and counts it in `room`.
    fn adopt(&self, fd: OwnedFd, room: &mut FdRoom) -> Arc<ForeignFd> {
        Arc::new(self.origin.adopt(fd, room))
    }

    /// Returns the number of the device's queues.
    pub(super) fn queues(&self) -> usize {
        self.queues
    }

    /// Takes the socket of a client that has connected. The janitor will close the socket: the
    /// kernel then also closes the descriptors in unread messages, which may block.
    pub(super) fn hold(&self, socket: OwnedFd) -> Arc<ForeignFd> {
        // The domain of the front-end is not known yet, so no domain's surplus is used.
        self.hold_for(socket, &Surplus::default())
    }

    fn hold_for(&self, socket: OwnedFd, surplus: &Surplus) -> Arc<ForeignFd> {
        let room = self.reserve.room(1, surplus);
        self.adopt(socket, &mut room.unwrap_or(FdRoom::none()))
    }

    /// Stores the socket of a front-end with a new journal, and returns the number of the
    /// front-end. `surplus`: the surplus of descriptors of the front-end's domain.
    ///
    /// # Errors
    /// Creating the memfd of the journal failed.
    pub(super) fn add(&self, socket: Arc<ForeignFd>, surplus: &Surplus) -> Result<u64, Errno> {
        let journal = sealed("journal", journal_layout::file_size(entries_max(self.queues)))?;
        Ok(self.add_with(socket, journal, surplus))
    }

    fn add_with(&self, socket: Arc<ForeignFd>, journal: OwnedFd, surplus: &Surplus) -> u64 {
        // No number is used twice: a device process may still send reports about a front-end of a
        // removed device, and the new device may have the same name.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let client = Client {
            socket,
            journal: self.hold_for(journal, surplus),
            named: BTreeMap::new(),
            is_lost: false,
            brief_lives: 0,
            handed_at: Instant::now(),
        };
        let mut kept = self.lock();
        kept.clients.insert(number, client);
        self.count.send_replace(kept.clients.len());
        number
    }

    /// Drops a front-end whose session is over or which the device process refused.
    pub(super) fn forget(&self, number: u64) {
        let mut kept = self.lock();
        kept.remove(number);
        self.count.send_replace(kept.clients.len());
    }

    /// Drops all front-ends. Their connections end when the device process has closed its copies of
    /// the sockets, too.
    pub(super) fn forget_all(&self) {
        let mut kept = self.lock();
        *kept = Kept::default();
        self.count.send_replace(0);
    }

    /// Drops the front-ends for whose journals a device process sent a descriptor of this file;
    /// returns true if there are any. Files are compared by their links in /proc/self/fd, so this
    /// waits for no file system.
    pub(super) fn forget_journals(&self, file: BorrowedFd<'_>) -> bool {
        let Some(name) = name_of(file) else { return false };
        let fds_of =
            |client: &Client| -> Vec<_> { client.named.values().flatten().cloned().collect() };
        let numbered = |(number, client): (&u64, &Client)| (*number, fds_of(client));
        let all: Vec<_> = self.lock().clients.iter().map(numbered).collect();
        let is_kept = |fd: &Arc<ForeignFd>| name_of(fd.as_fd()).as_ref() == Some(&name);
        let journals = all.iter().filter(|(_, fds)| fds.iter().any(is_kept));
        journals.map(|(number, _)| self.forget(*number)).count() > 0
    }

    /// True if the device has a front-end.
    pub(super) fn is_used(&self) -> bool {
        *self.count.borrow() > 0
    }

    /// Returns when the device has no front-end any more.
    pub(super) async fn unused(&self) {
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Returns when the device has fewer front-ends than [`CLIENTS_MAX`].
    pub(super) async fn has_place(&self) {
        let _ = self.count.subscribe().wait_for(|count| *count < CLIENTS_MAX).await;
    }

    /// Returns the number of the device's reserved descriptors that are free.
    #[cfg(test)]
    pub(super) fn part(&self) -> usize {
        self.reserve.free()
    }

    #[cfg(test)]
    pub(super) fn janitor(&self) -> &Arc<Janitor> {
        self.origin.janitor()
    }

    /// Returns when few enough file descriptors of the device wait to be closed.
    pub(super) async fn closes(&self) {
        self.origin.janitor().room().await;
    }

    /// Stores descriptors of a session under `name`, and closes those under the names in `release`.
    /// `surplus`: the surplus of descriptors of the device process's domain.
    ///
    /// # Errors
    /// One line: the report breaks a rule that every device process keeps, so this one is
    /// compromised.
    pub(super) fn keep(
        &self,
        number: u64,
        (name, release): (Option<u64>, &[u64]),
        fds: Vec<OwnedFd>,
        surplus: &Surplus,
    ) -> Result<(), String> {
        // A copy of a socket of AF_XDP would keep a queue of an interface busy.
        let has_xdp = fds.iter().any(|fd| socket_domain(fd) == Ok(AddressFamily::XDP));
        let room = self.reserve.room(fds.len(), surplus).filter(|_| !has_xdp);
        let has_room = room.is_some();
        let mut room = room.unwrap_or(FdRoom::none());
        // Adopt the descriptors before any check: the janitor must close even those of a report
        // that is refused.
        let fds: Vec<_> = fds.into_iter().map(|fd| self.adopt(fd, &mut room)).collect();
        if fds.len() > ENTRY_FDS_MAX || fds.is_empty() == name.is_some() {
            return Err(format!("{} descriptors of a session named {name:?}", fds.len()));
        }
        let mut kept = self.lock();
        let most = entries_max(self.queues);
        let Kept { clients, fds: held } = &mut *kept;
        // Reports about a front-end that was dropped may still arrive.
        let Some(client) = clients.get_mut(&number) else { return Ok(()) };
        for name in release {
            *held -= client.named.remove(name).map_or(0, |fds| fds.len());
        }
        let Some(name) = name else { return Ok(()) };
        if !has_room {
            if !std::mem::replace(&mut client.is_lost, true) {
                let few = "too few open files are allowed (ulimit -n) to keep all that a \
                           front-end has sent; it is disconnected if its device process dies";
                let xdp = "a socket of AF_XDP in a session is not kept; the front-end is \
                           disconnected if its device process dies";
                let problem = if has_xdp { xdp } else { few };
                tracing::warn!(device = self.device, kept = *held, "{problem}");
            }
            // Store none of these descriptors: without room in the budget, nothing would bound
            // their number.
            return Ok(());
        }
        if *held > SESSIONS_MAX * most {
            return Err(format!("a device with {held} descriptors of sessions"));
        }
        if client.named.contains_key(&name) {
            return Err(format!("descriptors under the name {name}, which is in use"));
        }
        *held += fds.len();
        client.named.insert(name, fds);
        match client.named.len() {
            count if count > most => Err(format!("{count} names of descriptors of a session")),
            _ => Ok(()),
        }
    }

    /// Makes the messages that hand front-end `number`, which has just connected, to a device
    /// process.
    pub(super) fn handing(&self, number: u64) -> Handing {
        let mut kept = self.lock();
        kept.clients.get_mut(&number).map(|client| self.command(number, client)).unwrap_or_default()
    }

    /// Called when the device process of the front-ends has died. Drops the front-ends whose
    /// sessions the next device process cannot resume.
    pub(super) fn orphan(&self) {
        let mut kept = self.lock();
        let Kept { clients, fds } = &mut *kept;
        clients.retain(|_, client| {
            let is_brief = client.handed_at.elapsed() < PROCESS_BRIEF;
            client.brief_lives = if is_brief { client.brief_lives + 1 } else { 0 };
            let problem = match () {
                () if client.is_lost => "too few open files are allowed (ulimit -n) to keep it",
                () if client.brief_lives >= BRIEF_LIVES_MAX => {
                    "its last 8 device processes died soon after their start"
                }
                () => return true,
            };
            tracing::warn!(device = self.device, "front-end disconnected: {problem}");
            *fds -= client.fds();
            false
        });
        self.count.send_replace(kept.clients.len());
    }

    /// Makes the messages that hand all front-ends to the next device process.
    pub(super) fn handings(&self) -> Handing {
        let mut kept = self.lock();
        let clients = kept.clients.iter_mut();
        clients.flat_map(|(number, client)| self.command(*number, client)).collect()
    }

    /// Stores a front-end that another supervisor handed over. `surplus`: the surplus of
    /// descriptors of its domain.
    pub(super) fn inherit(&self, adopted_session: AdoptedSession, surplus: &Surplus) {
        let AdoptedSession { socket, journal, named, .. } = adopted_session;
        let socket = self.hold_for(socket, surplus);
        let number = match journal {
            Some(journal) => Ok(self.add_with(socket, journal, surplus)),
            None => self.add(socket, surplus),
        };
        let number = match number {
            Ok(number) => number,
            Err(errno) => return self.unresumed(&errno.to_string()),
        };
        for (name, fds) in named {
            if let Err(problem) = self.keep(number, (Some(name), &[]), fds, surplus) {
                self.unresumed(&problem);
                return self.forget(number);
            }
        }
    }

    fn unresumed(&self, problem: &str) {
        tracing::warn!(device = self.device, problem, "resuming a front-end failed");
    }

    /// Makes the messages that hand all front-ends to another supervisor. `domain`: the domain of
    /// all of them.
    pub(super) fn share(&self, domain: &str) -> DeviceHandoff {
        let left = |(command, fds)| match command {
            Command::SavedFds { device, named } => {
                Some((HandoffMessage::SavedFds { device, named }, fds))
            }
            Command::Client { device, .. } => {
                Some((HandoffMessage::Client { device, domain: domain.to_owned() }, fds))
            }
            _ => None,
        };
        self.handings().into_iter().filter_map(left).collect()
    }

    fn command(&self, number: u64, client: &mut Client) -> Handing {
        client.handed_at = Instant::now();
        let mut handing = Handing::new();
        let mut of_message = (Vec::new(), Vec::new());
        for (name, fds) in &client.named {
            let (named, message_fds) = &mut of_message;
            named.push(NamedFds { name: *name, count: fds.len() });
            message_fds.extend(fds.iter().cloned().map(MessageFd::Foreign));
            if message_fds.len() + ENTRY_FDS_MAX > FDS_MAX {
                handing.push(self.saved(std::mem::take(&mut of_message)));
            }
        }
        if !of_message.0.is_empty() {
            handing.push(self.saved(of_message));
        }
        let fds = [&client.socket, &client.journal].map(|fd| MessageFd::Foreign(fd.clone()));
        handing.push((Command::Client { device: self.device.clone(), number }, fds.into()));
        handing
    }

    fn saved(&self, (named, fds): (Vec<NamedFds>, Vec<MessageFd>)) -> (Command, Vec<MessageFd>) {
        (Command::SavedFds { device: self.device.clone(), named }, fds)
    }
}

/// Returns the link of a descriptor in /proc/self/fd: the path of its file.
fn name_of(fd: BorrowedFd<'_>) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

#[cfg(test)]
mod tests;
