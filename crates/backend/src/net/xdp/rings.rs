//! `Rings`: the four rings of an AF_XDP socket.

use super::ring::{Ring, RingLayout};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::xdp_mmap_offsets;
use rustix::net::xdp::{
    XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING,
};

/// Entries of each ring: one for each chunk, of which there are at most 512.
pub(super) const RING_SIZE: u32 = 512;

/// The four rings of a socket, mapped.
pub(super) struct Rings {
    pub(super) rx: Ring,
    pub(super) fill: Ring,
    pub(super) tx: Ring,
    pub(super) completion: Ring,
}

impl Rings {
    /// Maps the rings of the socket `fd`.
    ///
    /// # Errors
    /// `EOPNOTSUPP`, `ENOPROTOOPT`, `ENOTSOCK`: `fd` is no such socket. Any other: a ring cannot be
    /// mapped.
    pub(super) fn map(fd: &OwnedFd) -> Result<Self, Errno> {
        let parts = xdp_mmap_offsets(fd)?;
        let ring = |offset, parts, entry| {
            Ring::map(fd.as_fd(), &RingLayout { offset, parts, entry, size: RING_SIZE })
        };
        Ok(Self {
            rx: ring(XDP_PGOFF_RX_RING, parts.rx, 16)?,
            fill: ring(XDP_UMEM_PGOFF_FILL_RING, parts.fr, 8)?,
            tx: ring(XDP_PGOFF_TX_RING, parts.tx, 16)?,
            completion: ring(XDP_UMEM_PGOFF_COMPLETION_RING, parts.cr, 8)?,
        })
    }
}
