//! How a guest arrives: negotiate, map memory, build queues, hand them to a device.
//!
//! **transport** -> queue -> device -> backend. A transport acts once, when a guest arrives or
//! leaves; while it runs, the queues belong to the device's workers. There are two transports:
//! [`vhost_user`], whose front-ends come over a socket, and [`xenbus`], through which Xen's come.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod vhost_user;
pub mod xenbus;
