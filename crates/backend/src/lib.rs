//! Where packets and blocks end. Knows bytes and pages, never rings or guests.
//!
//! transport -> queue -> device -> **backend**. A backend answers and never calls: the device
//! submits and reaps. Two entry points: [`net::Port`] and [`blk::Disk`].
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod blk;
pub mod net;
mod ready;
pub mod sys;
#[cfg(test)]
mod tests;
