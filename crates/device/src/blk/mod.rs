//! `BlkDevice`: a virtio block device (virtio 1.3 §5.2): its queues, features and config space.

mod backing;
pub mod blkif;
mod config;
mod handler;
mod hold;
mod host;
mod host_disk;
mod limited;
mod pending;
mod requests;
mod state;
mod virtio;
mod waiting_for_space;

pub use host::OnFull;
pub use host_disk::{HostDisk, Resize};
pub(crate) use virtio::BlkQueue;

use crate::state::Saved;
use crate::{ConfigError, Device, DeviceStats, PendingResult, StartError, StateError};
use backing::Backing;
use hold::Hold;
use host::HostErrors;
use manyring_backend::blk::Disk;
use manyring_engine::Activation;
use manyring_engine::Limit;
use manyring_engine::Moderation;
use manyring_engine::QueueHandle;
use manyring_engine::StopError;
use manyring_engine::stats::{QueueClass, QueueStats};
use manyring_engine::{Home, Pool};
use manyring_queue::Base;
use manyring_wire::blk::{CONFIG_WRITEBACK, ID_SIZE, VIRTIO_BLK_F_FLUSH};
use manyring_wire::vhost_user::PROTOCOL_F_INFLIGHT_SHMFD;
use manyring_wire::virtio::VIRTIO_ID_BLOCK;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use state::CacheMode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// The most requests of a queue in flight; further requests wait in the ring. This bounds the
/// memory for requests in flight, whatever the ring's size, and no disk needs more requests at a
/// time.
pub(crate) const IN_FLIGHT_MAX: u16 = 1024;

/// The properties of a block device, as the operator configures them.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlkOptions {
    /// Name of the device in the configuration.
    #[serde(skip)]
    pub name: String,
    /// Request queues, 1 to 256.
    pub num_queues: usize,
    /// Ring size from which `seg_max` is derived; a power of two. Rings may have any size.
    pub queue_size: u16,
    /// The device id string (`VIRTIO_BLK_T_GET_ID`), of which 20 bytes are used.
    pub serial: String,
    /// True if the guest may not write (`VIRTIO_BLK_F_RO`).
    pub read_only: bool,
    /// True if the cache mode is write-back at first; the driver may change it.
    pub writeback: bool,
    /// The logical block size that the guest reads; `None`: the disk's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<u32>,
    /// Whether a write for which the host has no space waits or fails.
    pub on_full: OnFull,
    /// How used buffer notifications are held back.
    pub moderation: Moderation,
}

impl Default for BlkOptions {
    /// Makes a disk called `blk` with one queue and a write-back cache.
    fn default() -> Self {
        Self {
            name: "blk".to_owned(),
            num_queues: 1,
            queue_size: 128,
            serial: String::new(),
            read_only: false,
            writeback: true,
            logical_block_size: None,
            on_full: OnFull::default(),
            moderation: Moderation::default(),
        }
    }
}

/// State that all queues of a device share: the control thread writes it, workers read it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) capacity: AtomicU64,
    /// True if every write must be durable at completion.
    pub(crate) write_through: AtomicBool,
    pub(crate) read_only: bool,
    /// The features that the device offers: a request that needs another feature is answered as
    /// unsupported.
    pub(crate) offered: u64,
    pub(crate) serial: [u8; ID_SIZE],
    pub(crate) host: Arc<HostErrors>,
    pub(crate) limit: Arc<Limit>,
}

/// A block device.
#[derive(Debug)]
pub struct BlkDevice {
    options: BlkOptions,
    backing: Backing,
    hold: Hold,
    shared: Arc<Shared>,
    /// The field `writeback` of the config space (§5.2.4).
    writeback: AtomicBool,
    /// True if writes must be durable whatever `writeback` says: see [`Device::reset_config`].
    stays_durable: AtomicBool,
    /// The features that were negotiated.
    features: AtomicU64,
    /// The cache mode from another process, until the driver's features arrive.
    awaited: Mutex<Option<CacheMode>>,
}

impl BlkDevice {
    /// Makes a device on `disk`, whose queues run in `pool`.
    #[must_use]
    pub fn new(mut options: BlkOptions, disk: Arc<dyn Disk>, pool: Arc<Pool>) -> Self {
        let queues = disk.queues_max();
        if options.num_queues > queues {
            let device = &options.name;
            tracing::info!(device, queues, "the disk's server allows no more queues");
            options.num_queues = queues;
        }
        let host = HostDisk::new(disk, options.logical_block_size, options.read_only);
        let backing = Backing::new(host, pool, options.num_queues, QueueClass::Blk);
        let geometry = backing.host.geometry();
        options.read_only = backing.host.is_read_only();
        let mut serial = [0; ID_SIZE];
        let len = options.serial.len().min(ID_SIZE);
        serial[..len].copy_from_slice(&options.serial.as_bytes()[..len]);
        let shared = Arc::new(Shared {
            capacity: AtomicU64::new(geometry.size),
            write_through: AtomicBool::new(!options.writeback),
            read_only: options.read_only,
            offered: config::features(&options, &geometry),
            serial,
            host: Arc::new(HostErrors::new(&options.name, options.on_full, backing.disk().clone())),
            limit: Arc::default(),
        });
        Self {
            writeback: AtomicBool::new(options.writeback),
            stays_durable: AtomicBool::new(false),
            options,
            backing,
            hold: Hold::default(),
            shared,
            features: AtomicU64::new(0),
            awaited: Mutex::default(),
        }
    }

    /// Makes a queue of this device that no worker runs, for fuzzing and benchmarks.
    #[cfg(any(fuzzing, feature = "bench"))]
    pub(crate) fn solo(
        &self,
        disk: Box<dyn manyring_backend::blk::DiskQueue>,
        memory: Arc<manyring_memory::GuestMemory>,
    ) -> BlkQueue {
        BlkQueue::new(disk, self.shared.clone(), memory)
    }

    /// Returns the disk behind the device.
    #[must_use]
    pub fn host(&self) -> &Arc<HostDisk> {
        &self.backing.host
    }

    /// Returns the counters of all queues.
    #[must_use]
    pub fn all_stats(&self) -> &Arc<DeviceStats> {
        &self.backing.stats
    }

    fn disk(&self) -> &Arc<dyn Disk> {
        self.backing.disk()
    }

    /// Returns the limit on requests and bytes per second. After a change, running queues follow it
    /// only when [`Pool::refresh`] tells them.
    #[must_use]
    pub fn limit(&self) -> &Arc<Limit> {
        &self.shared.limit
    }

    async fn start_queue(&self, activation: Activation) -> Result<QueueHandle, StartError> {
        self.hold.begin(self.disk(), &self.options.name).await?;
        let started = self.start_held(activation).await;
        if started.is_err() {
            self.hold.end(self.disk()).await;
        }
        started
    }

    /// Stops a queue, and unlocks the image after the last one. If the worker has ended, requests
    /// may still be in flight, so the image stays locked.
    async fn stop_queue(&self, queue: QueueHandle) -> Result<Base, StopError> {
        let base = queue.stop().await?;
        self.hold.end(self.disk()).await;
        Ok(base)
    }

    async fn start_held(&self, activation: Activation) -> Result<QueueHandle, StartError> {
        let disk = self.backing.open_queue_aside().await?;
        let stats = self.backing.stats.get(activation.index).unwrap_or_default();
        let memory = activation.queue.memory().clone();
        let features = activation.features;
        let blk = BlkQueue::new(disk, self.shared.clone(), memory).with_features(features);
        let home = Home { device: self.options.name.clone(), unit: activation.index };
        let queue = activation.running(blk, stats, self.options.moderation);
        self.backing.pool.start(queue, home).ok_or(StartError::NoWorker)
    }

    /// True if the present driver has negotiated `VIRTIO_BLK_F_FLUSH`.
    fn can_flush(&self) -> bool {
        self.features.load(Ordering::Relaxed) & VIRTIO_BLK_F_FLUSH != 0
    }

    /// Sets write-back only if the driver can flush and wants it (§5.2.6.2), else write-through.
    fn apply_cache_mode(&self) {
        let wanted = self.writeback.load(Ordering::Relaxed);
        let writeback = wanted && self.can_flush() && !self.stays_durable.load(Ordering::Relaxed);
        self.shared.write_through.store(!writeback, Ordering::Release);
    }
}

impl Resize for BlkDevice {
    fn resize(&self, size: Option<u64>) -> Result<u64, Errno> {
        self.backing.resize(&self.shared.capacity, size)
    }
}

impl Device for BlkDevice {
    fn name(&self) -> &str {
        &self.options.name
    }

    fn virtio_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        config::features(&self.options, &self.backing.host.geometry())
    }

    fn protocol_features(&self) -> u64 {
        PROTOCOL_F_INFLIGHT_SHMFD
    }

    fn queue_count(&self) -> usize {
        self.options.num_queues
    }

    fn queue_size_max(&self) -> u16 {
        manyring_wire::virtqueue::QUEUE_SIZE_MAX
    }

    fn read_config(&self, offset: u32, bytes: &mut [u8]) {
        self.backing.tell_geometry(&self.options.name);
        let writeback = self.writeback.load(Ordering::Relaxed);
        config::read(&self.options, &self.backing.host.geometry(), writeback, offset, bytes);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError> {
        match bytes {
            [value] if offset == CONFIG_WRITEBACK => {
                // A driver that cannot flush cannot switch to write-back: the field stays 0.
                self.writeback.store(*value != 0 && self.can_flush(), Ordering::Relaxed);
                self.stays_durable.store(false, Ordering::Relaxed);
                self.apply_cache_mode();
                Ok(())
            }
            _ => Err(ConfigError { offset, len: bytes.len() }),
        }
    }

    /// Sets the field `writeback` to its initial value. QEMU writes status 0 also when it pauses
    /// its guest, which then continues with its former cache mode. So if that mode was
    /// write-through, writes stay durable until a driver writes the field, or until the features
    /// are reset.
    fn reset_config(&self) {
        let initial = self.options.writeback;
        let former = self.writeback.swap(initial, Ordering::Relaxed);
        if initial && !former && self.can_flush() {
            self.stays_durable.store(true, Ordering::Relaxed);
        }
    }

    fn set_features(&self, features: u64) -> PendingResult<'_, ()> {
        let former = self.features.swap(features, Ordering::Relaxed);
        let can_flush = features & VIRTIO_BLK_F_FLUSH != 0;
        if features == 0 {
            self.writeback.store(self.options.writeback, Ordering::Relaxed);
            self.stays_durable.store(false, Ordering::Relaxed);
        } else if !can_flush {
            // The field must be 0 for a driver that may switch the mode and cannot flush
            // (§5.2.5.2).
            self.writeback.store(false, Ordering::Relaxed);
        } else if former != 0 && former & VIRTIO_BLK_F_FLUSH == 0 {
            // Features do not change while a driver runs, so this is another driver.
            self.writeback.store(self.options.writeback, Ordering::Relaxed);
        }
        self.apply_cache_mode();
        self.adopt(features);
        Box::pin(std::future::ready(()))
    }

    fn config_changes(&self) -> watch::Receiver<u64> {
        self.backing.host.changes()
    }

    fn start(&self, activation: Activation) -> PendingResult<'_, Result<QueueHandle, StartError>> {
        Box::pin(self.start_queue(activation))
    }

    fn stop(&self, _: usize, queue: QueueHandle) -> PendingResult<'_, Result<Base, StopError>> {
        Box::pin(self.stop_queue(queue))
    }

    fn save(&self) -> Vec<u8> {
        self.saved().emit()
    }

    fn restore<'a>(&'a self, state: &'a [u8]) -> PendingResult<'a, Result<(), StateError>> {
        let saved = Saved::parse(state, VIRTIO_ID_BLOCK, self.shared.offered);
        Box::pin(std::future::ready(saved.and_then(|saved| self.take(&saved))))
    }

    fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.backing.stats.get(index)
    }
}

#[cfg(test)]
pub(crate) mod tests;
