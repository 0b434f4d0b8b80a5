//! `DeviceGrant`: the descriptors that the supervisor opened for a device, and the disk or port on
//! them.

use super::nbd;
use crate::assemble::disk::{self, Supervised};
use crate::assemble::port::{self, PortGrant};
use crate::assemble::{Capture, Opened};
use crate::device_process::lock_with_rings::RingLocked;
use crate::pcap::Pcap;
use crate::supervisor_client::SupervisorClient;
use manyring_backend::blk::Disk;
use manyring_backend::net::Port;
use manyring_backend::net::switch::SwitchPort;
use manyring_protocol::message::PortFacts;
use manyring_protocol::nbd::NbdSpec;
use manyring_protocol::spec::{BlkSpec, KindSpec, NetSpec};
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// The files and port that the supervisor has opened for a device of this process.
pub(super) struct DeviceGrant {
    pub(super) port: Option<PortFacts>,
    pub(super) fds: Vec<OwnedFd>,
    /// The port of the device on the switch that this process serves.
    pub(super) switched: Option<Arc<SwitchPort>>,
}

impl DeviceGrant {
    /// Opens the disk or the port of a device on the descriptors of the grant. May block.
    ///
    /// # Errors
    /// A text of one line: the descriptors do not fit the spec.
    pub(super) fn opened(
        self,
        kind: KindSpec,
        uring: bool,
        supervisor: SupervisorClient,
    ) -> Result<(Opened, Option<PortGrant>), String> {
        Ok(match kind {
            KindSpec::Blk(BlkSpec { disk, options, fault }) => {
                let disk = (disk, options.read_only);
                let disk = disk::granted(disk, self.fds, uring, supervisor)?;
                (Opened::Disk(disk::decorated(disk, fault), None), None)
            }
            KindSpec::Net(NetSpec { port, captures, mac, options, fault }) => {
                let (of, mut fds) = ((port, options.queue_pairs), self.fds);
                let device = supervisor.device.clone();
                let stream =
                    captures.then(|| fds.pop().ok_or("supervisor: a capture without a stream"));
                let stream = stream.transpose()?;
                let grant = (self.port, fds, self.switched);
                let given = PortGrant::new(of, grant, Arc::new(supervisor))?;
                let port = port::faulty(given.port.clone(), fault);
                let port = captured(port, stream, &device)?;
                (Opened::Port(port, mac, Capture::Port), Some(given))
            }
        })
    }
}

impl Supervised for SupervisorClient {
    fn nbd(self, spec: NbdSpec, read_only: bool) -> Result<Arc<dyn Disk>, String> {
        nbd::disk(spec, read_only, self)
    }

    fn ring_locked(self, inner: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(RingLocked { inner, supervisor: self })
    }
}

/// Wraps the port in its capture, if the supervisor sent a stream for one.
///
/// # Errors
/// A text of one line: the thread of the capture cannot be made.
fn captured(
    port: Arc<dyn Port>,
    stream: Option<OwnedFd>,
    device: &str,
) -> Result<Arc<dyn Port>, String> {
    let Some(stream) = stream else { return Ok(port) };
    let port = Pcap::streamed(port, stream, device).map_err(|error| error.to_string())?;
    Ok(Arc::new(port))
}
