//! Network devices that are served, on each kind of port, and guests of one switch. Begin with
//! `packet.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[allow(dead_code, reason = "the tests of the back-end use all of it")]
#[path = "../../../backend/tests/net/guest.rs"]
mod guest;
#[path = "../support/mod.rs"]
mod support;

mod filter;
mod gone;
mod held;
mod legacy;
mod live;
mod merge_lies;
mod packet;
mod pcap;
mod receiving;
mod switch;
mod switch_rules;
mod switch_uplink;
mod unfinished;
mod xdp;

use support::space::own as space;
