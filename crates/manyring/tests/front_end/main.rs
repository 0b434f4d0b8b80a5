//! Front-ends that are not ours, that come and go, and that migrate their guests. Begin with
//! `blkio.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod blkio;
mod migrate;
mod reconnect;
mod replayed;
