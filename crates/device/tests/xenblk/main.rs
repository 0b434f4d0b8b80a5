//! A Xen disk's queue on a worker's thread, as a guest of the simulated Xen sees it: what is served
//! and what is refused, what is mapped and let go of, who is told, what a change waits for,
//! and what becomes of the requests of a process that was killed.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::cast_possible_truncation, reason = "small counts, and seeds of patterns")]

mod change;
mod data;
mod grants;
mod guest;
mod hostile;
mod memory;
mod mixed;
mod order;
mod takeover;
