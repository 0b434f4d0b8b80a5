//! The rights that a room gives up before its first thread: a guest that takes it over lacks them.
//!
//! ```text
//! rings            all io_urings of its workers are made, and none later; each takes the requests
//!                  of disks and no others (`sys/uring/bounds.rs`)
//! user, namespaces its own, where it can have them (`identity.rs`)
//! death signal     the kernel kills it when its house ends, however that ends
//! no_new_privs     no program gives it rights; what follows needs it
//! capabilities     none, whoever it runs as
//! landlock         of all files it may read those of /proc and /sys; no TCP port, no socket of
//!                  others by an abstract name, no signal to others
//! seccomp          the calls of `CALLS`, those of `own_process` for this process alone, and of
//!                  devices the `REQUESTS`, where Xen guests are served the `XEN_REQUESTS` too;
//!                  others fail with EPERM, and are logged with their
//!                  thread (`denied.rs`); threads are made and no process, which would outlive the
//!                  room
//! ```
//! Files are opened by a signal's handler, for which the list has a form of `openat` of its own: so
//! a file that landlock refuses is a line of the log, as any other call is.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use manyring_backend::sys::{denied, uring};
use manyring_memory::{EVENT_REQUEST, GRANT_REQUESTS};
use rustix::fd::AsFd;
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::sync::OnceLock;

/// How much a room gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sandbox {
    /// A room keeps its rights.
    None,
    /// A room gives up all rights that this kernel can take from it.
    Auto,
    /// As `Auto`, but a room ends at once if the kernel cannot take one of them.
    Seccomp,
}

impl Sandbox {
    /// Its name as an option.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::Seccomp => "seccomp",
        }
    }
}

/// The option with which the room of Xen guests is started.
pub(super) const XEN_OPTION: &str = "--xen";
/// Most workers of a room, each of which has a ring of 350 KiB from the beginning.
const RINGS_MAX: usize = 16;

/// The number of rings that were made.
static RINGS: OnceLock<usize> = OnceLock::new();

/// How many workers a room can have of `workers` that are wanted: each needs a ring. Where rings
/// are refused, all of them do without.
pub(super) fn workers_max(workers: usize) -> usize {
    match RINGS.get() {
        None | Some(0) => workers,
        Some(rings) => workers.min(*rings),
    }
}

/// Gives up what a room gives up, if the program was started as one; a house gives up less. Nothing
/// was read or started.
///
/// # Errors
/// One line: the kernel does not know all of it, and the room was to begin with all of it only.
pub(crate) fn enter(arguments: &[OsString]) -> Result<(), String> {
    if arguments.get(1).is_none_or(|command| command != "room") {
        super::identity::confine();
        return Ok(());
    }
    // Without a sandbox, too: a room that no house looks after would keep its images.
    let dies_with_house = || {
        let kill = Some(rustix::process::Signal::KILL);
        let _ = rustix::process::set_parent_process_death_signal(kill);
    };
    dies_with_house();
    // The house starts its rooms by a path that tells nobody what they are.
    let _ = rustix::thread::set_name(c"manyring-room");
    let asked = |mode: Sandbox| {
        let option = format!("--sandbox={}", mode.name());
        arguments.iter().any(|argument| *argument == *option)
    };
    if asked(Sandbox::None) {
        return Ok(());
    }
    // First: a host may let root alone make rings.
    if !arguments.iter().any(|argument| argument == "--no-io-uring") {
        let option =
            |argument: &OsString| argument.to_str()?.strip_prefix("--workers=")?.parse().ok();
        let workers: usize = arguments.iter().find_map(option).unwrap_or(1);
        let _ = RINGS.set(uring::reserve(workers.min(RINGS_MAX)));
    }
    super::identity::enter();
    // A change of user has taken it back.
    dies_with_house();
    let refused = give_up(arguments.iter().any(|argument| argument == XEN_OPTION));
    if !refused.is_empty() && asked(Sandbox::Seccomp) {
        return Err(refused);
    }
    let _ = REFUSED.set(refused);
    Ok(())
}

/// The steps that the kernel refused, each with its reason; empty if it refused none. Each step is
/// tried, whatever became of the one before it.
fn give_up(is_for_xen: bool) -> String {
    let steps = [no_rights(), no_files(), few_calls(is_for_xen)];
    steps.into_iter().filter_map(Result::err).collect::<Vec<_>>().join("; ")
}

/// The steps of the sandbox that the kernel refused, and without which this room goes on.
static REFUSED: OnceLock<String> = OnceLock::new();

/// The steps that the kernel has refused, if it has refused some.
pub(super) fn refused() -> Option<&'static str> {
    REFUSED.get().map(String::as_str).filter(|refused| !refused.is_empty())
}

fn no_rights() -> Result<(), String> {
    let failed = |errno| format!("capabilities: {errno}");
    rustix::thread::set_no_new_privs(true).map_err(failed)?;
    for capability in CapabilitySet::all().iter() {
        // Without CAP_SETPCAP, and for those that this kernel does not have.
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).map_err(failed)
}

fn no_files() -> Result<(), String> {
    let abi = ABI::V6;
    let shown = AccessFs::ReadFile | AccessFs::ReadDir;
    let enter = || {
        Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))?
            .handle_access(AccessNet::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(["/proc", "/sys"], shown))?
            .restrict_self()
    };
    match enter() {
        Ok(status) if status.ruleset == RulesetStatus::NotEnforced => {
            Err("landlock: this kernel has none".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(format!("landlock: {error}")),
    }
}

fn few_calls(is_for_xen: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("seccomp: {error}");
    super::denied::watch().map_err(|error| failed(&error))?;
    let mut calls: BTreeMap<i64, Vec<_>> =
        CALLS.iter().chain(OLD_CALLS).map(|call| (*call, Vec::new())).collect();
    let of_xen = XEN_REQUESTS.iter().filter(|_| is_for_xen);
    for request in REQUESTS.iter().chain(of_xen) {
        let rule = rule(&[(1, Eq, *request)]).map_err(|error| failed(&error))?;
        calls.entry(libc::SYS_ioctl).or_default().push(rule);
    }
    for (call, conditions) in own_process() {
        calls.insert(call, vec![rule(&conditions).map_err(|error| failed(&error))?]);
    }
    let opened = rule(&[(4, Eq, u64::from(denied::OPENED_BY_HANDLER))]);
    calls.insert(libc::SYS_openat, vec![opened.map_err(|error| failed(&error))?]);
    let of_diag = rule(&SOCK_DIAG).map_err(|error| failed(&error))?;
    calls.insert(libc::SYS_socket, vec![of_diag]);
    // The C library makes a thread by `clone3`, whose flags lie in memory that no list sees; where
    // the kernel has no such call, it makes the thread by `clone`. It makes a process with all
    // signals blocked, so that a signal in the place of the call would end this one.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    let process = rule(&[(0, MaskedEq(thread), 0)]).map_err(|error| failed(&error))?;
    let process = BTreeMap::from([(libc::SYS_clone, vec![process])]);
    let fails = |errno: i32| SeccompAction::Errno(errno.unsigned_abs());
    for (calls, otherwise, listed) in [
        (clone3, SeccompAction::Allow, fails(libc::ENOSYS)),
        (process, SeccompAction::Allow, fails(libc::EPERM)),
        (calls, SeccompAction::Trap, SeccompAction::Allow),
    ] {
        let machine =
            std::env::consts::ARCH.try_into().map_err(|e: seccompiler::BackendError| failed(&e))?;
        let filter = SeccompFilter::new(calls, otherwise, listed, machine);
        let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(|e| failed(&e))?;
        seccompiler::apply_filter(&program).map_err(|error| failed(&error))?;
    }
    Ok(())
}

/// A condition on an argument of a call: the argument's index, the comparison, and the value.
pub(super) type Condition = (u8, SeccompCmpOp, u64);

/// A call whose arguments meet all of these.
pub(super) fn rule(arguments: &[Condition]) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition = |(index, how, value): &Condition| {
        SeccompCondition::new(*index, SeccompCmpArgLen::Dword, how.clone(), *value)
    };
    SeccompRule::new(arguments.iter().map(condition).collect::<Result<_, _>>()?)
}

/// Calls by which a process could reach others of its user, and so the house: it signals its own
/// threads, also by no file's owner, and sets limits and CPUs of its own. Nor does it outlive the
/// house, or make memory that can be executed.
fn own_process() -> Vec<(i64, Vec<Condition>)> {
    let owner = |command: i32| (1, Ne, u64::from(command.unsigned_abs()));
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    vec![
        (libc::SYS_mmap, vec![(2, MaskedEq(executable), 0)]),
        (libc::SYS_mprotect, vec![(2, MaskedEq(executable), 0)]),
        (libc::SYS_prctl, vec![(0, Ne, u64::from(libc::PR_SET_PDEATHSIG.unsigned_abs()))]),
        (libc::SYS_fcntl, vec![owner(libc::F_SETOWN), owner(F_SETOWN_EX)]),
        (libc::SYS_prlimit64, vec![(0, Eq, 0)]),
        (libc::SYS_sched_setaffinity, vec![(0, Eq, 0)]),
        (libc::SYS_tgkill, vec![(0, Eq, u64::from(std::process::id()))]),
    ]
}

/// As the C library's headers have it.
const F_SETOWN_EX: i32 = 15;

/// The only socket that is made: one by which the kernel says which sockets are two ends of one
/// (`NETLINK_SOCK_DIAG`), so that a session's own socket is taken for no doorbell. It tells no more
/// than /proc does, and changes nothing without a capability.
const SOCK_DIAG: [Condition; 2] = [(0, Eq, 16), (2, Eq, 4)];

/// The system calls of a process that serves disks: those that its workers, janitors, disks'
/// threads and control thread were seen to make, and those that the C library or runtime may make
/// instead. It makes no socket with an address, starts no program, and looks into no process.
#[rustfmt::skip]
const CALLS: &[i64] = &[
    libc::SYS_accept4, libc::SYS_brk, libc::SYS_clock_getres, libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep, libc::SYS_clone, libc::SYS_clone3, libc::SYS_close,
    libc::SYS_close_range, libc::SYS_dup, libc::SYS_dup3, libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_eventfd2,
    libc::SYS_exit, libc::SYS_exit_group, libc::SYS_fallocate,
    libc::SYS_fdatasync, libc::SYS_fstat, libc::SYS_fstatfs, libc::SYS_fsync, libc::SYS_ftruncate,
    libc::SYS_futex, libc::SYS_getcpu, libc::SYS_getdents64, libc::SYS_getegid, libc::SYS_geteuid,
    libc::SYS_getgid, libc::SYS_getpeername, libc::SYS_getpid, libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getsockname, libc::SYS_getsockopt, libc::SYS_gettid, libc::SYS_getuid,
    libc::SYS_io_uring_enter, libc::SYS_io_uring_register,
    libc::SYS_kcmp, libc::SYS_lseek, libc::SYS_madvise, libc::SYS_membarrier,
    libc::SYS_memfd_create, libc::SYS_mremap,
    libc::SYS_munmap, libc::SYS_nanosleep, libc::SYS_newfstatat,
    libc::SYS_pipe2, libc::SYS_ppoll, libc::SYS_pread64, libc::SYS_preadv,
    libc::SYS_preadv2, libc::SYS_pwrite64, libc::SYS_pwritev,
    libc::SYS_pwritev2, libc::SYS_read, libc::SYS_readlinkat, libc::SYS_readv, libc::SYS_recvfrom,
    libc::SYS_recvmsg, libc::SYS_restart_syscall, libc::SYS_rseq, libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait, libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield, libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_set_robust_list,
    libc::SYS_set_tid_address, libc::SYS_setsockopt, libc::SYS_shutdown, libc::SYS_sigaltstack,
    libc::SYS_socketpair, libc::SYS_statfs, libc::SYS_statx, libc::SYS_sysinfo,
    libc::SYS_timerfd_create, libc::SYS_timerfd_settime, libc::SYS_uname, libc::SYS_write,
    libc::SYS_writev,
    // cachestat, by the one number that it has everywhere.
    451,
];

/// The allowed requests to a device (`ioctl`): whether a file is a terminal, whether its calls
/// wait, and how a block device is divided and erased. No request to the queues of a tap is
/// allowed: one of them would give the interface another owner.
const REQUESTS: &[u64] = &[
    0x5401, // TCGETS
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
    0x1268, // BLKSSZGET
    0x127b, // BLKPBSZGET
    0x127d, // BLKSECDISCARD
];

/// Further requests of the room of Xen guests: to map and unmap pages that a guest lends, and to
/// signal a guest. The house has bound the event channels: no other one can be bound.
const XEN_REQUESTS: &[u64] = &[GRANT_REQUESTS[0], GRANT_REQUESTS[1], EVENT_REQUEST];

/// Older forms of these, which only this machine has.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: &[i64] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_lstat,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: &[i64] = &[];

/// Tries what a room must not be able to do, and says what came of it, a line each.
pub(crate) fn tried() -> String {
    use rustix::net::{AddressFamily, SocketType, netlink, socket};
    let mut said = String::new();
    let mut say = |what, result: Result<(), std::io::Error>| {
        let result =
            result.map_or_else(|error| format!("refused: {error}"), |()| "done".to_owned());
        let _ = writeln!(said, "{what}: {result}");
    };
    let open = |path: &str| std::fs::File::open(path).map(drop);
    say("open a file", open("/etc/passwd"));
    say("make a file", std::fs::File::create("/tmp/manyring-tried").map(drop));
    say("look into the system", open("/proc/self/status"));
    let made = socket(AddressFamily::INET, SocketType::STREAM, None);
    say("make a socket", made.map(drop).map_err(Into::into));
    let diag = (AddressFamily::NETLINK, SocketType::RAW, Some(netlink::SOCK_DIAG));
    let made = socket(diag.0, diag.1, diag.2);
    say("ask which sockets are two ends", made.map(drop).map_err(Into::into));
    // NETLINK_ROUTE, which is 0.
    let routes = socket(AddressFamily::NETLINK, SocketType::RAW, None);
    say("ask for interfaces", routes.map(drop).map_err(Into::into));
    let started = std::process::Command::new("/proc/self/exe").arg("--version").spawn();
    let ended = started.and_then(|mut child| child.wait());
    // A child that may not call exec is killed by the signal that its parent handles.
    say(
        "start a program",
        ended.and_then(|ended| match ended.success() {
            true => Ok(()),
            false => Err(std::io::ErrorKind::PermissionDenied.into()),
        }),
    );
    // ENOTTY from what is no tap, and another error from who may not ask.
    let asked = manyring_backend::sys::tuntap::interface(std::io::stderr().as_fd());
    let asked = asked.map(drop).or_else(|errno| match errno {
        rustix::io::Errno::NOTTY => Ok(()),
        errno => Err(errno),
    });
    say("ask a tap", asked.map_err(Into::into));
    let init = rustix::process::Pid::INIT;
    say("signal another", rustix::process::test_kill_process(init).map_err(Into::into));
    use manyring_backend::sys::denied::reach;
    say("make memory that can be executed", reach::map_executable());
    say("outlive its house", reach::outlive_parent());
    say("trace another", reach::trace());
    reach_others(&mut say);
    said.push_str(&by_threads());
    said
}

/// Tries to reach the process that has started this one.
fn reach_others(say: &mut impl FnMut(&'static str, Result<(), std::io::Error>)) {
    use manyring_backend::sys::denied::reach;
    // The list has no call that gives the parent.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
    let Some(parent) = parent.and_then(rustix::process::Pid::from_raw) else { return };
    let same = rustix::thread::sched_getaffinity(Some(parent));
    let moved = same.and_then(|cpus| rustix::thread::sched_setaffinity(Some(parent), &cpus));
    say("choose the CPUs of another", moved.map_err(Into::into));
    let core = rustix::process::Resource::Core;
    let own = rustix::process::getrlimit(core);
    let limited = rustix::process::prlimit(Some(parent), core, own);
    say("limit another", limited.map(drop).map_err(Into::into));
    let parent = parent.as_raw_nonzero().get();
    say("signal a thread of another", reach::signal_thread(parent));
    say("have another signalled by a file", reach::own_file(parent));
    say("make a process", reach::make_process());
    say("make an io_uring", reach::make_ring());
}

/// The threads of a room, under their names, open a file each: what was noted of that, a line each.
fn by_threads() -> String {
    let _ = denied::take();
    let misbehaves = || {
        let made = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        );
        let _ = denied::reach::map_executable();
        let lines = super::denied::lines();
        format!("{}: {}", lines.join(" "), if made.is_err() { "refused" } else { "done" })
    };
    let mut said = format!("{}\n", misbehaves());
    for name in ["worker", "janitor", "disk-offload"] {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let line = thread.spawn(misbehaves).ok().and_then(|thread| thread.join().ok());
        let _ = writeln!(said, "{}", line.unwrap_or_default());
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_room_gives_anything_up() {
        let arguments = |all: &[&str]| all.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(enter(&arguments(&["manyring", "run", "--config", "room"])), Ok(()));
        assert_eq!(enter(&arguments(&["manyring", "room", "--sandbox=none"])), Ok(()));
        std::fs::File::open("/etc/passwd").unwrap();
    }
}
