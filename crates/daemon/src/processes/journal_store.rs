//! `JournalStore`: the sockets and journals of a device's front-ends, by which they outlive the
//! device process that serves them.
//!
//! The supervisor keeps a copy of each connected socket, and the journal of its session as the
//! device process sent it: bytes that the supervisor does not parse, and descriptors that it only
//! hands on. A front-end chose those descriptors, so a janitor thread of the device closes them.
//! When the device process dies, the next one gets the socket with the journal.

use super::handoff::{AdoptedSession, DeviceHandoff, HandoffMessage};
use super::outgoing::MessageFd;
use crate::times::PROCESS_BRIEF;
use manyring_engine::{FdReservation as FdRoom, ForeignFd, Janitor, Origin, Reserve, Surplus};
use manyring_protocol::message::{Command, JournalEntry};
use manyring_transport::vhost_user::{ENTRY_FDS_MAX, entries_max};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tokio::time::Instant;

/// Most journals of a device: a session begins while sessions before it still end.
const SESSIONS_MAX: usize = 4;
/// Longest entry: the state of a network device with full tables.
const ENTRY_SIZE_MAX: usize = 7168;
/// Bytes of a session's entries, for each that it may have: nearly all are short messages.
const ENTRY_SIZE_MEAN: usize = 128;
/// Bytes beside them: the state of a network device, and the longest writes to the configuration.
const LONG_SIZE_MAX: usize = 64 << 10;
/// Longest prefix of a message by which it is recognised.
const ANSWERING_MAX: usize = 256;
/// Most front-ends of a device: one is served, some wait in the device process, and some have left
/// while their end is not reported yet. Another one waits.
const CLIENTS_MAX: usize = 64;
/// How many device processes in a row may die, each within [`PROCESS_BRIEF`](PROCESS_BRIEF), before
/// their front-end is released.
const BRIEF_LIVES_MAX: u32 = 8;

/// Descriptors that are set apart for a session, beside three for each queue: its socket, those of
/// three memory regions, and two in-flight regions. A guest with more regions, one that migrates
/// and a VMM that listens to its back-end need some of the rest.
const SESSION_FDS: usize = 6;

/// The number of the next front-end, of any device.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// The front-ends of one device.
#[derive(Debug)]
pub(super) struct JournalStore {
    device: String,
    queues: usize,
    origin: Arc<Origin>,
    /// The descriptors that a session of the device needs are set apart.
    reserve: Reserve,
    kept: Mutex<Kept>,
    /// How many front-ends there are.
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Kept {
    clients: BTreeMap<u64, Client>,
    /// Of the entries of all clients. Reports come by the thousand, so nobody counts again.
    sums: Sums,
}

/// What some entries come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    entries: usize,
    fds: usize,
    bytes: usize,
}

impl Sums {
    fn add(&mut self, entry: &Entry) {
        self.entries += 1;
        self.fds += entry.fds.len();
        self.bytes += entry.bytes.len();
    }

    fn take(&mut self, entry: &Entry) {
        self.entries -= 1;
        self.fds -= entry.fds.len();
        self.bytes -= entry.bytes.len();
    }
}

#[derive(Debug)]
struct Client {
    socket: Arc<ForeignFd>,
    entries: BTreeMap<u32, Entry>,
    answering: Option<Vec<u8>>,
    /// The budget had no room for its descriptors: the front-end cannot outlive its device process.
    is_lost: bool,
    /// How many device processes in a row died soon after they got this front-end.
    brief_lives: u32,
    handed_at: Instant,
}

#[derive(Debug)]
struct Entry {
    bytes: Vec<u8>,
    fds: Vec<Arc<ForeignFd>>,
}

/// An update of a journal, as a device process reported it.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) puts: Vec<JournalEntry>,
    pub(super) drops: Vec<u32>,
    pub(super) answer: manyring_protocol::message::Answered,
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

    fn adopt(&self, fd: OwnedFd, room: &mut FdRoom) -> Arc<ForeignFd> {
        Arc::new(self.origin.adopt(fd, room))
    }

    /// The queues of the device.
    pub(super) fn queues(&self) -> usize {
        self.queues
    }

    /// Takes the socket of a front-end that has connected. The janitor closes the socket, since the
    /// kernel closes unread messages' descriptors with it.
    pub(super) fn hold(&self, socket: OwnedFd) -> Arc<ForeignFd> {
        // Nobody has asked whose the front-end is.
        self.hold_for(socket, &Surplus::default())
    }

    fn hold_for(&self, socket: OwnedFd, surplus: &Surplus) -> Arc<ForeignFd> {
        let room = self.reserve.room(1, surplus);
        self.adopt(socket, &mut room.unwrap_or(FdRoom::none()))
    }

    /// Keeps the socket of a front-end, and gives it a number.
    pub(super) fn add(&self, socket: Arc<ForeignFd>) -> u64 {
        // A number is used once: a device process may still report a front-end of a removed device
        // with the same name.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.lock();
        let client = Client {
            socket,
            entries: BTreeMap::new(),
            answering: None,
            is_lost: false,
            brief_lives: 0,
            handed_at: Instant::now(),
        };
        kept.clients.insert(number, client);
        self.count.send_replace(kept.clients.len());
        number
    }

    /// Forgets a front-end: its session is over, or it was refused.
    pub(super) fn forget(&self, number: u64) {
        let mut kept = self.lock();
        let Kept { clients, sums } = &mut *kept;
        // The janitor closes its descriptors.
        if let Some(client) = clients.remove(&number) {
            client.entries.values().for_each(|entry| sums.take(entry));
        }
        self.count.send_replace(kept.clients.len());
    }

    /// Releases all front-ends: their connections end when the device process has ended, too.
    pub(super) fn forget_all(&self) {
        let mut kept = self.lock();
        *kept = Kept::default();
        self.count.send_replace(0);
    }

    /// Releases the front-ends in whose journals a device process put a descriptor of this file;
    /// true if there are any. Only the kernel is asked for the names of the files, so this waits
    /// for no file system.
    pub(super) fn forget_journals(&self, file: BorrowedFd<'_>) -> bool {
        let Some(name) = name_of(file) else { return false };
        let fds_of = |client: &Client| -> Vec<_> {
            client.entries.values().flat_map(|entry| entry.fds.iter().cloned()).collect()
        };
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

    /// Returns when the device has no front-end.
    pub(super) async fn unused(&self) {
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Returns when the device may have another front-end.
    pub(super) async fn has_place(&self) {
        let _ = self.count.subscribe().wait_for(|count| *count < CLIENTS_MAX).await;
    }

    /// The descriptors that are set apart and free.
    #[cfg(test)]
    pub(super) fn part(&self) -> usize {
        self.reserve.free()
    }

    #[cfg(test)]
    pub(super) fn janitor(&self) -> &Arc<Janitor> {
        self.origin.janitor()
    }

    /// Returns when few enough of its file descriptors wait to be closed.
    pub(super) async fn closes(&self) {
        self.origin.janitor().room().await;
    }

    /// Stores an update of a journal. `surplus`: of the domain of the device process.
    ///
    /// # Errors
    /// One line: no device process of this version sends that.
    pub(super) fn note(
        &self,
        number: u64,
        change: Change,
        fds: Vec<OwnedFd>,
        surplus: &Surplus,
    ) -> Result<(), String> {
        use manyring_protocol::message::Answered;
        let room = self.reserve.room(fds.len(), surplus);
        let has_room = room.is_some();
        let mut room = room.unwrap_or(FdRoom::none());
        let mut fds: Vec<_> = fds.into_iter().map(|fd| self.adopt(fd, &mut room)).collect();
        if fds.len() > ENTRY_FDS_MAX {
            return Err(format!("a report with {} file descriptors", fds.len()));
        }
        let mut kept = self.lock();
        let most = entries_max(self.queues);
        let Kept { clients, sums } = &mut *kept;
        let Sums { entries: count, fds: held, bytes: size } = *sums;
        // Updates of a front-end that was released may still arrive.
        let Some(client) = clients.get_mut(&number) else { return Ok(()) };
        if !has_room {
            if !std::mem::replace(&mut client.is_lost, true) {
                let problem = "too few open files are allowed (ulimit -n) to keep all that a \
                               front-end has sent; it is disconnected if its device process dies";
                tracing::warn!(device = self.device, kept = held, "{problem}");
            }
            // Without this, the number of front-ends would have no bound.
            fds.clear();
        }
        let size_max = most * ENTRY_SIZE_MEAN + LONG_SIZE_MAX;
        if count.max(held) > SESSIONS_MAX * most || size > SESSIONS_MAX * size_max {
            let all =
                format!("{count} journal entries of {size} bytes and {held} file descriptors");
            return Err(format!("a device with {all}"));
        }
        for key in change.drops {
            if let Some(entry) = client.entries.remove(&key) {
                sums.take(&entry);
            }
        }
        for JournalEntry { key, bytes } in change.puts {
            if bytes.len() > ENTRY_SIZE_MAX {
                return Err(format!("a journal entry of {} bytes", bytes.len()));
            }
            let entry = Entry { bytes, fds: std::mem::take(&mut fds) };
            sums.add(&entry);
            if let Some(former) = client.entries.insert(key, entry) {
                sums.take(&former);
            }
        }
        if client.entries.len() > most {
            return Err(format!("{} journal entries of a session", client.entries.len()));
        }
        match change.answer {
            Answered::Unchanged => {}
            Answered::UnderWay(message) if message.len() > ANSWERING_MAX => {
                return Err(format!("an answer to {} bytes", message.len()));
            }
            Answered::UnderWay(message) => client.answering = Some(message),
            Answered::Sent => client.answering = None,
        }
        Ok(())
    }

    /// The messages that hand front-end `number`, which has just connected, to a device process.
    pub(super) fn handing(&self, number: u64) -> Handing {
        let mut kept = self.lock();
        kept.clients.get_mut(&number).map(|client| self.command(number, client)).unwrap_or_default()
    }

    /// The device process of the front-ends has died. Front-ends with which no device process can
    /// go on are released.
    pub(super) fn orphan(&self) {
        let mut kept = self.lock();
        let Kept { clients, sums } = &mut *kept;
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
            client.entries.values().for_each(|entry| sums.take(entry));
            false
        });
        self.count.send_replace(kept.clients.len());
    }

    /// The messages that hand all front-ends to the next device process.
    pub(super) fn handings(&self) -> Handing {
        let mut kept = self.lock();
        let clients = kept.clients.iter_mut();
        clients.flat_map(|(number, client)| self.command(*number, client)).collect()
    }

    /// Keeps a front-end that another supervisor handed over. `surplus`: of its domain.
    pub(super) fn inherit(&self, adopted_session: AdoptedSession, surplus: &Surplus) {
        let AdoptedSession { socket, entries, answering, .. } = adopted_session;
        let number = self.add(self.hold_for(socket, surplus));
        for (entry, fds) in entries {
            let change = Change { puts: vec![entry], ..Change::default() };
            if let Err(problem) = self.note(number, change, fds, surplus) {
                tracing::warn!(device = self.device, problem, "resuming a front-end failed");
                return self.forget(number);
            }
        }
        if let Some(client) = self.lock().clients.get_mut(&number) {
            client.answering = answering;
        }
    }

    /// The messages that hand all front-ends, which belong to `domain`, to another supervisor.
    pub(super) fn share(&self, domain: &str) -> DeviceHandoff {
        let mut kept = self.lock();
        let all: Vec<_> = kept
            .clients
            .iter_mut()
            .flat_map(|(n, client)| {
                let answering = client.answering.clone();
                let command = self.command(*n, client);
                client.answering = answering;
                command
            })
            .collect();
        let left = |(command, fds)| match command {
            Command::SavedEntry { device, entry } => {
                Some((HandoffMessage::Kept { device, entry }, fds))
            }
            Command::Client { device, answering, .. } => {
                Some((HandoffMessage::Client { device, domain: domain.to_owned(), answering }, fds))
            }
            _ => None,
        };
        all.into_iter().filter_map(left).collect()
    }

    fn command(&self, number: u64, client: &mut Client) -> Handing {
        client.handed_at = Instant::now();
        let mut command = Vec::new();
        for (key, Entry { bytes, fds }) in &client.entries {
            let (device, written) =
                (self.device.clone(), JournalEntry { key: *key, bytes: bytes.clone() });
            let message_fds = fds.iter().cloned().map(MessageFd::Foreign).collect();
            command.push((Command::SavedEntry { device, entry: written }, message_fds));
        }
        let (device, answering) = (self.device.clone(), client.answering.take());
        let socket = MessageFd::Foreign(client.socket.clone());
        // Whether it has credit is decided when it is sent.
        let has_credit = false;
        command.push((Command::Client { device, number, answering, has_credit }, vec![socket]));
        command
    }
}

/// The name by which the kernel shows the file of a descriptor.
fn name_of(fd: BorrowedFd<'_>) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use manyring_protocol::message::Answered;

    fn journals() -> Arc<JournalStore> {
        JournalStore::new("d", 2)
    }

    fn note(
        journals: &JournalStore,
        number: u64,
        change: Change,
        fds: Vec<OwnedFd>,
    ) -> Result<(), String> {
        journals.note(number, change, fds, &Surplus::default())
    }

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn change(keys: &[u32], drops: &[u32]) -> Change {
        let puts = keys.iter().map(|key| JournalEntry { key: *key, bytes: vec![7] }).collect();
        Change { puts, drops: drops.to_vec(), answer: Answered::Unchanged }
    }

    #[test]
    fn the_next_device_process_is_told_what_was_noted_in_order_and_then_the_socket() {
        let journals = journals();
        let number = journals.add(journals.hold(fd()));
        note(&journals, number, change(&[9], &[]), vec![fd(), fd()]).unwrap();
        note(&journals, number, change(&[4, 5], &[]), vec![fd()]).unwrap();
        note(&journals, number, change(&[], &[5]), Vec::new()).unwrap();
        let command = journals.handings();
        let said: Vec<_> = command
            .iter()
            .map(|(command, fds)| match command {
                Command::SavedEntry { entry, .. } => (entry.key, fds.len()),
                Command::Client { number: command, .. } if *command == number => (0, fds.len()),
                other => unreachable!("{other:?}"),
            })
            .collect();
        assert_eq!(said, [(4, 1), (9, 2), (0, 1)]);
        journals.forget(number);
        assert!(journals.handings().is_empty() && !journals.is_used());
    }

    #[test]
    fn a_number_is_given_once_also_when_a_device_is_put_together_again() {
        let before = journals();
        let number = before.add(before.hold(fd()));
        let again = journals();
        again.add(again.hold(fd()));
        // The report is about a removed device of the same name.
        again.forget(number);
        assert!(again.is_used());
    }

    #[test]
    fn entries_that_are_all_long_are_refused_before_there_are_as_many_as_may_be_short() {
        let journals = journals();
        let number = journals.add(journals.hold(fd()));
        let long = |key| JournalEntry { key, bytes: vec![0; ENTRY_SIZE_MAX] };
        let is_taken = |key: &u32| {
            let change = Change { puts: vec![long(*key)], ..Change::default() };
            note(&journals, number, change, Vec::new()).is_ok()
        };
        let (taken, most) = ((0..).take_while(is_taken).count(), entries_max(2));
        let size = SESSIONS_MAX * (most * ENTRY_SIZE_MEAN + LONG_SIZE_MAX);
        assert!(taken < most && taken * ENTRY_SIZE_MAX <= size + 2 * ENTRY_SIZE_MAX, "{taken}");
        // A session with as many short entries, and a state of full length, is kept.
        let journals = JournalStore::new("d", 2);
        let number = journals.add(journals.hold(fd()));
        let short = |key| JournalEntry { key, bytes: vec![0; ENTRY_SIZE_MEAN] };
        let most = u32::try_from(most).unwrap();
        for key in 0..most {
            let entry = if key == 0 { long(key) } else { short(key) };
            let change = Change { puts: vec![entry], ..Change::default() };
            note(&journals, number, change, Vec::new()).unwrap();
        }
    }

    #[test]
    fn a_device_process_that_notes_without_end_is_refused() {
        let journals = journals();
        let number = journals.add(journals.hold(fd()));
        let many: Vec<_> = (0..3000).collect();
        assert!(note(&journals, number, change(&many, &[]), Vec::new()).is_err());
        let number = journals.add(journals.hold(fd()));
        let long = Change {
            puts: vec![JournalEntry { key: 1, bytes: vec![0; ENTRY_SIZE_MAX + 1] }],
            drops: Vec::new(),
            answer: Answered::Unchanged,
        };
        assert!(note(&journals, number, long, Vec::new()).is_err());
        let fds = (0..=ENTRY_FDS_MAX).map(|_| fd()).collect();
        assert!(note(&journals, number, change(&[1], &[]), fds).is_err());
        let known = Answered::UnderWay(vec![0; ANSWERING_MAX + 1]);
        let known = Change { answer: known, ..Change::default() };
        assert!(note(&journals, number, known, Vec::new()).is_err());
    }

    /// The sums of a walk over all entries.
    fn walked(journals: &JournalStore) -> Sums {
        let (kept, mut sums) = (journals.lock(), Sums::default());
        let entries = kept.clients.values().flat_map(|client| client.entries.values());
        entries.for_each(|entry| sums.add(entry));
        sums
    }

    #[test]
    fn sums_are_those_of_a_walk_over_all_entries_after_any_update() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _entered = runtime.enter();
        let mut seed = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = |n: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            u32::try_from(seed % n).unwrap()
        };
        let (journals, mut most) = (journals(), Sums::default());
        let (mut numbers, mut refused) = (Vec::new(), 0);
        for step in 0..20_000 {
            while numbers.len() < 3 {
                numbers.push(journals.add(journals.hold(fd())));
            }
            let index = next(3) as usize;
            match next(300) {
                0 => journals.forget(numbers.swap_remove(index)),
                // Those that are lost go, and others after 8 times.
                1 => journals.orphan(),
                2 if next(8) == 0 => journals.forget_all(),
                3 => {
                    let mut kept = journals.lock();
                    kept.clients.values_mut().take(1).for_each(|client| client.is_lost = true);
                }
                _ => {
                    let mut keys = || (0..next(3)).map(|_| next(64)).collect::<Vec<_>>();
                    let (puts, drops) = (keys(), keys());
                    let size = if next(50) == 0 { ENTRY_SIZE_MAX + 1 } else { next(300) as usize };
                    let put = |key| JournalEntry { key, bytes: vec![0; size] };
                    let puts = puts.into_iter().map(put).collect();
                    let change = Change { puts, drops, answer: Answered::Unchanged };
                    let fds = (0..next(3)).map(|_| fd()).collect();
                    refused += u32::from(note(&journals, numbers[index], change, fds).is_err());
                }
            }
            numbers.retain(|number| journals.lock().clients.contains_key(number));
            let sums = journals.lock().sums;
            assert_eq!(sums, walked(&journals), "step {step}");
            most = if sums.entries > most.entries { sums } else { most };
        }
        assert!(most.entries > 100 && most.fds > 10 && refused > 10, "{most:?} {refused}");
    }

    #[test]
    fn what_a_device_keeps_is_bounded_over_all_its_front_ends() {
        let journals = journals();
        let most = u32::try_from(entries_max(journals.queues)).unwrap();
        let keys: Vec<_> = (0..most).collect();
        let noted = (0..=SESSIONS_MAX + 1).map(|_| {
            let number = journals.add(journals.hold(fd()));
            note(&journals, number, change(&keys, &[]), Vec::new())
        });
        assert_eq!(noted.filter(Result::is_ok).count(), SESSIONS_MAX + 1);
        // The next front-end waits while there are too many.
        while *journals.count.borrow() < CLIENTS_MAX {
            journals.add(journals.hold(fd()));
        }
        let first = *journals.lock().clients.keys().next().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let place = journals.has_place();
            tokio::pin!(place);
            let ready = std::future::poll_fn(|context| {
                std::task::Poll::Ready(place.as_mut().poll(context).is_ready())
            });
            assert!(!ready.await);
            journals.forget(first);
            place.await;
        });
    }

    #[test]
    fn a_front_end_whose_device_processes_die_at_once_is_let_go_of() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let journals = journals();
            journals.add(journals.hold(fd()));
            for _ in 1..BRIEF_LIVES_MAX {
                journals.orphan();
                assert_eq!(journals.handings().len(), 1);
            }
            journals.orphan();
            assert!(journals.handings().is_empty() && !journals.is_used());
        });
    }
}
