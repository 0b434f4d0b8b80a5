//! A compromised device process has the supervisor keep as many descriptors as it can: sessions of
//! other domains outlive their device processes all the same.
#![allow(clippy::disallowed_methods, reason = "a guest of a test has a thread of its own")]

use crate::domain::{pid, process, works};
use crate::support::foreign::Client;
use crate::support::process::{Daemon, is_root_or_left_out, wait_until};
use crate::support::program::shown;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;

/// Descriptors that belong to one entry, at most.
const ENTRY_FDS: usize = 8;

/// The device process's end of its channel, used as its own code could use it.
struct Channel(OwnedFd);

impl Channel {
    fn of(process: Pid) -> Self {
        let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
        Self(pidfd_getfd(&pidfd, 0, PidfdGetfdFlags::empty()).unwrap())
    }

    /// Sends a report with this many descriptors of a file. False: the process was ended.
    fn send(&self, report: &serde_json::Value, file: &OwnedFd, count: usize) -> bool {
        let bytes = [&[2], report.to_string().as_bytes()].concat();
        let fds: Vec<_> = std::iter::repeat_n(file.as_fd(), count).collect();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ENTRY_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let flags = SendFlags::NOSIGNAL;
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {
                Ok(_) => return true,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::TOOMANYREFS) => {
                    std::thread::yield_now();
                }
                Err(_) => return false,
            }
        }
    }
}

/// Has the device process of `bad` send descriptors for its journal, as far as the supervisor keeps
/// them.
fn hoards(daemon: &Daemon, entries: usize) {
    let compromised = pid(daemon, "bad");
    let channel = Channel::of(compromised);
    kill_process(compromised, Signal::STOP).unwrap();
    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    for key in 0..entries {
        let name = (1_u64 << 32) + key as u64;
        let report = serde_json::json!({ "session_fds": { "device": "bad", "number": 1,
                                         "keep": name, "release": [] } });
        assert!(channel.send(&report, &file, ENTRY_FDS), "{}", daemon.log());
    }
    // Once this shows, all reports before it were read.
    let last = serde_json::json!({ "session": { "device": "bad", "is_open": false } });
    assert!(channel.send(&last, &file, 0));
    let path = "/v1/devices/bad";
    let is_read = || shown(&daemon.socket_of("control"), path)["connected"] == false;
    assert!(wait_until(is_read), "{}", daemon.log());
}

#[test]
fn a_domain_that_hoards_descriptors_takes_crash_survival_from_no_other() {
    if !is_root_or_left_out() {
        return;
    }
    let disk = |name: &str, queues: usize| {
        format!(
            "[[blk]]\nname = '{name}'\nsocket_path = '@/{name}'\nmemory = '16M'\n\
             domain = '{name}'\nnum_queues = {queues}\n"
        )
    };
    let config =
        format!("[daemon]\ncontrol = '@/control'\n{}{}", disk("bad", 256), disk("good", 4));
    for (limit, entries) in [(4096, 600), (20_000, 2000)] {
        let how = format!("ulimit -n {limit}; exec");
        let daemon = Daemon::run_behind(&how, &config, &["control", "bad", "good"]);
        let bad = manyring_driver::FrontEnd::connect(
            &daemon.socket_of("bad"),
            std::time::Duration::from_secs(30),
        );
        let mut bad = bad.unwrap();
        bad.features().unwrap();
        hoards(&daemon, entries);
        let mut good = Client::connect(&daemon.socket_of("good"), false);
        works(&mut good, 1);
        for starts in 2..4 {
            kill_process(pid(&daemon, "good"), Signal::KILL).unwrap();
            let serves = || {
                let process = process(&daemon, "good");
                process["state"] == "serving" && process["starts"] == starts
            };
            assert!(wait_until(serves), "{limit}: {}", daemon.log());
            works(&mut good, starts);
        }
        let lost = |line: &str| line.contains("disconnected") && line.contains("\"good\"");
        assert!(!daemon.log().lines().any(lost), "{limit}: {}", daemon.log());
        // Its own session is the one that does not outlive its device process.
        let says = |line: &str| line.contains("too few open files") && line.contains("\"bad\"");
        assert!(daemon.log().lines().any(says), "{limit}: {}", daemon.log());
    }
}
