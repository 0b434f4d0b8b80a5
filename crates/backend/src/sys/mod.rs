//! System calls that the backends share. In this crate only this folder and `blk/uring.rs` may have
//! unsafe code.

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
