//! The supervisor: owns devices, images, taps and sockets, and the processes that serve them.
//!
//! ```text
//! in    Plan; Change, from the control API; a supervisor's handoff (`manyring run --takeover`)
//! out   Registry, which devices there are; Commands to device processes; a handoff to a successor
//!
//! devices.rs, devices/   opens, changes and removes devices, one change of a device after another
//! processes/             a device process for each trust domain; takeovers
//! xen.rs, xen/           the disks of Xen guests, from xenstore
//! model/                 the devices, their changes and events, as the control API shows them
//! links.rs               tells network devices of changes of the host's interfaces
//! ```
//! The supervisor of `manyring run` serves no queue of a device that has a device process, and maps
//! no memory of its guest. What a device process runs is `manyring_serve`. With `manyring blk`,
//! `net` or `xen-blk` without `--isolate`, and with `domains = "one"`, there is no device process:
//! this process runs `manyring_serve` itself. Its control thread waits for no device process; a
//! task that waits for one has a limit of time (`manyring_serve::times`).
//!
//! Begin with `serve` in `devices.rs`, and with `processes/mod.rs`.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod devices;
mod links;
pub mod model;
pub mod processes;
pub mod xen;
