//! The queue pairs in use: starts, stops and enables virtqueues, and attaches pairs to the host.

use super::port::{HasPort, HostPort, PortState};
use super::{Inner, NetDevice, NetRx, NetTx, Rules, State};
use crate::{DeviceStats, StartError};
use manyring_engine::Activation;
use manyring_engine::Home;
use manyring_engine::Limit;
use manyring_engine::Order;
use manyring_engine::QueueHandle;
use manyring_engine::aside;
use manyring_engine::policy::moderation::Limits;
use manyring_memory::MemoryError;
use manyring_wire::net::{Coalescing, MacAddress, Offloads, VIRTIO_NET_F_MRG_RXBUF, header_size};
use rustix::io::Errno;
use std::sync::Arc;

/// Makes a RARP frame (RFC 903, "request reverse"), like QEMU's that announces a guest after a
/// migration.
fn rarp(mac: MacAddress) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    // Type RARP; hardware Ethernet, protocol IPv4, sizes 6 and 4, operation 3 (request reverse).
    frame.extend([0x80, 0x35, 0, 1, 0x08, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(60, 0);
    frame
}

/// Converts the driver's coalescing parameters for the engine.
fn limits(wish: Option<Coalescing>) -> Option<Limits> {
    wish.map(|wish| Limits { count_max: wish.packets_max, delay_us_max: wish.delay_us_max })
}

fn no_memory(_: MemoryError) -> StartError {
    StartError::Backend(Errno::NOMEM)
}

impl State {
    /// True if the virtqueue is started and enabled, its pair is in use, and the port's interface
    /// exists.
    pub(super) fn serves(&self, index: usize) -> bool {
        let in_use = !self.has_control || index / 2 < self.pairs_in_use;
        let in_use = in_use && !self.port.is_gone;
        self.vqs.get(index).is_some_and(|vq| vq.is_started && vq.is_enabled && in_use)
    }
}

impl NetDevice {
    /// Returns the limit on packets and bytes per second. After a change, running queues follow it
    /// only when [`Pool::refresh`](manyring_engine::Pool::refresh) tells them.
    #[must_use]
    pub fn limit(&self) -> &Arc<Limit> {
        &self.0.limit
    }

    /// Returns the counters of all queues.
    #[must_use]
    pub fn all_stats(&self) -> &Arc<DeviceStats> {
        &self.0.stats
    }
}

impl Inner {
    /// Starts a receiveq or transmitq. First asks the host to use its pair.
    pub(super) async fn start_queue(
        &self,
        activation: Activation,
    ) -> Result<QueueHandle, StartError> {
        let index = activation.index;
        let (pair, is_rx) = (index / 2, index.is_multiple_of(2));
        if pair >= self.options.queue_pairs {
            return Err(StartError::Backend(Errno::NXIO));
        }
        let goes_on = self.goes_on(&activation);
        {
            let mut state = self.state();
            let default = if is_rx { state.coalescing_rx } else { state.coalescing_tx };
            let vq = &mut state.vqs[index];
            (vq.is_started, vq.is_enabled) = (true, activation.enabled);
            vq.is_control = false;
            if !goes_on {
                vq.coalescing = default;
            }
        }
        let started = {
            let mut pace = self.host.calls.lock().await;
            self.attach(&mut pace).await;
            self.start_attached(activation).await
        };
        if started.is_err() {
            self.stopped(index, false).await;
        }
        started
    }

    async fn start_attached(&self, mut activation: Activation) -> Result<QueueHandle, StartError> {
        let (index, features) = (activation.index, activation.features);
        let (pair, is_rx) = (index / 2, index.is_multiple_of(2));
        // Hold the lock until the queue can be told of changes, so that it misses none.
        let _told = self.told.lock().await;
        activation.enabled = {
            let mut state = self.state();
            let serves = state.serves(index);
            state.vqs[index].is_served = serves;
            serves
        };
        let home = Home { device: self.options.name.clone(), unit: pair };
        let (stats, moderation) = (self.stats.to_run(index), self.options.moderation);
        let started = if is_rx {
            let rx = self.receiver(pair, features, activation.queue.size())?;
            self.pool.start(activation.running(rx, stats, moderation), home)
        } else {
            let tx = self.transmitter(pair, features)?;
            self.pool.start(activation.running(tx, stats, moderation), home)
        };
        let handle = started.ok_or(StartError::NoWorker)?;
        let route = handle.route();
        let coalescing = {
            let vq = &mut self.state().vqs[index];
            vq.route = Arc::downgrade(route);
            vq.coalescing
        };
        route.ask(|reply| Order::Moderate(limits(coalescing), reply)).await;
        Ok(handle)
    }

    /// Makes the handler of a receiveq. The caller must hold `told`.
    fn receiver(&self, pair: usize, features: u64, ring_size: u16) -> Result<NetRx, StartError> {
        let port = self.host.port.open_rx(pair)?;
        let is_mergeable = features & VIRTIO_NET_F_MRG_RXBUF != 0;
        let rx = NetRx::new(port, self.renew_rules(), is_mergeable, ring_size);
        let mut rx = rx.map_err(no_memory)?.follow(self.live.clone()).limited(self.limit.clone());
        rx = rx.gated(self.receiving.gate(pair));
        rx.set_headers(header_size(features));
        Ok(rx)
    }

    /// Makes the handler of a transmitq. The caller must hold `told`.
    fn transmitter(&self, pair: usize, features: u64) -> Result<NetTx, StartError> {
        let port = self.host.port.open_tx(pair)?;
        let tx = NetTx::new(port, self.renew_rules(), Offloads::of_host(features));
        let mut tx = tx.map_err(no_memory)?.named(&self.options.name, pair * 2 + 1);
        tx.set_headers(header_size(features));
        let tx = tx.reclaiming(self.options.reclaim).follow(self.live.clone());
        Ok(tx.limited(self.limit.clone()))
    }

    /// Computes new rules from the present state, and returns them. The caller must tell the
    /// running queues.
    fn renew_rules(&self) -> Arc<Rules> {
        self.live.set(self.rules());
        self.live.load()
    }

    pub(super) async fn set_enabled(&self, index: usize, enabled: bool) {
        if let Some(vq) = self.state().vqs.get_mut(index) {
            vq.is_enabled = enabled;
        }
        self.apply_pairs().await;
    }

    /// Call when a virtqueue has stopped, or did not start.
    pub(super) async fn stopped(&self, index: usize, is_control: bool) {
        {
            let mut state = self.state();
            if is_control {
                state.has_control = false;
            }
            if let Some(vq) = state.vqs.get_mut(index) {
                vq.is_started = false;
                vq.route = std::sync::Weak::new();
            }
        }
        self.apply_pairs().await;
    }

    /// Has workers serve the pairs in use, and has the port spread frames over them by the guest's
    /// hash. No frame may go to a pair that is not served: so the hash is set after its pairs are
    /// served, and removed before pairs are taken out of use. Returns false if the port refuses.
    pub(super) async fn apply_steering(&self) -> bool {
        if self.state().port.rss.is_some() {
            return self.apply_pairs().await && self.apply_rss().await;
        }
        let forgets = self.apply_rss().await;
        self.apply_pairs().await && forgets
    }

    /// Tells each queue that must begin or stop to serve. A queue is told to begin only if its pair
    /// `may_begin`.
    async fn tell_served(&self, may_begin: impl Fn(&State, usize) -> bool) {
        let _told = self.told.lock().await;
        for index in 0..self.options.queue_pairs * 2 {
            let (serves, route) = {
                let mut state = self.state();
                let serves = state.serves(index);
                let waits = serves && !may_begin(&state, index / 2);
                let vq = &mut state.vqs[index];
                if waits || vq.is_served == serves {
                    continue;
                }
                vq.is_served = serves;
                (serves, vq.route.upgrade())
            };
            if let Some(route) = route {
                route.set_enabled(serves).await;
            }
        }
    }

    fn routes(&self) -> Vec<Arc<manyring_engine::Route>> {
        self.state().vqs.iter().filter_map(|vq| vq.route.upgrade()).collect()
    }

    /// Passes coalescing parameters to these virtqueues; returns when their workers have applied
    /// them.
    pub(super) async fn push_coalescing(&self, indices: &[usize]) {
        let _told = self.told.lock().await;
        for index in indices {
            let found = {
                let state = self.state();
                state.vqs.get(*index).map(|vq| (vq.route.upgrade(), vq.coalescing))
            };
            if let Some((Some(route), coalescing)) = found {
                route.ask(|reply| Order::Moderate(limits(coalescing), reply)).await;
            }
        }
    }

    pub(super) async fn send_rarp(&self, mac: MacAddress) -> bool {
        let device = &self.options.name;
        if !self.state().port.is_link_up() {
            tracing::info!(device, ?mac, "guest not announced: its link is down");
            return true;
        }
        let (port, frame) = (self.host.port.clone(), rarp(mac));
        let sent = aside(move || port.transmit(&frame)).await;
        match sent.unwrap_or(Err(Errno::INTR)) {
            Ok(()) => tracing::info!(device, ?mac, "guest announced"),
            Err(errno) => tracing::warn!(device, %errno, "guest could not be announced"),
        }
        true
    }
}

impl HasPort for Inner {
    fn name(&self) -> &str {
        &self.options.name
    }

    fn host(&self) -> &HostPort {
        &self.host
    }

    fn with<T>(&self, act: impl FnOnce(&mut PortState) -> T) -> T {
        act(&mut self.state().port)
    }

    fn next_pair(&self, is_refused: &[bool]) -> Option<(usize, bool)> {
        let state = self.state();
        let wanted = |pair| state.serves(pair * 2) || state.serves(pair * 2 + 1);
        state.port.next_pair(is_refused, wanted)
    }

    /// Has running queues adopt the present rules; returns when they have.
    async fn push_rules(&self) {
        let _told = self.told.lock().await;
        self.renew_rules();
        for route in self.routes() {
            route.ask(Order::Refresh).await;
        }
    }

    /// Has workers serve the queues of the pairs in use and no others. A pair is attached to the
    /// host before its queues are served, and detached after that. Returns false if the port
    /// refuses a change.
    async fn apply_pairs(&self) -> bool {
        // First make the changes that need no call of the host: they need not wait for the host.
        self.tell_served(|state, pair| state.port.attached[pair]).await;
        let mut pace = self.host.calls.lock().await;
        let follows = self.attach(&mut pace).await;
        // Serve also pairs that the host has refused: frames then pass at least in one direction.
        self.tell_served(|_, _| true).await;
        follows
    }

    /// A running driver keeps the MTU that it was told (§5.1.4.2); the next one reads the new MTU.
    fn note_mtu(&self, mtu: u16) {
        let mut state = self.state();
        state.port.mtu = Some(mtu);
        if state.features == 0 {
            state.mtu_told = Some(mtu);
        }
    }
}
