//! The user and the namespaces of a room: its own, where the house can give it some.
//!
//! ```text
//! user        where the house may change users and signal others (root): FIRST + the number of the
//!             room's process. No account has such a number, and no other room at the same time
//! namespaces  of users, System V IPC, the host's name and control groups, where the kernel lets it
//! ```
//! A room shares these with its house: the network, since the sockets of front-ends belong to it
//! and `sock_diag` finds them nowhere else; mounts, which landlock closes; processes, since a room
//! makes none; and the control group, with which a service manager ends both.

use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, capabilities};
use std::sync::OnceLock;

/// The first of the numbers that systemd's conventions leave to nobody (0x70000000 to 0x7fffffff).
/// The highest number of a process is below 2^22.
const FIRST: u32 = 0x7000_0000;

/// The names of the rights that the kernel refused to take away; empty if it refused none.
static REFUSED: OnceLock<String> = OnceLock::new();

/// Takes a user and namespaces of its own. Whatever is refused is left, and told by [`refused`].
/// The process has one thread.
pub(super) fn enter() {
    let mut refused = Vec::new();
    let mut tried = |what: &str, result: nix::Result<()>| {
        if let Err(errno) = result {
            refused.push(format!("{what}: {}", errno.desc()));
        }
        result.is_ok()
    };
    let mut flags =
        CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWCGROUP;
    // Without CAP_KILL the house could not end a room of another user.
    let wanted = CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::KILL;
    if capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted)) {
        if unshare(flags).is_ok() {
            flags = CloneFlags::empty();
        }
        tried("a user", own_user());
    }
    // Who is not root may make the others only together with a namespace of users, where it may.
    if flags.is_empty() || unshare(flags | CloneFlags::CLONE_NEWUSER).is_err() {
        tried("a namespace of users", unshare(CloneFlags::CLONE_NEWUSER));
    }
    // The kernel shows a process that has changed its user to root alone, and hides from it what
    // /proc says of its own file descriptors.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    let _ = REFUSED.set(refused.join("; "));
}

fn own_user() -> nix::Result<()> {
    let number = FIRST + std::process::id();
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, user)
}

/// What a room does not have to itself because the kernel has refused it.
pub(super) fn refused() -> Option<&'static str> {
    REFUSED.get().map(String::as_str).filter(|refused| !refused.is_empty())
}
