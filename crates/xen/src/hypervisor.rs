//! `Hypervisor`: maps pages that domains lend, and binds event channels, of this machine's Xen or
//! of a simulated one. Its calls may block.

use manyring_config::plan::XenPlan;
use manyring_engine::{Call, DoorbellError, Kick};
use manyring_memory::{EventPort, GrantDevice, GrantError, GrantMapper};
use manyring_protocol::message::XenSeat;
use manyring_serve::times::{XEN_BIND, XEN_BIND_RETRY};
use manyring_transport::xenbus::{Channel, Lent, Seat, SimulatedXen};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// Why the grant device or the simulated Xen cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// Opening the grant device, or mapping a page, failed.
    #[error(transparent)]
    Grants(#[from] GrantError),
    /// Connecting to the simulated Xen failed.
    #[error("the simulated Xen refuses calls: {0}")]
    Simulated(std::io::Error),
}

/// The hypervisor whose grants are mapped and whose event channels are bound.
#[derive(Debug)]
pub enum Hypervisor {
    /// This machine's Xen, by its grant device.
    Real(Arc<GrantDevice>),
    /// A simulated Xen, by a connection to it.
    Simulated(Arc<SimulatedXen>),
}

/// The right to map pages of a domain, as long as this lives.
#[derive(Debug)]
pub struct Lender {
    mapper: GrantMapper,
    _seat: Option<Seat>,
}

/// The descriptors by which another process maps a domain's pages. This process maps none.
#[derive(Debug)]
pub struct LentGrants {
    /// The grant device (`/dev/xen/gntdev`), or the memory of a simulated domain.
    pub grants: OwnedFd,
    /// The seat by which the other process maps the pages; only for a simulated Xen.
    pub seat: Option<XenSeat>,
    /// The connection to a simulated Xen. It must stay open until the other process has unmapped
    /// the pages.
    pub xen: Option<Arc<SimulatedXen>>,
}

/// The descriptors of a bound event channel, for a device process.
#[derive(Debug)]
pub struct LentBell {
    /// The descriptors from which the device process makes its end of the channel.
    pub fds: Vec<OwnedFd>,
    /// The port on this machine's Xen; `None` for a simulated one.
    pub port: Option<u32>,
    /// Keeps the port of a simulated Xen bound.
    pub channel: Option<Channel>,
}

/// A bound event channel, as kick and call of a queue in this process.
#[derive(Debug)]
pub struct Bell {
    /// Becomes readable when the guest has notified.
    pub kick: Kick,
    /// Notifies the guest.
    pub call: Arc<Call>,
    /// Keeps the port of a simulated Xen bound.
    pub channel: Option<Channel>,
}

impl Hypervisor {
    /// Opens the grant device, or connects to a simulated Xen.
    ///
    /// # Errors
    /// [`HypervisorError`]
    pub fn open(plan: &XenPlan) -> Result<Self, HypervisorError> {
        match plan {
            XenPlan::Real { .. } => Ok(Self::Real(Arc::new(GrantDevice::open()?))),
            XenPlan::Simulated { socket } => {
                let xen = SimulatedXen::connect(socket).map_err(HypervisorError::Simulated)?;
                Ok(Self::Simulated(Arc::new(xen)))
            }
        }
    }

    /// Returns the right to map pages that `domain` lends.
    ///
    /// # Errors
    /// Errors of the simulated Xen. `ESRCH`: there is no such domain.
    pub fn lender(&self, domain: u16) -> Result<Lender, Errno> {
        match self {
            Self::Real(device) => {
                let mapper = GrantMapper::Device { device: device.clone(), domain };
                Ok(Lender { mapper, _seat: None })
            }
            Self::Simulated(xen) => {
                let seat = xen.attach(domain)?;
                let mapper = GrantMapper::Simulated(seat.grants().clone());
                Ok(Lender { mapper, _seat: Some(seat) })
            }
        }
    }

    /// Opens the descriptors by which a device process maps pages of `domain`: a grant device, or
    /// the memory of a simulated domain.
    ///
    /// # Errors
    /// The grant device cannot be opened. `ESRCH`: the simulated Xen has no such domain.
    pub fn lend(plan: &XenPlan, domain: u16) -> Result<LentGrants, Errno> {
        match plan {
            XenPlan::Real { .. } => {
                let refused = |error| match error {
                    GrantError::Device(errno) => errno,
                    _ => Errno::IO,
                };
                let device = GrantDevice::open().map_err(refused)?;
                Ok(LentGrants { grants: device.into_fd(), seat: None, xen: None })
            }
            XenPlan::Simulated { socket } => {
                let refused = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
                let xen = Arc::new(SimulatedXen::connect(socket).map_err(refused)?);
                let Lent { file, entries, seat } = xen.lend(domain)?;
                let seat = Some(XenSeat { entries, seat });
                Ok(LentGrants { grants: file, seat, xen: Some(xen) })
            }
        }
    }

    /// Binds to the event channel that `domain` created for us. `inherited`: a former process may
    /// still have the channel for a moment, so binding is retried.
    ///
    /// # Errors
    /// `EINVAL`: there is no such channel.
    pub fn bind(&self, domain: u16, port: u32, inherited: bool) -> Result<Bell, Errno> {
        patiently(inherited, || self.try_to_bind(domain, port))
    }

    fn try_to_bind(&self, domain: u16, port: u32) -> Result<Bell, Errno> {
        let refused = |error| match error {
            DoorbellError::System(errno) => errno,
            _ => Errno::PROTO,
        };
        match self {
            Self::Real(_) => {
                let port = Arc::new(EventPort::bind(domain, port)?);
                let call = Arc::new(Call::of_port(port.clone()));
                Ok(Bell { kick: Kick::of_port(port), call, channel: None })
            }
            Self::Simulated(xen) => {
                let (channel, own, other) = xen.bind(domain, port)?;
                let kick = Kick::new(own).map_err(refused)?;
                let call = Arc::new(Call::new(other).map_err(refused)?);
                Ok(Bell { kick, call, channel: Some(channel) })
            }
        }
    }
}

impl LentGrants {
    /// Binds an event channel as [`Hypervisor::bind`] does, for the device process. The descriptor
    /// of the event device is restricted to `domain`, so that the process can reach no other domain
    /// by it.
    ///
    /// # Errors
    /// `EINVAL`: there is no such channel.
    pub fn bind(&self, domain: u16, port: u32, inherited: bool) -> Result<LentBell, Errno> {
        patiently(inherited, || match &self.xen {
            None => {
                let bound = EventPort::bind_restricted(domain, port)?;
                let port = Some(bound.port());
                Ok(LentBell { fds: vec![bound.into_fd()], port, channel: None })
            }
            Some(xen) => {
                let (channel, own, other) = xen.bind(domain, port)?;
                Ok(LentBell { fds: vec![own, other], port: None, channel: Some(channel) })
            }
        })
    }
}

impl Lender {
    /// Returns the mapper of the domain's pages.
    pub fn mapper(&self) -> &GrantMapper {
        &self.mapper
    }
}

/// Calls `bind`; if `inherited`, retries for [`XEN_BIND`], since a former process may still have
/// the port.
fn patiently<T>(inherited: bool, bind: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    let mut left = if inherited { XEN_BIND } else { Duration::ZERO };
    loop {
        match bind() {
            Err(Errno::INVAL) if !left.is_zero() => {
                std::thread::sleep(XEN_BIND_RETRY);
                left = left.saturating_sub(XEN_BIND_RETRY);
            }
            result => return result,
        }
    }
}
