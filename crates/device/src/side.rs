//! `HostSide`: a device's name, disk or port, counters and limit, as the API shows and changes
//! them, whether the queues run in this process or in another one (docs/design/0029).

use crate::blk::blkif::XenBlkDevice;
use crate::blk::{BlkDevice, HostDisk, Resize};
use crate::net::{NetDevice, NetSide, OwnedPort};
use crate::{Device, DeviceStats};
use manyring_engine::Limit;
use manyring_engine::stats::QueueClass;
use std::sync::Arc;

/// The properties and counters of a device that the API shows, and the changes that an operator can
/// make.
#[derive(Clone, Debug)]
pub struct HostSide {
    /// The device's name in the configuration.
    pub name: String,
    /// The disk or port behind the device.
    pub kind: SideKind,
    /// The counters of the queues.
    pub stats: Arc<DeviceStats>,
    /// The device's limit, if its queues run in this process.
    pub limit: Option<Arc<Limit>>,
}

/// The disk or the port of a device.
#[derive(Clone, Debug)]
pub enum SideKind {
    /// A disk.
    Blk(DiskSide),
    /// A port.
    Net(Arc<dyn NetSide>),
}

/// The disk of a device.
#[derive(Clone, Debug)]
pub struct DiskSide {
    /// True for a disk of a Xen guest.
    pub is_xen: bool,
    /// The disk of the host, with the geometry that the guest is told.
    pub host: Arc<HostDisk>,
    /// Changes the size of the disk.
    pub resizes: Arc<dyn Resize>,
}

/// The supervisor's object for the disk or port of a device whose queues run in another process.
#[derive(Clone, Debug)]
pub enum Owned {
    /// A disk.
    Disk(Arc<HostDisk>),
    /// A Xen guest's disk.
    XenDisk(Arc<HostDisk>),
    /// A port.
    Port(Arc<OwnedPort>),
}

impl HostSide {
    /// Returns the kind as a word: `blk`, `xen-blk` or `net`.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match &self.kind {
            SideKind::Blk(DiskSide { is_xen: false, .. }) => "blk",
            SideKind::Blk(DiskSide { is_xen: true, .. }) => "xen-blk",
            SideKind::Net(_) => "net",
        }
    }

    /// Returns the port of a network device; `None` for a disk.
    #[must_use]
    pub fn as_net(&self) -> Option<&Arc<dyn NetSide>> {
        match &self.kind {
            SideKind::Net(net) => Some(net),
            SideKind::Blk(_) => None,
        }
    }

    /// Returns the disk of a block device; `None` for a network device.
    #[must_use]
    pub fn as_blk(&self) -> Option<&DiskSide> {
        match &self.kind {
            SideKind::Blk(blk) => Some(blk),
            SideKind::Net(_) => None,
        }
    }
}

impl From<&Arc<BlkDevice>> for HostSide {
    fn from(device: &Arc<BlkDevice>) -> Self {
        let (host, resizes) = (device.host().clone(), device.clone());
        Self {
            name: device.name().to_owned(),
            kind: SideKind::Blk(DiskSide { is_xen: false, host, resizes }),
            stats: device.all_stats().clone(),
            limit: Some(device.limit().clone()),
        }
    }
}

impl From<&Arc<XenBlkDevice>> for HostSide {
    fn from(device: &Arc<XenBlkDevice>) -> Self {
        let (host, resizes) = (device.host().clone(), device.clone());
        Self {
            name: device.name().to_owned(),
            kind: SideKind::Blk(DiskSide { is_xen: true, host, resizes }),
            stats: device.all_stats().clone(),
            limit: Some(device.limit().clone()),
        }
    }
}

impl From<&Arc<NetDevice>> for HostSide {
    fn from(device: &Arc<NetDevice>) -> Self {
        Self {
            name: device.name().to_owned(),
            kind: SideKind::Net(device.clone()),
            stats: device.all_stats().clone(),
            limit: Some(device.limit().clone()),
        }
    }
}

impl Owned {
    /// Returns the port of a network device; `None` for a disk.
    #[must_use]
    pub fn as_port(&self) -> Option<&Arc<OwnedPort>> {
        match self {
            Self::Port(port) => Some(port),
            Self::Disk(_) | Self::XenDisk(_) => None,
        }
    }

    /// Returns the disk of a block device; `None` for a network device.
    #[must_use]
    pub fn as_disk(&self) -> Option<&Arc<HostDisk>> {
        match self {
            Self::Disk(disk) | Self::XenDisk(disk) => Some(disk),
            Self::Port(_) => None,
        }
    }

    /// Makes the [`HostSide`] of the device, which has this name and this many queues.
    #[must_use]
    pub fn side(&self, name: &str, queues: usize) -> HostSide {
        let disk = |is_xen, host: &Arc<HostDisk>| {
            let resizes: Arc<dyn Resize> = host.clone();
            SideKind::Blk(DiskSide { is_xen, host: host.clone(), resizes })
        };
        let (kind, class) = match self {
            Self::Disk(host) => (disk(false, host), QueueClass::Blk),
            Self::XenDisk(host) => (disk(true, host), QueueClass::XenBlk),
            Self::Port(port) => (SideKind::Net(port.clone()), QueueClass::Net),
        };
        let stats = Arc::new(DeviceStats::new(class, queues));
        HostSide { name: name.to_owned(), kind, stats, limit: None }
    }
}
