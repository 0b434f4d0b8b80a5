//! `NetDriver`: a virtio-net driver: queue pairs, the control queue in both ownerships.

mod control_queue;
mod options;
mod rx;
mod slab;
mod tx;

pub use control_queue::{ControlDriverQueue, CtrlAnswer};
pub use options::{ControlOwner, NetCounters, NetDriverOptions};
pub use rx::NetDriverRx;
pub use tx::NetDriverTx;

use crate::{Arena, DriverError, FrontEnd};
use manyring_queue::RingFeatures;
use manyring_wire::net::{
    CtrlStatus, NetConfig, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_MQ, VIRTIO_NET_F_RSS, controlq,
    receiveq, transmitq,
};
use manyring_wire::vhost_user::{F_PROTOCOL_FEATURES, PROTOCOL_F_CONFIG};
use slab::BufferPool;
use std::path::Path;
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

/// A queue pair. Owned by one thread, or by two: one for each half.
#[derive(Debug)]
pub struct NetPair {
    /// The receiveq.
    pub rx: NetDriverRx,
    /// The transmitq.
    pub tx: NetDriverTx,
}

/// A guest with a virtio-net device.
#[derive(Debug)]
pub struct NetDriver {
    /// The vhost-user session with the back-end.
    pub front: FrontEnd,
    /// Guest memory.
    pub arena: Arc<Arena>,
    /// The queue pairs; may be moved out, one to each thread.
    pub pairs: Vec<NetPair>,
    /// The control queue, if the device serves it.
    pub control: Option<ControlDriverQueue>,
    /// The config space as read at the start; zero without `PROTOCOL_F_CONFIG`.
    pub config: NetConfig,
    /// The virtio features that were negotiated.
    pub features: u64,
    options: NetDriverOptions,
}

impl NetDriver {
    /// Connects to the device at `path` and starts its queues.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn connect(path: &Path, options: &NetDriverOptions) -> Result<Self, DriverError> {
        Self::start(FrontEnd::connect(path, options.max_wait)?, options)
    }

    /// Starts the device at the other end of a connection. All queue pairs are set up, filled with
    /// buffers and enabled. A device that serves its control queue starts with one pair in use, as
    /// the specification says: see [`Self::set_queue_pairs`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(mut front: FrontEnd, options: &NetDriverOptions) -> Result<Self, DriverError> {
        let features = negotiate(&mut front, options)?;
        let config = read_config(&mut front)?;
        let ring = RingFeatures::from_bits(features);
        let per_pair = NetDriverRx::arena_size(options) + NetDriverTx::arena_size(options);
        let pairs_size = u64::from(options.queue_pairs) * per_pair;
        let size = pairs_size + ControlDriverQueue::arena_size() + options.spare;
        let arena = Arc::new(Arena::new(size)?);
        // Refuses more buffers than a shared pool can number.
        let count = options.queue_pairs.checked_mul(options.queue_size);
        let pool = match count.filter(|_| options.shared_buffers) {
            Some(count) => Some(Arc::new(BufferPool::new(&arena, count, options.transmit_size)?)),
            None => None,
        };
        let pair = |index| {
            let rx = NetDriverRx::new(&arena, index, features, options)?;
            let tx = match &pool {
                Some(pool) => NetDriverTx::sharing(pool, &arena, index, ring, options)?,
                None => NetDriverTx::new(&arena, index, ring, options)?,
            };
            Ok(NetPair { rx, tx: tx.with_headers(features) })
        };
        let pairs = (0..options.queue_pairs).map(pair).collect::<Result<_, DriverError>>()?;
        let control = match features & VIRTIO_NET_F_CTRL_VQ {
            0 => None,
            _ => {
                let index = controlq(features, config.max_virtqueue_pairs.get().into());
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                Some(ControlDriverQueue::new(&arena, index, ring)?)
            }
        };
        let options = options.clone();
        let mut driver = Self { front, arena, pairs, control, config, features, options };
        driver.start_rings()?;
        Ok(driver)
    }

    /// Sends memory and rings to the back-end; each ring goes on where the last back-end left it.
    fn start_rings(&mut self) -> Result<(), DriverError> {
        self.front.set_memory(&self.arena)?;
        let pairs = self.pairs.iter_mut();
        let rings = pairs.flat_map(|pair| [pair.rx.vring(), pair.tx.vring()]);
        for vring in rings.chain(self.control.as_mut().map(ControlDriverQueue::vring)) {
            let base = vring.resume_base();
            self.front.start_vring(vring, base)?;
        }
        Ok(())
    }

    /// Connects again after the back-end has died, with the same memory and rings. Each ring goes
    /// on behind the last chain that was returned, so that frames in flight are sent again. All
    /// pairs must be in [`Self::pairs`].
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reconnect(&mut self, path: &Path) -> Result<(), DriverError> {
        self.front = FrontEnd::connect(path, self.options.max_wait)?;
        negotiate(&mut self.front, &self.options)?;
        self.start_rings()?;
        for pair in &mut self.pairs {
            pair.rx.vring().kick()?;
            pair.tx.vring().kick()?;
        }
        Ok(())
    }

    /// Uses the first `count` queue pairs. Tells the device by a command if the device owns the
    /// control queue, else by `SET_VRING_ENABLE` for each ring.
    ///
    /// # Errors
    /// [`DriverError::Status`] or [`DriverError::Refused`] if the device refuses.
    pub fn set_queue_pairs(&mut self, count: u16) -> Result<(), DriverError> {
        if let Some(control) = &mut self.control {
            return match control.set_queue_pairs(count)? {
                CtrlStatus::Ok => Ok(()),
                CtrlStatus::Err => Err(DriverError::Status(CtrlStatus::Err as u8)),
            };
        }
        for pair in 0..self.options.queue_pairs {
            for index in [receiveq(pair.into()), transmitq(pair.into())] {
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                self.front.set_vring_enable(index, pair < count)?;
            }
        }
        Ok(())
    }

    /// Sends `SEND_RARP`, as a front-end does after a migration: the device then announces the
    /// guest.
    ///
    /// # Errors
    /// See [`FrontEnd::features`].
    pub fn announce(&mut self) -> Result<(), DriverError> {
        self.front.send_rarp(self.config.mac)
    }

    /// The control queue.
    ///
    /// # Errors
    /// [`DriverError::NoControlQueue`] if the front-end owns it, or it was not offered.
    pub fn control(&mut self) -> Result<&mut ControlDriverQueue, DriverError> {
        self.control.as_mut().ok_or(DriverError::NoControlQueue)
    }

    /// Number of queue pairs of the device, from its config space; 1 if the config space has none.
    #[must_use]
    pub fn queue_pairs_max(&self) -> u16 {
        match self.features & (VIRTIO_NET_F_MQ | VIRTIO_NET_F_RSS) {
            0 => 1,
            _ => self.config.max_virtqueue_pairs.get().max(1),
        }
    }
}

fn negotiate(front: &mut FrontEnd, options: &NetDriverOptions) -> Result<u64, DriverError> {
    // A driver that does not ask for `VERSION_1` is a legacy driver.
    front.negotiate(options.wanted(), F_PROTOCOL_FEATURES, options.protocol_features)
}

fn read_config(front: &mut FrontEnd) -> Result<NetConfig, DriverError> {
    let mut config = NetConfig::new_zeroed();
    if front.agreed_protocol_features() & PROTOCOL_F_CONFIG != 0 {
        let size = u32::try_from(size_of::<NetConfig>()).unwrap_or(0);
        let bytes = front.config(0, size)?;
        config.as_mut_bytes()[..bytes.len()].copy_from_slice(&bytes);
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
