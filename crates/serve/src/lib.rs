//! Serves the devices of one process: sessions, workers and guest memory. It handles no packet and
//! no request itself.
//!
//! ```text
//! in                  by                        out
//! a supervisor       a device of a plan  assemble/wanted.rs        Made: the opened device
//! a device process   Commands            device_process.rs, `run`  Reports, counters; sessions
//! ```
//! [`assemble`] opens the disks and ports of a plan (`manyring_config`). For devices that the
//! supervisor serves itself, the supervisor's `devices/front.rs` starts the sessions. A device
//! process ([`device_process`]) drops its rights first, and then gets each device's spec and
//! descriptors from its supervisor: it opens nothing itself. Begin with `assemble/wanted.rs` for
//! the supervisor, and with `run` in `device_process.rs` for a device process.
//!
//! Both processes send messages with descriptors by [`channel`]. A device process writes its
//! counters ([`counts`]), the state of its workers ([`threads`]) and its use of shared limits
//! ([`lease_file`]) into sealed memfds, which the supervisor reads.
//!
//! Only [`output`] and [`log`] write to standard output and standard error: `println!` and its like
//! panic when a write fails, and a panic would end the process with all its devices.
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
pub mod interface_watch;
pub mod lease_file;
pub mod lease_ring;
pub mod limit_groups;
pub mod log;
pub mod outgoing;
pub mod output;
pub mod pcap;
pub mod proc_stat;
pub mod reaper;
pub mod service;
pub mod signals;
pub mod supervisor_client;
pub mod threads;
pub mod times;
pub mod view;
pub mod worker_view;
