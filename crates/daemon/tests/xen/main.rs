//! The disks of Xen guests as the daemon serves them: announced, connected, changed, taken away,
//! by the tool stack and the guests of a simulated Xen.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "threads of the test")]
#![allow(clippy::cast_possible_truncation, reason = "bytes of patterns")]

mod beside;
mod between;
mod ends;
mod few;
#[path = "../frozen/mod.rs"]
mod frozen;
mod noise;
#[path = "../apart/prober.rs"]
mod prober;
#[path = "../process/mod.rs"]
mod process;
#[path = "../program/mod.rs"]
mod program;
#[path = "../rings/mod.rs"]
mod rings;
mod rooms;
mod serve;
mod storm;
mod successors;
mod takeover;
mod world;
