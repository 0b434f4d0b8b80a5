//! How the queues of a tap are opened: by its name, or as file descriptors that are handed in.

use super::find::{find, find_bridge, open_links};
use super::{Opened, QUEUE_FLAGS, TAP_QUEUE_PAIRS_MAX, TapError};
use crate::sys::link::{Links, TapLink};
use crate::sys::tuntap as sys;
use manyring_wire::net::MTU_MIN;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::path::Path;

/// The device node by which every tap is opened.
const TUN_NODE: &str = "/dev/net/tun";

pub(in crate::net) fn check_queue_pairs(queue_pairs: usize) -> Result<(), TapError> {
    let is_right = (1..=TAP_QUEUE_PAIRS_MAX).contains(&queue_pairs);
    if is_right { Ok(()) } else { Err(TapError::QueuePairs(queue_pairs)) }
}

pub(in crate::net) fn check_mtu(mtu: Option<u16>) -> Result<(), TapError> {
    mtu.filter(|mtu| *mtu < MTU_MIN).map_or(Ok(()), |mtu| Err(TapError::Mtu(mtu)))
}

/// Checks that an interface can have this name.
///
/// # Errors
/// [`TapError::Name`]: the name is empty, too long, or has a byte that no name may have.
pub fn check_name(name: &str) -> Result<(), TapError> {
    let is_bad = |b: u8| b == b'/' || b == b':' || b == 0 || b.is_ascii_whitespace();
    let is_name = (1..=sys::NAME_LEN_MAX).contains(&name.len()) && !name.bytes().any(is_bad);
    if is_name && name != "." && name != ".." {
        Ok(())
    } else {
        Err(TapError::Name(name.to_owned()))
    }
}

/// Joins or creates a tap. [`TapError::Busy`] may pass: the kernel releases the queues of a process
/// a little after its end.
pub(super) fn by_name(
    name: &str,
    must_exist: bool,
    queue_pairs: usize,
) -> Result<Opened, TapError> {
    let links = open_links(name)?;
    let found = find_tap(&links, (name, must_exist), queue_pairs)?;
    let is_created = found.is_none();
    // If a second process had queues of this tap, it would get some of the first one's frames.
    if found.is_some_and(|tap| tap.attached + tap.detached > 0) {
        return Err(TapError::Busy(name.to_owned()));
    }
    let is_multi_queue = found.map_or(queue_pairs > 1, |tap| tap.is_multi_queue);
    let flags = QUEUE_FLAGS | if is_multi_queue { sys::IFF_MULTI_QUEUE } else { 0 };
    // For a name with `%d` the first queue creates the interface, and the others join its name.
    let mut name = name.to_owned();
    let mut fds = Vec::with_capacity(queue_pairs);
    for _ in 0..queue_pairs {
        let fd = sys::open(Path::new(TUN_NODE))
            .map_err(|errno| TapError::system(TUN_NODE, "open the node of all taps", errno))?;
        name = sys::join(fd.as_fd(), &name, flags).map_err(|errno| join_error(&name, errno))?;
        fds.push(fd);
    }
    let link = find(&links, &name)?;
    Ok(Opened {
        kind: "tap",
        name,
        fds,
        is_multi_queue,
        attached: vec![true; queue_pairs],
        is_handed_in: false,
        is_left: false,
        is_created,
        links,
        link,
    })
}

/// The tap `name`; `None`: there is none, and it must be created.
fn find_tap(
    links: &Links,
    (name, must_exist): (&str, bool),
    queue_pairs: usize,
) -> Result<Option<TapLink>, TapError> {
    let Some(link) = find(links, name)? else {
        return if must_exist { Err(TapError::Missing(name.to_owned())) } else { Ok(None) };
    };
    let tap = link.tap.ok_or_else(|| TapError::WrongKind(name.to_owned(), "tap"))?;
    if queue_pairs > 1 && !tap.is_multi_queue {
        return Err(TapError::SingleQueue { name: name.to_owned(), queue_pairs });
    }
    Ok(Some(tap))
}

/// Looks for the tap `name` and for `bridge`, without opening or changing either.
///
/// # Errors
/// The errors of [`TapPort::open`](super::TapPort::open), except for a tap that is in use.
pub fn look(
    name: Option<(&str, bool)>,
    queue_pairs: usize,
    bridge: Option<&str>,
) -> Result<(), TapError> {
    if let Some((name, must_exist)) = name {
        find_tap(&open_links(name)?, (name, must_exist), queue_pairs)?;
    }
    if let Some(bridge) = bridge {
        find_bridge(&open_links(bridge)?, bridge)?;
    }
    Ok(())
}

pub(super) fn join_error(name: &str, errno: Errno) -> TapError {
    match errno {
        Errno::BUSY | Errno::TOOBIG => TapError::Busy(name.to_owned()),
        errno => TapError::system(name, "create it or join it", errno),
    }
}

/// Takes over the queues of a tap from the former process. If they do not belong to `name`, the
/// configuration names another interface now, which is joined or created.
pub(super) fn left(
    name: &str,
    must_exist: bool,
    fds: Vec<OwnedFd>,
    queue_pairs: usize,
) -> Result<Opened, TapError> {
    let opened = by_fds(fds, queue_pairs)?;
    if !is_made_of(name, &opened.name) {
        return by_name(name, must_exist, queue_pairs);
    }
    Ok(Opened { is_handed_in: false, is_left: true, ..opened })
}

/// True if the kernel may have made `name` of `wanted`, in which it replaces `%d` by a number.
fn is_made_of(wanted: &str, name: &str) -> bool {
    let Some((before, behind)) = wanted.split_once("%d") else { return name == wanted };
    let number = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(behind));
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Checks queues that another process has opened.
pub(super) fn by_fds(fds: Vec<OwnedFd>, queue_pairs: usize) -> Result<Opened, TapError> {
    if fds.len() != queue_pairs {
        return Err(TapError::FdCount { given: fds.len(), queue_pairs });
    }
    let mut name = String::new();
    let mut all_flags = 0;
    let mut attached = Vec::with_capacity(queue_pairs);
    for fd in &fds {
        let number = fd.as_raw_fd();
        let (own_name, flags) = sys::interface(fd.as_fd()).map_err(|_| TapError::FdKind(number))?;
        if flags & sys::IFF_TAP == 0 {
            return Err(TapError::FdTun(number));
        }
        if flags & sys::IFF_VNET_HDR == 0 {
            return Err(TapError::FdHeader(number));
        }
        if !name.is_empty() && name != own_name {
            return Err(TapError::FdOther { fd: number, name: own_name, other: name });
        }
        name = own_name;
        all_flags |= flags;
        attached.push(flags & sys::IFF_DETACH_QUEUE == 0);
        let set_flags = rustix::fs::fcntl_getfl(fd)
            .and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        set_flags.map_err(|errno| TapError::system(&name, "use it without blocking", errno))?;
    }
    let links = open_links(&name)?;
    // The interface may be in another network namespace, and one in this namespace may have the
    // same name: the address tells them apart.
    let address = sys::hardware_address(fds[0].as_fd()).ok();
    let link = find(&links, &name)?.filter(|link| link.address == address);
    // Ask the link, not TUNGETIFF, which uses the bit of IFF_NO_PI for whether the tap has a
    // filter.
    let tap = link.as_ref().and_then(|link| link.tap);
    if tap.is_some_and(|tap| tap.has_packet_info) {
        return Err(TapError::FdPacketInfo(fds[0].as_raw_fd()));
    }
    Ok(Opened {
        kind: "tap",
        name,
        fds,
        is_multi_queue: all_flags & sys::IFF_MULTI_QUEUE != 0,
        attached,
        is_handed_in: true,
        is_left: false,
        is_created: false,
        links,
        link,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_number_is_known_again_and_no_other_one() {
        for (wanted, name, is_it) in [
            ("tap0", "tap0", true),
            ("tap0", "tap1", false),
            ("vm%d", "vm0", true),
            ("vm%d", "vm12", true),
            ("vm%dx", "vm12x", true),
            ("vm%d", "vm", false),
            ("vm%d", "tap0", false),
            ("vm%d", "vm1x", false),
            ("vm%dx", "vmx", false),
        ] {
            assert_eq!(is_made_of(wanted, name), is_it, "{wanted} {name}");
        }
    }
}
