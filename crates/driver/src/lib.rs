//! The guest's side, for tests and bench: guest memory, a front-end, virtio drivers.
//!
//! transport -> queue -> device -> backend; **driver** stands across from the transport, where a
//! guest would be. It is never linked into the daemon.
//!
//! ```text
//! Arena     guest memory in files, a bump allocator of guest addresses
//! Virtqueue a driver queue in an arena, with its kick, call and err eventfds
//! FrontEnd  the vhost-user front-end over a blocking socket
//! BlkDriver a virtio-blk driver over the three
//! NetDriver a virtio-net driver: queue pairs, each movable to a thread; the control queue
//! SimXen    Xen without Xen: xenstore, grants and event channels between processes
//! XenDomain a domain of it from inside: pages, grants, event channels
//! Blkfront  a Xen block front-end in such a domain
//! hostile   a toolbox that spoils a valid ring
//! ```
//! Begin with `vhost_user.rs`.
#![deny(unsafe_code)]

mod arena;
mod blk;
mod blkfront;
mod error;
pub mod hostile;
mod net;
mod request;
mod vhost_user;
mod vring;
mod xen;

pub use arena::{Arena, TableEntry};
pub use blk::{BlkDriver, BlkDriverQueue};
pub use blkfront::{Blkfront, BlkfrontOptions, BlkfrontQueue, XenDone, XenOp};
pub use error::DriverError;
pub use net::{
    ControlDriverQueue, ControlOwner, CtrlAnswer, NetCounters, NetDriver, NetDriverOptions,
    NetDriverRx, NetDriverTx, NetPair,
};
pub use request::{BlkDriverOptions, Done, DriverOp};
pub use vhost_user::FrontEnd;
pub use vring::Virtqueue;
pub use xen::{EventChannel, SimXen, XEN_PAGE_SIZE, XenCalls, XenDisk, XenDomain, XenStore};
// A test of the daemon names this crate only, and spells messages and rings with these.
pub use {manyring_queue as queue, manyring_wire as wire};
