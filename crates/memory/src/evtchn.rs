//! `EventPort`: an event channel of a Xen domain, through the device of its own that each one has.
//!
//! The device `/dev/xen/evtchn` (Linux `xen/evtchn.h`) serves many ports; a queue opens it for
//! itself and binds one port, so that the file descriptor stands for the queue's channel. An event
//! masks its port and makes the descriptor readable: 4 bytes, the port. Writing these back unmasks
//! the port, and the next event may come. An ioctl signals the other end; the end of the file
//! descriptor closes the channel.
#![allow(unsafe_code, reason = "allow-listed: the ioctls of the event device")]

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The path of the event device.
pub const EVENT_DEVICE: &str = "/dev/xen/evtchn";

/// `struct ioctl_evtchn_bind_interdomain`
#[repr(C)]
struct BindInterdomain {
    remote_domain: u32,
    remote_port: u32,
}

/// `struct ioctl_evtchn_notify`
#[repr(C)]
struct Notify {
    port: u32,
}

/// `struct ioctl_evtchn_restrict_domid`
#[repr(C)]
struct RestrictDomain {
    domain: u16,
}

/// `IOCTL_EVTCHN_BIND_INTERDOMAIN`, which returns the local port.
const BIND_INTERDOMAIN: libc::Ioctl = ioctl_number(1, size_of::<BindInterdomain>());
/// `IOCTL_EVTCHN_NOTIFY`
const NOTIFY: libc::Ioctl = ioctl_number(4, size_of::<Notify>());

/// `IOCTL_EVTCHN_RESTRICT_DOMID`
const RESTRICT_DOMAIN: libc::Ioctl = ioctl_number(6, size_of::<RestrictDomain>());

/// The number of the only `ioctl` request that is made of a device after its port was bound.
#[allow(clippy::unnecessary_cast, reason = "the C library chooses the type of `Ioctl`")]
pub const EVENT_REQUEST: u64 = NOTIFY as u64;

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(BindInterdomain, remote_domain) == 0);
    assert!(offset_of!(BindInterdomain, remote_port) == 4);
    assert!(size_of::<BindInterdomain>() == 8);
    assert!(offset_of!(Notify, port) == 0 && size_of::<Notify>() == 4);
    // The values were computed by hand from the size, the letter E and the number.
    assert!(BIND_INTERDOMAIN == 0x0008_4501 && NOTIFY == 0x0004_4504);
    assert!(size_of::<RestrictDomain>() == 2 && RESTRICT_DOMAIN == 0x0002_4506);
};

/// `_IOC(_IOC_NONE, 'E', number, size)`
const fn ioctl_number(number: libc::Ioctl, size: usize) -> libc::Ioctl {
    (size as libc::Ioctl) << 16 | 0x45 << 8 | number
}

/// The back-end's end of an event channel.
#[derive(Debug)]
pub struct EventPort {
    fd: OwnedFd,
    port: u32,
}

impl EventPort {
    /// Binds to the port `remote_port` that `domain` has made for us.
    ///
    /// # Errors
    /// `ENOENT`, `ENODEV`: this machine runs no Xen, or the kernel lacks the driver; `EACCES`: the
    /// device is root's; `EINVAL`: there is no such port for us, or it is bound already; `ESRCH`:
    /// there is no such domain.
    pub fn bind(domain: u16, remote_port: u32) -> Result<Self, Errno> {
        Self::bind_to(open()?, domain, remote_port)
    }

    /// As [`Self::bind`], for a process that must reach no other domain by the device: it binds no
    /// port of another one, and none of Xen's own events.
    ///
    /// # Errors
    /// As for [`Self::bind`]; `ENOTTY`: the kernel cannot restrict the device (Linux before 4.9).
    pub fn bind_restricted(domain: u16, remote_port: u32) -> Result<Self, Errno> {
        let (fd, restrict) = (open()?, RestrictDomain { domain });
        if domain == 0 {
            // The kernel cannot restrict a device to domain 0.
            return Self::bind_to(fd, domain, remote_port);
        }
        // SAFETY: the number is that of the structure, which the device reads.
        match unsafe { libc::ioctl(fd.as_raw_fd(), RESTRICT_DOMAIN, &raw const restrict) } {
            -1 => Err(last_errno()),
            _ => Self::bind_to(fd, domain, remote_port),
        }
    }

    fn bind_to(fd: OwnedFd, domain: u16, remote_port: u32) -> Result<Self, Errno> {
        let bind = BindInterdomain { remote_domain: domain.into(), remote_port };
        // SAFETY: the number is that of the structure, which the device reads.
        let port = unsafe { libc::ioctl(fd.as_raw_fd(), BIND_INTERDOMAIN, &raw const bind) };
        let port = u32::try_from(port).map_err(|_| last_errno())?;
        Ok(Self { fd, port })
    }

    /// Makes an event port of an open device, to which another process has bound only the port
    /// `port`. The descriptor must be non-blocking.
    #[must_use]
    pub fn of_fd(fd: OwnedFd, port: u32) -> Self {
        Self { fd, port }
    }

    /// Returns the descriptor of the device, to be sent to another process.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Returns the local number of the port.
    #[must_use]
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Takes the event that made the descriptor readable, and unmasks the port. The caller must
    /// read the ring after this call: a request that the front-end adds after that read causes
    /// another event. If there is no event, this call does nothing.
    pub fn hear(&self) {
        let mut port = [0; 4];
        if rustix::io::read(&self.fd, &mut port) == Ok(port.len()) {
            let _ = rustix::io::write(&self.fd, &port);
        }
    }

    /// Signals the other end. Does nothing if the other end is closed.
    pub fn notify(&self) {
        let notify = Notify { port: self.port };
        // SAFETY: the number is that of the structure, which the device reads.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), NOTIFY, &raw const notify) };
    }
}

impl AsFd for EventPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn open() -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(EVENT_DEVICE, flags, Mode::empty())
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// A port whose device is the other end of a socket.
    fn port() -> (EventPort, UnixStream) {
        let (ours, device) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        device.set_nonblocking(true).unwrap();
        (EventPort::of_fd(ours.into(), 9), device)
    }

    #[test]
    fn an_event_that_is_heard_unmasks_its_port_and_none_unmasks_nothing() {
        let (port, mut device) = port();
        port.hear();
        let mut bytes = [0; 8];
        assert!(device.read(&mut bytes).is_err(), "nothing was heard");
        device.write_all(&9_u32.to_ne_bytes()).unwrap();
        port.hear();
        assert_eq!(device.read(&mut bytes).unwrap(), 4);
        assert_eq!(bytes[..4], 9_u32.to_ne_bytes());
    }

    #[test]
    fn the_other_end_of_a_device_that_does_not_know_the_request_hears_nothing() {
        let (port, mut device) = port();
        port.notify();
        assert!(device.read(&mut [0; 8]).is_err());
        assert_eq!(port.port(), 9);
    }

    #[test]
    fn without_xen_a_port_cannot_be_bound_and_the_reason_is_told() {
        if !std::path::Path::new(EVENT_DEVICE).exists() {
            assert_eq!(EventPort::bind(1, 1).unwrap_err(), Errno::NOENT);
        }
    }
}
