//! The system calls the backends share: beside `blk/uring.rs` the only place here that may be
//! unsafe.

pub mod bpf;
pub(crate) mod child;
pub mod denied;
pub mod file;
pub mod heap;
pub mod interrupt;
pub mod link;
pub mod starter;
pub mod tuntap;
pub mod uring;
