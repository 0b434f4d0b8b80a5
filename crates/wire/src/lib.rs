//! Bytes of every format that a peer can send, parsed and emitted. No I/O, no clock, no unsafe.
//!
//! transport -> queue -> device -> backend; **wire** lies under all of them. Every type here is
//! parsed from bytes or emitted to bytes and does nothing else: `parse` checks once, and a value
//! that exists is valid.
//!
//! Pinned specifications: virtio 1.3 (OASIS committee specification) and the vhost-user protocol
//! as documented in QEMU 11.0, plus the request and the two feature bits of 11.1.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("Manyring serves 64-bit hosts only: guest sizes are 64-bit and must fit `usize`");

pub mod blk;
pub mod nbd;
pub mod net;
pub mod rtnetlink;
pub mod vhost_user;
pub mod virtio;
pub mod virtqueue;
pub mod xen;

/// A 64-bit size as a host size. Lossless: 32-bit hosts do not compile.
#[must_use]
#[allow(clippy::cast_possible_truncation, reason = "usize is 64 bits: see the compile_error above")]
pub const fn host_size(size: u64) -> usize {
    size as usize
}
