//! The supervisor's state for a device that a device process serves, and for the device processes
//! of a domain.

use super::counts::Counts;
use super::journal_store::JournalStore;
use super::stderr_relay::StderrRelay;
use super::xen_line::XenLine;
use manyring_device::net::OwnedPort;
use manyring_engine::{Janitor, Surplus};
use manyring_protocol::message::PrivilegedRequest;
use manyring_transport::vhost_user::Connected;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A privileged request that waits for its turn.
#[derive(Clone, Debug)]
pub(super) struct PendingRequest {
    pub(super) number: u64,
    pub(super) request: PrivilegedRequest,
}

/// The supervisor's state for a device that a device process serves.
#[derive(Debug)]
pub(super) struct AssignedDevice {
    /// True while a session of the device runs.
    pub(super) connected: Connected,
    pub(super) counts: Arc<Counts>,
    pub(super) net: Option<Arc<OwnedPort>>,
    /// The queue of its privileged requests, of which one at a time is served.
    pub(super) asks: mpsc::Sender<PendingRequest>,
    /// The sockets and journals of the device's front-ends.
    pub(super) journals: Arc<JournalStore>,
    /// The connection of a Xen guest's disk.
    pub(super) xen: Option<Arc<XenLine>>,
}

/// The objects that the supervisor passes from one device process of a domain to the next.
#[derive(Clone, Debug)]
pub(super) struct DomainMembers {
    /// Closes descriptors that a device process sent and may not send.
    pub(super) janitor: Arc<Janitor>,
    pub(super) stderr_relay: Arc<StderrRelay>,
    /// What the supervisor keeps for their sessions beyond the parts of their devices.
    pub(super) surplus: Surplus,
}

impl DomainMembers {
    pub(super) fn of(domain: &str, surplus: Surplus) -> Self {
        let janitor = Arc::new(Janitor::of(domain));
        Self { janitor, stderr_relay: StderrRelay::new(), surplus }
    }
}
