//! A hundred device processes that do nothing cost little: no thread of theirs runs, and each takes
//! some memory of its own. This says how much, of the release build:
//!
//! ```sh
//! MANYRING_TEST_PROGRAM=$PWD/target/release/manyring \
//!     cargo test -p manyring --test processes idle:: -- --nocapture
//! ```

use crate::support::process::{Daemon, wait_until};
use crate::support::program::{manyring, shown};
use manyring_driver::{BlkDriver, BlkDriverOptions};
use std::io::Write;
use std::time::Duration;

const PROCESSES: usize = 100;
/// Longer than any pause of a process that looks again and again.
const QUIET: Duration = Duration::from_secs(10);
/// The program that is tried instead of the debug build.
const PROGRAM: &str = "MANYRING_TEST_PROGRAM";
/// Most KiB of memory that a device process may have to itself: of a release build, and of the
/// debug build.
const KIB_MAX: [u64; 2] = [2048, 4096];

/// A daemon with a disk in each of a hundred domains.
fn daemon() -> (Daemon, Vec<String>) {
    let names: Vec<_> = (0..PROCESSES).map(|n| format!("d{n}")).collect();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().display().to_string();
    let disk = |name: &String| {
        format!("[[blk]]\nname = '{name}'\nsocket_path = '{at}/{name}'\nmemory = '1M'\n")
    };
    let disks: String = names.iter().map(disk).collect();
    let head = format!("[daemon]\nworkers = 2\ncontrol = '{at}/control'\ndomains = 'device'\n");
    let file = folder.path().join("manyring.toml");
    std::fs::write(&file, head + &disks).unwrap();
    let mut command = match std::env::var_os(PROGRAM) {
        Some(program) => std::process::Command::new(program),
        None => manyring(),
    };
    command.arg("run").arg("--config").arg(file);
    let sockets = names.iter().map(String::as_str).chain(["control"]);
    let sockets: Vec<_> = sockets.map(|name| folder.path().join(name)).collect();
    (Daemon::start(command, folder, &sockets), names)
}

/// How often threads of these processes have begun to run.
fn runs(processes: &[u64]) -> u64 {
    let tasks = processes.iter().flat_map(|pid| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        // A thread may end while it is looked at.
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
    });
    let count = |status: String| {
        let lines = status.lines().filter(|line| line.contains("ctxt_switches:"));
        lines.map(number).sum::<u64>()
    };
    tasks.map(count).sum()
}

fn number(line: &str) -> u64 {
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// KiB of a process: those that it shares with nobody, and its part of all.
fn memory(process: &u64) -> [u64; 2] {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup")).unwrap();
    let sum = |key: &str| text.lines().filter(|line| line.starts_with(key)).map(number).sum();
    [sum("Private_"), sum("Pss:")]
}

#[test]
fn no_thread_of_a_hundred_processes_runs_while_guests_do_nothing_and_each_takes_little_memory() {
    let (daemon, names) = daemon();
    let options = BlkDriverOptions { queues: 1, ..BlkDriverOptions::default() };
    let connect = |name: &String| {
        let mut guest = BlkDriver::connect(&daemon.socket_of(name), &options).unwrap();
        guest.queues[0].read(0, &mut [0; 4096]).unwrap();
        guest
    };
    let _guests: Vec<_> = names.iter().map(connect).collect();
    let processes = shown(&daemon.socket_of("control"), "/v1/processes");
    let processes = processes["processes"].as_array().unwrap().iter();
    let processes: Vec<_> = processes.map(|process| process["pid"].as_u64().unwrap()).collect();
    assert_eq!(processes.len(), PROCESSES);
    let mut spells = Vec::new();
    let rests = wait_until(|| {
        let before = runs(&processes);
        std::thread::sleep(QUIET);
        spells.push(runs(&processes) - before);
        spells.ends_with(&[0])
    });
    let all: Vec<_> = processes.iter().map(memory).collect();
    let [own, part] =
        [0, 1].map(|at| all.iter().map(|kib| kib[at]).sum::<u64>() / PROCESSES as u64);
    let line = format!(
        "{PROCESSES} idle device processes: {own} KiB of its own for each (Pss {part} KiB); \
         threads began to run {spells:?} times in spells of {} s\n",
        QUIET.as_secs()
    );
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    assert!(rests, "{line}");
    let most = KIB_MAX[usize::from(std::env::var_os(PROGRAM).is_none())];
    assert!(own <= most, "{line}");
    assert!(daemon.terminate().success());
}
