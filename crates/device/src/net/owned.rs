//! `OwnedPort`: the port of a network device whose queues run in another process: its device
//! process (docs/design/0021).
//!
//! This process, the supervisor, owns the host's interface: it carries out the operator's changes,
//! watches the interface, and makes those calls of the host that the guest may cause. The device
//! process has a [`NetDevice`] with the guest's session, on a port that sends requests to this
//! process.

use super::lending::in_turn;
use super::pace::ChangePace;
use super::port::{HasPort, HostPort, PortState};
use super::presence::Presence;
use super::{NetDevice, NetOptions, NetSide, ReceivePairs, Receives, receive};
use crate::PendingResult;
use manyring_backend::net::Port;
use manyring_backend::net::tap::lent::Lent;
use manyring_wire::net::rss::{Rss, RssConfig};
use manyring_wire::net::{MacAddress, Offloads};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{MutexGuard as CallsGuard, watch};
use tokio::time::{Instant, sleep_until};

/// Settings that the guest made in the device process, for the API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guest {
    /// The MAC address that the driver has set.
    pub mac: Option<MacAddress>,
    /// True if the driver can announce itself, and the back-end serves its control queue.
    pub announces: bool,
    /// The index of the control queue, while the back-end serves it.
    pub control: Option<usize>,
    /// The number of pairs in use; `None`: this process attaches the pairs itself.
    pub pairs: Option<usize>,
}

/// State of the interface of which the device process must be told at each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// False if the operator has switched the guest's link off.
    pub link_up: bool,
    /// True if the interface was deleted, and no other interface with its name was opened yet.
    pub is_gone: bool,
    /// How often an interface was opened in place of a deleted one: each has new queues.
    pub joins: u64,
    /// The MTU that the next driver will be told, in bytes.
    pub mtu: Option<u16>,
    /// How often the operator has asked the guest to announce itself.
    pub announcements: u64,
}

#[derive(Debug)]
struct State {
    port: PortState,
    /// For each pair, whether the host must use it; the device process requests that.
    pairs: Vec<bool>,
    guest: Guest,
    /// The index of the guest's last control queue, which the API shows also after the guest has
    /// left.
    control: Option<usize>,
    /// How often the operator has asked the guest to announce itself.
    announcements: u64,
}

/// A port whose queues run in another process.
#[derive(Debug)]
pub struct OwnedPort {
    name: String,
    mac: MacAddress,
    receive_pairs: ReceivePairs,
    host: HostPort,
    state: Mutex<State>,
}

impl OwnedPort {
    /// Makes the port of the device that `options` describe.
    #[must_use]
    pub fn new(options: NetOptions, port: Arc<dyn Port>) -> Self {
        let NetOptions { name, queue_pairs, mac, mtu, receive_pairs, .. } = options;
        let state = State {
            port: PortState::new(queue_pairs, mtu),
            pairs: vec![false; queue_pairs],
            guest: Guest::default(),
            control: None,
            announcements: 0,
        };
        let (host, state) = (HostPort::new(port, queue_pairs), Mutex::new(state));
        Self { name, mac, receive_pairs, host, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the device's name in the configuration.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a receiver that is notified whenever [`Self::outside`] changes.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.host.changes.subscribe()
    }

    /// Returns the present state of the interface, for the device process.
    #[must_use]
    pub fn outside(&self) -> Outside {
        let state = self.state();
        Outside {
            link_up: state.port.link_up,
            is_gone: state.port.is_gone,
            joins: state.port.joins,
            mtu: state.port.mtu,
            announcements: state.announcements,
        }
    }

    /// Stores the settings of the guest, for the API.
    pub fn show_guest(&self, guest: Guest) {
        let mut state = self.state();
        state.control = guest.control.or(state.control);
        state.guest = guest;
    }

    /// Attaches a pair to the host, or detaches it, as soon as the pace of such changes allows
    /// (`pace.rs`).
    ///
    /// # Errors
    /// `EINVAL`: there is no such pair. `EIO`: the host refuses; the log says why.
    pub async fn lend_pair(&self, pair: usize, attached: bool) -> Result<(), Errno> {
        *self.state().pairs.get_mut(pair).ok_or(Errno::INVAL)? = attached;
        self.apply_pairs().await;
        let state = self.state();
        // While the interface is deleted, the setting is only stored, and applied to the next
        // interface.
        match state.port.is_gone || state.port.attached[pair] == attached {
            true => Ok(()),
            false => Err(Errno::IO),
        }
    }

    /// Sets the offloads of frames for the guest. The pace is that of [`Self::lend_pair`], since
    /// each change takes the host's network lock, too.
    ///
    /// # Errors
    /// `EINVAL`: the port does not support them. `EIO`: the host refuses; the log says why.
    pub async fn lend_offloads(&self, offloads: Offloads) -> Result<(), Errno> {
        if offloads.guest_features() & !self.host.port.given().guest_features() != 0 {
            return Err(Errno::INVAL);
        }
        if std::mem::replace(&mut self.state().port.given, offloads) == offloads {
            return if self.apply_offloads().await { Ok(()) } else { Err(Errno::IO) };
        }
        let began = self.turn().await;
        let follows = self.apply_offloads().await;
        self.calls().await.changed(began, Instant::now());
        if follows { Ok(()) } else { Err(Errno::IO) }
    }

    /// Has the host choose the pair of each frame by the guest's hash; `None`: by its own. The pace
    /// is that of [`Self::lend_pair`], since each change loads a BPF program.
    ///
    /// # Errors
    /// `EINVAL`: the port cannot hash, or has too few pairs. `EIO`: the host refuses; the log says
    /// why.
    pub async fn lend_rss(&self, rss: Option<RssConfig>) -> Result<(), Errno> {
        let can = |rss: &RssConfig| self.host.port.can_hash() && rss.pairs() <= self.queue_pairs();
        if !rss.as_ref().is_none_or(can) {
            return Err(Errno::INVAL);
        }
        if rss.is_none() && self.state().port.host_rss.is_none() {
            return Ok(());
        }
        let began = self.turn().await;
        self.state().port.rss = rss.map(|rss| Arc::new(Rss::new(rss)));
        let follows = self.apply_rss().await;
        self.calls().await.changed(began, Instant::now());
        if follows {
            return Ok(());
        }
        let state = &mut self.state().port;
        state.rss = state.host_rss.clone();
        Err(Errno::IO)
    }

    /// Detaches all pairs from the host, and resets hash and offloads, because the process that
    /// served the queues is gone. When this returns, no abandoned call has the interface open.
    pub async fn take_back(&self) {
        self.lends_nothing().await;
        let _ = self.lend_rss(None).await;
        self.state().pairs.fill(false);
        self.show_guest(Guest::default());
        self.apply_pairs().await;
        let _ = self.lend_offloads(Offloads::default()).await;
    }

    /// The queues of the interface, for the process that serves them, and how often the port had
    /// joined its interface when they were lent. `None` in place of queues: the port has no
    /// interface.
    ///
    /// # Errors
    /// Those of [`Port::lend`]. `EIO`: the call panicked.
    pub async fn lend(&self) -> (u64, Result<Option<Lent>, Errno>) {
        let lend = |port: &dyn Port, is_wanted: &dyn Fn() -> bool| port.lend(is_wanted).transpose();
        let lent = in_turn(&self.host, lend, |lent| (self.outside().joins, lent)).await;
        lent.unwrap_or_else(|| (self.outside().joins, Err(Errno::IO)))
    }

    /// True if every other process has closed the queues that were lent to it.
    ///
    /// # Errors
    /// Those of [`Port::is_let_go`]. `EIO`: the call panicked.
    pub async fn is_let_go(&self) -> Result<bool, Errno> {
        let is_let_go = |port: &dyn Port, _: &dyn Fn() -> bool| port.is_let_go();
        in_turn(&self.host, is_let_go, |is_let_go| is_let_go).await.unwrap_or(Err(Errno::IO))
    }

    /// Returns when no call is under way that nobody waits for: such a call has the interface open.
    pub async fn lends_nothing(&self) {
        drop(self.host.lending.lock().await);
    }

    async fn calls(&self) -> CallsGuard<'_, ChangePace> {
        self.host.calls.lock().await
    }

    /// Waits until the next change may begin (`pace.rs`). Returns the time then.
    async fn turn(&self) -> Instant {
        let next = self.calls().await.next();
        sleep_until(next).await;
        Instant::now()
    }
}

impl NetSide for OwnedPort {
    fn port(&self) -> &Arc<dyn Port> {
        &self.host.port
    }

    fn mac(&self) -> MacAddress {
        self.state().guest.mac.unwrap_or(self.mac)
    }

    fn mtu(&self) -> Option<u16> {
        self.state().port.mtu
    }

    fn queue_pairs(&self) -> usize {
        self.state().pairs.len()
    }

    fn attached_pairs(&self) -> usize {
        let state = self.state();
        let elsewhere = state.guest.pairs.map(|pairs| pairs.min(state.pairs.len()));
        elsewhere.unwrap_or_else(|| state.port.attached_pairs())
    }

    fn receives(&self) -> Receives {
        let (used, is_hashed) = (self.attached_pairs(), self.state().port.host_rss.is_some());
        receive::shown(&*self.host.port, self.receive_pairs, used, is_hashed)
    }

    fn is_control_queue(&self, index: usize) -> bool {
        let state = self.state();
        // The last virtqueue can only be the control queue.
        let last = state.pairs.len() * 2;
        index == last || index < last && state.control == Some(index)
    }

    fn is_link_up(&self) -> bool {
        self.state().port.is_link_up()
    }

    fn set_link(&self, up: bool) -> PendingResult<'_, ()> {
        Box::pin(HasPort::set_link(self, up))
    }

    fn set_mtu(&self, mtu: u16) -> PendingResult<'_, Result<(), Errno>> {
        Box::pin(HasPort::set_mtu(self, mtu))
    }

    fn announce(&self) -> bool {
        let mut state = self.state();
        let can = state.guest.announces;
        state.announcements += u64::from(can);
        if can {
            self.host.change();
        }
        can
    }

    fn port_may_have_changed(&self) {
        self.host.hint.notify_one();
    }

    fn look_after_port(&self) -> PendingResult<'_, ()> {
        Box::pin(self.look_after())
    }
}

impl HasPort for OwnedPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn host(&self) -> &HostPort {
        &self.host
    }

    fn with<T>(&self, act: impl FnOnce(&mut PortState) -> T) -> T {
        act(&mut self.state().port)
    }

    fn next_pair(&self, is_refused: &[bool]) -> Option<(usize, bool)> {
        let State { port, pairs, .. } = &*self.state();
        port.next_pair(is_refused, |pair| !port.is_gone && pairs[pair])
    }

    /// No queue runs in this process: a command tells the device process.
    async fn push_rules(&self) {}

    async fn apply_pairs(&self) -> bool {
        let mut pace = self.calls().await;
        self.attach(&mut pace).await
    }

    fn note_mtu(&self, mtu: u16) {
        self.state().port.mtu = Some(mtu);
    }
}

impl NetDevice {
    /// Returns the guest's settings, for the process that owns the port.
    #[must_use]
    pub fn guest(&self) -> Guest {
        let state = self.0.state();
        Guest {
            mac: Some(state.mac),
            announces: state.can_announce(),
            control: self.0.control_index(state.features).filter(|_| state.has_control),
            pairs: None,
        }
    }
}

#[cfg(test)]
mod tests;
