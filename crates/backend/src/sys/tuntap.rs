//! Taps: the device node, its ioctls, and frames read into and written from guest memory.
//!
//! The same calls work on a macvtap's queue.
#![allow(unsafe_code, reason = "allow-listed: ioctls, and system calls on guest memory")]

use manyring_memory::{GuestSlice, as_iovecs};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::path::Path;

/// Most slices of one call (`UIO_MAXIOV`).
pub const IOV_MAX: usize = 1024;
/// Longest name of an interface in bytes, without the zero that ends it.
pub const NAME_LEN_MAX: usize = 15;

/// Flag: the device is a tap and carries Ethernet frames.
pub const IFF_TAP: u16 = 0x0002;
/// Flag: the tap may have several queues.
pub const IFF_MULTI_QUEUE: u16 = 0x0100;
/// Flag: no packet information precedes the header.
pub const IFF_NO_PI: u16 = 0x1000;
/// Flag: a virtio-net header precedes each frame.
pub const IFF_VNET_HDR: u16 = 0x4000;
const IFF_ATTACH_QUEUE: u16 = 0x0200;
/// Flag: the host does not use this queue.
pub const IFF_DETACH_QUEUE: u16 = 0x0400;

/// `struct ifreq`: the name of an interface, and 24 bytes whose meaning depends on the request.
#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
struct IfReq {
    name: [u8; NAME_LEN_MAX + 1],
    /// Flags, or a hardware address behind its type.
    data: [u8; 24],
}

impl IfReq {
    fn named(name: &str, flags: u16) -> Result<Self, Errno> {
        let mut request = Self::default();
        if name.len() > NAME_LEN_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        request.data[..2].copy_from_slice(&flags.to_ne_bytes());
        Ok(request)
    }

    fn name(&self) -> String {
        let bytes = self.name.split(|&b| b == 0).next().unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    }

    const fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.data[0], self.data[1]])
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn done(result: c_long) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| last_errno())
}

fn zero(result: c_int) -> Result<(), Errno> {
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Opens the device node of all taps, or of one macvtap, in non-blocking mode.
///
/// # Errors
/// The error of `open`: `ENOENT` or `ENXIO` without such a device, `EACCES` without permission.
pub fn open(node: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(node, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
}

/// Makes `fd` a queue of interface `name` (`TUNSETIFF`). Returns the name of the interface, in
/// which the kernel replaces `%d` by a number.
///
/// # Errors
/// `EPERM`: `CAP_NET_ADMIN` is needed. `EBUSY`: it is in use. Any other: `TUNSETIFF`'s.
pub fn join(fd: BorrowedFd<'_>, name: &str, flags: u16) -> Result<String, Errno> {
    let mut request = IfReq::named(name, flags)?;
    // SAFETY: TUNSETIFF reads and writes the `struct ifreq` it is given, which outlives the call.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(request.name())
}

/// Returns the interface of which `fd` is a queue, and its `IFF_*` flags (`TUNGETIFF`).
///
/// # Errors
/// `EBADFD`: the file is no queue yet, or its interface is deleted. `ENOTTY`: it is no tap's file.
pub fn interface(fd: BorrowedFd<'_>) -> Result<(String, u16), Errno> {
    let mut request = IfReq::default();
    // SAFETY: TUNGETIFF writes the `struct ifreq` it is given, which outlives the call. On a file
    // of another kind this number is refused or, in terminals, unknown too.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    Ok((request.name(), request.flags()))
}

/// The number of the request in the type of `libc`'s `ioctl`: the constant of `libc` has a type
/// that suits glibc and not musl.
const SIOCGIFHWADDR: libc::Ioctl = 0x8927;

/// Returns the hardware address of the interface of which `fd` is a queue.
///
/// # Errors
/// `EBADFD`: the file is no queue, or its interface is deleted.
pub fn hardware_address(fd: BorrowedFd<'_>) -> Result<[u8; 6], Errno> {
    let mut request = IfReq::default();
    // SAFETY: SIOCGIFHWADDR writes the `struct ifreq` it is given, which outlives the call.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), SIOCGIFHWADDR, &raw mut request) })?;
    let mut address = [0; 6];
    address.copy_from_slice(&request.data[2..8]);
    Ok(address)
}

fn set_int(fd: BorrowedFd<'_>, request: libc::Ioctl, value: c_int) -> Result<(), Errno> {
    // SAFETY: the callers' requests read one int from the pointer, which outlives the call.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw const value) })
}

/// Sets the size of the header before each frame, and makes its fields little-endian.
///
/// # Errors
/// `EINVAL`: the size is smaller than the kernel's header.
pub fn set_header(fd: BorrowedFd<'_>, size: usize) -> Result<(), Errno> {
    let size = c_int::try_from(size).map_err(|_| Errno::INVAL)?;
    set_int(fd, libc::TUNSETVNETHDRSZ, size)?;
    set_int(fd, libc::TUNSETVNETLE, 1)
}

/// Limits the bytes of sent frames that the host holds (`sndbuf`). A full queue is not writable.
///
/// # Errors
/// `EINVAL`: the limit is 0.
pub fn set_send_buffer(fd: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    set_int(fd, libc::TUNSETSNDBUF, c_int::try_from(bytes).unwrap_or(c_int::MAX))
}

/// Shows the host that the interface has a carrier, or has none.
///
/// # Errors
/// `EINVAL`: the queue is that of a macvtap. Any other: `TUNSETCARRIER`'s.
pub fn set_carrier(fd: BorrowedFd<'_>, up: bool) -> Result<(), Errno> {
    set_int(fd, libc::TUNSETCARRIER, c_int::from(up))
}

/// Has the host choose the queue of each frame to the guest by `program`; `None`: by its own table.
///
/// # Errors
/// `EINVAL`: the queue is that of a macvtap.
pub fn set_steering(fd: BorrowedFd<'_>, program: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    set_int(fd, libc::TUNSETSTEERINGEBPF, program.map_or(-1, |program| program.as_raw_fd()))
}

/// Sets the offloads of delivered frames (`TUN_F_*`): partial checksums and large segments.
///
/// # Errors
/// `EINVAL`: the kernel does not know one of the bits.
pub fn set_offloads(fd: BorrowedFd<'_>, bits: c_uint) -> Result<(), Errno> {
    let bits = c_ulong::from(bits);
    // SAFETY: TUNSETOFFLOAD takes a number and no pointer.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, bits) })
}

/// Makes `number` refer to the file of `fd`, and closes its former file. A call that is under way
/// on `number` continues with the former file.
///
/// # Errors
/// `EMFILE`, `EBUSY`: those of `dup3`.
pub fn replace(fd: BorrowedFd<'_>, number: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: both descriptors are open, and `number` stays open: it only names another file.
    zero(unsafe { libc::dup3(fd.as_raw_fd(), number.as_raw_fd(), libc::O_CLOEXEC) }.min(0))
}

/// Attaches a queue to the host, or detaches it; then frames that wait in the queue are lost.
///
/// # Errors
/// `EINVAL`: the queue is already attached, or detached.
pub fn set_attached(fd: BorrowedFd<'_>, attached: bool) -> Result<(), Errno> {
    let request = IfReq::named("", if attached { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE })?;
    // SAFETY: TUNSETQUEUE reads the `struct ifreq` it is given, which outlives the call.
    zero(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETQUEUE, &raw const request) })
}

/// Has interface `index` receive the frames of all groups, as long as the packet socket is open and
/// the interface exists.
///
/// # Errors
/// `ENODEV`: there is no such interface.
pub fn join_all_groups(socket: BorrowedFd<'_>, index: u32) -> Result<(), Errno> {
    let request = libc::packet_mreq {
        mr_ifindex: c_int::try_from(index).map_err(|_| Errno::NODEV)?,
        mr_type: ALL_GROUPS,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    let (fd, name) = (socket.as_raw_fd(), libc::PACKET_ADD_MEMBERSHIP);
    // SAFETY: the call reads the `struct packet_mreq` it is given, whose size it is told.
    zero(unsafe {
        libc::setsockopt(fd, libc::SOL_PACKET, name, (&raw const request).cast(), MREQ_SIZE)
    })
}

/// `PACKET_MR_ALLMULTI`, in the type of the field.
const ALL_GROUPS: u16 = 2;
/// Bytes of a `struct packet_mreq`.
const MREQ_SIZE: libc::socklen_t = 16;
const _: () = assert!(size_of::<libc::packet_mreq>() == MREQ_SIZE as usize);

/// Sends one frame, with the header before it. Returns the length of both in bytes.
///
/// # Errors
/// `EINVAL`: more than [`IOV_MAX`] slices. `EAGAIN`: the queue is full. Any other: `write`'s.
#[inline]
pub fn write(fd: BorrowedFd<'_>, slices: &[GuestSlice]) -> Result<usize, Errno> {
    transfer(fd, slices, (libc::SYS_write, libc::SYS_writev))
}

/// Receives one frame, with the header before it. Bytes that do not fit the slices are lost.
///
/// # Errors
/// `EINVAL`: more than [`IOV_MAX`] slices. `EAGAIN`: no frame waits. Any other: `read`'s.
#[inline]
pub fn read(fd: BorrowedFd<'_>, slices: &[GuestSlice]) -> Result<usize, Errno> {
    transfer(fd, slices, (libc::SYS_read, libc::SYS_readv))
}

/// Makes the call `of_one` for one slice, and `of_several`, which takes an array, for several:
/// copying the array costs the kernel a fifteenth of the time of a short frame.
#[inline]
fn transfer(
    fd: BorrowedFd<'_>,
    slices: &[GuestSlice],
    (of_one, of_several): (c_long, c_long),
) -> Result<usize, Errno> {
    let (fd, iovecs) = (fd.as_raw_fd(), as_iovecs(slices));
    if let [one] = iovecs {
        // SAFETY: a read or a write of guest memory that the caller keeps mapped (memory's
        // contract), that the guest expects to change, and that the kernel checks byte by byte.
        return done(unsafe { libc::syscall(of_one, fd, one.iov_base, one.iov_len) });
    }
    // SAFETY: the call is told the length of the array; its iovecs refer to memory as above.
    done(unsafe { libc::syscall(of_several, fd, iovecs.as_ptr(), iovecs.len()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;

    #[test]
    fn a_request_is_as_long_as_the_systems() {
        assert_eq!(size_of::<IfReq>(), size_of::<libc::ifreq>());
        assert_eq!(align_of::<IfReq>(), align_of::<libc::ifreq>());
        let request = IfReq::named("fifteen-letters", IFF_TAP).unwrap();
        assert_eq!((request.name().as_str(), request.flags()), ("fifteen-letters", IFF_TAP));
        assert_eq!(IfReq::named("sixteen--letters", 0).err(), Some(Errno::NAMETOOLONG));
    }

    #[test]
    fn a_file_that_is_no_tap_says_so() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(interface(file.as_fd()), Err(Errno::NOTTY));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(interface(null.as_fd()), Err(Errno::NOTTY));
    }
}
