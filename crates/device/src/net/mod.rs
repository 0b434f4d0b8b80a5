//! `NetDevice`: a virtio network device (virtio 1.3 §5.1): queue pairs, features, config space, and
//! the settings of its guest.
//!
//! The control thread owns the state of a device. Sessions, the control queue and the control API
//! change it, and pass each running queue the settings that the queue follows (`Rules`, coalescing,
//! enabled). There are two kinds of front-ends. One serves the control queue itself (QEMU, Cloud
//! Hypervisor) and reports by `SET_VRING_ENABLE` which pairs are in use. The other leaves the
//! control queue to the back-end (UML, crosvm) and starts its ring: then `VQ_PAIRS_SET` also
//! decides which pairs are in use.

mod command_effect;
mod commands;
mod config;
mod control_queue;
mod delivery;
#[cfg(fuzzing)]
mod fuzzing;
mod handler;
mod kept_buffers;
mod lending;
mod moves;
mod owned;
mod pace;
mod pairs;
mod parse;
mod port;
mod posted;
mod presence;
mod receive;
mod refusal;
mod rules;
mod rx;
mod side;
mod state;
mod tally;
mod tx;

pub(crate) use rules::Rules;
pub(crate) use rx::NetRx;
pub(crate) use tx::NetTx;

pub use config::{Offload, Reclaim};
#[cfg(fuzzing)]
pub use fuzzing::{SoloControl, SoloRx, SoloTx, passes};
pub use manyring_wire::net::rss::RssConfig;
pub use manyring_wire::net::{MacAddress, Offloads, is_mtu, parse_mac};
pub use moves::{Gate, Receiving};
pub use owned::{Guest, Outside, OwnedPort};
pub use receive::{ReceivePairs, Receives};
pub use side::NetSide;

use crate::live::Live;
use crate::state::Saved;
use crate::{
    ConfigError, Device, DeviceStats, PendingResult, StartError, StateError, StateJournal,
};
use manyring_backend::net::Port;
use manyring_engine::Activation;
use manyring_engine::Moderation;
use manyring_engine::stats::{QueueClass, QueueStats};
use manyring_engine::{Limit, Pool, StopError};
use manyring_engine::{QueueHandle, Route};
use manyring_queue::Base;
use manyring_wire::net::rss::Hasher;
use manyring_wire::net::{
    Coalescing, FRAME_SIZE_MAX, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MTU,
    controlq,
};
use manyring_wire::vhost_user::{PROTOCOL_F_MTU, PROTOCOL_F_RARP};
use manyring_wire::virtio::VIRTIO_ID_NET;
use port::{HasPort, HostPort, PortState};
use presence::Presence;
use rules::Filter;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use state::Arrival;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::watch;

/// Bytes of an Ethernet header with a VLAN tag.
const ETHERNET_SIZE: usize = 14 + 4;

/// The properties of a network device, as the operator configures them.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetOptions {
    /// Name of the device in the configuration.
    #[serde(skip)]
    pub name: String,
    /// Number of queue pairs, 1 to 127: with the control queue there may be no more vrings than a
    /// vhost-user message can name.
    pub queue_pairs: usize,
    /// MAC address: configured, demanded by the interface, or generated.
    #[serde(skip)]
    pub mac: MacAddress,
    /// MTU that the guest is told, 68 or more; `None`: the device offers no MTU.
    pub mtu: Option<u16>,
    /// Speed that the guest is told, in Mbit/s, full duplex; `None`: unknown.
    pub speed: Option<u32>,
    /// How used buffer notifications are held back, unless the driver sets that itself.
    pub moderation: Moderation,
    /// When the buffers of transmitted frames go back to the driver.
    pub reclaim: Reclaim,
    /// The offloads of the port that the device uses.
    pub offload: Offload,
    /// True if the device offers to report the hash of each frame (`VIRTIO_NET_F_HASH_REPORT`). A
    /// driver that accepts this receives frames by a slower path.
    pub hash_report: bool,
    /// To how many of the guest's pairs the host delivers frames.
    pub receive_pairs: ReceivePairs,
}

impl Default for NetOptions {
    /// Makes a device called `net` with one pair and all offloads of its port. Its MAC address is
    /// all zeroes.
    fn default() -> Self {
        Self {
            name: "net".to_owned(),
            queue_pairs: 1,
            mac: MacAddress::default(),
            mtu: None,
            speed: None,
            moderation: Moderation::default(),
            reclaim: Reclaim::default(),
            offload: Offload::default(),
            hash_report: false,
            receive_pairs: ReceivePairs::All,
        }
    }
}

/// The result of a turn of a network queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NetTurn {
    /// Frames taken from the guest or the port.
    pub(crate) packets: usize,
    /// Number of chains returned to the driver, and number of frames in them: a long frame fills
    /// several receive buffers.
    pub(crate) used: usize,
    pub(crate) frames: usize,
    /// True if guest memory was truncated.
    pub(crate) memory_lost: bool,
    /// True if the burst continues in the next turn, without a kick.
    pub(crate) has_more: bool,
}

/// The control thread's state of one virtqueue.
#[derive(Clone, Debug, Default)]
struct Vq {
    /// True from the queue's start to its stop.
    is_started: bool,
    /// True if the queue is the control queue and this device serves it, or served it at its last
    /// start.
    is_control: bool,
    /// The front-end has enabled the queue.
    is_enabled: bool,
    /// True if the worker was last told to serve the queue.
    is_served: bool,
    route: Weak<Route>,
    /// The coalescing parameters that the driver has set for the queue.
    coalescing: Option<Coalescing>,
    /// True if the driver's settings came from another process, and the ring was not started here
    /// since.
    is_restored: bool,
}

/// The settings of the guest and of the operator, and the state of the host's interface.
#[derive(Debug)]
struct State {
    features: u64,
    /// Number of the present driver: it grows with each driver, and each one begins without
    /// settings.
    drivers: u64,
    port: PortState,
    announces: bool,
    mac: MacAddress,
    /// The MTU that the present driver was told.
    mtu_told: Option<u16>,
    /// The MTU of which the guest was told, as its front-end reported (`VHOST_USER_NET_SET_MTU`).
    mtu_front_end: Option<u16>,
    filter: Option<Filter>,
    /// True if the front-end leaves the control queue to this device, and its ring runs.
    has_control: bool,
    /// The number of pairs that `VQ_PAIRS_SET` has set; valid while the control queue runs here.
    pairs_in_use: usize,
    /// The hash that the driver has set last.
    hash: Option<Arc<Hasher>>,
    coalescing_tx: Option<Coalescing>,
    coalescing_rx: Option<Coalescing>,
    vqs: Vec<Vq>,
    /// State from another process, until the driver's features arrive.
    awaited: Option<Arrival>,
}

/// A network device.
#[derive(Debug)]
pub struct NetDevice(Arc<Inner>);

/// The state of a device, which it shares with the task that carries out the control queue's
/// commands.
#[derive(Debug)]
struct Inner {
    options: NetOptions,
    host: HostPort,
    pool: Arc<Pool>,
    /// The rules that all running queues follow.
    live: Arc<Live<Rules>>,
    limit: Arc<Limit>,
    /// The order of flows when the host delivers to other pairs.
    receiving: Receiving,
    state: Mutex<State>,
    /// Locked while workers are told of changes, one after another, and never during a call of the
    /// host. A task that takes this lock and the lock of host calls takes this one second.
    told: tokio::sync::Mutex<()>,
    stats: Arc<DeviceStats>,
    /// The journal for settings that the driver makes by the control queue.
    journal: Mutex<Option<Arc<dyn StateJournal>>>,
}

impl NetDevice {
    /// Makes a device on `port`, whose queues run in `pool`.
    #[must_use]
    pub fn new(options: NetOptions, port: Arc<dyn Port>, pool: Arc<Pool>) -> Self {
        receive::begin(&*port, options.receive_pairs, &options.name);
        let vq_count = options.queue_pairs * 2 + 1;
        let mut vqs = vec![Vq::default(); vq_count];
        // The last virtqueue can only be the control queue.
        vqs[vq_count - 1].is_control = true;
        let state = State {
            features: 0,
            drivers: 0,
            port: PortState::new(options.queue_pairs, options.mtu),
            announces: false,
            mac: options.mac,
            mtu_told: options.mtu,
            mtu_front_end: None,
            filter: None,
            has_control: false,
            pairs_in_use: 1,
            hash: None,
            coalescing_tx: None,
            coalescing_rx: None,
            vqs,
            awaited: None,
        };
        let stats = Arc::new(DeviceStats::new(QueueClass::Net, vq_count));
        Self(Arc::new(Inner {
            receiving: Receiving::new(options.queue_pairs),
            state: Mutex::new(state),
            host: HostPort::new(port, options.queue_pairs),
            told: tokio::sync::Mutex::default(),
            options,
            pool,
            live: Live::new(Rules::default()),
            limit: Arc::default(),
            stats,
            journal: Mutex::default(),
        }))
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes the rules of running queues from the present state.
    fn rules(&self) -> Rules {
        let state = self.state();
        let has_mtu = state.features & VIRTIO_NET_F_MTU != 0;
        let mtu = state.mtu_told.filter(|_| has_mtu).map(usize::from);
        let expected = self.host.port.mtu().map(usize::from).or(mtu);
        let room_size = match expected {
            Some(mtu) if !state.port.given.has_gso() => mtu + ETHERNET_SIZE,
            _ => FRAME_SIZE_MAX,
        };
        Rules {
            link_up: state.port.link_up && !state.port.is_gone,
            given: state.port.given,
            frame_size_max: mtu.map_or(FRAME_SIZE_MAX, |mtu| mtu + ETHERNET_SIZE),
            room_size: room_size.min(FRAME_SIZE_MAX),
            filter: state.filter.clone().filter(|f| !f.passes_all()),
            hash: state.hash.clone().filter(|_| state.features & VIRTIO_NET_F_HASH_REPORT != 0),
        }
    }

    /// Returns the index of the control queue; `None` if the driver has not negotiated one.
    fn control_index(&self, features: u64) -> Option<usize> {
        let has = features & VIRTIO_NET_F_CTRL_VQ != 0;
        has.then(|| controlq(features, self.options.queue_pairs))
    }
}

impl NetSide for NetDevice {
    fn port(&self) -> &Arc<dyn Port> {
        &self.0.host.port
    }

    fn mac(&self) -> MacAddress {
        self.0.state().mac
    }

    fn mtu(&self) -> Option<u16> {
        self.0.state().port.mtu
    }

    fn queue_pairs(&self) -> usize {
        self.0.options.queue_pairs
    }

    fn attached_pairs(&self) -> usize {
        self.0.state().port.attached_pairs()
    }

    fn receives(&self) -> Receives {
        let used = self.attached_pairs();
        let is_hashed = self.0.state().port.host_rss.is_some();
        receive::shown(&*self.0.host.port, self.0.options.receive_pairs, used, is_hashed)
    }

    fn is_control_queue(&self, index: usize) -> bool {
        self.0.state().vqs.get(index).is_some_and(|vq| vq.is_control)
    }

    fn is_link_up(&self) -> bool {
        self.0.state().port.is_link_up()
    }

    fn set_link(&self, up: bool) -> PendingResult<'_, ()> {
        Box::pin(self.0.set_link(up))
    }

    fn set_mtu(&self, mtu: u16) -> PendingResult<'_, Result<(), Errno>> {
        Box::pin(self.0.set_mtu(mtu))
    }

    fn announce(&self) -> bool {
        let mut state = self.0.state();
        let can = state.can_announce();
        state.announces |= can;
        if can {
            self.0.host.change();
        }
        can
    }

    fn port_may_have_changed(&self) {
        self.0.host.hint.notify_one();
    }

    fn look_after_port(&self) -> PendingResult<'_, ()> {
        if !self.0.chooses_receivers() {
            // Not the future of both: a thousand idle devices would take 200 KiB for it.
            return Box::pin(self.0.look_after());
        }
        Box::pin(async {
            tokio::select! {
                () = self.0.look_after() => {}
                () = self.0.choose_receivers() => {}
            }
        })
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
        let mtu = self.0.state().port.mtu;
        config::features(&self.0.options, &*self.0.host.port, mtu)
    }

    fn protocol_features(&self) -> u64 {
        PROTOCOL_F_RARP | PROTOCOL_F_MTU
    }

    fn queue_count(&self) -> usize {
        self.0.stats.count()
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

    fn set_features(&self, features: u64) -> PendingResult<'_, ()> {
        Box::pin(self.0.set_features(features))
    }

    fn config_changes(&self) -> watch::Receiver<u64> {
        self.0.host.changes.subscribe()
    }

    fn trails_rings(&self) -> bool {
        true
    }

    fn start(&self, activation: Activation) -> PendingResult<'_, Result<QueueHandle, StartError>> {
        Box::pin(async move {
            let (index, features) = (activation.index, activation.features);
            if self.0.control_index(features) == Some(index) {
                self.0.state().vqs[index].is_control = true;
                let started = control_queue::start(&self.0, activation).await;
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
    ) -> PendingResult<'a, ()> {
        Box::pin(async move {
            if self.is_control_queue(index) {
                return queue.set_enabled(enabled).await;
            }
            self.0.set_enabled(index, enabled).await;
        })
    }

    fn stop(&self, index: usize, queue: QueueHandle) -> PendingResult<'_, Result<Base, StopError>> {
        Box::pin(async move {
            let is_control = self.is_control_queue(index);
            let base = queue.stop().await;
            self.0.stopped(index, is_control).await;
            base
        })
    }

    fn port_lost(&self) {
        self.0.host.hint.notify_one();
    }

    fn send_rarp(&self, mac: MacAddress) -> PendingResult<'_, bool> {
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

    fn restore<'a>(&'a self, state: &'a [u8]) -> PendingResult<'a, Result<(), StateError>> {
        Box::pin(async move {
            let saved = Saved::parse(state, VIRTIO_ID_NET, self.features())?;
            self.0.restore(&saved).await
        })
    }

    fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.0.stats.get(index)
    }
}

#[cfg(test)]
mod tests;
