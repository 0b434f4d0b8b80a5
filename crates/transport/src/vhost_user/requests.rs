//! Carries out the effects that the session decides on: maps memory; starts, stops and changes
//! queues.

mod journal_entries;
mod start;

use super::inflight::{self, InflightRegion, OwnRegion};
use super::session::{
    Answer, DeviceOffer, Effect, MemoryChange, OFFERED, Outcome, Session, SessionError, Unsent,
};
use super::socket::Message;
use super::transfer::Transfer;
use super::vring::VringHost;
use journal_entries::JournalWriter;
pub use journal_entries::is_of_vring;
use manyring_device::Device;
use manyring_engine::{Call, Channel, DoorbellError, Event, ForeignFd, Janitor, Kick};
use manyring_memory::{DirtyLog, GuestMemory, MemoryError, MemoryRules, RegionSpec};
use manyring_queue::{QueueError, RingAddresses, RingFeatures};
use manyring_wire::vhost_user::{
    BACKEND_CONFIG_CHANGE_MSG, ConfigAccess, FLAG_VERSION, Header, InflightArea, LogArea, Region,
    Reply, STATE_FAILED, STATE_NO_FD, VringState,
};
use rustix::fd::OwnedFd;
use start::Waiting;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Why a session must end, or ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum FrontError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{name} of vring {index}: {source}")]
    Doorbell { name: &'static str, index: usize, source: DoorbellError },
    #[error("back-end request channel: {0}")]
    Channel(DoorbellError),
    #[error("SET_LOG_BASE: {0}")]
    Log(MemoryError),
    #[error("SET_INFLIGHT_FD: {0}")]
    Inflight(MemoryError),
    #[error("vring {index} was in use before, and no in-flight region says where to resume")]
    NoRecord { index: u32 },
}

/// A message to the front-end, with its descriptor if it has one.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) bytes: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

/// One front-end: its session, its memory, its queues.
#[derive(Debug)]
pub(super) struct ServedFrontEnd {
    device: Arc<dyn Device>,
    session: Session,
    /// Which files the guest's memory may lie in, and how large it may be.
    rules: MemoryRules,
    memory: Arc<GuestMemory>,
    vrings: Vec<VringHost>,
    /// The front-end's region, in which rings that start and fit it record their chains in flight.
    inflight: Option<InflightRegion>,
    /// The region that the session itself has made, for rings that do not fit the front-end's.
    own_inflight: Option<OwnRegion>,
    /// True once the operator was told that a ring does not fit the front-end's region.
    is_unfit_told: bool,
    /// The vrings whose start has failed for a shortage of the host, and is retried.
    waiting: Waiting,
    /// A transfer of the device's state that the front-end has begun.
    transfer: Option<Transfer>,
    channel: Option<Channel>,
    events: mpsc::Sender<Event>,
    janitor: Arc<Janitor>,
    /// Writes the journal for the process that resumes the session; `None`: there is no journal.
    journal_writer: Option<JournalWriter>,
}

impl ServedFrontEnd {
    pub(super) fn new(
        device: Arc<dyn Device>,
        rules: MemoryRules,
        events: mpsc::Sender<Event>,
        janitor: Arc<Janitor>,
    ) -> Self {
        let offer = DeviceOffer {
            features: device.features(),
            protocol: OFFERED | device.protocol_features(),
            queue_count: device.queue_count(),
            queue_size_max: device.queue_size_max(),
        };
        let vrings = (0..offer.queue_count).map(|_| VringHost::default()).collect();
        Self {
            device,
            session: Session::new(offer),
            rules,
            memory: Arc::default(),
            vrings,
            inflight: None,
            own_inflight: None,
            is_unfit_told: false,
            waiting: Waiting::default(),
            transfer: None,
            channel: None,
            events,
            janitor,
            journal_writer: None,
        }
    }

    /// Returns the messages that the front-end has not sent, if no ring is served because of that.
    pub(super) fn unsent(&self) -> Option<Unsent> {
        self.session.unsent()
    }

    /// Handles one message to the end: carries out its effects, then returns its reply, if any.
    #[allow(clippy::cast_possible_truncation, reason = "a queue of the session: fewer than 2^16")]
    pub(super) async fn handle(&mut self, message: Message) -> Result<Option<Sent>, FrontError> {
        let Message { header, payload, fds, .. } = message;
        let Outcome { effects, answer } = self.session.handle(header, &payload, fds)?;
        let mut refused = false;
        for effect in effects {
            refused |= !self.apply(effect).await?;
        }
        let mut fd = None;
        let reply = match answer {
            Answer::None => return Ok(None),
            Answer::Reply(reply) => reply,
            Answer::Ack => Reply::U64(u64::from(refused)),
            Answer::Base(index) => Reply::VringState(VringState {
                index: index as u32,
                num: self.session.vring(index).map_or(0, |v| v.base().bits()),
            }),
            Answer::Config(access) => self.read_config(access),
            Answer::Inflight(area, size) => {
                let area = match inflight::make(area, self.is_packed()) {
                    Ok((area, file)) => {
                        fd = Some(file);
                        area
                    }
                    Err(error) => self.without_region(&error),
                };
                Reply::Inflight(area, size)
            }
            Answer::StateFd => Reply::U64(STATE_NO_FD | if refused { STATE_FAILED } else { 0 }),
            Answer::CheckState { is_suspended } => {
                let is_done = self.end_transfer(is_suspended).await;
                Reply::U64(if is_done { 0 } else { STATE_FAILED })
            }
        };
        Ok(Some(Sent { bytes: reply.message(header.request), fd }))
    }

    /// Drives a transfer of the device's state; never returns. The future may be dropped at any
    /// time.
    pub(super) async fn transfer_state(&mut self) {
        match &mut self.transfer {
            Some(transfer) => transfer.go_on().await,
            None => std::future::pending().await,
        }
    }

    /// Begins to save or load the device's state. Returns false if the descriptor cannot be used
    /// for that.
    async fn begin_transfer(&mut self, fd: ForeignFd, is_save: bool) -> bool {
        let save = is_save.then_some(&*self.device);
        let begun = Transfer::begin(self.janitor.clone(), fd, save).await;
        let device = self.device.name();
        self.transfer = begun.inspect_err(|error| _ = warn_of_state(device, error)).ok();
        self.transfer.is_some()
    }

    /// Ends a transfer of the device's state, because the front-end asks for its result. Returns
    /// true if the whole state was written to the front-end, or if the device has restored the
    /// state that the front-end sent. Restoring fails unless the device is suspended: no ring runs.
    async fn end_transfer(&mut self, is_suspended: bool) -> bool {
        let Some(transfer) = self.transfer.take() else { return false };
        let device = self.device.name();
        match transfer.end().await {
            Ok(None) => true,
            Ok(Some(state)) if is_suspended => match self.device.restore(&state).await {
                Ok(()) => {
                    tracing::info!(device, bytes = state.len(), "device state restored");
                    true
                }
                Err(error) => warn_of_state(device, &error),
            },
            Ok(Some(_)) => warn_of_state(device, &"a state was sent while a ring runs"),
            Err(error) => warn_of_state(device, &error),
        }
    }

    /// Returns the answer to a front-end for which no in-flight region can be created: an area of
    /// size 0. The front-end then passes no region, and the device is served without a record of
    /// its requests in flight.
    fn without_region(&self, error: &std::io::Error) -> InflightArea {
        let device = self.device.name();
        tracing::warn!(
            device,
            %error,
            "creating the in-flight region failed; requests are not recorded"
        );
        InflightArea::default()
    }

    fn read_config(&self, access: ConfigAccess) -> Reply {
        let mut bytes = vec![0; access.size as usize];
        self.device.read_config(access.offset, &mut bytes);
        Reply::Config(access, bytes)
    }

    /// Carries out one effect. Returns false if it is refused; the session continues.
    async fn apply(&mut self, effect: Effect<ForeignFd>) -> Result<bool, FrontError> {
        match effect {
            Effect::Features(bits) => self.device.set_features(bits).await,
            Effect::Memory(change) => self.change_memory(change).await?,
            Effect::Start(index) => return Ok(self.start(index).await),
            Effect::Stop(index) => {
                let device = self.device.name().to_owned();
                told_if_slow(&device, "a queue is still stopping", self.stop(index)).await;
            }
            Effect::FindBase(index) => self.find_base(index).await,
            Effect::Enable(index, enabled) => {
                if let Some(queue) = &self.vrings[index].running {
                    self.device.set_enabled(index, queue, enabled).await;
                }
            }
            Effect::Relocate(index, addresses) => {
                return Ok(self.set_memory(index, addresses).await);
            }
            Effect::Kick(index, fd) => self.set_kick(index, fd).await?,
            Effect::Call(index, fd) => {
                let call = doorbell("SET_VRING_CALL", index, fd).await?;
                let host = &mut self.vrings[index];
                host.call.clone_from(&call);
                if let Some(queue) = &host.running {
                    queue.set_call(call).await;
                }
            }
            Effect::Err(index, fd) => {
                let err = doorbell("SET_VRING_ERR", index, fd).await?;
                let host = &mut self.vrings[index];
                host.err.clone_from(&err);
                if let Some(queue) = &host.running {
                    queue.set_err(err).await;
                }
            }
            Effect::WriteConfig(access, bytes) => {
                if let Err(error) = self.device.write_config(access.offset, &bytes) {
                    tracing::warn!(device = self.device.name(), %error, "config write refused");
                    return Ok(false);
                }
            }
            Effect::BackendChannel(fd) => self.set_channel(fd).await?,
            Effect::SendRarp(mac) => return Ok(self.device.send_rarp(mac).await),
            Effect::SetMtu(mtu) => return Ok(self.device.set_front_end_mtu(mtu)),
            Effect::Inflight(given) => self.set_inflight(given).await?,
            Effect::Log(given) => self.set_log(given).await?,
            Effect::SaveState(fd) => return Ok(self.begin_transfer(fd, true).await),
            Effect::LoadState(fd) => return Ok(self.begin_transfer(fd, false).await),
            Effect::ResetConfig => self.device.reset_config(),
            Effect::Refuse(error) => {
                tracing::warn!(device = self.device.name(), %error, "request refused");
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn set_kick(&mut self, index: usize, fd: Option<ForeignFd>) -> Result<(), FrontError> {
        let name = "SET_VRING_KICK";
        let wrong = |source| FrontError::Doorbell { name, index, source };
        let kick = match fd {
            Some(fd) => Some(Kick::of_front_end(fd, index).await.map_err(wrong)?),
            None => None,
        };
        let host = &mut self.vrings[index];
        match &host.running {
            Some(queue) => queue.set_kick(kick).await,
            None => host.kick = kick,
        }
        Ok(())
    }

    async fn set_channel(&mut self, fd: ForeignFd) -> Result<(), FrontError> {
        let request = BACKEND_CONFIG_CHANGE_MSG;
        let message = Header { request, flags: FLAG_VERSION, size: 0 }.emit().to_vec();
        let channel = Channel::of_front_end(fd, message).await;
        self.channel = Some(channel.map_err(FrontError::Channel)?);
        Ok(())
    }

    /// Maps the in-flight region for rings that start from now on; no ring runs now.
    async fn set_inflight(
        &mut self,
        given: Option<(InflightArea, ForeignFd)>,
    ) -> Result<(), FrontError> {
        let mapped = match given {
            // On the janitor, since mapping a front-end's file may block.
            Some((area, fd)) => {
                let is_packed = self.is_packed();
                let mapped =
                    self.janitor.run(move || InflightRegion::map(area, is_packed, fd)).await;
                Some(mapped.unwrap_or(Err(MemoryError::NoThread)).map_err(FrontError::Inflight)?)
            }
            None => None,
        };
        // On the janitor too: dropping the last reference unmaps the region.
        self.janitor.dispose(std::mem::replace(&mut self.inflight, mapped));
        self.janitor.dispose(self.own_inflight.take());
        self.is_unfit_told = false;
        Ok(())
    }

    /// Maps the migration log, and makes every running queue mark its writes in it. Returns when no
    /// request is in flight that does not mark its writes, or marks them in the former log.
    async fn set_log(&mut self, given: Option<(LogArea, ForeignFd)>) -> Result<(), FrontError> {
        let memory = self.memory.clone();
        let map = move || {
            let map = |(area, fd): (LogArea, _)| DirtyLog::map(fd, area.offset, area.size);
            let log = given.map(map).transpose()?;
            memory.with_log(log.map(Arc::new)).map(Arc::new)
        };
        let memory = self.janitor.run(map).await.unwrap_or(Err(MemoryError::NoThread));
        let is_logged = self.use_memory(memory.map_err(FrontError::Log)?).await;
        tracing::debug!(device = self.device.name(), is_logged, "migration log");
        Ok(())
    }

    /// Makes a new snapshot of guest memory and gives it to every running queue. Returns when no
    /// queue uses the old snapshot.
    async fn change_memory(&mut self, change: MemoryChange<ForeignFd>) -> Result<(), FrontError> {
        let (rules, memory) = (self.rules, self.memory.clone());
        // On the janitor, so that a file system which hangs holds up this device only.
        let mapped = self.janitor.run(move || map(rules, &memory, change).map(Arc::new)).await;
        self.use_memory(mapped.unwrap_or(Err(MemoryError::NoThread))?).await;
        Ok(())
    }

    /// Makes every running queue use a snapshot of guest memory. Returns whether the snapshot has a
    /// log.
    async fn use_memory(&mut self, memory: Arc<GuestMemory>) -> bool {
        let former = std::mem::replace(&mut self.memory, memory);
        for index in 0..self.vrings.len() {
            let addresses = self.session.vring(index).and_then(|v| v.addresses());
            if let (Some(_), Some(addresses)) = (&self.vrings[index].running, addresses) {
                self.set_memory(index, addresses).await;
            }
        }
        // Dropping the last reference unmaps the memory and closes its files, which may block.
        self.janitor.dispose(former);
        self.memory.log().is_some()
    }

    /// Gives a running queue the present snapshot of memory and the addresses of its ring. Returns
    /// false if the ring is not in guest memory: the queue is then stopped.
    async fn set_memory(&mut self, index: usize, addresses: RingAddresses) -> bool {
        let Some(queue) = &self.vrings[index].running else { return true };
        let result = queue.set_memory(self.memory.clone(), addresses).await;
        let Err(error) = result else { return true };
        self.tell_queue_error(index, error);
        self.stop(index).await;
        false
    }

    fn tell_queue_error(&self, index: usize, error: QueueError) {
        tracing::warn!(device = self.device.name(), queue = index, %error, "queue stopped");
        if let Some(err) = &self.vrings[index].err {
            err.ring_aside();
        }
    }

    /// True if the driver has negotiated packed rings.
    fn is_packed(&self) -> bool {
        RingFeatures::from_bits(self.session.features()).packed
    }

    async fn stop(&mut self, index: usize) {
        if let Some(queue) = self.vrings[index].running.take()
            && let Ok(base) = self.device.stop(index, queue).await
        {
            let (device, bits) = (self.device.name(), base.bits());
            tracing::debug!(device, queue = index, base = bits, "queue stopped");
            self.session.stopped(index, base);
        }
    }

    /// Tells the front-end that the config space has changed (`CONFIG_CHANGE_MSG`), if it has given
    /// a back-end channel.
    pub(super) fn send_config_change(&self) {
        if let Some(channel) = &self.channel {
            channel.send();
        }
    }

    /// Stops every queue; returns when no queue uses memory of this guest any more.
    pub(super) async fn tear_down(mut self) {
        self.device.keep_state_by(None);
        for index in 0..self.vrings.len() {
            if let Some(queue) = &self.vrings[index].running {
                queue.leave_aside().await;
            }
            self.stop(index).await;
        }
        // Before `set_features`, which may wait for the host: if the daemon stops waiting, this
        // future is dropped on the control thread, which must not unmap memory.
        self.janitor.dispose(std::mem::take(&mut self.memory));
        self.janitor.dispose((self.inflight.take(), self.own_inflight.take()));
        self.device.set_features(0).await;
    }
}

/// Logs why a transfer of state failed. Returns false: the front-end reads this result.
fn warn_of_state(device: &str, error: &dyn std::fmt::Display) -> bool {
    tracing::warn!(device, %error, "transferring the device state failed");
    false
}

/// Makes the new snapshot of guest memory: maps the new regions. May block.
fn map(
    rules: MemoryRules,
    memory: &GuestMemory,
    change: MemoryChange<ForeignFd>,
) -> Result<GuestMemory, MemoryError> {
    match change {
        MemoryChange::Replace(regions) => {
            let regions = regions.into_iter().map(|(region, fd)| (spec(&region), fd));
            let none = GuestMemory::default().with_log(memory.log().cloned())?;
            none.with_regions_in(rules, regions)
        }
        MemoryChange::Add(region, fd) => memory.with_region_in(rules, spec(&region), fd),
        MemoryChange::Remove(region) => Ok(memory.without_region(&spec(&region))),
    }
}

async fn doorbell(
    name: &'static str,
    index: usize,
    fd: Option<ForeignFd>,
) -> Result<Option<Arc<Call>>, FrontError> {
    let Some(fd) = fd else { return Ok(None) };
    let wrong = |source| FrontError::Doorbell { name, index, source };
    Ok(Some(Arc::new(Call::of_front_end(fd).await.map_err(wrong)?)))
}

fn spec(region: &Region) -> RegionSpec {
    RegionSpec {
        guest_addr: region.guest_addr,
        size: region.size,
        user_addr: region.user_addr,
        mmap_offset: region.mmap_offset,
    }
}

/// Longest time in which queues stop before a warning is logged.
const STOP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);

/// Waits until queues have stopped. If that takes longer than [`STOP_TIMEOUT`], logs `what` is
/// awaited, and the threads that are blocked in calls of the host.
pub(super) async fn told_if_slow(device: &str, what: &str, stops: impl Future<Output = ()>) {
    tokio::pin!(stops);
    if tokio::time::timeout(STOP_TIMEOUT, &mut stops).await.is_err() {
        let by = |held: &manyring_engine::Held| format!("{} by {:?}", held.thread, held.device);
        let held = manyring_engine::held().iter().map(by).collect::<Vec<_>>().join(", ");
        tracing::info!(device, held, "{what}: waiting");
        stops.await;
    }
}
