//! `macvtap`: an interface on top of another one, whose queues are read and written like a tap's.
//!
//! The macvtap must exist. Each queue is opened by its device node, `/dev/tap<number>`. A node of
//! this name may belong to another interface (numbers are unique only within a network namespace),
//! or be missing (in containers). The queue is then opened by a node that the daemon makes, and
//! removes at once.

use super::find::{find, open_links};
use super::open::{check_mtu, check_name, check_queue_pairs, join_error};
use super::settings::Settings;
use super::{Opened, QUEUE_FLAGS, QueueLength, TapError, TapPort};
use crate::sys::link::{InterfaceInfo, Links};
use crate::sys::tuntap as sys;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat, stat, unlink};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The name of a macvtap, and the settings that are applied to it.
#[derive(Clone, Debug)]
pub struct MacvtapOptions {
    /// The interface: 1 to 15 bytes.
    pub name: String,
    /// Queue pairs, 1 to 256.
    pub queue_pairs: usize,
    /// At most how many sent bytes the host may hold that it has not passed on; `None`: the host's
    /// default.
    pub sndbuf: Option<u32>,
    /// How many frames may wait for the guest, in all queues that the host uses together.
    pub txqueuelen: QueueLength,
    /// Join frames of a flow that come together: the host cuts them again where it must.
    pub merge: bool,
    /// The MTU in bytes; `None`: unchanged.
    pub mtu: Option<u16>,
    /// Set the interface up or down; `None`: unchanged.
    pub up: Option<bool>,
}

/// Opens a macvtap. If it has several queues, the host uses none of them yet. The macvtap receives
/// only frames to its own address: see [`TapPort::guest_mac`].
///
/// # Errors
/// [`TapError`], in words for an operator. It is no error if another process has opened queues of
/// the macvtap too: the host does not show this.
pub fn open(options: &MacvtapOptions) -> Result<TapPort, TapError> {
    let MacvtapOptions { name, queue_pairs, sndbuf, txqueuelen, merge, mtu, up } = options;
    check_queue_pairs(*queue_pairs)?;
    check_mtu(*mtu)?;
    check_name(name)?;
    let opened = open_by_name(name, *queue_pairs)?;
    TapPort::assemble(
        opened,
        &Settings {
            sndbuf: *sndbuf,
            txqueuelen: *txqueuelen,
            merge: *merge,
            // A macvtap takes no steering program: it chooses a queue by the frame alone.
            steer: false,
            mtu: *mtu,
            up: *up,
            bridge: None,
        },
    )
}

/// Opens the queues of the macvtap `name`.
pub(super) fn open_by_name(name: &str, queue_pairs: usize) -> Result<Opened, TapError> {
    let links = open_links(name)?;
    let link = find_macvtap(&links, name)?;
    let is_multi_queue = queue_pairs > 1;
    let flags = QUEUE_FLAGS | if is_multi_queue { sys::IFF_MULTI_QUEUE } else { 0 };
    let fds = (0..queue_pairs).map(|_| {
        let fd = open_queue(name, &link)?;
        sys::join(fd.as_fd(), name, flags).map_err(|errno| join_error(name, errno))?;
        Ok(fd)
    });
    Ok(Opened {
        kind: "macvtap",
        name: name.to_owned(),
        fds: fds.collect::<Result<_, _>>()?,
        is_multi_queue,
        attached: vec![true; queue_pairs],
        is_handed_in: false,
        is_left: false,
        is_created: false,
        links,
        link: Some(link),
    })
}

fn find_macvtap(links: &Links, name: &str) -> Result<InterfaceInfo, TapError> {
    let link = find(links, name)?.ok_or_else(|| TapError::Missing(name.to_owned()))?;
    if matches!(link.kind.as_str(), "macvtap" | "ipvtap") {
        return Ok(link);
    }
    Err(TapError::WrongKind(name.to_owned(), "macvtap"))
}

/// Looks for the macvtap `name`, without opening it.
///
/// # Errors
/// No interface has this name, or the interface is no macvtap.
pub fn look(name: &str) -> Result<(), TapError> {
    find_macvtap(&open_links(name)?, name).map(drop)
}

/// Opens a queue of interface `name`, and checks that it belongs to this interface.
fn open_queue(name: &str, link: &InterfaceInfo) -> Result<OwnedFd, TapError> {
    let failed = |errno| match errno {
        // The interface has all the queues that it can have, and other processes have opened them.
        Errno::BUSY => TapError::Busy(name.to_owned()),
        Errno::ACCESS => TapError::system(name, "open its device node", Errno::PERM),
        errno => TapError::system(name, "open its device node", errno),
    };
    let node = PathBuf::from(format!("/dev/tap{}", link.index));
    let there =
        stat(&node).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode).is_char_device());
    let wanted = device_number(name, link.index);
    let fd = match (there, wanted) {
        (Some(stat), Some(wanted)) if stat.st_rdev == wanted => sys::open(&node),
        (Some(_), None) => sys::open(&node),
        (_, Some(wanted)) => open_own_node(wanted),
        (None, None) => Err(Errno::NOENT),
    }
    .map_err(failed)?;
    let is_it = sys::interface(fd.as_fd()).is_ok_and(|(found, _)| found == name)
        && sys::hardware_address(fd.as_fd()).ok() == link.address;
    if is_it { Ok(fd) } else { Err(failed(Errno::NODEV)) }
}

/// The device number of the interface's node. `None` if sysfs does not show this interface: sysfs
/// shows the interfaces of the network namespace in which it was mounted.
fn device_number(name: &str, index: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/tap{index}/dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Opens character device `number` by a device node that is made for this call and then removed.
fn open_own_node(number: u64) -> Result<OwnedFd, Errno> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut last = Errno::NOENT;
    // Use the first folder in which a node can be made and opened.
    for folder in [Path::new("/dev"), Path::new("/run"), &std::env::temp_dir()] {
        let unique = COUNT.fetch_add(1, Ordering::Relaxed);
        let node = folder.join(format!(".manyring-{}-{unique}", std::process::id()));
        let mode = Mode::RUSR | Mode::WUSR;
        let result = mknodat(CWD, &node, FileType::CharacterDevice, mode, number).and_then(|()| {
            let fd = sys::open(&node);
            unlink(&node).and(fd)
        });
        match result {
            Ok(fd) => return Ok(fd),
            Err(errno) => last = errno,
        }
    }
    Err(last)
}
