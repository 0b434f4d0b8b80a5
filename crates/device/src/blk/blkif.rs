//! `XenBlkDevice`: a Xen block device on a disk: the features that it offers, and its queues.
//!
//! ```text
//! offer, disk_nodes     make nodes of the back-end's folder in xenstore
//! start(attachment)     maps the ring of one queue and gives the queue to a worker
//! QueueHandle::stop     returns when nothing of the queue is in flight, mapped or notified
//! ```
//! virtio-blk and Xen's blkif share the code for the disk, its queues, limits and counters
//! (`backing.rs`, `requests.rs`). Here, the requests of a queue come from a ring of Xen's format
//! (`queue.rs`), and their data lies in pages that the guest grants by reference.

mod complete;
mod handler;
mod indirect;
mod journal;
mod limited;
mod plan;
mod queue;
mod stages;

pub use manyring_wire::xen::blkif::{Abi, INDIRECT_SEGMENTS_MAX, RING_PAGE_ORDER_MAX};

use super::backing::Backing;
use super::host::{HostErrors, OnFull};
use super::{HostDisk, Resize};
use crate::{DeviceStats, StartError};
use handler::BlkifHandler;
use manyring_backend::blk::{Disk, DiskQueue};
use manyring_engine::stats::{QueueClass, QueueStats};
use manyring_engine::{
    Activation, Call, Event, Home, Kick, Limit, Moderation, Pool, QueueHandle, RunningQueue,
};
use manyring_memory::{GrantLimits, GrantMapper, GrantPages, GrantRef, PersistentGrants};
use manyring_queue::RingAddresses;
use manyring_queue::blkif::{BackRing, RingConfig, journal_size};
use manyring_wire::xen::blkif::{SECTOR_SIZE, VDISK_READONLY};
use manyring_wire::xen::device::{Discard, DiskGeometry as DiskNodes, Offer};
use queue::{BlkifQueue, QueueParts};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::sync::mpsc;

/// The number of grant references in a lot: these are mapped and unmapped together. For its pages
/// that do not stay mapped, a request takes one lot for each `LOT_PAGES` of them.
const LOT_PAGES: usize = 32;

/// The properties of a Xen block device, as the operator configures them.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct XenBlkOptions {
    /// Name of the device in the configuration.
    #[serde(skip)]
    pub name: String,
    /// The most queues of a front-end.
    pub num_queues: usize,
    /// True if the guest may not write.
    pub read_only: bool,
    /// True: writes are durable when the guest flushes. False: when they are answered.
    pub writeback: bool,
    /// The logical block size that the guest reads; `None`: the disk's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<u32>,
    /// Whether a write for which the host has no space waits or fails.
    pub on_full: OnFull,
    /// True if discards are offered, where the disk supports them.
    pub discard: bool,
    /// True if write barriers are offered. A front-end that uses barriers need not flush, but each
    /// barrier waits for all requests before it.
    pub barrier: bool,
    /// True if grants stay mapped for front-ends that use the same grants again.
    pub persistent: bool,
    /// Most grants of a queue that stay mapped.
    pub persistent_max: u32,
    /// Most segments of an indirect request; 0: indirect requests are not offered.
    pub indirect_segments_max: u16,
    /// The largest ring, as log2 of its number of pages.
    pub ring_page_order_max: u32,
    /// How notifications to the guest are held back.
    pub moderation: Moderation,
}

impl XenBlkOptions {
    /// Returns the default options, for a device of this name with at most `num_queues` queues.
    #[must_use]
    pub fn new(name: impl Into<String>, num_queues: usize) -> Self {
        Self {
            name: name.into(),
            num_queues,
            read_only: false,
            writeback: true,
            logical_block_size: None,
            on_full: OnFull::default(),
            discard: true,
            barrier: false,
            persistent: true,
            persistent_max: 1056,
            indirect_segments_max: 256,
            ring_page_order_max: RING_PAGE_ORDER_MAX,
            moderation: Moderation::Off,
        }
    }

    fn segments_max(&self) -> u16 {
        self.indirect_segments_max.min(INDIRECT_SEGMENTS_MAX)
    }

    fn order_max(&self) -> u32 {
        self.ring_page_order_max.min(RING_PAGE_ORDER_MAX)
    }

    /// Returns the features that a device on `disk` offers, for the back-end's folder in xenstore.
    #[must_use]
    pub fn offer(&self, disk: &HostDisk) -> Offer {
        let geometry = disk.geometry();
        let discard = self.discard && !disk.is_read_only() && geometry.discard_max > 0;
        Offer {
            barrier: self.barrier,
            flush: true,
            discard: discard.then_some(Discard {
                alignment: 0,
                granularity: Some(geometry.block_size),
                secure: geometry.secure_erase_max > 0,
            }),
            persistent: self.persistent,
            indirect_segments_max: self.segments_max(),
            ring_page_order_max: self.order_max(),
            queues_max: u32::try_from(self.num_queues).unwrap_or(u32::MAX),
        }
    }
}

/// Returns the size and sectors of a disk, for the back-end's folder in xenstore. The caller must
/// write them again whenever [`HostDisk::changes`] changes.
#[must_use]
pub fn disk_nodes(disk: &HostDisk) -> DiskNodes {
    let geometry = disk.geometry();
    DiskNodes {
        sectors: disk.size() / SECTOR_SIZE,
        sector_size: geometry.block_size,
        physical_sector_size: geometry.physical_block_size,
        info: if disk.is_read_only() { VDISK_READONLY } else { 0 },
    }
}

/// State that all queues of a device share: the control thread writes it, workers read it.
#[derive(Debug)]
struct Shared {
    capacity: AtomicU64,
    host: Arc<HostErrors>,
    limit: Arc<Limit>,
}

/// One queue of a connected front-end: the values that it has written, and the resources for
/// serving the queue.
#[derive(Debug)]
pub struct Attachment {
    /// Index of the queue.
    pub index: usize,
    /// The layout of the ring's requests, which the front-end has chosen.
    pub abi: Abi,
    /// Grant references of the ring's pages: a power of two of them.
    pub ring_refs: Vec<u32>,
    /// True if the front-end uses the same grants again and again (`feature-persistent`).
    pub persistent: bool,
    /// Most segments of an indirect request, as the front-end was offered. A former process may
    /// have offered more than this device does.
    pub indirect_segments_max: u16,
    /// The journal: a file for this queue and connection alone, which outlives this process. It
    /// records the requests that were taken and not answered. It must be readable and writable; it
    /// is empty, or has the content that a former process left, and may have any size. `None`: no
    /// process can take over the ring.
    pub journal: Option<OwnedFd>,
    /// True if a former process has served this ring, and the front-end has stayed connected since.
    pub takeover: bool,
    /// Maps the pages that the front-end's domain has granted.
    pub mapper: GrantMapper,
    /// Receives events from the front-end, over the event channel.
    pub kick: Kick,
    /// Sends events to the front-end, over the event channel.
    pub call: Arc<Call>,
    /// Reports faults of the queue to the session.
    pub events: mpsc::Sender<Event>,
}

/// A Xen block device.
#[derive(Debug)]
pub struct XenBlkDevice {
    options: XenBlkOptions,
    backing: Backing,
    shared: Arc<Shared>,
}

impl Resize for XenBlkDevice {
    fn resize(&self, size: Option<u64>) -> Result<u64, Errno> {
        self.backing.resize(&self.shared.capacity, size)
    }
}

impl XenBlkDevice {
    /// Makes a device on `disk`, whose queues run in `pool`.
    #[must_use]
    pub fn new(mut options: XenBlkOptions, disk: Arc<dyn Disk>, pool: Arc<Pool>) -> Self {
        let host = HostDisk::new(disk, options.logical_block_size, options.read_only);
        let backing = Backing::new(host, pool, options.num_queues, QueueClass::XenBlk);
        backing.tell_geometry(&options.name);
        let geometry = backing.host.geometry();
        options.read_only = backing.host.is_read_only();
        options.indirect_segments_max = options.segments_max();
        options.ring_page_order_max = options.order_max();
        let host = HostErrors::new(&options.name, options.on_full, backing.disk().clone());
        let host = Arc::new(host);
        let (capacity, limit) = (AtomicU64::new(geometry.size), Arc::default());
        let shared = Arc::new(Shared { capacity, host, limit });
        Self { options, backing, shared }
    }

    /// Returns the device's name in the configuration.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// Returns the disk behind the device.
    #[must_use]
    pub fn host(&self) -> &Arc<HostDisk> {
        &self.backing.host
    }

    /// Returns the limit on requests and bytes per second. After a change, running queues follow it
    /// only when [`Pool::refresh`] tells them.
    #[must_use]
    pub fn limit(&self) -> &Arc<Limit> {
        &self.shared.limit
    }

    /// Returns the features that the device offers.
    #[must_use]
    pub fn offer(&self) -> Offer {
        self.options.offer(self.host())
    }

    /// Returns the counters of queue `index`.
    #[must_use]
    pub fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        self.backing.stats.get(index)
    }

    /// Returns the counters of all queues, which outlive connections.
    #[must_use]
    pub fn all_stats(&self) -> &Arc<DeviceStats> {
        &self.backing.stats
    }

    /// Maps the ring of a queue and serves it, beginning with the first request that has no
    /// response. If the ring is taken over, the journal of the former process tells which requests
    /// have no response (docs/design/0012).
    ///
    /// # Errors
    /// * [`StartError::Grants`]: a page of the ring cannot be mapped, or the process has no
    ///   addresses left for the pages of its requests.
    /// * [`StartError::Queue`]: the ring has more pages than a ring may have, or cannot be taken
    ///   over: the caller must close the device, so that its front-end reconnects with a new ring.
    /// * [`StartError::Journal`], [`StartError::JournalSpace`]: the ring is to be taken over and
    ///   has requests without a response, but its journal cannot be mapped.
    /// * [`StartError::Backend`]: the disk cannot open a queue.
    /// * [`StartError::NoWorker`]: no worker could be started to run the queue.
    pub fn start(&self, attachment: Attachment) -> Result<QueueHandle, StartError> {
        let home = Home { device: self.options.name.clone(), unit: attachment.index };
        let (takeover, front) = (attachment.takeover, attachment.call.clone());
        let queue = self.running(attachment, self.backing.open_queue()?)?;
        let handle = self.backing.pool.start(Box::new(queue), home).ok_or(StartError::NoWorker)?;
        if takeover {
            // Signal the front-end: the former process may have died after it published responses,
            // before its signal.
            front.ring();
        }
        Ok(handle)
    }

    /// Makes a queue of this device that no worker runs, for benchmarks.
    #[cfg(feature = "bench")]
    pub(crate) fn solo(
        &self,
        attachment: Attachment,
    ) -> Result<Box<dyn manyring_engine::solo::Run>, StartError> {
        let disk = self.backing.disk().open_queue(false)?;
        Ok(Box::new(self.running(attachment, disk)?))
    }

    fn running(
        &self,
        attachment: Attachment,
        disk: Box<dyn DiskQueue>,
    ) -> Result<RunningQueue<BackRing, BlkifHandler>, StartError> {
        let Attachment { index, abi, ring_refs, persistent, mapper, kick, call, events, .. } =
            attachment;
        let indirect = attachment.indirect_segments_max.min(INDIRECT_SEGMENTS_MAX);
        let grefs: Vec<_> = ring_refs.iter().copied().map(GrantRef).collect();
        let order = ring_refs.len().max(1).ilog2();
        let ring_pages = GrantPages::of_ring(mapper.clone(), &grefs)?;
        let config = RingConfig { abi, order, addr: 0 };
        let queue =
            self.ring(index, config, &ring_pages, attachment.journal, attachment.takeover)?;
        let handler =
            self.handler((abi, order), (persistent, indirect), mapper, ring_pages, disk)?;
        let stats = self.backing.stats.to_run(index);
        let activation = Activation {
            index,
            queue,
            addresses: RingAddresses { descriptor: 0, available: 0, used: 0 },
            kick: Some(kick),
            call: Some(call),
            err: None,
            enabled: true,
            features: 0,
            events,
        };
        let queue = RunningQueue::new(activation, handler, stats);
        Ok(queue.moderated(self.options.moderation))
    }

    fn ring(
        &self,
        queue: usize,
        config: RingConfig,
        pages: &GrantPages,
        journal: Option<OwnedFd>,
        takeover: bool,
    ) -> Result<BackRing, StartError> {
        let memory = pages.memory().clone();
        let device = &self.options.name;
        let mapped = |file| journal::map(&file, journal_size(config.abi, config.order));
        let journal = journal.map(mapped).transpose();
        if !takeover {
            // Continue without a journal: when this process ends the guest then loses its disk,
            // which is better than having no disk at all.
            let journal = journal.unwrap_or_else(|error| {
                tracing::warn!(
                    device,
                    queue,
                    %error,
                    "serving without a journal: this ring cannot be resumed after a crash"
                );
                None
            });
            return Ok(BackRing::begin(config, memory, journal)?);
        }
        let (journal, problem) = match journal {
            Ok(journal) => (journal, None),
            Err(error) => (None, Some(error)),
        };
        // A ring without pending requests can be taken over without its journal.
        let ring = match (BackRing::take_over(config, memory, journal), problem) {
            (Ok(ring), None) => ring,
            (Ok(ring), Some(error)) => {
                tracing::warn!(
                    device,
                    queue,
                    %error,
                    "serving without a journal: this ring cannot be resumed after a crash"
                );
                ring
            }
            (Err(error), problem) => return Err(problem.unwrap_or_else(|| error.into())),
        };
        let owed = ring.owed_count();
        tracing::info!(device, owed, "took a ring over from a former process");
        Ok(ring)
    }

    fn handler(
        &self,
        (abi, order): (Abi, u32),
        (persistent, indirect_segments_max): (bool, u16),
        mapper: GrantMapper,
        ring_pages: GrantPages,
        disk: Box<dyn DiskQueue>,
    ) -> Result<BlkifHandler, StartError> {
        let options = &self.options;
        let lots = lots_for(abi.ring_size(order), indirect_segments_max);
        let lot_pages = u32::try_from(LOT_PAGES).unwrap_or(u32::MAX);
        let persistent = if persistent && options.persistent { options.persistent_max } else { 0 };
        let limits = GrantLimits { persistent, lot_pages, lots };
        Ok(BlkifHandler::new(BlkifQueue::new(QueueParts {
            disk,
            shared: self.shared.clone(),
            // Accept every sector, whatever the logical block size: a front-end that a former
            // process connected may have been told smaller blocks.
            limits: Offer { indirect_segments_max, ..self.offer() }.limits(
                &DiskNodes { sector_size: 512, ..disk_nodes(self.host()) },
                !options.read_only,
            ),
            write_through: !options.writeback,
            grants: PersistentGrants::new(mapper, limits)?,
            ring_pages,
            lots_max: lots,
            ring_size: abi.ring_size(order),
        })))
    }
}

/// Returns the number of lots of a queue. That is one for each entry of its ring, which suffices
/// while no request has more segments than a lot has pages, and at least as many as the largest
/// request takes. In a burst of longer requests, later ones wait until earlier ones are done.
fn lots_for(ring_size: u16, indirect_segments_max: u16) -> u32 {
    let largest = usize::from(indirect_segments_max).div_ceil(LOT_PAGES);
    u32::from(ring_size).max(u32::try_from(largest).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
