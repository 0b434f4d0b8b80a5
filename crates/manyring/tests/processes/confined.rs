//! A supervisor that is not root and may change users, as the packaged service: each of its device
//! processes has a user of its own, and the supervisor itself can become nobody else.
#![cfg(target_arch = "x86_64")]

use crate::domain::{client_works, pid, process};
use crate::support::process::{Daemon, is_root_or_left_out, wait_until};
use crate::support::taken::Taken;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;

/// The user of the supervisor.
const SUPERVISOR: u32 = 4242;
/// The numbers that belong to no account.
const NOBODY: std::ops::RangeInclusive<u32> = 0x7000_0000..=0x7fff_ffff;
const CHANGES: &str = "-all,+setuid,+setgid";

fn confined() -> Daemon {
    let disk = |name: &str| {
        format!(
            "[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nnum_queues = 4\n\
             memory = '16M'\ndomain = '{name}'\n"
        )
    };
    let config = format!("[daemon]\ncontrol = '@/control'\n{}{}", disk("a"), disk("b"));
    let how = format!(
        "exec setpriv --reuid={SUPERVISOR} --regid={SUPERVISOR} --clear-groups \
         --inh-caps={CHANGES} --ambient-caps={CHANGES} --bounding-set={CHANGES}"
    );
    Daemon::run_behind(&how, &config, &["a", "b", "control"])
}

/// The fields of a line of `/proc/PID/status`.
fn status(process: i32, key: &str) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let line = line.unwrap_or_else(|| unreachable!("{key}: {status}"));
    line.split_whitespace().map(str::to_owned).collect()
}

fn has_ended(pid: &Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_err() || stat.unwrap().contains(") Z ")
}

#[test]
fn device_processes_of_a_supervisor_that_is_not_root_have_users_of_their_own_and_end_with_it() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = confined();
    let supervisor = i32::try_from(daemon.pid()).unwrap();
    let mut users = Vec::new();
    for name in ["a", "b"] {
        client_works(&daemon.socket_of(name), 1);
        let its_pid = pid(&daemon, name).as_raw_nonzero().get();
        let user = status(its_pid, "Uid");
        let number: u32 = user[0].parse().unwrap();
        assert!(NOBODY.contains(&number), "{user:?}");
        // Of the supervisor's user it has the saved one, by which the supervisor may end it.
        assert_eq!(user, [user[0].as_str(), &user[0], &SUPERVISOR.to_string(), &user[0]]);
        assert_eq!(status(its_pid, "Gid"), vec![user[0].clone(); 4]);
        assert!(status(its_pid, "Groups").is_empty());
        assert_eq!(status(its_pid, "NoNewPrivs"), ["1"]);
        assert_eq!(status(its_pid, "Seccomp"), ["2"]);
        for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            assert_eq!(status(its_pid, set), ["0000000000000000"], "{set}");
        }
        assert!(process(&daemon, name)["resident_bytes"].as_u64().unwrap() > 0);
        users.push(number);
    }
    assert_ne!(users[0], users[1]);
    // The supervisor can change users in no thread but the one that starts device processes.
    for set in ["CapEff", "CapInh", "CapAmb"] {
        assert_eq!(status(supervisor, set), ["0000000000000000"], "{set}");
    }
    assert!(!daemon.log().contains("denied by the sandbox"), "{}", daemon.log());
    let processes = ["a", "b"].map(|name| pid(&daemon, name));
    processes.iter().for_each(|process| kill_process(*process, Signal::STOP).unwrap());
    kill_process(Pid::from_raw(supervisor).unwrap(), Signal::KILL).unwrap();
    assert!(
        wait_until(|| processes.iter().all(has_ended)),
        "a device process outlives its supervisor"
    );
}

#[test]
fn a_supervisor_that_is_taken_takes_no_number_of_an_account() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = confined();
    let supervisor = i32::try_from(daemon.pid()).unwrap();
    let mut thread = Taken::take(supervisor, supervisor);
    // The rights that it has given up for a while come back with one call.
    let (head, data) = (thread.scratch(), thread.scratch() + 16);
    let both = (1 << 7) | (1 << 6);
    for (at, word) in [(head, 0x2008_0522), (head + 4, 0), (data, both), (data + 4, both)] {
        thread.store(at, word);
    }
    (8..24).step_by(4).for_each(|at| thread.store(data + at, 0));
    assert_eq!(thread.call(libc::SYS_capset, [head, data, 0, 0, 0, 0]), 0);
    let (same, first) = (u64::from(u32::MAX), u64::from(*NOBODY.start()));
    let refused = -i64::from(libc::EPERM);
    let new_users = u64::from(libc::CLONE_NEWUSER.unsigned_abs());
    for (call, arguments) in [
        (libc::SYS_setresuid, [0, 0, 0]),
        (libc::SYS_setresuid, [same, 0, same]),
        (libc::SYS_setresuid, [first, first, 0]),
        (libc::SYS_setresuid, [first, 1000, first]),
        (libc::SYS_setresgid, [first, first, 0]),
        (libc::SYS_setuid, [0, 0, 0]),
        (libc::SYS_setreuid, [0, 0, 0]),
        (libc::SYS_setfsuid, [0, 0, 0]),
        (libc::SYS_setgid, [0, 0, 0]),
        (libc::SYS_setgroups, [1, head, 0]),
        // AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT.
        (libc::SYS_socket, [16, 3, 15]),
        // As programs with 32-bit pointers make it.
        (libc::SYS_setresuid | 0x4000_0000, [0, 0, 0]),
        // In a namespace that is made here the number of a device process could be that of anybody.
        (libc::SYS_clone, [new_users | u64::from(libc::SIGCHLD.unsigned_abs()), 0, 0]),
        (libc::SYS_unshare, [new_users, 0, 0]),
    ] {
        let [a, b, c] = arguments;
        assert_eq!(thread.call(call, [a, b, c, 0, 0, 0]), refused, "{call} {arguments:?}");
    }
    // It had the right: a number of nobody is taken.
    assert_eq!(thread.call(libc::SYS_setresgid, [first, first, first, 0, 0, 0]), 0);
    drop(thread);
    kill_process(Pid::from_raw(supervisor).unwrap(), Signal::KILL).unwrap();
}
