//! Network ports with the kernel as their peer, in network namespaces of their own. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod gso;
mod guest;
mod macvtap;
mod queues;
mod space;
mod start;
mod steer;
mod tap;
mod xdp;
