//! Opens the files and ports of a device in the plan, and makes the device.

use super::capture::{Capture, CaptureFile};
use super::disk::{self, DiskError, Means};
use super::nbd_host::{Measurer, Remote, Remotely};
use super::{AssembleError, Host, port};
use crate::view::DeviceView;
use manyring_backend::blk::{Disk, ImageError};
use manyring_backend::net::Port;
use manyring_config::plan::{BlkPlan, DiskPlan, Place, Unfound, Wanted, helped};
use manyring_device::blk::{BlkDevice, BlkOptions, HostDisk};
use manyring_device::net::{MacAddress, NetDevice, NetOptions, OwnedPort};
use manyring_device::{Device, Owned};
use manyring_engine::Pool;
use std::sync::Arc;

/// The disk or the port of a device, opened.
#[derive(Debug)]
pub enum Opened {
    /// The disk, and the NBD server's object if a device process connects to the server.
    Disk(Arc<dyn Disk>, Option<Arc<Remote>>),
    /// The port, the guest's MAC address, and the capture file of its frames.
    Port(Arc<dyn Port>, MacAddress, Capture),
}

/// A device whose queues run in this process, and the view of it that the API shows.
#[derive(Debug)]
pub struct Here {
    /// The device that sessions serve to front-ends.
    pub device: Arc<dyn Device>,
    /// The view of the device that the API shows.
    pub view: DeviceView,
}

/// The supervisor's part of a device that a device process serves: the disk or the port, and the
/// view for the API. The supervisor has no queue, worker or session of the device.
#[derive(Clone, Debug)]
pub struct Part {
    /// The disk or the port of the device, which the supervisor has opened.
    pub owned: Owned,
    /// The view of the device that the API shows.
    pub view: DeviceView,
    /// The NBD server of the disk, if the device process connects to it.
    pub remote: Option<Arc<Remote>>,
    /// The capture file of the port's frames.
    pub capture: Option<Arc<CaptureFile>>,
}

/// A device of the plan, made from its opened disk or port.
#[derive(Debug)]
pub enum Made {
    /// The queues of the device run in this process.
    Here(Here),
    /// A device process serves the device; this is the supervisor's part of it.
    Owned(Part),
}

/// Opens and makes a device of the plan, in three steps.
pub trait Assemble {
    /// Opens the disk or the port, and looks up the folder of the socket. May block.
    fn open(&self, host: &Host) -> Result<Opened, AssembleError>;

    /// Wraps the disk or the port in its test faults and its capture. May block.
    fn decorated(&self, opened: Opened) -> Result<Opened, AssembleError>;

    /// Makes the device. With a `domain`, the device process of that domain serves it, and only the
    /// supervisor's part is made.
    fn made(&self, opened: Opened, domain: Option<String>, pool: &Arc<Pool>) -> Made;
}

impl Assemble for Wanted {
    fn open(&self, host: &Host) -> Result<Opened, AssembleError> {
        let unfound = |unfound| AssembleError::unfound(&self.plan().place, unfound);
        self.find().map_err(unfound)?;
        match self {
            Self::Blk(blk) => open_disk(blk, remotely(self, host), host)
                .map(|(disk, remote)| Opened::Disk(disk, remote)),
            Self::Net(net) => {
                let is_apart = self.domain(host.domains).is_some();
                let (port, mac) = port::open(net, host, is_apart)?;
                let capture = match is_apart {
                    false => Capture::Port,
                    true => Capture::Supervisor(host.captures.take(&net.device.name).pop()),
                };
                Ok(Opened::Port(port, mac, capture))
            }
        }
    }

    fn decorated(&self, opened: Opened) -> Result<Opened, AssembleError> {
        match (self, opened) {
            (Self::Blk(blk), Opened::Disk(disk, remote)) => {
                Ok(Opened::Disk(disk::decorated(disk, blk.fault), remote))
            }
            (Self::Net(net), Opened::Port(port, mac, capture)) => {
                let (port, capture) = port::decorated(net, port, capture)?;
                Ok(Opened::Port(port, mac, capture))
            }
            (_, opened) => Ok(opened),
        }
    }

    fn made(&self, opened: Opened, domain: Option<String>, pool: &Arc<Pool>) -> Made {
        let (plan, shown) = (self.plan(), (self.socket(), self.plan().place.origin()));
        let mut begun = None;
        let (owned, queues, remote) = match (self, opened) {
            (Self::Blk(blk), Opened::Disk(disk, remote)) => {
                let options = blk.options.clone();
                if domain.is_none() {
                    return Made::Here(Here::blk(options, disk, pool, shown));
                }
                let queues = options.num_queues.min(disk.queues_max());
                let disk = HostDisk::new(disk, options.logical_block_size, options.read_only);
                (Owned::Disk(Arc::new(disk)), queues, remote)
            }
            (Self::Net(net), Opened::Port(port, mac, capture)) => {
                let options = NetOptions { mac, ..net.options.clone() };
                if domain.is_none() {
                    return Made::Here(Here::net(options, port, pool, shown).0);
                }
                if let Capture::Begun(capture) = capture {
                    begun = Some(capture);
                }
                // Two queues for each pair, and the control queue.
                let queues = options.queue_pairs * 2 + 1;
                (Owned::Port(Arc::new(OwnedPort::new(options, port))), queues, None)
            }
            _ => unreachable!("a disk is opened for a block device, a port for a network device"),
        };
        let mut view = DeviceView::new(owned.side(&plan.name, queues), shown, domain);
        view.has_helper = matches!(self, Self::Blk(blk) if matches!(blk.disk, DiskPlan::Helper(_)));
        Made::Owned(Part { owned, view, remote, capture: begun })
    }
}

/// Returns the measurer, which asks an NBD server for the size of a disk through a device process.
/// `None`: this process serves the device, and asks the server itself.
fn remotely(wanted: &Wanted, host: &Host) -> Option<Arc<dyn Measurer>> {
    host.measurer.clone().filter(|_| wanted.domain(host.domains).is_some())
}

impl Made {
    /// Returns the view of the device that the API shows.
    pub fn view(&self) -> &DeviceView {
        match self {
            Self::Here(here) => &here.view,
            Self::Owned(owned) => &owned.view,
        }
    }
}

impl Here {
    /// Makes a block device. `shown`: its endpoint and its origin, for the API.
    pub(crate) fn blk(
        options: BlkOptions,
        disk: Arc<dyn Disk>,
        pool: &Arc<Pool>,
        shown: (String, &'static str),
    ) -> Self {
        let device = Arc::new(BlkDevice::new(options, disk, pool.clone()));
        let view = DeviceView::new(&device, shown, None);
        Self { device, view }
    }

    /// Makes a network device. Arguments as for [`Self::blk`].
    pub(crate) fn net(
        options: NetOptions,
        port: Arc<dyn Port>,
        pool: &Arc<Pool>,
        shown: (String, &'static str),
    ) -> (Self, Arc<NetDevice>) {
        let device = Arc::new(NetDevice::new(options, port, pool.clone()));
        let view = DeviceView::new(&device, shown, None);
        (Self { device: device.clone(), view }, device)
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
        (blk.options.read_only, blk.options.logical_block_size),
        Means {
            io_uring: host.io_uring,
            held: host.adopted_fds.take(&blk.device.name).pop(),
            helpers: host.helpers.as_deref(),
            remotely: measurer.map(|measurer| Remotely {
                measurer,
                queues: blk.options.num_queues,
                told: host.adopted_exports.take(&blk.device.name),
            }),
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

/// Returns the error that an image cannot be served: the key, and a hint what to do.
pub(crate) fn image_error(place: &Place, source: ImageError) -> AssembleError {
    let hint = match source {
        ImageError::Container { format, .. } => {
            let insist = place.setting("format", "raw");
            let by_helper = helped(format).map_or_else(String::new, |format| {
                format!(", or have a helper read it (format = {format:?} in `manyring run`'s file)")
            });
            // A guest can write such a header into its raw disk, with the path of any file of the
            // host in it: a program that takes the disk for this format would open that file.
            format!(
                "; if a guest may have written these bytes into its raw disk: {insist}; only if \
                 you made the image in that format: convert it (qemu-img convert -O raw){by_helper}"
            )
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
