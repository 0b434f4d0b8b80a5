//! What the supervisor and a device process say to each other: plain values, without I/O. Nothing
//! here uses the configuration, the supervisor, or what serves a device.

pub mod message;
pub mod nbd;
pub mod spec;
