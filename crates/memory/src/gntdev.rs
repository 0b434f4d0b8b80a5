//! `GrantDevice`: Xen's grant device, which maps pages that other domains lend us.
//!
//! Mapping takes two calls: an ioctl names the references and is answered with an offset, and an
//! mmap of that offset maps them, all or none (Linux `xen/gntdev.h`). A second ioctl then takes the
//! references out of the device's table: the mapping keeps them, and unmapping it ends them,
//! whoever unmaps it. So a dropped mapping, a window that the SIGBUS handler replaces, and a
//! process that is killed all give their pages back, and the device's table, which it searches from
//! the start, stays empty.
#![allow(unsafe_code, reason = "allow-listed: the ioctls of the grant device")]

use crate::error::MemoryError;
use crate::lot::{GrantAccess, GrantError, GrantRef, Lot, pages_of};
use crate::mapping::PAGE;
use crate::window::Window;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The path of the grant device.
pub const GRANT_DEVICE: &str = "/dev/xen/gntdev";

/// `IOCTL_GNTDEV_MAP_GRANT_REF`: u32 count, u32 pad, u64 offset (out), then count pairs of u32
/// domain and u32 reference. The number counts one pair.
const MAP_GRANT_REF: libc::Ioctl = ioctl_number(0, 24);
/// `IOCTL_GNTDEV_UNMAP_GRANT_REF`: u64 offset, u32 count, u32 pad.
const UNMAP_GRANT_REF: libc::Ioctl = ioctl_number(1, 16);

/// `_IOC(_IOC_NONE, 'G', number, size)`
const fn ioctl_number(number: libc::Ioctl, size: libc::Ioctl) -> libc::Ioctl {
    size << 16 | 0x47 << 8 | number
}

/// The numbers of all `ioctl` requests that are made of the device after it was opened.
#[allow(clippy::unnecessary_cast, reason = "the C library chooses the type of `Ioctl`")]
pub const GRANT_REQUESTS: [u64; 2] = [MAP_GRANT_REF as u64, UNMAP_GRANT_REF as u64];

/// Xen's grant device. All domains and queues of a process share one.
#[derive(Debug)]
pub struct GrantDevice {
    fd: OwnedFd,
}

impl GrantDevice {
    /// Opens the device.
    ///
    /// # Errors
    /// [`GrantError::Device`]. `ENOENT`, `ENODEV`: this machine runs no Xen, or the kernel lacks
    /// the driver; `EACCES`: the device is root's.
    pub fn open() -> Result<Self, GrantError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let fd =
            rustix::fs::open(GRANT_DEVICE, flags, Mode::empty()).map_err(GrantError::Device)?;
        Ok(Self { fd })
    }

    /// Makes the grant device from a descriptor that another process has opened for this one alone.
    #[must_use]
    pub fn of_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Returns the descriptor of the device, to be sent to another process.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Maps a lot: all references together, or each on its own if Xen refuses one of them, so that
    /// a bad reference does not affect the others.
    pub(crate) fn map(
        &self,
        window: &mut Window,
        domain: u16,
        lot: &Lot<'_>,
        results: &mut Vec<Result<(), GrantError>>,
    ) {
        let whole = self.map_together(window, domain, lot);
        if lot.grefs.len() == 1 || !matches!(whole, Err(GrantError::NotGranted { .. })) {
            results.extend(lot.grefs.iter().map(|_| whole));
            return;
        }
        for (page, gref) in (lot.page..).zip(lot.grefs) {
            let one = Lot { page, grefs: std::slice::from_ref(gref), ..*lot };
            results.push(self.map_together(window, domain, &one));
        }
    }

    /// Maps all references of a lot, or none of them.
    fn map_together(
        &self,
        window: &mut Window,
        domain: u16,
        lot: &Lot<'_>,
    ) -> Result<(), GrantError> {
        let Some(GrantRef(gref)) = lot.grefs.first().copied() else { return Ok(()) };
        let mut request = map_request(domain, lot.grefs);
        // SAFETY: the request holds the header, and the number of pairs that the header counts; the
        // device reads both and writes the header.
        unsafe { self.ioctl(MAP_GRANT_REF, &mut request) }.map_err(GrantError::Device)?;
        let offset = request[1];
        let is_writable = lot.access == GrantAccess::Write;
        let put = window.put(pages_of(lot), &self.fd, offset, is_writable);
        let mut end = [offset, lot.grefs.len() as u64];
        // SAFETY: the request has the 16 bytes that the device reads. The references leave the
        // device's table; the mapping has a count of its own and stays.
        let ended = unsafe { self.ioctl(UNMAP_GRANT_REF, &mut end) };
        debug_assert!(ended.is_ok(), "the device forgot its own offset: {ended:?}");
        put.map_err(|error| match error {
            // The grant device returns this if Xen refuses a reference, for any reason.
            MemoryError::Map(Errno::INVAL) => GrantError::NotGranted { gref },
            error => GrantError::Memory(error),
        })
    }

    /// # Safety
    /// `words` must be as large as what the device reads and writes for `number`.
    unsafe fn ioctl(&self, number: libc::Ioctl, words: &mut [u64]) -> Result<(), Errno> {
        // SAFETY: the words are as large as the device expects: the caller's word.
        match unsafe { libc::ioctl(self.fd.as_raw_fd(), number, words.as_mut_ptr()) } {
            -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
            _ => Ok(()),
        }
    }
}

/// Returns the words of a request that maps `grefs` of `domain`. The device writes the offset into
/// the second word. The reference is the upper half of a pair, since Xen's machines are
/// little-endian.
fn map_request(domain: u16, grefs: &[GrantRef]) -> Vec<u64> {
    const { assert!(cfg!(target_endian = "little") && PAGE == 4096) };
    let pairs = grefs.iter().map(|gref| u64::from(domain) | u64::from(gref.0) << 32);
    [grefs.len() as u64, 0].into_iter().chain(pairs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_kernels_header_says() {
        // Worked out by hand from the size of each structure.
        assert_eq!((MAP_GRANT_REF, UNMAP_GRANT_REF), (0x18_4700, 0x10_4701));
        let request = map_request(7, &[GrantRef(0x0102_0304), GrantRef(9)]);
        let bytes: Vec<u8> = request.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let wanted =
            [[2, 0, 0, 0, 0, 0, 0, 0], [0; 8], [7, 0, 0, 0, 4, 3, 2, 1], [7, 0, 0, 0, 9, 0, 0, 0]];
        assert_eq!(bytes, wanted.concat());
    }

    #[test]
    fn a_device_that_does_not_know_the_request_refuses_each_reference() {
        let fd = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        let (device, mut window) = (GrantDevice { fd }, Window::new(4, 0).unwrap());
        let grefs = [GrantRef(1), GrantRef(2)];
        let lot = Lot { page: 1, access: GrantAccess::Write, grefs: &grefs };
        let mut results = Vec::new();
        device.map(&mut window, 1, &lot, &mut results);
        assert_eq!(results, [Err(GrantError::Device(Errno::NOTTY)); 2]);
    }

    #[test]
    fn without_xen_the_device_is_refused_with_its_reason() {
        if std::path::Path::new(GRANT_DEVICE).exists() {
            return;
        }
        let error = GrantDevice::open().unwrap_err();
        assert_eq!(error, GrantError::Device(Errno::NOENT));
    }
}
