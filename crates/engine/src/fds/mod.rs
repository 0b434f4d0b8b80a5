//! File descriptors that front-ends send: checked on arrival, touched by one thread of the device
//! alone, and closed there.
//!
//! A front-end may send anything as a doorbell, and decides how long a write to it, a look at it or
//! its close lasts. So only eventfds reach a worker (`doorbell.rs`). The engine puts its own
//! eventfd before a pipe or a socket (`bridge.rs`), and the device's janitor does all looks,
//! mappings and closes (`foreign.rs`). A write that blocks is interrupted (`sentry.rs`).
//! `budget.rs` counts the file descriptors that front-ends have. Which sockets are sessions, whose
//! ends are no doorbells, is kept in `ends.rs`.

pub(crate) mod bridge;
pub(crate) mod budget;
pub(crate) mod doorbell;
pub(crate) mod ends;
pub(crate) mod foreign;
pub(crate) mod sentry;
