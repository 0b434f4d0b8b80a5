//! What the supervisor has opened of a device, and the disk or port on it.

use super::nbd;
use crate::assemble::{Capture, Opened, disk, port};
use crate::device_process::locked::RingLocked;
use crate::device_process::net::PortGrant;
use crate::supervisor_client::SupervisorClient;
use manyring_backend::blk::file::FileDisk;
use manyring_backend::blk::memory::MemoryDisk;
use manyring_backend::blk::null::NullDisk;
use manyring_backend::blk::uring::UringDisk;
use manyring_backend::blk::{Disk, Image, ImageDescriptors, ImageOptions};
use manyring_backend::net::Port;
use manyring_backend::net::pcap::PcapPort;
use manyring_backend::net::switch::SwitchPort;
use manyring_protocol::message::PortFacts;
use manyring_protocol::spec::{BlkSpec, DiskSpec, KindSpec, NetSpec, PortSpec};
use rustix::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The name in log lines of a file that the supervisor has opened, whose path is not told.
const HANDED: &str = "handed";

/// The files and the port of a device that the supervisor has opened for this device process.
pub(super) struct DeviceGrant {
    pub(super) port: Option<PortFacts>,
    pub(super) fds: Vec<OwnedFd>,
    /// Its port on the switch of this process.
    pub(super) switched: Option<Arc<SwitchPort>>,
}

impl DeviceGrant {
    /// Opens the disk or the port of a device on the descriptors of the grant. May block.
    pub(super) fn opened(
        self,
        kind: KindSpec,
        uring: bool,
        supervisor: SupervisorClient,
    ) -> Result<(Opened, Option<PortGrant>), String> {
        Ok(match kind {
            KindSpec::Blk(BlkSpec { disk, settings }) => {
                let disk = self.disk((disk, settings.read_only), uring, supervisor)?;
                (Opened::Disk(disk::decorated(disk, settings.fault), None), None)
            }
            KindSpec::Net(NetSpec { port, captures, settings }) => {
                let (of, mut fds) = ((port, settings.queue_pairs), self.fds);
                let device = supervisor.device.clone();
                let stream =
                    captures.then(|| fds.pop().ok_or("supervisor: a capture without a stream"));
                let stream = stream.transpose()?;
                let given = match self.switched.filter(|_| port == PortSpec::Switch) {
                    Some(switched) => PortGrant::Switch(switched),
                    None => PortGrant::new(of, self.port, fds, supervisor)?,
                };
                let port = port::faulty(given.port(), settings.fault);
                let port = captured(port, stream, &device)?;
                (Opened::Port(port, settings.mac, Capture::Port), Some(given))
            }
        })
    }

    /// Opens the disk of a device on the descriptors from the supervisor; a null disk needs none.
    pub(super) fn disk(
        self,
        (disk, read_only): (DiskSpec, bool),
        uring: bool,
        supervisor: SupervisorClient,
    ) -> Result<Arc<dyn Disk>, String> {
        let mut given = self.fds;
        match disk {
            DiskSpec::Null { size } => Ok(Arc::new(NullDisk::new(size))),
            DiskSpec::Memory { size } => {
                let file = given.pop().ok_or("supervisor: a disk in memory without its memory")?;
                let disk = MemoryDisk::handed(file, size);
                Ok(Arc::new(disk.map_err(|error| error.to_string())?))
            }
            DiskSpec::Nbd(spec) => nbd::disk(spec, read_only, supervisor),
            DiskSpec::File { direct, lock_with_rings } => {
                if given.len() < 2 {
                    return Err("supervisor: a disk without the descriptors of its file".to_owned());
                }
                let handed = ImageDescriptors { file: given.remove(0), flushes: given };
                let options = ImageOptions { read_only, direct, ..ImageOptions::default() };
                let image = Image::handed(handed, Path::new(HANDED), options);
                let image = image.map_err(|error| error.to_string())?;
                let inner: Arc<dyn Disk> = match uring {
                    true => Arc::new(UringDisk::new(image).map_err(|error| error.to_string())?),
                    false => Arc::new(FileDisk::new(image)),
                };
                Ok(if lock_with_rings { Arc::new(RingLocked { inner, supervisor }) } else { inner })
            }
        }
    }
}

/// The port with what is captured around it, if there is a stream for that.
///
/// # Errors
/// One line: the system has no thread.
fn captured(
    port: Arc<dyn Port>,
    stream: Option<OwnedFd>,
    device: &str,
) -> Result<Arc<dyn Port>, String> {
    let Some(stream) = stream else { return Ok(port) };
    let port = PcapPort::streamed(port, stream, device).map_err(|error| error.to_string())?;
    Ok(Arc::new(port))
}
