//! Drops rights before the device process starts its first thread, so that a compromised process
//! lacks them.
//!
//! ```text
//! rings            all io_urings of its workers are made now, and none later; each accepts only
//!                  the requests of disks (`sys/uring/bounds.rs`)
//! user, namespaces its own, where the host allows it (`identity.rs`)
//! death signal     the kernel kills the process when its supervisor ends, for whatever reason
//! no_new_privs     no program that it starts gets rights; landlock and seccomp require it
//! capabilities     none, whatever its user is
//! landlock         of all files it may read those of /proc and /sys; no TCP port, no abstract
//!                  socket of other processes, no signal to other processes
//! seccomp          a list of calls for the process, a shorter one for each thread
//!                  (`system_calls.rs`); other calls fail with EPERM, and are logged with their
//!                  thread (`denied.rs`); it can make threads, but no process, since that would
//!                  outlive it
//! ```
//! The list allows `openat` only with an argument that the signal handler of denied calls sets. So
//! each `openat` goes through the handler, and a file that landlock refuses is logged, as any other
//! denied call is.

use super::system_calls::{self, rule};
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use manyring_backend::sys::starter::{self, ThreadRole};
use manyring_backend::sys::{denied, uring};
use manyring_config::plan::Sandbox;
use rustix::fd::AsFd;
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::sync::mpsc::channel;
use std::sync::{Arc, Once, OnceLock};

/// Option of a device process that serves Xen guests.
pub const XEN_OPTION: &str = "--xen";
/// Option for the number of workers of a device process. The supervisor passes it if
/// `queue_workers` of its devices names a worker above `RINGS_USUAL`.
const RINGS_OPTION: &str = "--rings=";
/// Most workers of a device process without `RINGS_OPTION`. Each worker needs an io_uring of 220
/// KiB, and they are made before the process knows its devices.
const RINGS_USUAL: usize = 16;

/// The number of io_urings that were made.
static RINGS: OnceLock<usize> = OnceLock::new();

/// Returns the number of workers that the process can have, at most `workers`: each needs an
/// io_uring. If the host refuses io_urings altogether, the number is not limited, since all workers
/// use plain system calls.
pub(super) fn workers_max(workers: usize) -> usize {
    match RINGS.get() {
        None | Some(0) => workers,
        Some(rings) => workers.min(*rings),
    }
}

/// Returns the options of a device process that needs `workers` workers: `usual`, and
/// `RINGS_OPTION` if the number is above `RINGS_USUAL`.
#[must_use]
pub fn arguments_for(usual: &Arc<[OsString]>, workers: usize) -> Arc<[OsString]> {
    if workers <= RINGS_USUAL {
        return usual.clone();
    }
    let rings = format!("{RINGS_OPTION}{workers}").into();
    usual.iter().cloned().chain([rings]).collect()
}

/// True if the options suit any domain, so that a warm process that was started with them can serve
/// any domain.
#[must_use]
pub fn are_usual(arguments: &[OsString]) -> bool {
    !arguments.iter().filter_map(|argument| argument.to_str()).any(|a| a.starts_with(RINGS_OPTION))
}

/// Drops rights: in a device process as the page of this module says, in a supervisor only those of
/// `identity::confine`. Must run before the program reads or starts anything.
///
/// # Errors
/// A text of one line: the kernel refused a step, and `--sandbox=seccomp` requires all of them.
pub fn enter(arguments: &[OsString]) -> Result<(), String> {
    if arguments.get(1).is_none_or(|command| command != "device-process") {
        super::identity::confine();
        return Ok(());
    }
    // Needed without a sandbox, too: a device process that outlives its supervisor would keep
    // images open.
    let dies_with_supervisor = || {
        let kill = Some(rustix::process::Signal::KILL);
        let _ = rustix::process::set_parent_process_death_signal(kill);
    };
    dies_with_supervisor();
    // The supervisor starts device processes as /proc/self/exe, and the kernel would name them
    // `exe`.
    let _ = rustix::thread::set_name(c"manyring-device");
    let asked = |mode: Sandbox| {
        let option = format!("--sandbox={}", mode.name());
        arguments.iter().any(|argument| *argument == *option)
    };
    if asked(Sandbox::None) {
        return Ok(());
    }
    // Make the rings before rights are dropped: a host may allow io_uring for root alone.
    if !arguments.iter().any(|argument| argument == "--no-io-uring") {
        let number = |option: &str| {
            let number =
                |argument: &OsString| argument.to_str()?.strip_prefix(option)?.parse().ok();
            arguments.iter().find_map(number)
        };
        let workers: usize = number("--workers=").unwrap_or(1);
        let rings = number(RINGS_OPTION).unwrap_or(RINGS_USUAL);
        let _ = RINGS.set(uring::reserve(workers.min(rings)));
    }
    super::identity::enter();
    // Set the death signal again: a change of user has reset it.
    dies_with_supervisor();
    let refused = give_up(arguments.iter().any(|argument| argument == XEN_OPTION));
    if !refused.is_empty() && asked(Sandbox::Seccomp) {
        return Err(refused);
    }
    let _ = REFUSED.set(refused);
    Ok(())
}

/// Tries every step. Returns the steps that the kernel refused, each with its reason; empty if it
/// refused none.
fn give_up(is_for_xen: bool) -> String {
    let steps = [no_rights(), no_files(), few_calls(is_for_xen)];
    steps.into_iter().filter_map(Result::err).collect::<Vec<_>>().join("; ")
}

/// The steps of the sandbox that the kernel refused this process, which runs without them.
static REFUSED: OnceLock<String> = OnceLock::new();

/// Returns the refused steps, each with its reason, if there are any.
pub(super) fn refused() -> Option<&'static str> {
    REFUSED.get().map(String::as_str).filter(|refused| !refused.is_empty())
}

fn no_rights() -> Result<(), String> {
    let failed = |errno| format!("capabilities: {errno}");
    rustix::thread::set_no_new_privs(true).map_err(failed)?;
    for capability in CapabilitySet::all().iter() {
        // An error is ignored: it means that CAP_SETPCAP is missing, or that this kernel does not
        // have the capability.
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
            Err("landlock: not supported by this kernel".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(format!("landlock: {error}")),
    }
}

fn few_calls(is_for_xen: bool) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("seccomp: {error}");
    super::denied::watch().map_err(|error| failed(&error))?;
    // The C library makes a thread by `clone3`, whose flags lie in memory that seccomp cannot read.
    // With ENOSYS the C library falls back to `clone`. A `clone` that makes a process fails with
    // EPERM, and not with the signal of other denied calls: the C library blocks all signals during
    // it, and a blocked signal of seccomp kills the caller.
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    let process = rule(&[(0, MaskedEq(thread), 0)]).map_err(|error| failed(&error))?;
    let process = BTreeMap::from([(libc::SYS_clone, vec![process])]);
    for (calls, errno) in [(clone3, libc::ENOSYS), (process, libc::EPERM)] {
        let machine =
            std::env::consts::ARCH.try_into().map_err(|e: seccompiler::BackendError| failed(&e))?;
        let fails = SeccompAction::Errno(errno.unsigned_abs());
        let filter = SeccompFilter::new(calls, SeccompAction::Allow, fails, machine);
        let program: BpfProgram = filter.and_then(TryInto::try_into).map_err(|e| failed(&e))?;
        seccompiler::apply_filter(&program).map_err(|error| failed(&error))?;
    }
    let all = system_calls::program(None, is_for_xen).map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&all).map_err(|error| failed(&error))?;
    let program = |role| Ok((role, system_calls::program(Some(role), is_for_xen)?));
    let programs: Result<Vec<_>, seccompiler::BackendError> =
        system_calls::ROLES.into_iter().map(program).collect();
    let _ = PROGRAMS.set(programs.map_err(|error| failed(&error))?);
    starter::begin(confine).map_err(|error| failed(&error))
}

/// The filter for each role of threads; set once the filter of the process is in force.
static PROGRAMS: OnceLock<Vec<(ThreadRole, BpfProgram)>> = OnceLock::new();

/// Restricts the calling thread to the system calls of its role, if its process has a filter.
pub(super) fn confine(role: ThreadRole) {
    static FAILED: Once = Once::new();
    let mut programs = PROGRAMS.get().into_iter().flatten();
    let Some((_, program)) = programs.find(|(of, _)| *of == role) else { return };
    if let Err(error) = seccompiler::apply_filter(program) {
        let problem = "restricting the system calls of a thread failed; it keeps those of its \
                       process";
        FAILED.call_once(|| tracing::warn!(?role, %error, "{problem}"));
    }
}

/// Self-test: tries actions that a device process must not be able to do. Returns a line for each.
pub fn tried() -> String {
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
    // Protocol 0, which is NETLINK_ROUTE.
    let routes = socket(AddressFamily::NETLINK, SocketType::RAW, None);
    say("ask for interfaces", routes.map(drop).map_err(Into::into));
    let started = std::process::Command::new("/proc/self/exe").arg("--version").spawn();
    let ended = started.and_then(|mut child| child.wait());
    // The child may not call exec; it is killed by the signal whose handler only the parent has.
    say(
        "start a program",
        ended.and_then(|ended| match ended.success() {
            true => Ok(()),
            false => Err(std::io::ErrorKind::PermissionDenied.into()),
        }),
    );
    // ENOTTY: the ioctl reached the kernel, which found that the file is no tap. Any other error:
    // the ioctl was denied.
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
    say("outlive its supervisor", reach::outlive_parent());
    say("trace another", reach::trace());
    reach_others(&mut say);
    said.push_str(&by_threads());
    said
}

/// Tries to signal and to change the parent process.
fn reach_others(say: &mut impl FnMut(&'static str, Result<(), std::io::Error>)) {
    use manyring_backend::sys::denied::reach;
    // The filter does not allow getppid, so read the parent's ID from /proc.
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
    let moved = manyring_memory::try_to_move_pages();
    say("move pages between nodes", moved.map_err(Into::into));
}

/// Self-test: starts a thread of each role, which tries to make a socket and executable memory.
/// Returns a line for each thread: the denied calls, and whether it got a socket.
fn by_threads() -> String {
    let _ = denied::take();
    let misbehaves = || {
        use rustix::net::{AddressFamily, SocketType, socket};
        let made = socket(AddressFamily::INET, SocketType::STREAM, None);
        let _ = denied::reach::map_executable();
        made.is_ok()
    };
    // The kernel does not show the name of a thread that has ended: keep each thread alive
    // until its line is made.
    let line = |is_done: bool| {
        let result = if is_done { "done" } else { "refused" };
        format!("{}: {result}\n", super::denied::lines().join(" "))
    };
    let mut said = line(misbehaves());
    for (name, role) in [
        ("worker", ThreadRole::Worker),
        ("janitor", ThreadRole::Janitor),
        ("disk-offload", ThreadRole::Disk),
    ] {
        let ((tells, command), (lets_go, waits)) = (channel(), channel::<()>());
        let thread = std::thread::Builder::new().name(name.to_owned());
        let _ = starter::spawn(role, thread, move || {
            let _ = tells.send(misbehaves());
            let _ = waits.recv();
        });
        said.push_str(&line(command.recv().unwrap_or(true)));
        drop(lets_go);
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_process_gives_anything_up() {
        let arguments = |all: &[&str]| all.iter().map(OsString::from).collect::<Vec<_>>();
        assert_eq!(enter(&arguments(&["manyring", "run", "--config", "device-process"])), Ok(()));
        assert_eq!(enter(&arguments(&["manyring", "device-process", "--sandbox=none"])), Ok(()));
        std::fs::File::open("/etc/passwd").unwrap();
    }
}
