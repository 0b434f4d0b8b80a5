//! `JournalWriter`: writes the journal of a session, from which another process can resume the
//! session (`saved_session.rs`); and how that process resumes it.

use super::{FrontError, ServedFrontEnd};
use crate::vhost_user::inflight::{self, InflightRegion, OwnRegion};
use crate::vhost_user::saved_session::{
    AnswerState, Entry, JournalUpdate, MEM_SLOTS_MAX, PLACES, SessionJournal,
};
use crate::vhost_user::session::Session;
use crate::vhost_user::socket::Message;
use manyring_device::{Device, PendingResult, StateJournal};
use manyring_engine::{FdReservation, Origin};
use manyring_wire::vhost_user::{
    FLAG_VERSION, Header, InflightArea, Region, Request, VringState, row_of,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The subject of an entry: the upper half of its key. The next process handles the entries in the
/// order in which the variants are declared here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
enum Place {
    Protocol,
    /// Before the features: a device without negotiated features forgets the front-end's MTU.
    Mtu,
    Features,
    /// The device's state.
    State,
    Status,
    /// A write to the configuration space. The lower half of the key is the offset.
    Config,
    MemTable,
    /// A memory region. The lower half of the key is the region's slot.
    MemRegion,
    Log,
    /// The front-end's in-flight region.
    Inflight,
    /// The in-flight region that the session has made.
    OwnInflight,
    Channel,
    // From here on, the lower half of the key is the index of a vring. The kick is last: with it
    // the ring starts.
    Size,
    Base,
    Addresses,
    Call,
    Err,
    Enable,
    Kick,
}

impl Place {
    const ALL: [Self; PLACES] = [
        Self::Protocol,
        Self::Mtu,
        Self::Features,
        Self::State,
        Self::Status,
        Self::Config,
        Self::MemTable,
        Self::MemRegion,
        Self::Log,
        Self::Inflight,
        Self::OwnInflight,
        Self::Channel,
        Self::Size,
        Self::Base,
        Self::Addresses,
        Self::Call,
        Self::Err,
        Self::Enable,
        Self::Kick,
    ];

    #[allow(clippy::cast_possible_truncation, reason = "16 bits of it")]
    fn key(self, index: usize) -> u32 {
        ((self as u32) << 16) | (index as u32 & 0xffff)
    }

    fn of(key: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(key >> 16).ok()?).copied()
    }

    /// True if `RESET_DEVICE` removes the entry.
    fn is_of_driver(self) -> bool {
        !matches!(self, Self::Protocol | Self::MemTable | Self::MemRegion | Self::Channel)
    }
}

/// True if an entry with this key belongs to a vring: its file descriptors are eventfds, and keep
/// no memory in use.
#[must_use]
pub fn is_of_vring(key: u32) -> bool {
    Place::of(key).is_some_and(|place| place >= Place::Size)
}

/// The journal of the session that runs in this process.
#[derive(Debug)]
pub(super) struct JournalWriter {
    journal: Arc<dyn SessionJournal>,
    /// The entries, without file descriptors.
    entries: BTreeMap<u32, Vec<u8>>,
}

impl JournalWriter {
    pub(super) fn new(journal: Arc<dyn SessionJournal>) -> Self {
        Self { journal, entries: BTreeMap::new() }
    }

    /// Records that no answer is under way any more.
    pub(super) async fn answered(&self) {
        let note = JournalUpdate { answer: AnswerState::Sent, ..JournalUpdate::default() };
        self.journal.update(note, Vec::new()).await;
    }

    async fn keep(&mut self, note: JournalUpdate, fds: Vec<BorrowedFd<'_>>) {
        for key in &note.drops {
            self.entries.remove(key);
        }
        let puts = note.puts.iter().map(|entry| (entry.key, entry.bytes.clone()));
        self.entries.extend(puts);
        self.journal.update(note, fds).await;
    }

    /// Returns the keys of the entries whose place satisfies `is_meant`.
    fn kept(&self, is_meant: impl Fn(Place) -> bool) -> Vec<u32> {
        let all = self.entries.keys().copied();
        all.filter(|key| Place::of(*key).is_some_and(&is_meant)).collect()
    }

    /// Returns the keys of the memory regions whose bytes satisfy `is_meant`.
    fn slots<'a>(
        &'a self,
        is_meant: impl Fn(&[u8]) -> bool + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        let slots = self.entries.range(Place::MemRegion.key(0)..Place::Log.key(0));
        slots.filter(move |(_, bytes)| is_meant(bytes)).map(|(key, _)| *key)
    }

    /// Returns the key under which a message is kept. `None`: the message sets nothing that a
    /// resumed session needs, or the session refuses the message.
    fn place(&self, request: &Request, bytes: &[u8], queues: usize) -> Option<u32> {
        let of_vring = |place: Place, index: usize| (index < queues).then(|| place.key(index));
        let of_state = |place, state: &VringState| of_vring(place, state.index as usize);
        match request {
            Request::SetProtocolFeatures(_) => Some(Place::Protocol.key(0)),
            Request::NetSetMtu(_) => Some(Place::Mtu.key(0)),
            Request::SetFeatures(_) => Some(Place::Features.key(0)),
            Request::SetStatus(_) => Some(Place::Status.key(0)),
            Request::SetConfig(access, _) => Some(Place::Config.key(access.offset as usize)),
            Request::SetMemTable(_) => Some(Place::MemTable.key(0)),
            // QEMU sends each region once for every queue pair: record it once only.
            Request::AddMemReg(_) if self.slots(|kept| kept == bytes).next().is_some() => None,
            Request::AddMemReg(_) => {
                let free = |slot: &usize| !self.entries.contains_key(&Place::MemRegion.key(*slot));
                (0..MEM_SLOTS_MAX).find(free).map(|slot| Place::MemRegion.key(slot))
            }
            Request::SetLogBase(_) => Some(Place::Log.key(0)),
            Request::SetInflightFd(_) => Some(Place::Inflight.key(0)),
            Request::SetBackendReqFd => Some(Place::Channel.key(0)),
            Request::SetVringNum(state) => of_state(Place::Size, state),
            Request::SetVringBase(state) => of_state(Place::Base, state),
            Request::SetVringAddr(addr) => of_vring(Place::Addresses, addr.index as usize),
            Request::SetVringCall { index, .. } => of_vring(Place::Call, *index),
            Request::SetVringErr { index, .. } => of_vring(Place::Err, *index),
            Request::SetVringEnable(state) => of_state(Place::Enable, state),
            Request::SetVringKick { index, .. } => of_vring(Place::Kick, *index),
            _ => None,
        }
    }

    /// Returns the changes of the journal that a message causes beside the entry of the message
    /// itself: entries that no longer hold, and states that have changed.
    fn consequences(
        &self,
        request: &Request,
        session: &Session,
        device: &dyn Device,
    ) -> JournalUpdate {
        let mut note = JournalUpdate::default();
        match request {
            Request::ResetDevice => note.drops = self.kept(Place::is_of_driver),
            Request::SetStatus(0) => note.drops = self.kept(|place| place == Place::Config),
            Request::SetInflightFd(_) => {
                note.drops = self.kept(|place| place == Place::OwnInflight);
            }
            Request::RemMemReg(region) => {
                note.drops = self.slots(|kept| is_place_of(kept, region)).collect();
            }
            Request::SetFeatures(_) | Request::CheckDeviceState => {
                note.puts.push(Entry { key: Place::State.key(0), bytes: device.save() });
            }
            _ => {}
        }
        if !session.has_log() {
            note.drops.extend(self.kept(|place| place == Place::Log));
        }
        // A ring that has stopped needs a new kick to start, and resumes at the base at which it
        // stopped.
        for key in self.kept(|place| place == Place::Kick) {
            let index = (key & 0xffff) as usize;
            let Some(vring) = session.vring(index).filter(|vring| !vring.has_kick()) else {
                continue;
            };
            note.drops.push(key);
            if !matches!(request, Request::ResetDevice) {
                let (index, num) = (key & 0xffff, vring.base().bits());
                let payload = VringState { index, num };
                let bytes = message(SET_VRING_BASE, payload.as_bytes());
                note.puts.push(Entry { key: Place::Base.key(index as usize), bytes });
            }
        }
        note
    }
}

const SET_VRING_BASE: u32 = 10;
const SET_INFLIGHT_FD: u32 = 32;

#[allow(clippy::cast_possible_truncation, reason = "a message of ours: some bytes")]
fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let size = payload.len() as u32;
    let header = Header { request, flags: FLAG_VERSION, size };
    [&header.emit()[..], payload].concat()
}

/// True if a kept `ADD_MEM_REG` is of the region that a `REM_MEM_REG` names.
fn is_place_of(kept: &[u8], region: &Region) -> bool {
    // Header, padding, and then the region: its address, size and user address.
    kept.get(20..44) == region.as_bytes().get(..24)
}

/// Returns the bytes of a message for the journal, without the flag that asks for an
/// acknowledgement: when the next process handles the message again, no second acknowledgement may
/// be sent.
fn kept_bytes(message: &Message) -> Vec<u8> {
    let Header { request, .. } = message.header;
    self::message(request, &message.payload)
}

/// Parses a message. `None`: its request is not served, or the message is malformed.
fn parsed(message: &Message) -> Option<Request> {
    let row = row_of(message.header.request).filter(|row| row.served)?;
    Request::parse(row, &message.payload, message.fds.len()).ok()
}

/// Records the device's state whenever the driver has changed it by the control queue.
#[derive(Debug)]
struct OfDevice(Arc<dyn SessionJournal>);

impl StateJournal for OfDevice {
    fn keep_state(&self, bytes: Vec<u8>) -> PendingResult<'_, ()> {
        let puts = vec![Entry { key: Place::State.key(0), bytes }];
        self.0.update(JournalUpdate { puts, ..JournalUpdate::default() }, Vec::new())
    }
}

/// The request of the message that is being handled: its consequences must be recorded afterwards.
/// `None`: there is nothing to record.
#[derive(Debug)]
pub(in crate::vhost_user) struct PendingNote(Option<Request>);

impl ServedFrontEnd {
    /// Records the session in `journal` from now on.
    pub(in crate::vhost_user) fn keep(&mut self, journal: Arc<dyn SessionJournal>) {
        self.device.keep_state_by(Some(Arc::new(OfDevice(journal.clone()))));
        self.journal_writer = Some(JournalWriter::new(journal));
    }

    /// Records that the answer to a message was sent, and the message consumed.
    pub(in crate::vhost_user) async fn journal_answered(&self) {
        if let Some(journal_writer) = &self.journal_writer {
            journal_writer.answered().await;
        }
    }

    /// Records the settings of a message, before the message is handled.
    pub(in crate::vhost_user) async fn journal_before(&mut self, message: &Message) -> PendingNote {
        let queues = self.device.queue_count();
        let Some(request) = self.journal_writer.as_ref().and_then(|_| parsed(message)) else {
            return PendingNote(None);
        };
        if let Request::SetVringKick { index, .. } = &request {
            self.prepare_region(*index).await;
        }
        if let Some(journal_writer) = &mut self.journal_writer {
            let bytes = kept_bytes(message);
            if let Some(key) = journal_writer.place(&request, &bytes, queues) {
                let drops = match &request {
                    Request::SetMemTable(_) => {
                        journal_writer.kept(|place| place == Place::MemRegion)
                    }
                    _ => Vec::new(),
                };
                let puts = vec![Entry { key, bytes }];
                let fds = message.fds.iter().map(AsFd::as_fd).collect();
                journal_writer
                    .keep(JournalUpdate { puts, drops, ..JournalUpdate::default() }, fds)
                    .await;
            }
        }
        PendingNote(Some(request))
    }

    /// Records the changes that a handled message has made, and that its answer is under way.
    pub(in crate::vhost_user) async fn journal_after(
        &mut self,
        pending: PendingNote,
        answer: AnswerState,
    ) {
        let (PendingNote(Some(request)), Some(journal_writer)) =
            (pending, &mut self.journal_writer)
        else {
            return;
        };
        let mut note = journal_writer.consequences(&request, &self.session, &*self.device);
        note.answer = answer;
        if note != JournalUpdate::default() {
            journal_writer.keep(note, Vec::new()).await;
        }
    }

    /// Prepares the in-flight record of a ring that is about to start and does not fit the
    /// front-end's region: makes a region of the session itself, or zeroes the ring's place there.
    #[allow(clippy::cast_possible_truncation, reason = "a device has some hundred queues")]
    async fn prepare_region(&mut self, index: usize) {
        let (device, is_packed) = (self.device.clone(), self.is_packed());
        let is_running = self.vrings.get(index).is_none_or(|vring| vring.running.is_some());
        if self.journal_writer.is_none() || is_running || self.fits_front_end(index) {
            return;
        }
        match &self.own_inflight {
            Some(own) if own.region.is_packed() == is_packed => {
                return inflight::forget(&own.file, own.area, index, is_packed);
            }
            // The region is for the other ring format, and running rings use it.
            Some(_) if self.session.has_running() => return,
            _ => {}
        }
        let queues = device.queue_count() as u16;
        let queue_size = device.queue_size_max();
        let area = InflightArea { queues, queue_size, ..InflightArea::default() };
        let Ok((area, file)) = inflight::make(area, is_packed) else { return };
        let file = Arc::new(file);
        if !self.use_own_region(area, file.clone()).await {
            return;
        }
        if let Some(journal_writer) = &mut self.journal_writer {
            let bytes = message(SET_INFLIGHT_FD, area.as_bytes());
            let puts = vec![Entry { key: Place::OwnInflight.key(0), bytes }];
            journal_writer
                .keep(JournalUpdate { puts, ..JournalUpdate::default() }, vec![file.as_fd()])
                .await;
        }
    }

    /// True if the front-end's region has a place for the ring. False for a ring whose size is not
    /// set yet: it may turn out to be too large.
    fn fits_front_end(&self, index: usize) -> bool {
        let size = self.session.vring(index).map_or(0, |vring| vring.size());
        let fits =
            |theirs: &InflightRegion| theirs.fitting(index, size, self.is_packed()).is_some();
        size != 0 && self.inflight.as_ref().is_some_and(fits)
    }

    /// Maps a region that a session of this device has made, for rings that start from now on.
    /// Returns false if mapping the region fails.
    async fn use_own_region(&mut self, area: InflightArea, file: Arc<OwnedFd>) -> bool {
        let (is_packed, theirs) = (self.is_packed(), file.clone());
        let map = move || InflightRegion::map(area, is_packed, theirs.as_fd());
        let Some(Ok(region)) = self.janitor.run(map).await else { return false };
        self.janitor.dispose(self.own_inflight.replace(OwnRegion { region, area, file }));
        true
    }

    /// Handles an entry that a former process has recorded in the session's journal.
    ///
    /// # Errors
    /// [`FrontError`]: an entry breaks a rule. The session must end.
    pub(in crate::vhost_user) async fn resume(
        &mut self,
        entry: Entry,
        fds: Vec<OwnedFd>,
        origin: &Arc<Origin>,
    ) -> Result<(), FrontError> {
        let Entry { key, bytes } = entry;
        let mut room = FdReservation::at_once().unwrap_or(FdReservation::none());
        match Place::of(key) {
            Some(Place::State) => {
                // The restore fails for a state with other features: it belongs to an earlier
                // driver of the same session, and is ignored.
                let _ = self.device.restore(&bytes).await;
            }
            Some(Place::OwnInflight) => {
                let mut files = fds.into_iter();
                let file = files.next();
                let asked = Message::of_bytes(&bytes, Vec::new());
                let row = row_of(SET_INFLIGHT_FD);
                let asked =
                    asked.zip(row).map(|(asked, row)| Request::parse(row, &asked.payload, 1));
                if let (Some(Ok(Request::SetInflightFd(area))), Some(file)) = (asked, file) {
                    self.use_own_region(area, Arc::new(file)).await;
                }
            }
            // The recorded base is from before the ring was served. Without an in-flight record,
            // nobody knows where to resume the ring.
            Some(Place::Kick) if !self.has_record((key & 0xffff) as usize) => {
                return Err(FrontError::NoRecord { index: key & 0xffff });
            }
            _ => {
                let fds = fds.into_iter().map(|fd| origin.adopt(fd, &mut room)).collect();
                let Some(message) = Message::of_bytes(&bytes, fds) else { return Ok(()) };
                self.handle(message).await?;
            }
        }
        if let Some(journal_writer) = &mut self.journal_writer {
            journal_writer.entries.insert(key, bytes);
        }
        Ok(())
    }

    /// Notifies the drivers of all running rings, since they may have missed notifications of the
    /// former process.
    pub(in crate::vhost_user) fn ring_all(&self) {
        for vring in self.vrings.iter().filter(|vring| vring.running.is_some()) {
            if let Some(call) = &vring.call {
                call.ring_aside();
            }
        }
    }
}
