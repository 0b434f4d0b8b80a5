//! Which queue pairs are in use: starts, stops and enables virtqueues, and lets the port follow.

use super::{Inner, NetRx, NetTx};
use crate::handle::QueueHandle;
use crate::queue::{Change, Handler, RunningQueue};
use crate::{Activation, StartError};
use manyring_wire::net::{MacAddress, Offloads, VIRTIO_NET_F_MRG_RXBUF};
use manyring_wire::virtio::VIRTIO_F_VERSION_1;
use rustix::io::Errno;
use std::sync::Arc;

/// RARP frame: what QEMU's users know from a guest that has moved (RFC 903, request reverse).
fn rarp(mac: MacAddress) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(mac);
    // Type RARP; Ethernet, IPv4, sizes 6 and 4, operation 3.
    frame.extend([0x80, 0x35, 0, 1, 0x08, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.resize(60, 0);
    frame
}

impl Inner {
    /// Starts a receiveq or transmitq. The host may use its pair before the first frame passes.
    pub(super) async fn start_queue(
        &self,
        mut activation: Activation,
    ) -> Result<QueueHandle, StartError> {
        let (index, features) = (activation.index, activation.features);
        let (pair, is_rx) = (index / 2, index.is_multiple_of(2));
        if features & VIRTIO_F_VERSION_1 == 0 {
            return Err(StartError::Legacy);
        }
        if pair >= self.options.queue_pairs {
            return Err(StartError::Backend(Errno::NXIO));
        }
        let coalescing = {
            let mut state = self.state();
            let default = if is_rx { state.coalescing_rx } else { state.coalescing_tx };
            let vq = &mut state.vqs[index];
            (vq.is_started, vq.is_enabled) = (true, activation.enabled);
            vq.is_control = false;
            vq.coalescing = default;
            default
        };
        // Held until the queue can be told of changes: none is missed, and none comes twice.
        let mut attached = self.attached.lock().await;
        self.attach(&mut attached).await;
        activation.enabled = self.serves(index);
        self.state().vqs[index].is_served = activation.enabled;
        let queue = match self.handler(pair, is_rx, features, activation.queue.size()) {
            Ok(handler) => RunningQueue::new(activation, handler, self.stats[index].clone()),
            Err(error) => {
                drop(attached);
                self.stopped(index, false).await;
                return Err(error);
            }
        };
        let Some(handle) = self.pool.start(queue) else {
            drop(attached);
            self.stopped(index, false).await;
            return Err(StartError::NoWorker);
        };
        if let Some(route) = handle.route() {
            self.state().vqs[index].route = Arc::downgrade(route);
            route.change(Change::Coalescing(coalescing)).await;
        }
        Ok(handle)
    }

    fn handler(
        &self,
        pair: usize,
        is_rx: bool,
        features: u64,
        ring_size: u16,
    ) -> Result<Handler, StartError> {
        let rules = Arc::new(self.rules());
        let no_memory = |_| StartError::Backend(Errno::NOMEM);
        Ok(if is_rx {
            let port = self.port.open_rx(pair)?;
            let is_mergeable = features & VIRTIO_NET_F_MRG_RXBUF != 0;
            Handler::Rx(NetRx::new(port, rules, is_mergeable, ring_size).map_err(no_memory)?)
        } else {
            let port = self.port.open_tx(pair)?;
            Handler::Tx(NetTx::new(port, rules, Offloads::of_host(features)).map_err(no_memory)?)
        })
    }

    /// True if the virtqueue runs, is enabled, and its pair is in use.
    fn serves(&self, index: usize) -> bool {
        let state = self.state();
        let in_use = !state.has_control || index / 2 < state.pairs_in_use;
        state.vqs.get(index).is_some_and(|vq| vq.is_started && vq.is_enabled && in_use)
    }

    pub(super) async fn set_enabled(&self, index: usize, enabled: bool) {
        if let Some(vq) = self.state().vqs.get_mut(index) {
            vq.is_enabled = enabled;
        }
        self.apply_pairs().await;
    }

    /// A virtqueue has stopped, or did not start.
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

    /// Serves the queues of the pairs in use and no others: what begins is attached before it is
    /// served, what ends is served no more before it is detached.
    /// False if the port does not follow.
    pub(super) async fn apply_pairs(&self) -> bool {
        let mut attached = self.attached.lock().await;
        let count = self.options.queue_pairs * 2;
        for index in (0..count).filter(|i| !self.serves(*i)) {
            self.enable(index, false).await;
        }
        let follows = self.attach(&mut attached).await;
        for index in (0..count).filter(|i| self.serves(*i)) {
            self.enable(index, true).await;
        }
        follows
    }

    /// Tells a queue, unless it knows.
    async fn enable(&self, index: usize, enabled: bool) {
        let route = {
            let vq = &mut self.state().vqs[index];
            let knows = std::mem::replace(&mut vq.is_served, enabled) == enabled;
            if knows { None } else { vq.route.upgrade() }
        };
        if let Some(route) = route {
            route.set_enabled(enabled).await;
        }
    }

    /// Lets the host use the pairs that are served, and no others. False if it does not all of it.
    async fn attach(&self, attached: &mut [bool]) -> bool {
        let mut follows = true;
        for pair in 0..attached.len() {
            let wanted = self.serves(pair * 2) || self.serves(pair * 2 + 1);
            if attached[pair] == wanted {
                continue;
            }
            let port = self.port.clone();
            let done = tokio::task::spawn_blocking(move || port.set_attached(pair, wanted)).await;
            match done.unwrap_or(Err(Errno::INTR)) {
                Ok(()) => {
                    attached[pair] = wanted;
                    let count = attached.iter().map(|a| u64::from(*a)).sum();
                    self.attached_pairs.set(count);
                }
                Err(errno) => {
                    follows = false;
                    let device = &self.options.name;
                    tracing::warn!(device, pair, wanted, %errno, "the port does not follow");
                }
            }
        }
        follows
    }

    /// Gives running queues what they go by now; returns when they do.
    pub(super) async fn push_rules(&self) {
        // One after the other: the last word is the newest.
        let _changes = self.attached.lock().await;
        let rules = Arc::new(self.rules());
        for route in self.routes() {
            route.change(Change::Rules(rules.clone())).await;
        }
    }

    fn routes(&self) -> Vec<Arc<crate::handle::Route>> {
        self.state().vqs.iter().filter_map(|vq| vq.route.upgrade()).collect()
    }

    /// Gives the virtqueue its coalescing parameters; returns when it has them.
    pub(super) async fn push_coalescing(&self, index: usize) {
        let _changes = self.attached.lock().await;
        let found = {
            let state = self.state();
            state.vqs.get(index).map(|vq| (vq.route.upgrade(), vq.coalescing))
        };
        if let Some((Some(route), coalescing)) = found {
            route.change(Change::Coalescing(coalescing)).await;
        }
    }

    pub(super) async fn send_rarp(&self, mac: MacAddress) -> bool {
        let device = &self.options.name;
        if !self.state().link_up {
            tracing::info!(device, ?mac, "guest not announced: its link is down");
            return true;
        }
        let (port, frame) = (self.port.clone(), rarp(mac));
        let sent = tokio::task::spawn_blocking(move || port.transmit(&frame)).await;
        match sent.unwrap_or(Err(Errno::INTR)) {
            Ok(()) => tracing::info!(device, ?mac, "guest announced"),
            Err(errno) => tracing::warn!(device, %errno, "guest could not be announced"),
        }
        true
    }
}
