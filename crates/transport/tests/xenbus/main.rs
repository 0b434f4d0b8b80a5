//! xenbus over real sockets: the xenstore client, discovery, and a device from start to end.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends where it fails")]
#![allow(clippy::disallowed_methods, reason = "the server has threads and a clock of its own")]

mod client;
mod serve;
mod server;
