//! How the program starts and ends, what it says, and the documents that tell so.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod bad;
mod bad_net;
mod documents;
mod guides;
mod log;
mod log_sink;
mod net;
mod output;
mod plan;
mod service;
mod stop;
mod ways;
