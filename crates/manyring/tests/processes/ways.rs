//! Front-ends that come by other ways than a socket of the daemon, and workers that the operator
//! has chosen: a device process serves them as any others.

use crate::domain::{disk, pid, process, serve};
use crate::support::client::Client;
use crate::support::process::{Daemon, TIMEOUT, end_of, kill_and_reap, wait_until};
use crate::support::program::{http_json, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use manyring_engine::allowed_cpus;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// GET_FEATURES: request 1, version 1, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// The header of its answer: a reply with 8 bytes.
const FEATURES: [u8; 12] = [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0];

/// True if whoever is at the other end answers like a back-end.
fn is_served(mut stream: &UnixStream) -> bool {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut reply = [0; 20];
    stream.write_all(&GET_FEATURES).is_ok()
        && stream.read_exact(&mut reply).is_ok()
        && reply[..12] == FEATURES
}

fn accepted(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let mut front = None;
    assert!(wait_until(|| {
        front = listener.accept().ok();
        front.is_some()
    }));
    front.unwrap().0
}

/// The process of a device, as the API shows it.
fn process_of(daemon: &Daemon, device: &str) -> serde_json::Value {
    shown(&daemon.socket_of("control"), &format!("/v1/devices/{device}"))["process"].clone()
}

#[test]
fn a_front_end_that_listens_is_connected_to_after_each_session_and_outlives_its_device_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("front");
    let table = format!(
        "[[blk]]\nname = 'c'\nnull = '1G'\nclient = true\ndomain = 'c'\nsocket_path = '{}'\n",
        path.display()
    );
    let devices = [table, disk("a", "null = '1G'\n")].concat();
    let daemon = serve("", &devices, &["a"]);
    assert_eq!(process_of(&daemon, "c"), "c");
    for _ in 0..2 {
        let listener = UnixListener::bind(&path).unwrap();
        let front = accepted(&listener);
        assert!(is_served(&front), "{}", daemon.log());
        assert_eq!(process(&daemon, "c")["devices"], serde_json::json!(["c"]));
        // One connection at a time.
        assert!(listener.accept().is_err());
        kill_process(pid(&daemon, "c"), Signal::KILL).unwrap();
        assert!(is_served(&front), "{}", daemon.log());
        drop((front, listener));
        std::fs::remove_file(&path).unwrap();
    }
    assert!(daemon.terminate().success());
}

#[test]
fn a_device_that_ends_with_its_session_ends_with_it_and_not_with_its_device_process() {
    let daemon = serve("", &disk("a", "null = '1G'\none_off = true\ndomain = 'a'\n"), &["a"]);
    let mut daemon = daemon;
    let mut guest =
        BlkDriver::connect(&daemon.socket_of("a"), &BlkDriverOptions::default()).unwrap();
    guest.queues[0].read(0, &mut [0; 512]).unwrap();
    kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    guest.queues[0].read(0, &mut [0; 512]).unwrap();
    assert!(daemon.is_running());
    drop(guest);
    assert!(daemon.wait().success(), "{}", daemon.log());
    assert!(!daemon.socket_of("a").exists());
}

/// A child that is killed when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        kill_and_reap(&mut self.0);
    }
}

/// Starts `manyring run` with a disk whose socket is handed in as descriptor 7.
fn with_fd_7(socket: impl Into<OwnedFd>, folder: &Path) -> Started {
    let file = folder.join("manyring.toml");
    let control = folder.join("control");
    let text = format!(
        "[daemon]\ncontrol = '{}'\n[[blk]]\nname = 'f'\nnull = '1G'\nfd = 7\ndomain = 'f'\n",
        control.display()
    );
    std::fs::write(&file, text).unwrap();
    // It comes as the shell's input, and goes on under its number.
    let program = env!("CARGO_BIN_EXE_manyring");
    let script = format!("exec {program} run --config {} 7<&0 </dev/null", file.display());
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).stdin(Stdio::from(socket.into()));
    Started(command.spawn().unwrap())
}

#[test]
fn a_socket_that_is_handed_in_listens_for_a_device_process_and_keeps_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut started = with_fd_7(UnixListener::bind(&path).unwrap(), folder.path());
    for _ in 0..2 {
        let mut client = Client::connect(&path, 1);
        client.submit_reads(0, 1);
        assert_eq!(client.wait_for(0, 1, TIMEOUT), 1);
    }
    let control = folder.path().join("control");
    assert_eq!(shown(&control, "/v1/devices/f")["process"], "f");
    kill_process(Pid::from_child(&started.0), Signal::TERM).unwrap();
    assert!(wait_until(|| started.0.try_wait().unwrap().is_some()));
    assert!(path.exists());
}

#[test]
fn a_connection_that_is_handed_in_is_served_to_its_end_by_a_device_process() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut started = with_fd_7(theirs, folder.path());
    assert!(is_served(&ours));
    let control = folder.path().join("control");
    let processes = shown(&control, "/v1/processes");
    assert_eq!(processes["processes"][0]["devices"], serde_json::json!(["f"]), "{processes}");
    drop(ours);
    assert!(wait_until(|| started.0.try_wait().unwrap().is_some()));
    assert!(end_of(&mut started.0).success());
}

#[test]
fn workers_of_a_device_process_serve_the_queues_and_have_the_cpus_that_were_chosen() {
    let cpu = *allowed_cpus().last().unwrap();
    let keys = format!("workers = 3\nworker_cpus = ['{cpu}', '{cpu}', '{cpu}']\n");
    let table = disk("a", "memory = '16M'\nqueue_workers = [2, 0]\ndomain = 'a'\n");
    let daemon = serve(&keys, &table, &["a"]);
    let options = BlkDriverOptions { queues: 3, ..BlkDriverOptions::default() };
    for _ in 0..2 {
        let mut guest = BlkDriver::connect(&daemon.socket_of("a"), &options).unwrap();
        for queue in &mut guest.queues {
            queue.read(0, &mut [0; 4096]).unwrap();
        }
        let shown = shown(&daemon.socket_of("control"), "/v1/devices/a");
        let workers: Vec<_> = (0..3).map(|n| &shown["queues"][n]["counters"]["worker"]).collect();
        assert_eq!(workers, [2, 0, 0]);
        let process = pid(&daemon, "a");
        let tasks = std::fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap();
        let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status"));
        let tasks = tasks.flatten().filter_map(|task| status(task).ok());
        let workers: Vec<_> = tasks.filter(|status| status.starts_with("Name:\tworker-")).collect();
        assert_eq!(workers.len(), 2, "{workers:?}");
        let bound = format!("Cpus_allowed_list:\t{cpu}\n");
        assert!(workers.iter().all(|status| status.contains(&bound)), "{workers:?}");
        drop(guest);
        kill_process(process, Signal::KILL).unwrap();
    }
    assert!(daemon.terminate().success());
}

/// The io_urings that a process has open, and its threads.
fn rings_and_threads(process: Pid) -> (usize, usize) {
    let process = process.as_raw_nonzero();
    let entries = |of: &str| std::fs::read_dir(format!("/proc/{process}/{of}")).unwrap().flatten();
    let target = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).ok();
    let fds = entries("fd").filter_map(target);
    let rings = fds.filter(|target| target.to_string_lossy().contains("[io_uring]")).count();
    (rings, entries("task").count())
}

/// The workers that serve the first two queues of a disk, which answer.
fn workers_of(daemon: &Daemon, name: &str, guest: &mut BlkDriver) -> [serde_json::Value; 2] {
    for queue in &mut guest.queues {
        queue.read(0, &mut [0; 4096]).unwrap();
    }
    let shown = shown(&daemon.socket_of("control"), &format!("/v1/devices/{name}"));
    [0, 1].map(|n| shown["queues"][n]["counters"]["worker"].clone())
}

#[test]
fn a_device_process_has_as_many_workers_as_the_queues_of_its_devices_are_given() {
    const USUAL: usize = 16;
    const ALL: usize = 256;
    let queues = "memory = '16M'\n";
    let wide = disk("wide", &format!("{queues}queue_workers = [{}, 16]\ndomain = 'a'\n", ALL - 1));
    let usual = disk("usual", &format!("{queues}domain = 'b'\n"));
    let daemon = serve(&format!("workers = {ALL}\n"), &(wide + &usual), &["wide", "usual"]);
    let options = BlkDriverOptions { queues: 2, ..BlkDriverOptions::default() };
    let connect = |name: &str| BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
    let mut usual = connect("usual");
    workers_of(&daemon, "usual", &mut usual);
    let (rings, threads) = rings_and_threads(pid(&daemon, "b"));
    // Where the kernel refuses all rings, workers do without.
    assert!([0, USUAL].contains(&rings), "{rings}");
    assert!(threads < USUAL, "workers are started when they have work: {threads}");
    for _ in 0..2 {
        let mut wide = connect("wide");
        assert_eq!(workers_of(&daemon, "wide", &mut wide), [ALL - 1, 16]);
        let (all, threads) = rings_and_threads(pid(&daemon, "a"));
        assert_eq!(all, if rings == 0 { 0 } else { ALL });
        assert!(threads < USUAL, "it has no thread for workers without a queue: {threads}");
        let workers = shown(&daemon.socket_of("control"), "/v1/workers");
        let last =
            |worker: &serde_json::Value| worker["process"] == "a" && worker["index"] == ALL - 1;
        assert!(workers["workers"].as_array().unwrap().iter().any(last), "{workers}");
        drop(wide);
        kill_process(pid(&daemon, "a"), Signal::KILL).unwrap();
    }
    // A device that comes to a domain whose process has fewer workers than it needs: the next
    // process has them, and the front-ends that are there go on with it.
    let put = serde_json::json!({
        "kind": "blk", "socket_path": daemon.socket_of("late"), "memory": "16M", "num_queues": 2,
        "queue_workers": [200, 0], "domain": "b",
    });
    let control = daemon.socket_of("control");
    let (status, answer) = http_json(&control, "PUT", "/v1/devices/late", &put.to_string());
    assert_eq!(status, 201, "{answer}");
    let mut late = connect("late");
    assert_eq!(workers_of(&daemon, "late", &mut late), [200, 0]);
    workers_of(&daemon, "usual", &mut usual);
    assert_eq!(process(&daemon, "b")["starts"], 2, "{}", daemon.log());
    assert!(!daemon.log().contains("is not followed"), "{}", daemon.log());
    assert!(daemon.terminate().success());
}

#[test]
fn a_user_whose_devices_need_few_workers_has_few_whatever_another_device_may_need() {
    let memory = "memory = '16M'\n";
    let wide = disk("wide", &format!("{memory}queue_workers = [255, 16, 0, 0]\n"));
    let usual = disk("usual", memory);
    let daemon = serve("workers = 256\n", &(usual + &wide), &["usual", "wide"]);
    let options = BlkDriverOptions { queues: 2, ..BlkDriverOptions::default() };
    let connect = |name: &str| BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
    let mut usual = connect("usual");
    workers_of(&daemon, "usual", &mut usual);
    let domain = shown(&daemon.socket_of("control"), "/v1/devices/usual")["process"].clone();
    let domain = domain.as_str().unwrap();
    let (few, _) = rings_and_threads(pid(&daemon, domain));
    // Where the kernel refuses all rings, workers do without.
    assert!(few <= 16, "{few}");
    let mut wide = connect("wide");
    assert_eq!(workers_of(&daemon, "wide", &mut wide), [255, 16]);
    workers_of(&daemon, "usual", &mut usual);
    let (all, _) = rings_and_threads(pid(&daemon, domain));
    assert_eq!(all, if few == 0 { 0 } else { 256 });
    assert_eq!(process(&daemon, domain)["starts"], 2, "{}", daemon.log());
    assert!(daemon.terminate().success());
}
