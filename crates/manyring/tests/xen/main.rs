//! The disks of Xen guests as the daemon serves them: announced, connected, changed, taken away,
//! by the tool stack and the guests of a simulated Xen.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "threads of the test")]
#![allow(clippy::cast_possible_truncation, reason = "bytes of patterns")]

#[path = "../support/mod.rs"]
mod support;

mod beside;
mod between;
mod ends;
mod few;
mod noise;
mod processes;
mod serve;
mod storm;
mod successors;
mod takeover;
mod world;
