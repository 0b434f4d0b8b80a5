//! Disks that are served: their limits, their faults, their rings, and the workers that serve them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod fault;
mod idle;
mod limits;
mod live;
mod load;
mod missed;
mod moderated;
mod moving;
mod pinned;
mod short_device;
