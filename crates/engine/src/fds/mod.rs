//! File descriptors that front-ends send: one thread of the device checks, uses and closes them.
//!
//! A front-end may send any file as a doorbell, and decides how long a write, an `fstat` or a close
//! of it lasts. So only eventfds, and sockets that are calls, reach a worker (`doorbell.rs`). The
//! engine puts its own eventfd in front of a pipe or another socket (`bridge.rs`), and the device's
//! janitor makes all checks, mappings and closes (`foreign.rs`). A write that blocks is interrupted
//! (`sentry.rs`). `budget.rs` counts the file descriptors of front-ends. `ends.rs` lists the
//! sockets of sessions, since an end of such a socket must not be a doorbell.

pub(crate) mod bridge;
pub(crate) mod budget;
pub(crate) mod doorbell;
pub(crate) mod ends;
pub(crate) mod foreign;
pub(crate) mod sentry;
