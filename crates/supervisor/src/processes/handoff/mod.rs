//! A takeover (`manyring run --takeover CONTROL`): the running supervisor and the next one.
//!
//! ```text
//! the next supervisor                            the running one
//! reads its configuration, starts
//! processes, listens   -- POST /v1/takeover -->  its device processes quiesce; accepts nobody
//!                                   <-- sockets, disks with their locks, front-ends --
//! opens everything in its plan
//! `Taken`                           ---------------------->  ends; else it continues
//! its device processes serve the front-ends
//! ```
//! Until `Taken` arrives, the running supervisor keeps everything that it hands over. If the next
//! one ends, sends another message or takes too long, the running supervisor starts device
//! processes again, which serve the same front-ends: guests see a pause. The next supervisor serves
//! nobody before the running one has ended.
//!
//! The running supervisor may also die during a takeover. Before it continues to serve, or is
//! stopped, it sends `GoesOn`. A next supervisor that reads no `GoesOn` and sees the running
//! process end takes its place (`predecessor.rs`).

mod destination;
mod predecessor;
mod protocol;
mod source;

pub use destination::Handoff;
pub use predecessor::Before;
pub use protocol::HandoffMessage;
pub(super) use protocol::{AdoptedSession, DeviceHandoff, LingeringIo, Locked};
pub use source::{HandoffRequest, Shown};

use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};

/// The answer of the next supervisor to the running one.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Reply {
    /// The next supervisor has opened everything, and serves when the running one has ended.
    Taken {},
}

/// What a handoff carries of Xen guests' disks: locks, and disks in memory.
#[derive(Debug, Default)]
pub struct OfXen {
    pub(crate) locks: Vec<OwnedFd>,
    pub(crate) memory: Vec<XenBytes>,
}

/// The bytes of a Xen guest's disk in memory ([`HandoffMessage::XenMemory`]).
#[derive(Debug)]
pub struct XenBytes {
    pub(crate) kind: String,
    pub(crate) domain: u16,
    pub(crate) device: u32,
    pub(crate) params: String,
    pub(crate) file: OwnedFd,
}
