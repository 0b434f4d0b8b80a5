//! The supervisor's state for a device that a device process serves, and for the device processes
//! of a domain.

use super::journal_store::JournalStore;
use super::stderr_relay::StderrRelay;
use super::xen_line::XenLine;
use manyring_device::net::OwnedPort;
use manyring_engine::{Janitor, Surplus};
use manyring_protocol::message::PrivilegedRequest;
use manyring_serve::assemble::SwitchHost;
use manyring_serve::bucket::Bucket;
use manyring_serve::counts::Counts;
use manyring_transport::vhost_user::Connected;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, watch};

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
    /// The queue of the device's privileged requests. The request server serves one at a time.
    pub(super) asks: mpsc::Sender<PendingRequest>,
    /// The sockets and journals of the device's front-ends.
    pub(super) journals: Arc<JournalStore>,
    /// The connection of a Xen guest's disk.
    pub(super) xen: Option<Arc<XenLine>>,
}

/// The switch of a device process, and what the supervisor has sent to the process about it.
#[derive(Debug)]
pub(super) struct ServedSwitch {
    pub(super) host: Arc<SwitchHost>,
    /// True once the switch was sent to the process.
    pub(super) is_given: watch::Sender<bool>,
    /// The number of each port that was sent to the process, by device. Locked during sends.
    pub(super) told: tokio::sync::Mutex<BTreeMap<String, u64>>,
    /// The queue of privileged requests for the uplink. The request server serves one at a time.
    asks: Mutex<Option<mpsc::Sender<PendingRequest>>>,
    pub(super) asked: Mutex<Option<mpsc::Receiver<PendingRequest>>>,
}

impl ServedSwitch {
    pub(super) fn new(host: Arc<SwitchHost>) -> Self {
        let (asks, asked) = mpsc::channel(1);
        let (is_given, told) = Default::default();
        Self { host, is_given, told, asks: Mutex::new(Some(asks)), asked: Mutex::new(Some(asked)) }
    }

    /// Returns the uplink of the switch, if it has one.
    pub(super) fn uplink(&self) -> Option<Arc<OwnedPort>> {
        self.host.uplink()
    }

    /// Queues a request for the uplink. Returns false if the queue is full: an earlier request
    /// still waits.
    pub(super) fn ask(&self, request: PendingRequest) -> bool {
        lock(&self.asks).as_ref().is_some_and(|asks| asks.try_send(request).is_ok())
    }

    /// Closes the queue of requests for the uplink.
    pub(super) fn closes_asks(&self) {
        *lock(&self.asks) = None;
    }
}

/// The objects that the supervisor passes from one device process of a domain to the next.
#[derive(Clone, Debug)]
pub(super) struct DomainMembers {
    /// Closes the descriptors that came with reports which may carry none.
    pub(super) janitor: Arc<Janitor>,
    pub(super) stderr_relay: Arc<StderrRelay>,
    /// Descriptors that the supervisor keeps for the domain's sessions beyond the reserves of its
    /// devices.
    pub(super) surplus: Surplus,
    /// Limits the rate of the domain's reports.
    pub(super) bucket: Arc<Bucket>,
}

impl DomainMembers {
    pub(super) fn of(domain: &str, surplus: Surplus) -> Self {
        let janitor = Arc::new(Janitor::of(domain));
        let (stderr_relay, bucket) = (StderrRelay::new(), Arc::new(Bucket::of_reader()));
        Self { janitor, stderr_relay, surplus, bucket }
    }
}

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
