//! Serves the devices of one process: sessions, workers and guest memory. Touches no packet.
//!
//! ```text
//!                    in                  by                        out
//! a supervisor       a device of a plan  assemble/wanted.rs        Made: the opened device
//! a device process   Commands            device_process.rs, `run`  Reports, counters; sessions
//! ```
//! [`assemble`] opens the disks and ports of a plan (`manyring_config`). The sessions of a device
//! that the supervisor serves itself are started by its `devices/front.rs`. A device process
//! ([`device_process`]) gets a device's specification and descriptors from its supervisor instead,
//! opens nothing itself, and gives up its rights first. Begin with `assemble/wanted.rs` for the
//! supervisor, and with `run` in `device_process.rs` for a device process.
//!
//! Both processes send messages with descriptors by [`channel`]. A device process writes its
//! counters ([`counts`]), the state of its workers ([`threads`]) and the work that a limit let
//! pass ([`lease_file`]) into sealed memory, which the supervisor reads.
//!
//! Nothing here writes to standard output or standard error but [`output`] and [`log`]: the macros
//! that print panic where a write fails, and a panic ends the process with every device in it.
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod assemble;
pub mod bucket;
pub mod byte_stream;
pub mod channel;
pub mod control_client;
pub mod counts;
pub mod credentials;
pub mod device_process;
pub mod fds;
pub mod lease_file;
pub mod lease_ring;
pub mod limit_groups;
pub mod log;
pub mod outgoing;
pub mod output;
pub mod ports;
pub mod proc_stat;
pub mod reaper;
pub mod service;
pub mod signals;
pub mod supervisor_client;
pub mod threads;
pub mod times;
pub mod view;
pub mod workers;
