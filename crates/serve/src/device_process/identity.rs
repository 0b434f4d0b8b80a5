//! The user and the namespaces of a device process: its own, as far as the supervisor and the
//! kernel can provide them.
//!
//! ```text
//! user        if the supervisor may change users: FIRST + the pid of the device process. No
//!             account has such a number, and no other device process at the same time
//! namespaces  of users, System V IPC, the host's name and control groups, as far as the kernel and
//!             the supervisor's rights allow
//! ```
//! A supervisor that is not root but may change users can change only to the users of device
//! processes (`confine`). A device process then keeps the supervisor's user as its saved user ID.
//! That gives the device process no right, but it lets a supervisor without `CAP_KILL` kill it.
//!
//! A device process shares the following with its supervisor. The network: the sockets of
//! front-ends belong to that network namespace, and `sock_diag` finds them only there. Mounts,
//! which landlock makes inaccessible. Processes: a device process can make none. The control group,
//! by which a service manager ends both.

use super::system_calls::{Condition, rule};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::process::DumpableBehavior;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, configure_capability_in_ambient_set,
    set_capabilities,
};
use seccompiler::SeccompCmpOp::{Eq, Gt, Lt, MaskedEq, Ne};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The first of the user IDs that systemd's conventions assign to nobody (0x70000000 to
/// 0x7fffffff). A process ID is below 2^22.
const FIRST: u32 = 0x7000_0000;
const LAST: u32 = 0x7fff_ffff;

/// The capabilities to change user and groups.
const CHANGES: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// This bit marks a system call of the x32 ABI (32-bit pointers on x86-64). A filter must name each
/// call twice, with this bit and without. Other architectures use no such number.
const X32: i64 = 0x4000_0000;

/// The steps of the isolation that the kernel refused, each with its error; empty if it refused
/// none.
static REFUSED: OnceLock<String> = OnceLock::new();

/// Gives this process a user and namespaces of its own. [`refused`] returns what the kernel
/// refused. Must run while the process has one thread.
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
    let has = |wanted| capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted));
    let (kills, supervisor) = (has(CapabilitySet::KILL), Uid::current());
    // Without `CAP_KILL`, the supervisor can kill this process only if its user stays the saved
    // user ID here. If that user is root, keep it entirely: a device process with root as its saved
    // user could become root again.
    if has(CHANGES) && (kills || !supervisor.is_root()) {
        if unshare(flags).is_ok() {
            flags = CloneFlags::empty();
        }
        tried("a user", own_user((!kills).then_some(supervisor)));
    }
    // A process that is not root can create the other namespaces only together with a user
    // namespace, and only if the kernel's settings allow that.
    if flags.is_empty() || unshare(flags | CloneFlags::CLONE_NEWUSER).is_err() {
        tried("a namespace of users", unshare(CloneFlags::CLONE_NEWUSER));
    }
    // After a change of user, the files in /proc/self belong to root. Without this, the process
    // could not read /proc/self/fd.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    let _ = REFUSED.set(refused.join("; "));
}

/// Changes to a user ID of the process's own. `saved`: the saved user ID, whose processes may
/// signal this one.
fn own_user(saved: Option<Uid>) -> nix::Result<()> {
    let number = FIRST + std::process::id();
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    setgroups(&[])?;
    setresgid(group, group, group)?;
    setresuid(user, user, saved.unwrap_or(user))
}

/// Restricts a supervisor that is not root, and all processes that it starts: they may change only
/// to users of device processes.
pub(super) fn confine() {
    let Ok(sets) = capabilities(None) else { return };
    if Uid::current().is_root() || !sets.permitted.intersects(CHANGES) {
        return;
    }
    let kept = few_numbers().map_or(CapabilitySet::empty(), |()| CHANGES);
    let permitted = sets.permitted - (CHANGES - kept);
    let (effective, inheritable) = (sets.effective - CHANGES, sets.inheritable - CHANGES);
    let _ = set_capabilities(None, CapabilitySets { effective, permitted, inheritable });
}

/// Lets programs that this thread starts from now on change users, if this process may.
pub fn grant() {
    let Ok(mut sets) = capabilities(None) else { return };
    if Uid::current().is_root() || !sets.permitted.contains(CHANGES) {
        return;
    }
    sets.inheritable |= CHANGES;
    if set_capabilities(None, sets).is_ok() {
        for capability in CHANGES.iter() {
            let _ = configure_capability_in_ambient_set(capability, true);
        }
    }
}

/// Installs a seccomp filter by which the process may change users and groups only to those of
/// device processes. Two more calls are denied. A user namespace: in it, a process with
/// `CAP_SETUID` outside could map the user of a device process to any user. A netlink socket for
/// kernel events of devices: its receivers trust the user ID that a sender with `CAP_SETUID`
/// claims.
fn few_numbers() -> Option<()> {
    let [first, last, own] = [FIRST, LAST, Uid::current().as_raw()].map(u64::from);
    let outside = |index: u8| [vec![(index, Lt, first)], vec![(index, Gt, last)]];
    let changes: Vec<Vec<Condition>> = (0..3).flat_map(outside).collect();
    let mut user = changes.clone();
    // The saved user ID may also be the supervisor's own.
    user[4..].iter_mut().for_each(|saved| saved.push((2, Ne, own)));
    // `socket` of AF_NETLINK (16) and NETLINK_KOBJECT_UEVENT (15).
    let events = vec![vec![(0, Eq, 16), (2, Eq, 15)]];
    let users = u64::from(libc::CLONE_NEWUSER.unsigned_abs());
    let of_users = vec![vec![(0, MaskedEq(users), users)]];
    let mut refused = BTreeMap::new();
    for (call, conditions) in [
        (libc::SYS_setresuid, user),
        (libc::SYS_setresgid, changes),
        (libc::SYS_setgroups, vec![vec![(0, Ne, 0)]]),
        (libc::SYS_socket, events),
        (libc::SYS_setuid, Vec::new()),
        (libc::SYS_setgid, Vec::new()),
        (libc::SYS_setreuid, Vec::new()),
        (libc::SYS_setregid, Vec::new()),
        (libc::SYS_setfsuid, Vec::new()),
        (libc::SYS_setfsgid, Vec::new()),
        (libc::SYS_unshare, of_users.clone()),
        (libc::SYS_clone, of_users),
        (libc::SYS_setns, Vec::new()),
    ] {
        let rules: Option<Vec<SeccompRule>> = conditions.iter().map(|all| rule(all).ok()).collect();
        refused.insert(call, rules?);
        refused.insert(call | X32, Vec::new());
    }
    refuse(refused, libc::EPERM)?;
    // The flags of `clone3` lie in memory, which seccomp cannot read. With ENOSYS the C library
    // falls back to `clone`.
    refuse(
        BTreeMap::from([(libc::SYS_clone3, Vec::new()), (libc::SYS_clone3 | X32, Vec::new())]),
        libc::ENOSYS,
    )
}

/// Installs a filter by which these calls fail with `errno`. `None`: the kernel refused it.
fn refuse(calls: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Option<()> {
    let machine = std::env::consts::ARCH.try_into().ok()?;
    let refuses = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuses, machine).ok()?;
    let program: BpfProgram = filter.try_into().ok()?;
    seccompiler::apply_filter(&program).ok()
}

/// Returns the steps of the isolation that the kernel refused this device process, each with its
/// error.
pub(super) fn refused() -> Option<&'static str> {
    REFUSED.get().map(String::as_str).filter(|refused| !refused.is_empty())
}
