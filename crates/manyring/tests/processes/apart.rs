//! Disks that are served by device processes: each domain a process of its own, and none harms
//! another.
#![allow(clippy::disallowed_methods, reason = "what a neighbour feels is measured")]

use crate::domain::{client_works, counted, pid, process, two_domains, works};
use crate::support::foreign::Client;
use crate::support::process::{self, TIMEOUT, is_root_or_left_out, wait_until};
use crate::support::program::{self, http_json, manyring};
use manyring_driver::FrontEnd;
use manyring_driver::hostile::HeldLock;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open,
};
use std::time::{Duration, Instant};

#[test]
fn each_domain_has_a_process_and_the_supervisor_shows_what_it_counts() {
    let daemon = two_domains();
    assert_eq!(process(&daemon, "a"), serde_json::Value::Null, "it starts with its first client");
    client_works(&daemon.socket_of("a"), 1);
    client_works(&daemon.socket_of("b"), 2);
    let (a, b) = (pid(&daemon, "a"), pid(&daemon, "b"));
    assert!(a != b && a.as_raw_nonzero().get().unsigned_abs() != daemon.pid());
    assert_eq!(process(&daemon, "a")["devices"], serde_json::json!(["a"]));
    assert!(process(&daemon, "a")["resident_bytes"].as_u64().unwrap() > 1 << 16);
    let metrics = program::http(&daemon.socket_of("control"), "GET", "/metrics", "").2;
    assert!(
        metrics.contains("manyring_device_process_resident_memory_bytes{process=\"a\"} "),
        "{metrics}"
    );
    assert!(
        metrics.contains("manyring_device_process_cpu_seconds_total{process=\"b\"} "),
        "{metrics}"
    );
    assert!(counted(&daemon, "a", "reads") > 0 && counted(&daemon, "a", "writes") > 0);
    assert!(metrics.contains("manyring_worker_queues{process=\"a\",worker=\"0\"} "), "{metrics}");
    let workers = program::shown(&daemon.socket_of("control"), "/v1/workers");
    let ran = |process: &str| {
        let all = workers["workers"].as_array().unwrap().iter();
        let of_process = all.filter(|worker| worker["process"] == process);
        of_process.map(|worker| worker["ran_ns"].as_u64().unwrap()).sum::<u64>()
    };
    assert!(ran("a") > 0 && ran("b") > 0, "{workers}");
    let control = daemon.socket_of("control");
    let stats = manyring().args(["stats", "--control"]).arg(&control).output().unwrap();
    let stats = String::from_utf8(stats.stdout).unwrap();
    assert!(stats.contains("a/0 ") && stats.contains("b/0 "), "{stats}");
    // The lock is the supervisor's, and the device process's as long as it has the image.
    let taken = manyring()
        .args(["blk", "--wait", "0", "--socket-path"])
        .arg(daemon.folder().join("other"))
        .arg("--blk-file")
        .arg(daemon.folder().join("a.img"))
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&taken.stderr).contains("in use"), "{taken:?}");
    assert!(daemon.terminate().success());
    let is_gone = |pid| rustix::process::test_kill_process(pid).is_err();
    assert!(wait_until(|| is_gone(a) && is_gone(b)), "a device process ends with its supervisor");
}

/// The processes that the supervisor has started.
fn children(daemon: &process::Daemon) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let text: String = tasks.filter_map(|task| of(task).ok()).collect();
    text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

#[test]
fn a_process_waits_for_the_next_domain_and_one_that_was_killed_is_not_missed() {
    let daemon = two_domains();
    assert!(wait_until(|| children(&daemon).len() == 1), "{}", daemon.log());
    let spare = children(&daemon);
    client_works(&daemon.socket_of("a"), 1);
    assert_eq!(pid(&daemon, "a"), spare[0]);
    assert!(wait_until(|| children(&daemon).len() == 2), "the next one waits");
    let next = children(&daemon).into_iter().find(|child| *child != spare[0]).unwrap();
    kill_process(next, Signal::KILL).unwrap();
    let stat = format!("/proc/{}/stat", next.as_raw_nonzero());
    let has_ended = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z "));
    assert!(wait_until(has_ended));
    client_works(&daemon.socket_of("b"), 2);
    assert!(pid(&daemon, "b") != next && process(&daemon, "b")["starts"] == 1);
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_that_is_killed_costs_its_own_guest_alone_and_is_there_for_the_next() {
    let daemon = two_domains();
    let mut neighbour = Client::connect(&daemon.socket_of("b"), false);
    works(&mut neighbour, 1);
    for round in 0..3 {
        client_works(&daemon.socket_of("a"), round);
        let (reads, starts) =
            (counted(&daemon, "a", "reads"), process(&daemon, "a")["starts"].clone());
        assert_eq!(starts, round + 1, "{}", daemon.log());
        kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
        assert!(wait_until(|| process(&daemon, "a")["state"] == "ended"), "{}", daemon.log());
        assert_eq!(counted(&daemon, "a", "reads"), reads, "what was counted stays");
    }
    client_works(&daemon.socket_of("a"), 9);
    works(&mut neighbour, 2);
    assert_eq!(process(&daemon, "b")["starts"], 1);
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_that_hangs_holds_up_neither_its_neighbour_nor_the_supervisor() {
    let daemon = two_domains();
    let mut held = Client::connect(&daemon.socket_of("a"), false);
    works(&mut held, 1);
    let stopped = pid(&daemon, "a");
    kill_process(stopped, Signal::STOP).unwrap();
    // The process stays stopped throughout: whoever waited for it would get no answer.
    client_works(&daemon.socket_of("b"), 2);
    assert_eq!(process(&daemon, "a")["answers"], false);
    assert_eq!(process(&daemon, "b")["answers"], true);
    assert!(counted(&daemon, "b", "reads") > 0);
    let metrics = program::http(&daemon.socket_of("control"), "GET", "/metrics", "");
    assert!(
        metrics.2.contains("manyring_device_process_answers{process=\"a\"} 0"),
        "{}",
        metrics.2
    );
    kill_process(stopped, Signal::CONT).unwrap();
    works(&mut held, 3);
    assert!(wait_until(|| process(&daemon, "a")["answers"] == true));
    assert!(daemon.terminate().success());
}

#[test]
fn what_processes_of_a_domain_write_is_bounded_over_all_starts_and_heard_while_they_live() {
    let daemon = two_domains();
    let (began, line) = (Instant::now(), [b"flood".repeat(200), b"\n".to_vec()].concat());
    for round in 0..3 {
        client_works(&daemon.socket_of("a"), round);
        let process_pid = pid(&daemon, "a");
        // As somebody has it whom a device process has sent its standard error by a socket.
        let stderr = stderr_of(process_pid);
        let write = |bytes: &[u8]| {
            rustix::net::send(&stderr, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        };
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            if write(&line).is_err() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        kill_process(process_pid, Signal::KILL).unwrap();
        assert!(wait_until(|| process(&daemon, "a")["state"] == "ended"), "the supervisor goes on");
        assert_eq!(write(b"late\n"), Err(Errno::PIPE), "the device process has ended");
    }
    let passed = daemon.log().matches("flood").count() * "flood".len();
    let seconds = usize::try_from(began.elapsed().as_secs()).unwrap() + 1;
    assert!(passed > 200 << 10, "{passed} bytes: what may come at once");
    assert!(passed < (256 << 10) + seconds * (32 << 10) + (16 << 10), "{passed} in {seconds} s");
    assert!(daemon.terminate().success());
}

/// The standard error of a device process.
fn stderr_of(process: Pid) -> OwnedFd {
    let process = pidfd_open(process, PidfdFlags::empty()).unwrap();
    pidfd_getfd(process, 2, PidfdGetfdFlags::empty()).unwrap()
}

#[test]
fn a_device_process_that_writes_memory_that_never_comes_holds_no_thread_of_the_supervisor() {
    if !is_root_or_left_out() {
        return;
    }
    let daemon = two_domains();
    client_works(&daemon.socket_of("a"), 1);
    let process_pid = pid(&daemon, "a");
    // As a thread of the device process, with memory of a file whose server does not answer.
    let held = match HeldLock::pipe(stderr_of(process_pid)) {
        Ok(held) => held,
        Err(error) => return println!("not tested: {error}"),
    };
    kill_process(process_pid, Signal::KILL).unwrap();
    assert!(wait_until(|| process(&daemon, "a")["state"] == "ended"), "the supervisor goes on");
    for (name, number) in [("a", 2), ("b", 3)] {
        client_works(&daemon.socket_of(name), number);
    }
    assert!(daemon.terminate().success());
    drop(held);
}

#[test]
fn a_disk_in_a_device_process_is_resized_by_the_supervisor_and_its_front_end_is_told() {
    let daemon = two_domains();
    // As QEMU does, the front-end gives a socket by which it hears of the size.
    let mut front = FrontEnd::connect(&daemon.socket_of("a"), TIMEOUT).unwrap();
    let offered = front.protocol_features().unwrap();
    front.set_protocol_features(offered).unwrap();
    let mut channel = front.open_backend_channel().unwrap();
    let resize = |size: u64| {
        let body = format!("{{\"size\": {size}, \"shrink\": true}}");
        http_json(&daemon.socket_of("control"), "POST", "/v1/devices/a/resize", &body)
    };
    for bytes in [32 << 20, 8 << 20] {
        assert_eq!(resize(bytes).0, 200);
        let mut message = [0; 12];
        std::io::Read::read_exact(&mut channel, &mut message).unwrap();
        let size = front.config(0, 8).unwrap();
        assert_eq!(u64::from_le_bytes(*size.first_chunk().unwrap()), bytes / 512);
        assert_eq!(std::fs::metadata(daemon.folder().join("a.img")).unwrap().len(), bytes);
    }
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_process_reaches_no_file_network_program_or_process() {
    let tried = |sandbox: &str| {
        let mut command = manyring();
        let output = command.args(["device-process", sandbox, "--show"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (free, process) = (tried("--sandbox=none"), tried("--sandbox=seccomp"));
    for what in [
        "open a file",
        "make a file",
        "make a socket",
        "ask for interfaces",
        "start a program",
        "ask a tap",
        "make memory that can be executed",
        "outlive its supervisor",
        "trace another",
        "choose the CPUs of another",
        "limit another",
        "signal a thread of another",
        "have another signalled by a file",
        "make a process",
        "make an io_uring",
        "move pages between nodes",
    ] {
        assert!(free.contains(&format!("{what}: done")), "{free}");
        assert!(process.contains(&format!("{what}: refused")), "{process}");
    }
    for what in ["look into the system", "ask which sockets are two ends"] {
        assert!(process.contains(&format!("{what}: done")), "{process}");
    }
    // One line for each call that the list denies, whatever the thread: here socket(2) and mmap(2).
    for thread in ["manyring-device", "worker", "janitor", "disk-offload"] {
        let [socket, mmap] = [libc::SYS_socket, libc::SYS_mmap];
        let line = format!("call {socket} of {thread} call {mmap} of {thread}: refused\n");
        assert_eq!(process.matches(&line).count(), 1, "{process}");
    }
}

/// A device process that was made to misbehave does not end with its channel. A stopped process
/// reads none.
#[test]
fn a_device_process_that_does_nothing_for_it_ends_with_a_supervisor_that_is_killed() {
    let daemon = two_domains();
    client_works(&daemon.socket_of("a"), 1);
    client_works(&daemon.socket_of("b"), 1);
    let processes = [pid(&daemon, "a"), pid(&daemon, "b")];
    processes.iter().for_each(|process| kill_process(*process, Signal::STOP).unwrap());
    assert!(processes.iter().all(|process| rustix::process::test_kill_process(*process).is_ok()));
    let supervisor = Pid::from_raw(i32::try_from(daemon.pid()).unwrap()).unwrap();
    kill_process(supervisor, Signal::KILL).unwrap();
    let is_gone = |process: &Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
        stat.is_err() || stat.unwrap().contains(") Z ")
    };
    assert!(
        wait_until(|| processes.iter().all(is_gone)),
        "a device process outlives its supervisor"
    );
}

#[test]
fn a_device_process_has_no_right_and_a_list_of_calls() {
    let daemon = two_domains();
    client_works(&daemon.socket_of("a"), 1);
    let pid = pid(&daemon, "a").as_raw_nonzero();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let mut threads = 0;
    for task in tasks {
        // A thread can have ended since.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        threads += 1;
        let is = |key: &str, value: &str| {
            let line = status.lines().find(|line| line.starts_with(key)).unwrap();
            assert_eq!(line.split_whitespace().nth(1), Some(value), "{status}");
        };
        is("NoNewPrivs:", "1");
        is("Seccomp:", "2");
        is("CapEff:", "0000000000000000");
        is("CapPrm:", "0000000000000000");
        is("CapInh:", "0000000000000000");
    }
    assert!(threads > 2, "its workers have it too");
    assert!(
        !daemon.log().contains("denied by the sandbox"),
        "it needs no other call: {}",
        daemon.log()
    );
    assert!(daemon.terminate().success());
}
