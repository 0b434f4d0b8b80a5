//! Devices in device processes: the processes that serve them, their walls and their ends, and
//! supervisors that take over from each other.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod apart;
mod captured;
mod confined;
mod crowd;
mod default;
mod disks;
mod domain;
mod held;
mod hoard;
mod idle;
mod journal;
mod memory;
mod nbd;
mod net;
mod outlived;
mod parked;
mod qcow2;
mod reaped;
mod reserved;
mod shared_limit;
mod silent;
mod stopped;
mod switched;
mod taken;
mod takeover;
mod takeover_died;
mod takeover_taps;
mod uplink_away;
mod users;
mod view;
mod ways;
mod xdp;
mod xdp_uplink;
