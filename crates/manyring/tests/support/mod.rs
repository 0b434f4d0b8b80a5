//! Code that the test programs of this crate share: the daemon as a child, front-ends, guests,
//! namespaces. Each program has a copy of it, and uses its part.
#![allow(dead_code, reason = "every test program uses its own part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

pub(crate) mod changes;
pub(crate) mod client;
pub(crate) mod datagram;
pub(crate) mod foreign;
pub(crate) mod frozen;
pub(crate) mod prober;
pub(crate) mod process;
pub(crate) mod program;
pub(crate) mod rings;
pub(crate) mod space;
pub(crate) mod taken;
pub(crate) mod view;
