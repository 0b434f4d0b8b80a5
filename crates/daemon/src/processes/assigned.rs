//! The supervisor's part of a device that it has given to a device process, and of a domain for all
//! its device processes.

use super::counts::Counts;
use super::journal_store::JournalStore;
use super::message::PrivilegedRequest;
use super::stderr_relay::StderrRelay;
use super::xen_line::XenLine;
use manyring_device::net::NetDevice;
use manyring_engine::Janitor;
use manyring_transport::vhost_user::Connected;
use std::sync::Arc;
use tokio::sync::mpsc;

/// A question of a device process.
#[derive(Clone, Debug)]
pub(super) struct PendingRequest {
    pub(super) number: u64,
    pub(super) request: PrivilegedRequest,
}

/// The supervisor's part of a device that a device process serves.
#[derive(Debug)]
pub(super) struct AssignedDevice {
    /// Follows its sessions.
    pub(super) connected: Connected,
    pub(super) counts: Arc<Counts>,
    pub(super) net: Option<Arc<NetDevice>>,
    /// Where its questions go: one at a time is answered.
    pub(super) asks: mpsc::Sender<PendingRequest>,
    /// The sockets and session notes that the supervisor keeps of the device's front-ends.
    pub(super) journals: Arc<JournalStore>,
    /// The connection of a Xen guest's disk.
    pub(super) xen: Option<Arc<XenLine>>,
}

/// The parts that each device process of a domain shares with the device processes before and after
/// it.
#[derive(Clone, Debug)]
pub(super) struct DomainMembers {
    /// Closes the file descriptors that the device processes had no reason to send.
    pub(super) janitor: Arc<Janitor>,
    pub(super) stderr_relay: Arc<StderrRelay>,
}

impl DomainMembers {
    pub(super) fn of(domain: &str) -> Self {
        Self { janitor: Arc::new(Janitor::of(domain)), stderr_relay: StderrRelay::new() }
    }
}
