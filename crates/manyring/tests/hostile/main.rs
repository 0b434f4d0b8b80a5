//! Hostile guests and front-ends, and a host that has nothing more to give: what each costs, and
//! whom.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod blk;
mod doorbells;
mod few_fds;
mod few_threads;
mod messages;
mod net;
mod silent;
mod supervisor;
mod vast;
