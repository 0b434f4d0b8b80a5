//! The supervisor: owns devices, images, taps and sockets, and the processes that serve them.
//!
//! ```text
//! in    Plan; Change, from the control API; a supervisor's handoff (`manyring run --takeover`)
//! out   Registry, which devices there are; Commands to device processes; a handoff to a successor
//!
//! devices.rs, devices/   opens, changes and removes devices, one change of a device after another
//! processes/             a device process for each trust domain; takeovers
//! xen.rs, xen/           serves the disks of Xen guests that xenstore announces
//! model/                 the devices, their changes and events, as the control API shows them
//! links.rs               has network devices check their interfaces when the host changes one
//! ```
//! The supervisor of `manyring run` serves no queue of a device that has a device process, and maps
//! no memory of its guest. A device process runs `manyring_serve`. With `manyring blk`, `net` or
//! `xen-blk` without `--isolate`, and with `domains = "one"`, there is no device process: this
//! process runs `manyring_serve` itself. The control thread never blocks on a device process, and
//! each task that awaits one has a timeout (`manyring_serve::times`).
//!
//! Begin with `serve` in `devices.rs`, and with `processes/mod.rs`.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod devices;
mod links;
pub mod model;
pub mod processes;
pub mod xen;
