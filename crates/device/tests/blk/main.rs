//! A disk's queue on a worker's thread, as a guest and its front-end see it: what is served and
//! what is refused, who is told of it, when the worker sleeps, what a change waits for.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

mod busy;
mod change;
mod churn;
mod disks;
mod full;
mod guest;
mod memory;
mod notify;
mod requests;
