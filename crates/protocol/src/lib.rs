//! What the supervisor and a device process say to each other: plain values, without I/O.
//!
//! Nothing here uses the configuration, the supervisor, or what serves a device.
//!
//! ```text
//! supervisor                                             device process
//!     | -- Command (a device, a queue's descriptors, ..) ----> |
//!     | <-- Report (a session, what a front-end sent, ..) ---- |
//!     | <-- PrivilegedRequest (what needs rights), answered -> |
//! ```
//! `message.rs` has the messages, of which each is one datagram of JSON with its descriptors;
//! `spec.rs` a device, resolved, without a path and without a socket; `switch.rs` a switch and its
//! ports; `nbd.rs` what is said of an NBD server; `journal.rs` how the journal of a session lies in
//! memory. A device process may have been taken over by its guest: what it sends is parsed with the
//! bounds of `message.rs`, and judged by the supervisor.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod digits;
pub mod journal;
pub mod message;
pub mod nbd;
pub mod spec;
pub mod switch;
