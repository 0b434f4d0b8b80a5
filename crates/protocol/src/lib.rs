//! The messages between the supervisor and a device process, and the layouts of files that they
//! share: plain values, without I/O.
//!
//! Nothing here uses the configuration or the supervisor. The options of a device are the device's
//! own types, which are values too.
//!
//! ```text
//! supervisor                                             device process
//!     | -- Command (serve a device, serve a client, ..) -----> |
//!     | <-- Report (a session began, a device stopped, ..) --- |
//!     | <-- Report::Request: a PrivilegedRequest ------------- |
//!     | -- Command::Done or ::Connected, its answer ---------> |
//! ```
//! Begin with `message.rs`, which defines the messages: each is one datagram of a version byte and
//! JSON, with file descriptors. `spec.rs` describes a device with all values resolved, without
//! paths and sockets; `switch.rs` a switch and its ports; `nbd.rs` an NBD server's export and its
//! errors; `journal_layout.rs` the layout of a session's journal in memory. A device process may
//! have been compromised by its guest: its messages are parsed with the bounds of `message.rs`, and
//! the supervisor checks each one before it acts.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod digits;
pub mod journal_layout;
pub mod message;
pub mod nbd;
pub mod spec;
pub mod switch;
