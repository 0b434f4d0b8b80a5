//! xenbus: offers disks to Xen guests through xenstore, and connects their front-ends.
//!
//! xenstore is a tree of strings that the tool stack, back-ends and front-ends write and watch. A
//! device is two folders in it: the back-end's, in the home of the domain that serves, and the
//! front-end's, in the home of the guest.
//!
//! ```text
//! discovery   finds the devices, by a watch on backend/KIND and the difference of two listings
//! store       the client of xenstore: requests and replies, watches, transactions
//! negotiate   the nodes that are read, and the typed records that are made of them
//! state       the handshake, pure: (state, event) -> (state, actions)
//! readings    limits how often the nodes of a device are read
//! serve       one device: reads nodes for the state machine and carries out its actions
//! simulated   the hypervisor's part of a simulated Xen: seats and event channels
//! ```
//! This module does not touch rings, grants and event channels: the implementation of [`Host`] maps
//! and starts them. docs/design/0010 gives the reasons for this design.

mod discovery;
pub mod negotiate;
mod readings;
mod serve;
mod simulated;
pub mod state;
mod store;

pub use discovery::{DEVICES_MAX, Discovery, Known, Presence, listing};
pub use manyring_wire::xen::device::{Assignment, DiskGeometry, Offer, QUEUES_MAX};
pub use serve::{Command, Host, HostError, ServeError, serve};
pub use simulated::{Channel, Lent, Seat, SimulatedXen};
pub use store::{
    Changed, DEVICE, SOCKET, Store, StoreEndpoint, StoreError, Transaction, Tries, Watch,
    default_endpoint,
};

/// A device, as the path of its back-end's folder names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The kind of the back-end: `vbd`, `vbd3`, `manyring`.
    pub kind: String,
    /// The number of the front-end's domain.
    pub domain: u16,
    /// The number of the virtual device in its guest.
    pub device: u32,
}

impl DeviceId {
    /// Returns the path of the back-end's folder, relative to the home of its domain.
    #[must_use]
    pub fn back_folder(&self) -> String {
        format!("backend/{self}")
    }

    /// Returns the node to which an error of the device is written, relative to its domain's home.
    #[must_use]
    pub fn error_node(&self) -> String {
        format!("error/{}/error", self.back_folder())
    }
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.kind, self.domain, self.device)
    }
}
