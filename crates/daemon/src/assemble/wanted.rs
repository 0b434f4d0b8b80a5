//! Opens the files and ports of a device of the plan, and makes the device of them.

use super::disk::{self, DiskError, Means};
use super::remote::{Measurer, Remote, Remotely};
use super::{AssembleError, Blk, Host, Kind, Part, options, port};
use crate::config::plan::{BlkPlan, DiskPlan, Place, Unfound, Wanted, helped};
use crate::limits::Groups;
use manyring_backend::blk::{Disk, ImageError};
use manyring_backend::net::Port;
use manyring_device::Device;
use manyring_device::blk::{BlkDevice, BlkOptions};
use manyring_device::net::{MacAddress, NetDevice, NetOptions};
use manyring_engine::Pool;
use std::sync::Arc;

/// The host's side of a device, opened.
#[derive(Debug)]
pub(crate) enum Opened {
    /// With the server that has it, if a device process talks to that one.
    Disk(Arc<dyn Disk>, Option<Arc<Remote>>),
    Port(Arc<dyn Port>, MacAddress),
}

/// A device, and the same device as the control API sees it.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) part: Part,
}

impl Wanted {
    /// Opens the disk or the port; the socket's folder is found then, too. May block.
    pub(crate) fn open(&self, host: &Host) -> Result<Opened, AssembleError> {
        let unfound = |unfound| AssembleError::unfound(&self.plan().place, unfound);
        self.find().map_err(unfound)?;
        match self {
            Self::Blk(blk) => open_disk(blk, self.remotely(host), host)
                .map(|(disk, remote)| Opened::Disk(disk, remote)),
            Self::Net(net) => port::open(net, host).map(|(port, mac)| Opened::Port(port, mac)),
        }
    }

    /// What measures the disk of a server, if a device process serves the device.
    fn remotely(&self, host: &Host) -> Option<Arc<dyn Measurer>> {
        host.measurer.clone().filter(|_| self.domain(host.domains).is_some())
    }

    /// Puts around it what goes wrong on purpose and what captures. May block.
    pub(crate) fn decorated(&self, opened: Opened) -> Result<Opened, AssembleError> {
        match (self, opened) {
            (Self::Blk(blk), Opened::Disk(disk, remote)) => {
                Ok(Opened::Disk(disk::decorated(disk, blk.fault), remote))
            }
            (Self::Net(net), Opened::Port(port, mac)) => {
                Ok(Opened::Port(port::decorated(net, port)?, mac))
            }
            (_, opened) => Ok(opened),
        }
    }

    /// Makes the device of what was opened for it.
    pub(crate) fn made(&self, opened: Opened, (pool, groups): (&Arc<Pool>, &Groups)) -> Made {
        let (plan, shown) = (self.plan(), (self.socket(), self.plan().place.origin()));
        let made = match (self, opened) {
            (Self::Blk(blk), Opened::Disk(disk, remote)) => {
                let options = options::of_blk(&plan.name, &blk.settings());
                let mut made = Made::blk(options, disk, pool, shown);
                made.part.remote = remote;
                made
            }
            (Self::Net(net), Opened::Port(port, mac)) => {
                let settings = net.settings(mac, net.mtu);
                Made::net(options::of_net(&plan.name, &settings), port, pool, shown)
            }
            _ => unreachable!("a disk is opened for a block device, a port for a network device"),
        };
        groups.limit(made.part.kind.limit(), &plan.limit);
        made
    }
}

impl Made {
    /// A block device; people are shown how it can be reached, and who has asked for it.
    pub(crate) fn blk(
        options: BlkOptions,
        disk: Arc<dyn Disk>,
        pool: &Arc<Pool>,
        (socket, origin): (String, &'static str),
    ) -> Self {
        let device = Arc::new(BlkDevice::new(options, disk, pool.clone()));
        let part = Part::new(Kind::Blk(Blk::Virtio(device.clone())), socket, origin);
        Self { device, part }
    }

    /// A network device, as [`Self::blk`].
    pub(crate) fn net(
        options: NetOptions,
        port: Arc<dyn Port>,
        pool: &Arc<Pool>,
        (socket, origin): (String, &'static str),
    ) -> Self {
        let device = Arc::new(NetDevice::new(options, port, pool.clone()));
        Self { part: Part::new(Kind::Net(device.clone()), socket, origin), device }
    }
}

fn open_disk(
    blk: &BlkPlan,
    measurer: Option<Arc<dyn Measurer>>,
    host: &Host,
) -> Result<disk::Open, AssembleError> {
    let place = &blk.device.place;
    let opened = disk::open(
        (&blk.device.name, &blk.disk),
        (blk.read_only, blk.logical_block_size),
        Means {
            io_uring: host.io_uring,
            held: host.adopted_fds.take(&blk.device.name).pop(),
            helpers: host.helpers.as_deref(),
            remotely: measurer.map(|measurer| Remotely { measurer, queues: blk.num_queues }),
        },
    );
    opened.map_err(|error| match error {
        DiskError::Image(source) => image_error(place, source),
        DiskError::Helper(source) => AssembleError::Helper { at: place.at("format"), source },
        DiskError::Nbd(source) => AssembleError::Nbd { at: place.at("nbd"), source },
        DiskError::Unfound(problem) => {
            AssembleError::unfound(place, Unfound { key: "file", problem })
        }
        DiskError::Memory(source) => {
            let is_memory = matches!(blk.disk, DiskPlan::Memory { .. });
            AssembleError::Memory {
                at: place.at(if is_memory { "memory" } else { "file" }),
                source,
            }
        }
    })
}

/// The error that an image cannot be served, with its key and its cure.
pub(crate) fn image_error(place: &Place, source: ImageError) -> AssembleError {
    let hint = match source {
        ImageError::Container { format, .. } => {
            let insist = place.setting("format", "raw");
            let by_helper = helped(format).map_or_else(String::new, |format| {
                format!(" or have a helper read it (format = {format:?} in `manyring run`'s file),")
            });
            format!("; convert it (qemu-img convert -O raw),{by_helper} or insist: {insist}")
        }
        ImageError::Sectors { .. } => {
            "; if it is an image of another format (qemu-img info), convert it".to_owned()
        }
        _ => String::new(),
    };
    let key = match source {
        ImageError::Blocks { .. } => "logical_block_size",
        _ => "file",
    };
    AssembleError::Image { at: place.at(key), source, hint }
}
