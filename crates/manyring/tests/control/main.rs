//! The control of a daemon that runs, by its sockets, its commands and its files, and what is kept
//! of it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]

#[path = "../support/mod.rs"]
mod support;

mod api;
mod change;
mod durable;
mod held;
mod kept;
mod net;
mod openapi;
mod races;
mod reload;
mod roles;
mod scrape;
mod slow_host;
mod slow_proc;
