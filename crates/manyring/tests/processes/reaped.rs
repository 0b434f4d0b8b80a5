//! Device processes that have ended, and that the kernel does not let anybody reap for long, as it
//! does where many programs read /proc. Needs root, to trace them.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{client_works, pid, process, two_domains, works};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, end_of, is_root_or_left_out, wait_until};
use crate::takeover::{has_ended, log, take_over};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};

/// A process that has ended and cannot be reaped before this is dropped: its tracer, which is the
/// test, has not looked at its end.
struct Unreaped(Pid);

impl Unreaped {
    fn kill(process: i32) -> Self {
        let unreaped = Self(Pid::from_raw(process));
        ptrace::seize(unreaped.0, ptrace::Options::empty()).unwrap();
        kill(unreaped.0, Signal::SIGKILL).unwrap();
        // /proc shows the end of the first thread, a pidfd that of the last one.
        let process = rustix::process::Pid::from_raw(process).unwrap();
        let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
        let has_ended = || {
            let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(wait_until(has_ended));
        unreaped
    }

    /// The kernel has it in its tables.
    fn is_there(&self) -> bool {
        std::fs::exists(format!("/proc/{}/stat", self.0)).unwrap()
    }
}

impl Drop for Unreaped {
    fn drop(&mut self) {
        let _ = waitpid(self.0, Some(WaitPidFlag::__WALL));
    }
}

/// Kills the device process of a domain, and returns when the next one serves.
fn serves_again(daemon: &Daemon, domain: &str) -> Unreaped {
    let before = pid(daemon, domain).as_raw_nonzero().get();
    let unreaped = Unreaped::kill(before);
    let serves = || {
        let process = process(daemon, domain);
        process["state"] == "serving" && process["pid"] != before
    };
    assert!(wait_until(serves), "{}", daemon.log());
    unreaped
}

#[test]
fn a_device_is_served_again_before_its_device_process_is_reaped() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let first = serves_again(&daemon, "a");
    works(&mut client, 2);
    let second = serves_again(&daemon, "a");
    works(&mut client, 3);
    client_works(&daemon.socket_of("b"), 4);
    assert_eq!(process(&daemon, "a")["starts"], 3);
    assert!(first.is_there() && second.is_there());
    let processes = [first.0, second.0].map(|process| format!("/proc/{process}"));
    drop((first, second));
    // The daemon tries again.
    let are_reaped = || processes.iter().all(|process| !std::fs::exists(process).unwrap());
    assert!(wait_until(are_reaped));
}

#[test]
fn a_takeover_does_not_wait_until_a_device_process_is_reaped() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = two_domains();
    let mut client = Client::connect(&daemon.socket_of("a"), false);
    works(&mut client, 1);
    let before = pid(&daemon, "a").as_raw_nonzero().get();
    let unreaped = Unreaped::kill(before);
    let mut next = take_over(&daemon, "manyring.toml");
    assert!(wait_until(|| has_ended(daemon.pid())), "{} {}", daemon.log(), log(&daemon));
    works(&mut client, 2);
    assert!(unreaped.is_there());
    drop(client);
    kill(Pid::from_raw(next.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert!(end_of(&mut next).success(), "{}", log(&daemon));
}

#[test]
fn a_warm_process_that_was_killed_serves_nobody_though_it_is_not_reaped() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = two_domains();
    // The first one is the daemon itself.
    assert!(wait_until(|| daemon.processes().len() == 2));
    let warm = daemon.processes()[1];
    let unreaped = Unreaped::kill(warm.cast_signed());
    client_works(&daemon.socket_of("a"), 1);
    assert_eq!(process(&daemon, "a")["starts"], 1, "{}", daemon.log());
    assert!(unreaped.is_there());
}
