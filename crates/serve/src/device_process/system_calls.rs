//! The system calls (seccomp) that a device process may make: a list for the process, and a shorter
//! one for each of its threads.
//!
//! ```text
//! worker    io_urings, transfers, doorbells
//! disk      transfers
//! server    sockets of an NBD server, pairs of sockets
//! log       writes
//! lookout   reads of /proc about threads
//! janitor   queries about descriptors, reads of /proc
//! control   the janitor's, and sockets of sessions; also for threads that make blocking calls
//! starter   making threads, and shortening their lists
//! ```
//! The process has the list of the starter, which contains all of these. Each thread also has the
//! calls that every thread needs. A list can only become shorter: a compromised worker can make no
//! thread, open no file, and receive no descriptor.

use manyring_backend::sys::denied;
use manyring_backend::sys::starter::ThreadRole;
use manyring_memory::{EVENT_REQUEST, GRANT_REQUESTS};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};
use std::collections::{BTreeMap, BTreeSet};

/// All roles.
pub(super) const ROLES: [ThreadRole; 7] = [
    ThreadRole::Worker,
    ThreadRole::Disk,
    ThreadRole::Server,
    ThreadRole::Janitor,
    ThreadRole::Lookout,
    ThreadRole::Log,
    ThreadRole::Control,
];

/// Returns the seccomp filter of a thread of this role, or of the process. A call that the filter
/// does not allow raises a signal (`denied.rs`).
pub(super) fn program(
    role: Option<ThreadRole>,
    is_for_xen: bool,
) -> Result<BpfProgram, BackendError> {
    let mut rules = rules(is_for_xen)?;
    let with_rules = |call| (call, rules.remove(&call).unwrap_or_default());
    let calls: BTreeMap<_, _> = numbers(role).into_iter().map(with_rules).collect();
    let machine = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(calls, SeccompAction::Trap, SeccompAction::Allow, machine)?.try_into()
}

/// Returns the numbers of the system calls that a role allows a thread; without a role, those that
/// the process may make.
fn numbers(role: Option<ThreadRole>) -> BTreeSet<i64> {
    let groups: &[&[i64]] = match role {
        None => &[
            RINGS,
            TRANSFERS,
            WAITS,
            DOORBELLS,
            SHOWN,
            DESCRIPTORS,
            NODES,
            SESSIONS,
            CONNECTIONS,
            PAIRS,
            THREADS,
        ],
        Some(ThreadRole::Worker) => &[RINGS, TRANSFERS, WAITS, DOORBELLS, CONNECTIONS],
        Some(ThreadRole::Disk) => &[TRANSFERS],
        Some(ThreadRole::Server) => &[TRANSFERS, WAITS, DOORBELLS, CONNECTIONS, PAIRS],
        Some(ThreadRole::Janitor) => {
            &[TRANSFERS, WAITS, DOORBELLS, SHOWN, DESCRIPTORS, CONNECTIONS]
        }
        Some(ThreadRole::Lookout) => &[SHOWN],
        Some(ThreadRole::Log) => &[WAITS],
        Some(ThreadRole::Control) => {
            &[TRANSFERS, WAITS, DOORBELLS, SHOWN, DESCRIPTORS, NODES, SESSIONS, CONNECTIONS, PAIRS]
        }
    };
    groups.iter().chain(&[EVERY]).flat_map(|group| group.iter().copied()).collect()
}

/// Calls of every thread: memory, time, locks, signals to its own process, its end, and writing a
/// line of the log.
#[rustfmt::skip]
const EVERY: &[i64] = &[
    libc::SYS_brk, libc::SYS_clock_gettime, libc::SYS_clock_nanosleep, libc::SYS_close,
    libc::SYS_exit, libc::SYS_exit_group, libc::SYS_futex, libc::SYS_getpid, libc::SYS_getrandom,
    libc::SYS_gettid, libc::SYS_madvise, libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_mremap,
    libc::SYS_munmap, libc::SYS_nanosleep, libc::SYS_read, libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity, libc::SYS_sched_yield, libc::SYS_sigaltstack, libc::SYS_tgkill,
    libc::SYS_write,
];

/// Calls for a worker's io_uring, and for its CPUs.
#[rustfmt::skip]
const RINGS: &[i64] = &[
    libc::SYS_getrusage, libc::SYS_io_uring_enter, libc::SYS_io_uring_register,
    libc::SYS_sched_setaffinity,
];

/// Transfers between memory and open files, flushes and allocation. `ftruncate`: for a file that a
/// write of whole blocks has made longer.
#[rustfmt::skip]
const TRANSFERS: &[i64] = &[
    // `cachestat`. The call has this number on every architecture.
    451,
    libc::SYS_fadvise64, libc::SYS_fallocate, libc::SYS_fdatasync, libc::SYS_ftruncate,
    libc::SYS_ioctl, libc::SYS_lseek, libc::SYS_pread64, libc::SYS_preadv2, libc::SYS_pwrite64,
    libc::SYS_pwritev2, libc::SYS_readv, libc::SYS_writev,
];

/// Waiting for a descriptor.
#[rustfmt::skip]
const WAITS: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
];

/// Waiting for kicks (epoll), notifying front-ends (eventfd, socket), and timers.
#[rustfmt::skip]
const DOORBELLS: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_eventfd2,
    libc::SYS_fcntl, libc::SYS_sendto, libc::SYS_timerfd_settime,
];

/// Reading files below /proc and /sys; on x86-64 also the older calls.
#[rustfmt::skip]
const SHOWN: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    libc::SYS_fstat, libc::SYS_lseek, libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_readlinkat,
    libc::SYS_statx,
];

/// Queries about descriptors that a front-end sent, and making memfds for a front-end.
#[rustfmt::skip]
const DESCRIPTORS: &[i64] = &[
    libc::SYS_fstatfs, libc::SYS_getpeername, libc::SYS_getsockname, libc::SYS_getsockopt,
    libc::SYS_kcmp, libc::SYS_memfd_create, libc::SYS_prlimit64, libc::SYS_socket,
    libc::SYS_uname,
];

/// Asking for the NUMA nodes of its own pages; `rules` allows it to move none.
#[rustfmt::skip]
const NODES: &[i64] = &[
    libc::SYS_move_pages,
];

/// Connections to the server of a disk, and to front-ends.
#[rustfmt::skip]
const CONNECTIONS: &[i64] = &[
    libc::SYS_recvfrom, libc::SYS_shutdown,
];

/// Pairs of connected sockets.
#[rustfmt::skip]
const PAIRS: &[i64] = &[
    libc::SYS_socketpair,
];

/// Sockets of sessions and of the supervisor; devices that come and go. `membarrier`: for flows
/// that move to other queues of a tap.
#[rustfmt::skip]
const SESSIONS: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    libc::SYS_dup3, libc::SYS_epoll_pwait2, libc::SYS_fsync, libc::SYS_membarrier,
    libc::SYS_recvmsg, libc::SYS_sendmsg, libc::SYS_timerfd_create,
];

/// Making threads, and the calls of a new thread before its list is shortened.
#[rustfmt::skip]
const THREADS: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    libc::SYS_clone, libc::SYS_clone3, libc::SYS_prctl, libc::SYS_rseq,
    libc::SYS_seccomp, libc::SYS_set_robust_list,
];

/// `MEMBARRIER_CMD_GLOBAL`: waits, and does nothing else.
const GRACE_PERIOD: u64 = 1;

/// A condition on an argument of a call: the argument's index, the comparison, and the value.
pub(super) type Condition = (u8, SeccompCmpOp, u64);

/// Makes a rule: it allows a call whose arguments meet all of these conditions.
pub(super) fn rule(arguments: &[Condition]) -> Result<SeccompRule, BackendError> {
    let condition = |(index, how, value): &Condition| {
        SeccompCondition::new(*index, SeccompCmpArgLen::Dword, how.clone(), *value)
    };
    SeccompRule::new(arguments.iter().map(condition).collect::<Result<_, _>>()?)
}

/// Returns the conditions of calls that are allowed with some arguments only. With other arguments
/// they would reach other processes of the same user, and so the supervisor. A process signals only
/// its own threads, sets only its own limits and CPUs, and sends only on connected sockets. It
/// cannot outlive the supervisor, make memory executable or lock a file, and it can only add
/// denials to a thread's list.
fn rules(is_for_xen: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let command = |command: &i32| vec![(1, Eq, u64::from(command.unsigned_abs()))];
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    let adds = u64::from(libc::SECCOMP_SET_MODE_FILTER);
    let of_xen = XEN_REQUESTS.iter().filter(|_| is_for_xen);
    let requests = REQUESTS.iter().chain(of_xen).map(|request| vec![(1, Eq, *request)]).collect();
    let conditions: Vec<(i64, Vec<Vec<Condition>>)> = vec![
        (libc::SYS_ioctl, requests),
        (libc::SYS_mmap, vec![vec![(2, MaskedEq(executable), 0)]]),
        (libc::SYS_mprotect, vec![vec![(2, MaskedEq(executable), 0)]]),
        (libc::SYS_prctl, vec![vec![(0, Ne, u64::from(libc::PR_SET_PDEATHSIG.unsigned_abs()))]]),
        (libc::SYS_fcntl, COMMANDS.iter().map(command).collect()),
        (libc::SYS_prlimit64, vec![vec![(0, Eq, 0)]]),
        (libc::SYS_sched_setaffinity, vec![vec![(0, Eq, 0)]]),
        (libc::SYS_membarrier, vec![vec![(0, Eq, GRACE_PERIOD)]]),
        (libc::SYS_tgkill, vec![vec![(0, Eq, u64::from(std::process::id()))]]),
        // Only with the argument that the signal handler of denied calls sets.
        (libc::SYS_openat, vec![vec![(4, Eq, u64::from(denied::OPENED_BY_HANDLER))]]),
        (libc::SYS_socket, vec![SOCK_DIAG.to_vec()]),
        (libc::SYS_socketpair, vec![STREAMS.to_vec()]),
        // Without an address, the message goes to the peer to which the socket is connected.
        (libc::SYS_sendto, vec![vec![(5, Eq, 0)]]),
        // TCP fast open would connect a socket to an address of the caller's choice.
        (libc::SYS_sendmsg, vec![vec![(2, MaskedEq(FAST_OPEN), 0)]]),
        (libc::SYS_seccomp, vec![vec![(0, Eq, adds), (1, Eq, 0)]]),
    ];
    let mut rules = BTreeMap::new();
    for (call, alternatives) in conditions {
        let all: Result<_, _> = alternatives.iter().map(|all| rule(all)).collect();
        rules.insert(call, all?);
    }
    rules.insert(libc::SYS_move_pages, vec![asks_for_nodes()?]);
    Ok(rules)
}

/// `move_pages` of its own pages, without target nodes. The list of target nodes is a pointer, of
/// which all 64 bits count: another call would move pages, and have each CPU of the host empty its
/// lists of pages.
fn asks_for_nodes() -> Result<SeccompRule, BackendError> {
    let is_zero = |(index, len)| SeccompCondition::new(index, len, Eq, 0);
    let arguments =
        [(0, SeccompCmpArgLen::Dword), (3, SeccompCmpArgLen::Qword), (5, SeccompCmpArgLen::Dword)];
    SeccompRule::new(arguments.into_iter().map(is_zero).collect::<Result<_, _>>()?)
}

/// `MSG_FASTOPEN`
const FAST_OPEN: u64 = 0x2000_0000;

/// The allowed commands of `fcntl`. None of them sets the owner of a file, whom the kernel would
/// signal. None takes or releases a lock: by the locks of this process's open files the supervisor
/// sees that requests are in flight, even after this process has ended.
const COMMANDS: &[i32] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_ADD_SEALS,
];

/// The only socket that may be made: `NETLINK_SOCK_DIAG`, which tells which sockets are the two
/// ends of a pair. With it a session detects, and refuses, its own socket as a doorbell. This
/// socket reveals no more than /proc does, and changes nothing without a capability.
const SOCK_DIAG: [Condition; 2] = [(0, Eq, 16), (2, Eq, 4)];

/// The only pairs of sockets that may be made, `SOCK_STREAM` of `AF_UNIX`. A datagram socket could
/// send to any socket name, for example to the host's log, which would take this process for the
/// supervisor.
const STREAMS: [Condition; 2] = [(0, Eq, 1), (1, MaskedEq(0xf), 1)];

/// The allowed requests of `ioctl`: is a file a terminal, do its calls block, the block sizes of a
/// block device, and secure erase. No request to the queues of a tap is allowed: one of them would
/// change the owner of the interface.
const REQUESTS: &[u64] = &[
    0x5401, // TCGETS
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
    0x1268, // BLKSSZGET
    0x127b, // BLKPBSZGET
    0x127d, // BLKSECDISCARD
];

/// Further `ioctl` requests of a device process for Xen guests: mapping and unmapping granted
/// pages, and signalling a guest. The supervisor has bound the event channels; this process can
/// bind no other.
const XEN_REQUESTS: &[u64] = &[GRANT_REQUESTS[0], GRANT_REQUESTS[1], EVENT_REQUEST];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_a_part_of_its_process_list_and_makes_no_other() {
        let all = numbers(None);
        let makes = [libc::SYS_clone, libc::SYS_clone3, libc::SYS_seccomp, libc::SYS_prctl];
        assert!(makes.iter().all(|call| all.contains(call)));
        for role in ROLES {
            let own = numbers(Some(role));
            assert!(
                own.is_subset(&all) && makes.iter().all(|call| !own.contains(call)),
                "{role:?}"
            );
        }
        for role in [ThreadRole::Worker, ThreadRole::Disk, ThreadRole::Server, ThreadRole::Log] {
            let own = numbers(Some(role));
            for call in [libc::SYS_openat, libc::SYS_socket, libc::SYS_recvmsg, libc::SYS_dup3] {
                assert!(!own.contains(&call), "{role:?} {call}");
            }
        }
    }

    /// The supervisor hands over sockets of TCP: their options choose how long a close takes, by
    /// which interface they send, and by which other hosts.
    #[test]
    fn no_thread_connects_a_socket_or_changes_its_options() {
        let calls = [
            libc::SYS_setsockopt,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept,
            libc::SYS_accept4,
            libc::SYS_sendmmsg,
        ];
        for role in ROLES.map(Some).into_iter().chain([None]) {
            let own = numbers(role);
            assert!(calls.iter().all(|call| !own.contains(call)), "{role:?}");
        }
    }

    /// docs/guide/security.md names these.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn lists_have_as_many_calls_as_the_guide_says() {
        let guide = include_str!("../../../../docs/guide/security.md");
        let names = ["worker", "disk", "server", "janitor", "lookout", "log", "control"];
        for (name, role) in names.into_iter().zip(ROLES) {
            let row = format!("{name} {}", numbers(Some(role)).len());
            assert!(guide.contains(&row), "{row}");
        }
        let row = format!("the process {}", numbers(None).len());
        assert!(guide.contains(&row), "{row}");
    }

    #[test]
    fn every_list_is_a_program() {
        for role in ROLES.map(Some).into_iter().chain([None]) {
            assert!(!program(role, true).unwrap().is_empty());
        }
    }
}
