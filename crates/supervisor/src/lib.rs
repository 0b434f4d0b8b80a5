//! The supervisor: owns devices, images, taps and sockets, and the processes that serve them.
//!
//! ```text
//! devices.rs, devices/   opens, changes and removes devices, one change of a device after another
//! processes/             a device process for each trust domain; takeovers
//! xen.rs, xen/           the disks of Xen guests, from xenstore
//! model/                 the devices, their changes and events, as the control API shows them
//! client.rs              sends a request to another daemon, by its control socket
//! links.rs               tells network devices of changes of the host's interfaces
//! ```
//! It serves no queue, maps no guest's memory, and waits for no device process. What a device
//! process runs is `manyring_serve`.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod client;
pub mod devices;
mod links;
pub mod model;
pub mod processes;
pub mod xen;
