//! Device halves that are killed: `cargo test -p manyring-queue inflight` runs these tests.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![cfg(all(not(loom), debug_assertions))]

#[path = "../guest/mod.rs"]
mod guest;
mod inflight;
