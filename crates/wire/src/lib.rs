//! Bytes of every format that a peer can send, parsed and emitted. No I/O, no clock, no unsafe.
//!
//! transport -> queue -> device -> backend; **wire** lies under all of them. Every type here is
//! parsed from bytes or emitted to bytes and does nothing else.
//!
//! ```text
//! module      whose bytes                              main types
//! vhost_user  a front-end's messages                   Header -> Row (THE TABLE) -> Request; Reply
//! virtio      feature, status and device numbers       constants
//! virtqueue   descriptors and flags of both rings      constants (the crate queue reads the rings)
//! blk         a driver's requests to a disk            RawBlkHeader -> RequestKind; Segment
//! net         a driver's frames and commands           RawNetHeader, Offloads; Command; segment
//! nbd         an NBD server's answers                  Handshake, replies; commands emitted
//! xen         xenstore, and a Xen disk's nodes, ring   Message; Offer, DiskGeometry; requests
//! rtnetlink   the kernel's news of interfaces          Request emitted; Link, LinkEvent parsed
//! ```
//! Bytes that were copied out of a socket or of guest memory flow in, a valid value or an error
//! flows out; `emit` makes bytes of a value again. Why it is so, and why it is right:
//! 1. **Parse, do not validate.** `parse` checks lengths, sums, counts and reserved bits once; a
//!    value that exists is valid, and nobody checks it again. Whatever depends on state, such as
//!    "is there a queue 7?", is decided above.
//! 2. **Bytes are copied first.** A guest writes while we read. Types whose name begins with `Raw`
//!    have the layout of guest memory, and are parsed from a copy.
//! 3. **An unknown value is a value where the specification has an answer for it**
//!    ([`blk::RequestKind::Unknown`]), and an error where the peer broke a rule.
//! 4. **A format is a table where it can be.** [`vhost_user::REQUESTS`] has a row for each request,
//!    with the shape of its payload, its file descriptors, and the feature that it needs.
//!
//! Pinned specifications: virtio 1.3 (OASIS committee specification) and the vhost-user protocol
//! as documented in QEMU 11.0, plus the request and the two feature bits of 11.1.
//!
//! Begin with `vhost_user.rs`, and the table in it.
//!
//! ```
//! use manyring_wire::blk::{RawBlkHeader, RequestKind, VIRTIO_BLK_T_IN};
//! use manyring_wire::vhost_user::{FLAG_VERSION, Header, ParseError, Request, row_of};
//!
//! // A message of a front-end: a header of 12 bytes, then the payload of its row.
//! let header = Header { request: 2, flags: FLAG_VERSION, size: 8 };
//! assert_eq!(Header::parse(&header.emit()), Ok(header));
//! let row = row_of(header.request).unwrap();
//! assert_eq!(row.name, "SET_FEATURES");
//! let payload = (1u64 << 32).to_ne_bytes();
//! assert_eq!(Request::parse(row, &payload, 0), Ok(Request::SetFeatures(1 << 32)));
//! let name = "SET_FEATURES";
//! assert_eq!(Request::parse(row, &payload[..4], 0), Err(ParseError::Size { name, size: 4 }));
//!
//! // A request of a driver: its sector becomes an offset in bytes, which cannot overflow.
//! let of = |kind: u32, sector: u64| {
//!     let (kind, sector) = (kind.into(), sector.into());
//!     RequestKind::parse(&RawBlkHeader { kind, sector, ..RawBlkHeader::default() })
//! };
//! assert_eq!(of(VIRTIO_BLK_T_IN, 8), RequestKind::In { offset: 4096 });
//! assert_eq!(of(VIRTIO_BLK_T_IN, u64::MAX), RequestKind::OutOfRange);
//! assert_eq!(of(77, 0), RequestKind::Unknown(77));
//! ```
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
