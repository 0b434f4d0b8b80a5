//! The host's half of Xen disks: the calls to a hypervisor, and the folder of their journals.
//!
//! ```text
//! hypervisor.rs   maps pages that a domain lends, and binds event channels; or makes descriptors
//!                 by which a device process does so
//! state_dir.rs    locks `state_dir`, opens the journal of each ring, and bounds a journal's size
//! ```
//! The supervisor (`manyring_supervisor`, `xen.rs`) finds the disks in xenstore and decides when a
//! ring starts and stops. All calls of this crate may block: the supervisor makes them on a thread
//! that serves no queue.
#![deny(unsafe_code)]

mod hypervisor;
mod state_dir;

pub use hypervisor::{Bell, Hypervisor, HypervisorError, Lender, LentBell, LentGrants};
pub use state_dir::{Fate, Held, Served, StateDir, StateDirError};
