//! The offloads of a tap: which ones the kernel supports, and the bits that ask for them.

use crate::sys::tuntap as sys;
use manyring_wire::net::Offloads;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

/// The `TUN_F_*` bits of these offloads, without those that the kernel would refuse: any without
/// `TUN_F_CSUM`, ECN without TSO, and UDP segments of only one version of IP.
pub(super) fn offload_bits(offloads: Offloads) -> u32 {
    let has_tso = offloads.tso4 || offloads.tso6;
    let has_uso = offloads.uso4 && offloads.uso6;
    let bits = [
        (offloads.csum, libc::TUN_F_CSUM),
        (offloads.tso4, libc::TUN_F_TSO4),
        (offloads.tso6, libc::TUN_F_TSO6),
        (offloads.ecn && has_tso, libc::TUN_F_TSO_ECN),
        (has_uso, libc::TUN_F_USO4 | libc::TUN_F_USO6),
    ];
    let all = bits.iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, bit)| all | bit);
    if offloads.csum { all } else { 0 }
}

/// Finds the offloads that the kernel supports, by trying to set them, and leaves none set.
pub(super) fn probe_offloads(fd: &OwnedFd) -> Result<Offloads, Errno> {
    let all = Offloads { csum: true, tso4: true, tso6: true, ecn: true, uso4: true, uso6: true };
    let has_uso = sys::set_offloads(fd.as_fd(), offload_bits(all)).is_ok();
    sys::set_offloads(fd.as_fd(), 0)?;
    Ok(Offloads { uso4: has_uso, uso6: has_uso, ..all })
}
