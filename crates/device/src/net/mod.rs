//! `NetDevice`: a virtio network device (virtio 1.3 §5.1): queue pairs, features, config space, and
//! the settings of its guest.
//!
//! The control thread owns the state of a device: sessions, the control queue and the control API
//! change it, and pass each running queue the part that it follows (`Rules`, coalescing, enabled).
//! There are two kinds of front-ends. One serves the control queue itself (QEMU, Cloud Hypervisor)
//! and says by `SET_VRING_ENABLE` which pairs are in use. The other leaves the control queue to the
//! back-end (UML, crosvm) and starts its ring: then `VQ_PAIRS_SET` says so as well.

mod config;
mod control;
mod ctrl;
mod delivery;
mod effect;
#[cfg(fuzzing)]
mod fuzzing;
mod handler;
mod kept;
mod lent;
mod pace;
mod pairs;
mod parse;
mod posted;
mod presence;
mod refusal;
mod rules;
mod rx;
mod state;
mod tally;
mod tx;

pub(crate) use rules::Rules;
pub(crate) use rx::NetRx;
pub(crate) use tx::NetTx;

pub use crate::policy::reclaim::Reclaim;
pub use config::Offload;
#[cfg(fuzzing)]
pub use fuzzing::{SoloControl, SoloRx, SoloTx, passes};
pub use lent::{Guest, Outside};
pub use manyring_wire::net::rss::RssConfig;
pub use manyring_wire::net::{MacAddress, Offloads, is_mtu, parse_mac};

use crate::live::Live;
use crate::state::Saved;
use crate::{ConfigError, Device, Later, StartError, StateError, StateJournal};
use lent::Elsewhere;
use manyring_backend::net::Port;
use manyring_engine::Activation;
use manyring_engine::Moderation;
use manyring_engine::aside;
use manyring_engine::stats::{Class, QueueStats};
use manyring_engine::{Limit, Pool, StopError};
use manyring_engine::{QueueHandle, Route};
use manyring_queue::Base;
use manyring_wire::net::rss::{Hasher, Rss};
use manyring_wire::net::{
    Coalescing, FRAME_SIZE_MAX, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MTU,
    controlq,
};
use manyring_wire::vhost_user::{PROTOCOL_F_MTU, PROTOCOL_F_RARP};
use manyring_wire::virtio::VIRTIO_ID_NET;
use pace::Pace;
use rules::Filter;
use rustix::io::Errno;
use state::Arrival;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// Bytes of an Ethernet header with a VLAN tag.
const ETHERNET_SIZE: usize = 14 + 4;

/// The properties of a network device, as the operator configures them.
#[derive(Clone, Debug)]
pub struct NetOptions {
    /// Name in the configuration.
    pub name: String,
    /// Queue pairs, 1 to 127: with the control queue, no more vrings than a message can name.
    pub queue_pairs: usize,
    /// MAC address.
    pub mac: MacAddress,
    /// MTU that the guest is told, 68 or more; `None`: it is told none.
    pub mtu: Option<u16>,
    /// Speed that the guest is told, in Mbit/s, full duplex; `None`: it is told none.
    pub speed: Option<u32>,
    /// How used buffer notifications are held back, unless the driver sets that itself.
    pub moderation: Moderation,
    /// When the buffers of transmitted frames go back to the driver.
    pub reclaim: Reclaim,
    /// The offloads of the port that the device uses.
    pub offload: Offload,
    /// Offer to report the hash of each frame (`VIRTIO_NET_F_HASH_REPORT`). The frames of a driver
    /// that accepts it are received by a slower path.
    pub hash_report: bool,
}

/// The result of a turn of a network queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// Frames taken from the guest or the port.
    pub(crate) packets: usize,
    /// Chains returned, and frames in them: a long frame fills several receive buffers.
    pub(crate) used: usize,
    pub(crate) frames: usize,
    /// Guest memory was cut away.
    pub(crate) memory_lost: bool,
    /// The burst is not over: it continues in the next turn, without a kick.
    pub(crate) has_more: bool,
}

/// The control thread's state of one virtqueue.
#[derive(Clone, Debug, Default)]
struct Vq {
    /// The queue was started and not stopped.
    is_started: bool,
    /// It is the control queue that this device serves, or was when it was last started.
    is_control: bool,
    /// The front-end has enabled the queue.
    is_enabled: bool,
    /// The worker was told to serve the queue.
    is_served: bool,
    route: Weak<Route>,
    /// The coalescing that the driver has set for the queue, if any.
    coalescing: Option<Coalescing>,
    /// The driver's settings came from another process, and the ring was not started here yet.
    is_restored: bool,
}

/// The settings of the guest and of the operator, and the state of the host's interface.
#[derive(Debug)]
struct State {
    features: u64,
    /// The number of drivers so far: each begins with nothing set.
    drivers: u64,
    /// The operator has not switched the guest's link off.
    link_up: bool,
    /// The link's state that guest and operator see: up only once the queues pass frames.
    is_link_shown: bool,
    /// The host's interface was deleted: the guest's link is down until it is joined again.
    is_port_gone: bool,
    /// The loss of the interface is shown to guest and operator, until the queues are served again.
    is_loss_shown: bool,
    announces: bool,
    mac: MacAddress,
    /// The MTU that the next driver will be told, and the one that the present driver was told.
    mtu: Option<u16>,
    mtu_told: Option<u16>,
    /// The MTU that the guest was told according to its front-end (`VHOST_USER_NET_SET_MTU`).
    mtu_front_end: Option<u16>,
    filter: Option<Filter>,
    given: Offloads,
    /// The front-end has left the control queue to this device, and its ring runs.
    has_control: bool,
    /// Pairs that `VQ_PAIRS_SET` has set; valid while the control queue runs here.
    pairs_in_use: usize,
    /// The pair of each frame, if `RSS_CONFIG` was set after `VQ_PAIRS_SET`.
    rss: Option<Arc<Rss>>,
    /// The hash that the driver has set last.
    hash: Option<Arc<Hasher>>,
    coalescing_tx: Option<Coalescing>,
    coalescing_rx: Option<Coalescing>,
    vqs: Vec<Vq>,
    /// The state that another process has saved, for the driver whose features come next.
    awaited: Option<Arrival>,
    /// The settings that the host was last told: pairs in use, offloads, and hash.
    attached: Vec<bool>,
    host_given: Option<Offloads>,
    host_rss: Option<Arc<Rss>>,
    /// How often an interface was joined in place of a deleted one.
    joins: u64,
    elsewhere: Elsewhere,
}

/// A network device.
#[derive(Debug)]
pub struct NetDevice(Arc<Inner>);

/// The part of a device that the task which obeys the control queue's commands uses too.
#[derive(Debug)]
struct Inner {
    options: NetOptions,
    port: Arc<dyn Port>,
    pool: Arc<Pool>,
    /// The rules that all running queues follow.
    live: Arc<Live<Rules>>,
    limit: Arc<Limit>,
    state: Mutex<State>,
    /// Held during calls of the host, which may take long, so that they are made one after another.
    /// Each call uses the state at that time, so that the last one has the newest state.
    host: tokio::sync::Mutex<Pace>,
    /// Held while workers are told of changes, one after another, and never during a call of the
    /// host. Where both locks are taken, this one is taken second.
    told: tokio::sync::Mutex<()>,
    stats: Vec<Arc<QueueStats>>,
    changes: watch::Sender<u64>,
    /// Notified when the host's interface may have been deleted, or may be back.
    port_hint: Notify,
    /// The keeper of the settings that the driver makes by the control queue.
    journal: Mutex<Option<Arc<dyn StateJournal>>>,
}

impl NetDevice {
    /// A device on `port`, whose queues run in `pool`.
    #[must_use]
    pub fn new(options: NetOptions, port: Arc<dyn Port>, pool: Arc<Pool>) -> Self {
        let vq_count = options.queue_pairs * 2 + 1;
        let mut vqs = vec![Vq::default(); vq_count];
        // The last virtqueue can only be the control queue.
        vqs[vq_count - 1].is_control = true;
        let state = State {
            features: 0,
            drivers: 0,
            link_up: true,
            is_link_shown: true,
            is_port_gone: false,
            is_loss_shown: false,
            announces: false,
            mac: options.mac,
            mtu: options.mtu,
            mtu_told: options.mtu,
            mtu_front_end: None,
            filter: None,
            given: Offloads::default(),
            has_control: false,
            pairs_in_use: 1,
            rss: None,
            hash: None,
            coalescing_tx: None,
            coalescing_rx: None,
            vqs,
            awaited: None,
            attached: vec![false; options.queue_pairs],
            host_given: None,
            host_rss: None,
            joins: 0,
            elsewhere: Elsewhere::default(),
        };
        let stats = (0..vq_count).map(|_| Arc::new(QueueStats::new(Class::Net))).collect();
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            host: tokio::sync::Mutex::new(Pace::new(options.queue_pairs, Instant::now())),
            told: tokio::sync::Mutex::default(),
            options,
            port,
            pool,
            live: Live::new(Rules::default()),
            limit: Arc::default(),
            stats,
            changes: watch::Sender::new(0),
            port_hint: Notify::new(),
            journal: Mutex::default(),
        }))
    }

    /// The port behind the device.
    #[must_use]
    pub fn port(&self) -> &Arc<dyn Port> {
        &self.0.port
    }

    /// The present MAC address, which the driver may have changed.
    #[must_use]
    pub fn mac(&self) -> MacAddress {
        self.0.state().mac
    }

    /// The MTU the guest is told when it starts its device.
    #[must_use]
    pub fn mtu(&self) -> Option<u16> {
        self.0.state().mtu
    }

    /// Queue pairs the device has.
    #[must_use]
    pub fn queue_pairs(&self) -> usize {
        self.0.options.queue_pairs
    }

    /// Queue pairs that the host may use now. Does not wait for a change under way.
    #[must_use]
    pub fn attached_pairs(&self) -> usize {
        let state = self.0.state();
        let here = state.attached.iter().filter(|attached| **attached).count();
        let elsewhere = state.elsewhere.attached_pairs();
        elsewhere.map_or(here, |pairs| pairs.min(state.attached.len()))
    }

    /// True if virtqueue `index` is the control queue served here, or was at its last start. Its
    /// index depends on the features (§5.1.2): without `VIRTIO_NET_F_MQ` it is the third queue.
    #[must_use]
    pub fn is_control_queue(&self, index: usize) -> bool {
        self.0.state().vqs.get(index).is_some_and(|vq| vq.is_control)
    }

    /// Sets the host's MTU, and the MTU that the guest is told when it next starts its device: a
    /// running driver keeps the MTU that it was told (§5.1.4.2). A port may have no MTU.
    ///
    /// # Errors
    /// `EINVAL`: `mtu` is below 68. Any other: the error of the host.
    pub async fn set_mtu(&self, mtu: u16) -> Result<(), Errno> {
        if !is_mtu(mtu) {
            return Err(Errno::INVAL);
        }
        let port = self.0.port.clone();
        let set = aside(move || port.set_mtu(mtu)).await;
        match set.unwrap_or(Err(Errno::INTR)) {
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(errno),
        }
        {
            let mut state = self.0.state();
            state.mtu = Some(mtu);
            if state.features == 0 {
                state.mtu_told = Some(mtu);
            }
        }
        self.0.changes.send_modify(|n| *n += 1);
        self.0.push_rules().await;
        Ok(())
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rules of running queues that follow from the present state.
    fn rules(&self) -> Rules {
        let state = self.state();
        let has_mtu = state.features & VIRTIO_NET_F_MTU != 0;
        let mtu = state.mtu_told.filter(|_| has_mtu).map(usize::from);
        let expected = self.port.mtu().map(usize::from).or(mtu);
        let room_size = match expected {
            Some(mtu) if !state.given.has_gso() => mtu + ETHERNET_SIZE,
            _ => FRAME_SIZE_MAX,
        };
        Rules {
            link_up: state.link_up && !state.is_port_gone,
            given: state.given,
            frame_size_max: mtu.map_or(FRAME_SIZE_MAX, |mtu| mtu + ETHERNET_SIZE),
            room_size: room_size.min(FRAME_SIZE_MAX),
            filter: state.filter.clone().filter(|f| !f.passes_all()),
            hash: state.hash.clone().filter(|_| state.features & VIRTIO_NET_F_HASH_REPORT != 0),
        }
    }

    /// Tells the port which offloads the guest accepts. False: the port refuses.
    async fn apply_offloads(&self) -> bool {
        let _calls = self.host.lock().await;
        loop {
            let (given, told) = {
                let state = self.state();
                (state.given, state.host_given)
            };
            if told == Some(given) {
                return true;
            }
            let port = self.port.clone();
            let set = aside(move || port.set_offloads(given)).await;
            if let Err(errno) = set.unwrap_or(Err(Errno::INTR)) {
                let device = &self.options.name;
                tracing::warn!(device, %errno, ?given, "the port cannot switch its offloads");
                return false;
            }
            self.state().host_given = Some(given);
        }
    }

    /// Index of the control queue, if the driver has negotiated one.
    fn control_index(&self, features: u64) -> Option<usize> {
        let has = features & VIRTIO_NET_F_CTRL_VQ != 0;
        has.then(|| controlq(features, self.options.queue_pairs))
    }
}

impl Device for NetDevice {
    fn name(&self) -> &str {
        &self.0.options.name
    }

    fn virtio_id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        let mtu = self.0.state().mtu;
        config::features(&self.0.options, &*self.0.port, mtu)
    }

    fn protocol_features(&self) -> u64 {
        PROTOCOL_F_RARP | PROTOCOL_F_MTU
    }

    fn queue_count(&self) -> usize {
        self.0.stats.len()
    }

    fn queue_size_max(&self) -> u16 {
        manyring_wire::virtqueue::QUEUE_SIZE_MAX
    }

    fn read_config(&self, offset: u32, bytes: &mut [u8]) {
        let config = config::config(&self.0.options, &self.0.state());
        config::read(&config, offset, bytes);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError { offset, len: bytes.len() })
    }

    fn set_features(&self, features: u64) -> Later<'_, ()> {
        Box::pin(self.0.set_features(features))
    }

    fn config_changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    fn trails_rings(&self) -> bool {
        true
    }

    fn start(&self, activation: Activation) -> Later<'_, Result<QueueHandle, StartError>> {
        Box::pin(async move {
            let (index, features) = (activation.index, activation.features);
            if self.0.control_index(features) == Some(index) {
                self.0.state().vqs[index].is_control = true;
                let started = ctrl::start(&self.0, activation).await;
                if started.is_err() {
                    self.0.stopped(index, true).await;
                }
                return started;
            }
            self.0.start_queue(activation).await
        })
    }

    fn set_enabled<'a>(
        &'a self,
        index: usize,
        queue: &'a QueueHandle,
        enabled: bool,
    ) -> Later<'a, ()> {
        Box::pin(async move {
            if self.is_control_queue(index) {
                return queue.set_enabled(enabled).await;
            }
            self.0.set_enabled(index, enabled).await;
        })
    }

    fn stop(&self, index: usize, queue: QueueHandle) -> Later<'_, Result<Base, StopError>> {
        Box::pin(async move {
            let is_control = self.is_control_queue(index);
            let base = queue.stop().await;
            self.0.stopped(index, is_control).await;
            base
        })
    }

    fn port_lost(&self) {
        self.0.port_hint.notify_one();
    }

    fn send_rarp(&self, mac: MacAddress) -> Later<'_, bool> {
        Box::pin(self.0.send_rarp(mac))
    }

    fn set_front_end_mtu(&self, mtu: u64) -> bool {
        let Some(mtu) = u16::try_from(mtu).ok().filter(|mtu| is_mtu(*mtu)) else { return false };
        let mut state = self.0.state();
        (state.mtu_front_end, state.mtu_told) = (Some(mtu), Some(mtu));
        true
    }

    fn save(&self) -> Vec<u8> {
        self.0.save().emit()
    }

    fn keep_state_by(&self, journal: Option<Arc<dyn StateJournal>>) {
        *self.0.journal.lock().unwrap_or_else(PoisonError::into_inner) = journal;
    }

    fn restore<'a>(&'a self, state: &'a [u8]) -> Later<'a, Result<(), StateError>> {
        Box::pin(async move {
            let saved = Saved::parse(state, VIRTIO_ID_NET, self.features())?;
            self.0.restore(&saved).await
        })
    }

    fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.0.stats.get(index).cloned()
    }
}

#[cfg(test)]
mod tests;
