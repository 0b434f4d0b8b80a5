//! `Part`: a device that is put together, as whoever shows or changes it sees it.

use super::remote::Remote;
use manyring_backend::blk::{Disk, Geometry};
use manyring_device::Device;
use manyring_device::blk::BlkDevice;
use manyring_device::blk::blkif::XenBlkDevice;
use manyring_device::net::NetDevice;
use manyring_engine::{Limit, QueueStats};
use manyring_transport::vhost_user::Connected;
use rustix::io::Errno;
use std::sync::Arc;

/// A device that is put together.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) connected: Connected,
    /// How the device can be reached, for people.
    pub(crate) socket: String,
    /// Who has asked for it: see [`crate::config::plan::Place::origin`].
    pub(crate) origin: &'static str,
    /// The trust domain whose device process serves it.
    pub(crate) process: Option<String>,
    /// The server of its disk, if a device process talks to it.
    pub(crate) remote: Option<Arc<Remote>>,
}

/// The device as what it is.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Blk(Blk),
    Net(Arc<NetDevice>),
}

/// A device with a disk.
#[derive(Clone, Debug)]
pub(crate) enum Blk {
    Virtio(Arc<BlkDevice>),
    Xen(Arc<XenBlkDevice>),
}

impl Part {
    /// A device that no front-end uses yet.
    pub(crate) fn new(kind: Kind, socket: String, origin: &'static str) -> Self {
        let connected = Connected::new(false);
        Self { kind, connected, socket, origin, process: None, remote: None }
    }

    /// The device's name in the configuration.
    pub(crate) fn name(&self) -> &str {
        match &self.kind {
            Kind::Blk(Blk::Virtio(device)) => device.name(),
            Kind::Blk(Blk::Xen(device)) => device.name(),
            Kind::Net(device) => device.name(),
        }
    }

    /// Most queues that a front-end can use.
    pub(crate) fn queue_count(&self) -> usize {
        match &self.kind {
            Kind::Blk(Blk::Virtio(device)) => device.queue_count(),
            Kind::Blk(Blk::Xen(device)) => device.queue_count(),
            Kind::Net(device) => device.queue_count(),
        }
    }

    /// Counters of queue `index`.
    pub(crate) fn stats(&self, index: usize) -> Option<Arc<QueueStats>> {
        match &self.kind {
            Kind::Blk(Blk::Virtio(device)) => device.stats(index),
            Kind::Blk(Blk::Xen(device)) => device.stats(index),
            Kind::Net(device) => device.stats(index),
        }
    }
}

impl Kind {
    /// The limit of the device's work per second.
    pub(crate) fn limit(&self) -> &Arc<Limit> {
        match self {
            Self::Blk(Blk::Virtio(device)) => device.limit(),
            Self::Blk(Blk::Xen(device)) => device.limit(),
            Self::Net(device) => device.limit(),
        }
    }
}

impl Blk {
    /// Bytes the guest sees.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Virtio(device) => device.size(),
            Self::Xen(device) => device.size(),
        }
    }

    /// The guest may not write.
    pub(crate) fn is_read_only(&self) -> bool {
        match self {
            Self::Virtio(device) => device.is_read_only(),
            Self::Xen(device) => device.is_read_only(),
        }
    }

    /// The geometry of the disk, as the guest is told.
    pub(crate) fn geometry(&self) -> Geometry {
        match self {
            Self::Virtio(device) => device.geometry(),
            Self::Xen(device) => device.geometry(),
        }
    }

    /// The disk behind the device.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        match self {
            Self::Virtio(device) => device.disk(),
            Self::Xen(device) => device.disk(),
        }
    }

    /// Takes the disk's size anew, after changing it to `size` if one is given. May block.
    ///
    /// # Errors
    /// The disk's. `EBUSY`: requests in flight did not end, the disk is as it was.
    pub(crate) fn resize(&self, size: Option<u64>) -> Result<u64, Errno> {
        match self {
            Self::Virtio(device) => device.resize(size),
            Self::Xen(device) => device.resize(size),
        }
    }
}
