//! The negotiation as a pure state machine: (state, message) -> (state, reply, effects).
//!
//! It does no I/O, and knows neither a clock nor file descriptors: these are values of any type
//! `F`, which are passed on in the effects. Each order of messages that a real front-end sends is a
//! named test.

mod inflight;
mod log;
mod outcome;
mod position;
mod state;
mod unsent;

pub use outcome::{Answer, Effect, MemoryChange, Outcome, SessionError};
pub use unsent::Unsent;

use log::LogState;
use manyring_queue::{Base, RingAddresses, RingFeatures};
use manyring_wire::vhost_user::{
    ConfigAccess, F_LOG_ALL, F_PROTOCOL_FEATURES, Header, MEM_SLOTS, PROTOCOL_F_BACKEND_REQ,
    PROTOCOL_F_CONFIG, PROTOCOL_F_CONFIGURE_MEM_SLOTS, PROTOCOL_F_DEVICE_STATE,
    PROTOCOL_F_LOG_SHMFD, PROTOCOL_F_MQ, PROTOCOL_F_REPLY_ACK, PROTOCOL_F_RESET_DEVICE,
    PROTOCOL_F_STATUS, ParseError, Region, Reply, Request, Row, VringAddr, VringState, row_of,
};

/// The protocol features that every device offers.
pub const OFFERED: u64 = PROTOCOL_F_MQ
    | PROTOCOL_F_LOG_SHMFD
    | PROTOCOL_F_REPLY_ACK
    | PROTOCOL_F_BACKEND_REQ
    | PROTOCOL_F_CONFIG
    | PROTOCOL_F_DEVICE_STATE
    | PROTOCOL_F_RESET_DEVICE
    | PROTOCOL_F_CONFIGURE_MEM_SLOTS
    | PROTOCOL_F_STATUS;

/// Feature bits that only transport and front-end use: devices and drivers do not see them.
const OF_TRANSPORT: u64 = F_PROTOCOL_FEATURES | F_LOG_ALL;

/// The features and queues of a device, as its side of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOffer {
    /// The virtio features that are offered.
    pub features: u64,
    /// The protocol features that are offered.
    pub protocol: u64,
    /// How many virtqueues the device has.
    pub queue_count: usize,
    /// The most entries of a virtqueue.
    pub queue_size_max: u16,
}

/// Whether the front-end has set a vring's kick: an eventfd, or that the device must poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum KickState {
    #[default]
    Unset,
    Set,
}

/// A vring under construction, or running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vring {
    size: Option<u16>,
    base: Base,
    addresses: Option<RingAddresses>,
    /// The last `SET_VRING_ENABLE`; `None` if there was none: then the features decide.
    enabled: Option<bool>,
    kick: KickState,
    running: bool,
    /// True if starting the vring has failed: it is retried only after a message changes the vring.
    refused: bool,
    /// True if the front-end has sent a message for the ring, and has not stopped the ring since.
    is_begun: bool,
}

impl Vring {
    /// Returns the number of entries; 0 if the front-end has not set it.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size.unwrap_or(0)
    }

    /// Returns the base: the index at which the ring is resumed.
    #[must_use]
    pub fn base(&self) -> Base {
        self.base
    }

    /// Returns the addresses of the ring; `None` if the front-end has not set them.
    #[must_use]
    pub fn addresses(&self) -> Option<RingAddresses> {
        self.addresses
    }

    /// True if the vring has a kick; without one, it does not start.
    #[must_use]
    pub fn has_kick(&self) -> bool {
        self.kick == KickState::Set
    }

    /// True if the vring has its size, addresses and kick.
    fn is_complete(&self) -> bool {
        self.size.is_some() && self.addresses.is_some() && self.has_kick()
    }
}

/// The state of a front-end's session: its features, memory regions and vrings.
#[derive(Debug)]
pub struct Session {
    offer: DeviceOffer,
    features: Option<u64>,
    protocol: u64,
    vrings: Vec<Vring>,
    /// The memory regions of the front-end. The transport maps them.
    regions: Vec<Region>,
    status: u64,
    log: LogState,
}

impl Session {
    /// Makes a session that has received no message yet.
    #[must_use]
    pub fn new(offer: DeviceOffer) -> Self {
        let vrings = vec![Vring::default(); offer.queue_count];
        let log = LogState::default();
        Self { offer, features: None, protocol: 0, vrings, regions: Vec::new(), status: 0, log }
    }

    /// Returns the negotiated virtio features, without the bit of the migration log.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features.unwrap_or(0) & !F_LOG_ALL
    }

    /// Returns the vring of this index; `None` if the device has no such vring.
    #[must_use]
    pub fn vring(&self, index: usize) -> Option<&Vring> {
        self.vrings.get(index)
    }

    /// True if the vring is enabled: by `SET_VRING_ENABLE`, or from the start if
    /// `VHOST_USER_F_PROTOCOL_FEATURES` was not negotiated (vhost-user, "Ring states").
    #[must_use]
    pub fn is_enabled(&self, index: usize) -> bool {
        let unsaid = self.features() & F_PROTOCOL_FEATURES == 0;
        self.vrings.get(index).is_some_and(|v| v.enabled.unwrap_or(unsaid))
    }

    /// Called when the transport could not start the vring.
    pub fn refuse(&mut self, index: usize) {
        if let Some(vring) = self.vrings.get_mut(index) {
            vring.running = false;
            vring.refused = true;
        }
    }

    /// Retries the start of vrings that the transport could not start, if they are still complete
    /// and do not run.
    pub fn retry<F>(&mut self, indexes: &[usize]) -> Vec<Effect<F>> {
        for index in indexes {
            if let Some(vring) = self.vrings.get_mut(*index) {
                vring.refused = false;
            }
        }
        let mut effects = Vec::new();
        self.start_ready(&mut effects);
        effects
    }

    /// Handles one message with its file descriptors.
    ///
    /// # Errors
    /// [`SessionError`]: the front-end broke a rule, and the session must end.
    pub fn handle<F>(
        &mut self,
        header: Header,
        payload: &[u8],
        fds: Vec<F>,
    ) -> Result<Outcome<F>, SessionError> {
        let row = row_of(header.request).ok_or(ParseError::Unknown { request: header.request });
        let row = match row {
            Ok(row) if self.serves(row) => row,
            Ok(row) => {
                let error = ParseError::NotServed { name: row.name };
                return self.refuse_request(header, row.replies, error);
            }
            Err(error) => return self.refuse_request(header, false, error),
        };
        let mut outcome = match Request::parse(row, payload, fds.len()) {
            Err(error @ ParseError::Config { .. }) => refuse_config(row, error),
            request => self.obey(row.name, request?, fds)?,
        };
        if outcome.answer == Answer::None && self.wants_ack(header) {
            outcome.answer = Answer::Ack;
        }
        self.start_ready(&mut outcome.effects);
        Ok(outcome)
    }

    fn serves(&self, row: &Row) -> bool {
        row.served && (row.needs == 0 || row.needs & self.offer.protocol != 0)
    }

    fn wants_ack(&self, header: Header) -> bool {
        header.needs_reply() && self.protocol & PROTOCOL_F_REPLY_ACK != 0
    }

    /// Refuses a request that this back-end does not serve. A front-end that asks for an
    /// acknowledgement (`REPLY_ACK`) gets a failure, and the session continues. If the front-end
    /// does not ask for one, the session must end, because the front-end would believe that the
    /// request succeeded. The same if the request has a reply of its own, for which the front-end
    /// would wait for ever.
    fn refuse_request<F>(
        &self,
        header: Header,
        has_own_answer: bool,
        error: ParseError,
    ) -> Result<Outcome<F>, SessionError> {
        if has_own_answer || !self.wants_ack(header) {
            return Err(error.into());
        }
        Ok(Outcome { effects: vec![Effect::Refuse(error)], answer: Answer::Ack })
    }

    fn obey<F>(
        &mut self,
        name: &'static str,
        request: Request,
        fds: Vec<F>,
    ) -> Result<Outcome<F>, SessionError> {
        let mut fds = fds.into_iter();
        let answer = |reply| Ok(Outcome::of(Answer::Reply(reply)));
        let effects = match request {
            Request::GetFeatures => {
                return answer(Reply::U64(self.offer.features | OF_TRANSPORT));
            }
            Request::GetProtocolFeatures => return answer(Reply::U64(self.offer.protocol)),
            Request::GetQueueNum => return answer(Reply::U64(self.offer.queue_count as u64)),
            Request::GetMaxMemSlots => return answer(Reply::U64(MEM_SLOTS)),
            Request::GetStatus => return answer(Reply::U64(self.status)),
            Request::GetConfig(access) => return Ok(Outcome::of(Answer::Config(access))),
            Request::GetVringBase(state) => return self.base_of(name, state),
            Request::GetInflightFd(area, size) => return self.inflight_of(name, area, size),
            Request::SetInflightFd(area) => self.set_inflight(name, area, fds.next())?,
            Request::SetLogBase(area) => return Ok(self.set_log(area, fds.next())),
            Request::SetDeviceStateFd(which) => return Ok(self.begin_transfer(which, fds.next())),
            Request::CheckDeviceState => return Ok(self.end_transfer()),
            Request::SetFeatures(bits) => self.set_features(bits)?,
            Request::SetProtocolFeatures(bits) => self.set_protocol_features(bits)?,
            // SET_OWNER has no effect here, RESET_OWNER is deprecated, and no front-end waits for
            // the eventfd of SET_LOG_FD.
            Request::SetOwner | Request::ResetOwner | Request::SetLogFd => Vec::new(),
            Request::SetMemTable(regions) => {
                self.regions.clone_from(&regions);
                self.forget_refusals();
                vec![Effect::Memory(MemoryChange::Replace(regions.into_iter().zip(fds).collect()))]
            }
            Request::AddMemReg(region) => self.add_region(region, fds.next())?,
            Request::RemMemReg(region) => {
                self.regions.retain(|r| !is_same_place(r, &region));
                vec![Effect::Memory(MemoryChange::Remove(region))]
            }
            Request::SetVringNum(state) => self.set_size(name, state)?,
            Request::SetVringBase(state) => self.set_base(name, state)?,
            Request::SetVringAddr(addr) => self.set_addresses(name, addr)?,
            Request::SetVringEnable(state) => self.set_enabled(name, state)?,
            Request::SetVringKick { index, .. } => {
                let vring = self.vring_mut(name, index)?;
                vring.kick = KickState::Set;
                (vring.refused, vring.is_begun) = (false, true);
                vec![Effect::Kick(index, fds.next())]
            }
            Request::SetVringCall { index, .. } => {
                self.vring_mut(name, index)?;
                vec![Effect::Call(index, fds.next())]
            }
            Request::SetVringErr { index, .. } => {
                self.vring_mut(name, index)?;
                vec![Effect::Err(index, fds.next())]
            }
            Request::SetBackendReqFd => {
                fds.next().map(Effect::BackendChannel).into_iter().collect()
            }
            Request::SendRarp(mac) => vec![Effect::SendRarp(mac)],
            Request::NetSetMtu(mtu) => vec![Effect::SetMtu(mtu)],
            Request::SetConfig(access, bytes) => vec![Effect::WriteConfig(access, bytes)],
            Request::SetStatus(status) => {
                self.status = status & 0xff;
                if self.status == 0 { vec![Effect::ResetConfig] } else { Vec::new() }
            }
            Request::ResetDevice => self.reset(),
        };
        Ok(Outcome { effects, answer: Answer::None })
    }

    fn vring_mut(&mut self, name: &'static str, index: usize) -> Result<&mut Vring, SessionError> {
        let count = self.vrings.len();
        self.vrings.get_mut(index).ok_or(SessionError::Index { name, index, count })
    }

    fn set_features<F>(&mut self, bits: u64) -> Result<Vec<Effect<F>>, SessionError> {
        let unknown = bits & !(self.offer.features | OF_TRANSPORT);
        if unknown != 0 {
            return Err(SessionError::Features { bits: unknown });
        }
        let former = self.features.replace(bits);
        Ok(self.follow_features(former, bits))
    }

    fn set_protocol_features<F>(&mut self, bits: u64) -> Result<Vec<Effect<F>>, SessionError> {
        let unknown = bits & !self.offer.protocol;
        if unknown != 0 {
            return Err(SessionError::ProtocolFeatures { bits: unknown });
        }
        self.protocol = bits;
        Ok(Vec::new())
    }

    /// Adds a memory region. Adding the same region again succeeds and changes nothing: QEMU sends
    /// each region once for every queue pair.
    fn add_region<F>(
        &mut self,
        region: Region,
        fd: Option<F>,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        if self.regions.contains(&region) {
            return Ok(Vec::new());
        }
        if self.regions.len() as u64 >= MEM_SLOTS {
            return Err(SessionError::Slots { max: MEM_SLOTS });
        }
        self.regions.push(region);
        self.forget_refusals();
        let change = fd.map(|fd| Effect::Memory(MemoryChange::Add(region, fd)));
        Ok(change.into_iter().collect())
    }

    fn forget_refusals(&mut self) {
        self.vrings.iter_mut().for_each(|v| v.refused = false);
    }

    fn set_size<F>(
        &mut self,
        name: &'static str,
        state: VringState,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        let max = self.offer.queue_size_max;
        let value = u64::from(state.num);
        let has_any = RingFeatures::from_bits(self.features()).packed;
        let fits = |n: &u16| (has_any || n.is_power_of_two()) && (1..=max).contains(n);
        let size = u16::try_from(state.num).ok().filter(fits);
        let index = state.index as usize;
        let vring = self.vring_mut(name, index)?;
        let size = size.ok_or(SessionError::Value { name, value })?;
        let changes = vring.size.replace(size) != Some(size);
        (vring.refused, vring.is_begun) = (false, true);
        Ok(restart_if(vring.running && changes, index))
    }

    /// Sets the base. For a running ring this means that the driver begins anew, as UML's does,
    /// which never sends `GET_VRING_BASE`: the queue stops, and starts with the next kick.
    fn set_base<F>(
        &mut self,
        name: &'static str,
        state: VringState,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        let base = Base::from_bits(state.num);
        let (ring, index) = (RingFeatures::from_bits(self.features()), state.index as usize);
        let vring = self.vring_mut(name, index)?;
        let checked = base.check(vring.size.unwrap_or(u16::MAX), ring);
        checked.map_err(|_| SessionError::Value { name, value: state.num.into() })?;
        let effects = restart_if(vring.running, index);
        vring.is_begun = !vring.running;
        if vring.running {
            vring.kick = KickState::Unset;
            vring.running = false;
        }
        vring.base = base;
        Ok(effects)
    }

    fn set_addresses<F>(
        &mut self,
        name: &'static str,
        addr: VringAddr,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        let index = addr.index as usize;
        let vring = self.vring_mut(name, index)?;
        let addresses = RingAddresses {
            descriptor: addr.descriptor,
            available: addr.available,
            used: addr.used,
        };
        let changed = vring.addresses.replace(addresses) != Some(addresses);
        (vring.refused, vring.is_begun) = (false, true);
        let moves = vring.running && changed;
        Ok(if moves { vec![Effect::Relocate(index, addresses)] } else { Vec::new() })
    }

    fn set_enabled<F>(
        &mut self,
        name: &'static str,
        state: VringState,
    ) -> Result<Vec<Effect<F>>, SessionError> {
        let index = state.index as usize;
        let value = u64::from(state.num);
        let vring = self.vring_mut(name, index)?;
        if value > 1 {
            return Err(SessionError::Value { name, value });
        }
        vring.enabled = Some(value == 1);
        let running = vring.running;
        Ok(if running { vec![Effect::Enable(index, value == 1)] } else { Vec::new() })
    }

    /// `RESET_DEVICE`: all rings stop, and the features are forgotten; the memory regions stay.
    fn reset<F>(&mut self) -> Vec<Effect<F>> {
        let mut effects: Vec<_> =
            (0..self.vrings.len()).filter(|i| self.vrings[*i].running).map(Effect::Stop).collect();
        self.vrings.fill(Vring::default());
        self.features = None;
        self.status = 0;
        effects.push(Effect::Inflight(None));
        effects.extend(self.forget_log());
        effects.push(Effect::Features(0));
        effects
    }

    /// Starts every vring that has its size, addresses and kick, once features and memory are set.
    fn start_ready<F>(&mut self, effects: &mut Vec<Effect<F>>) {
        if self.features.is_none() || self.regions.is_empty() || self.awaits_log() {
            return;
        }
        for (index, vring) in self.vrings.iter_mut().enumerate() {
            if vring.is_complete() && !vring.running && !vring.refused {
                vring.running = true;
                effects.push(Effect::Start(index));
            }
        }
    }
}

fn restart_if<F>(condition: bool, index: usize) -> Vec<Effect<F>> {
    if condition { vec![Effect::Stop(index)] } else { Vec::new() }
}

/// Refuses an access outside of the configuration space, or one whose payload does not have the
/// size that it states. A guest can cause such an access through its front-end, so the session does
/// not end. A read is answered with size 0, by which the protocol reports a failure; a write has no
/// effect.
fn refuse_config<F>(row: &Row, error: ParseError) -> Outcome<F> {
    let answer = match error {
        ParseError::Config { offset, .. } if row.replies => {
            let access = ConfigAccess { offset, size: 0, flags: 0 };
            Answer::Reply(Reply::Config(access, Vec::new()))
        }
        _ => Answer::None,
    };
    Outcome { effects: vec![Effect::Refuse(error)], answer }
}

/// `REM_MEM_REG` names a region by its addresses and size; the offset in the file does not count.
fn is_same_place(a: &Region, b: &Region) -> bool {
    (a.guest_addr, a.size, a.user_addr) == (b.guest_addr, b.size, b.user_addr)
}

#[cfg(test)]
mod tests;
