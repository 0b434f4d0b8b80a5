//! A network namespace of a test's own: what is made in it ends with it. Needs root.

#[path = "../../../backend/tests/net/space.rs"]
pub(crate) mod own;

#[allow(unused_imports, reason = "as above")]
pub(crate) use own::{in_own_space, in_shared_space, link, queues, run};

use manyring_backend::sys::tuntap;
use rustix::fd::{AsFd, OwnedFd};
use std::fmt::Display;
use std::path::Path;
use std::process::{Command, Stdio};

/// Flags that a queue of a tap must have for the daemon.
pub(crate) const RIGHT: u16 = tuntap::IFF_TAP | tuntap::IFF_NO_PI | tuntap::IFF_VNET_HDR;
/// Flags that a queue of a tap with several queues must have.
pub(crate) const MULTI: u16 = RIGHT | tuntap::IFF_MULTI_QUEUE;

/// The prefix that makes nobody the user of the command behind it: no capability is left.
pub(crate) const AS_NOBODY: &str = "setpriv --reuid=65534 --regid=65534 --clear-groups";

/// Lets everybody open the node of all taps, as udev does; a host without udev keeps it for root.
/// Only for the mount namespace of a test.
pub(crate) fn open_taps_to_all() {
    run("mount -t tmpfs none /dev/net");
    run("mknod -m 666 /dev/net/tun c 10 200");
}

/// A new queue of interface `name`, as somebody else would open it.
pub(crate) fn queue(name: &str, flags: u16) -> OwnedFd {
    let fd = tuntap::open(Path::new("/dev/net/tun")).unwrap();
    tuntap::join(fd.as_fd(), name, flags).unwrap();
    fd
}

/// The host's own view of a cable's carrier; other processes are told a little later.
pub(crate) fn has_carrier(interface: &str) -> bool {
    let file = format!("/sys/class/net/{interface}/carrier");
    std::fs::read_to_string(file).unwrap() == "1\n"
}

/// A command of a shell that hands `fds` (two at most) to `program` as 7 and 8.
pub(crate) fn handing_in(program: impl Display, arguments: &str, fds: Vec<OwnedFd>) -> Command {
    // They come as the shell's input and output, and go on under their numbers: so no other program
    // that is started at the same time gets them.
    let plain = "</dev/null >/dev/null";
    let script = format!("exec {program} {arguments} 7<&0 8>&1 {plain}");
    let mut command = Command::new("sh");
    command.arg("-c").arg(script);
    let mut fds = fds.into_iter().map(Stdio::from);
    command.stdin(fds.next().unwrap_or_else(Stdio::null));
    command.stdout(fds.next().unwrap_or_else(Stdio::null));
    command
}

/// Starts a program as nobody, with no capability.
pub(crate) fn as_nobody(program: &Path) -> Command {
    let mut words = AS_NOBODY.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words).arg(program);
    command.stdin(Stdio::null());
    command
}
