//! `cargo xtask limits`: what a disk's limit lets pass, measured by a client: operations and bytes,
//! reads and writes, each with small and large requests and several queues.
//!
//! A worker or a client that is ready to run while other programs have the CPUs passes less than
//! the limit allows, which tells nothing of the limit. The kernel says for how long they waited
//! (`schedstat`). A cell that is short by no more than that is measured again; one that is short by
//! more has failed, and so has one that passes too much.

use crate::cargo::{build_bench, build_daemon};
use clap::Args;
use manyring_system::cleanup::Folder;
use manyring_system::command::{command, output, text, wait_for};
use manyring_system::{Context, Outcome, check};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// Operations that may pass in a second, if operations are limited.
const IOPS: f64 = 10_000.0;
/// Bytes that may pass in a second, if bytes are limited.
const BYTES: f64 = (100 << 20) as f64;
/// How far from it the client may be.
const TOLERANCE: f64 = 0.01;
/// How often a cell is measured, if other programs hold it up.
const TRIES: u32 = 3;

/// The loads to measure.
#[derive(Args, Debug)]
pub(crate) struct Limits {
    /// Seconds of each load; fractions are fine. The burst of the first 50 ms counts as well.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Bytes of a request.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "4096,65536,1048576")]
    sizes: Vec<u32>,
    /// Queues that the client drives, 16 at most.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4,16")]
    queues: Vec<u32>,
    /// The profile of cargo with which the programs are built.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// One load.
#[derive(Clone, Copy, Debug)]
struct Cell {
    way: &'static str,
    of: &'static str,
    size: u32,
    queues: u32,
}

/// The results of one load.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// How far the client was from the limit, as a part of it.
    error: f64,
    /// For which part of the time others had the CPUs that worker or client wanted.
    held_up: f64,
    /// CPUs that the daemon used.
    cpus: f64,
}

/// The verdict on a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Exact,
    /// Too little has passed, and other programs explain it.
    HeldUp,
    Beside,
}

impl Measured {
    fn verdict(&self) -> Verdict {
        match self.error {
            error if error.abs() <= TOLERANCE => Verdict::Exact,
            error if error < 0.0 && -error - self.held_up <= TOLERANCE => Verdict::HeldUp,
            _ => Verdict::Beside,
        }
    }
}

/// Who serves, and who asks.
#[derive(Debug)]
struct Programs<'a> {
    /// The process that serves.
    serving: u32,
    daemon: &'a Path,
    bench: &'a Path,
    folder: &'a Path,
}

/// Measures every cell; fails if one is more than 1 % beside its limit, or if other programs held
/// it up each time.
pub(crate) fn run(limits: &Limits) -> Outcome {
    let (daemon, bench) = (build_daemon(&limits.profile)?, build_bench(&limits.profile)?);
    let folder = Folder::new()?;
    let mut served = command(&daemon.to_string_lossy());
    served.args(["blk", "--name", "d", "--null", "1G", "--num-queues", "16"]);
    served.arg("--socket-path").arg(folder.path().join("d"));
    served.arg("--control").arg(folder.path().join("control"));
    let mut served =
        served.stdin(Stdio::null()).stderr(Stdio::null()).spawn().context("manyring")?;
    let folder = folder.path();
    let programs = Programs { serving: served.id(), daemon: &daemon, bench: &bench, folder };
    let ended = measured(limits, &programs);
    let _ = served.kill();
    let _ = served.wait();
    let beside = ended?;
    check(beside.is_empty(), || format!("beside their limits: {}", beside.join(", ")))
}

/// Measures all cells, shows each, and gives those that are beside their limits.
fn measured(limits: &Limits, programs: &Programs<'_>) -> Outcome<Vec<String>> {
    let mut beside = Vec::new();
    for (way, of) in [("read", "iops"), ("write", "iops"), ("read", "bps"), ("write", "bps")] {
        for size in limits.sizes.iter().copied() {
            for queues in limits.queues.iter().copied() {
                let cell = Cell { way, of, size, queues };
                let Measured { error, held_up, cpus } = programs.decided(cell, limits.seconds)?;
                let verdict = Measured { error, held_up, cpus }.verdict();
                let percent = error * 100.0;
                println!(
                    "{way}_{of} {size:>8} bytes {queues:>2} queues: {percent:+.2} %, \
                     {cpus:.3} CPUs, held up for {:.1} % of the time",
                    held_up * 100.0
                );
                let name = format!("{way}_{of}/{size}/{queues}");
                match verdict {
                    Verdict::Exact => {}
                    Verdict::HeldUp => beside.push(format!("{name} (held up by others)")),
                    Verdict::Beside => beside.push(format!("{name} ({percent:+.2} %)")),
                }
            }
        }
    }
    Ok(beside)
}

impl Programs<'_> {
    /// Measures until other programs do not explain what is missing, a few times at most.
    fn decided(&self, cell: Cell, seconds: f64) -> Outcome<Measured> {
        let mut measured = self.measured(cell, seconds)?;
        for _ in 1..TRIES {
            if measured.verdict() != Verdict::HeldUp {
                break;
            }
            measured = self.measured(cell, seconds)?;
        }
        Ok(measured)
    }

    fn measured(&self, cell: Cell, seconds: f64) -> Outcome<Measured> {
        let Cell { way, of, size, queues } = cell;
        let rate = if of == "iops" { IOPS } else { BYTES };
        let keys = ["read_iops", "write_iops", "read_bps", "write_bps"].map(|key| {
            let is_this = key == format!("{way}_{of}");
            format!("limit.{key}={}", if is_this { rate } else { 0.0 })
        });
        wait_for("the daemon", Duration::from_secs(60), || {
            let mut set = command(&self.daemon.to_string_lossy());
            set.args(["set", "--control"]).arg(self.folder.join("control")).arg("d");
            Ok(output(set.args(&keys)).ok())
        })?;
        let mut load = command(&self.bench.to_string_lossy());
        load.args(["load", "driver", "--json", "--rw", way]);
        load.arg("--socket").arg(self.folder.join("d"));
        load.args(["--size", &size.to_string(), "--queues", &queues.to_string()]);
        let before = Threads::of(self.serving)?;
        let said = text(load.args(["--seconds", &seconds.to_string()]))?;
        let after = Threads::of(self.serving)?;
        let said: Value = serde_json::from_str(&said).context("manyring-bench")?;
        let requests = said["iops"].as_f64().ok_or("manyring-bench has said no iops")?;
        let passed = if of == "iops" { requests } else { requests * f64::from(size) };
        // Each of its threads drives one queue.
        let client = said["waited_seconds"].as_f64().ok_or("no waited_seconds")?;
        let client = client / f64::from(queues);
        Ok(Measured {
            error: passed / rate - 1.0,
            held_up: (client + after.worker_waited - before.worker_waited) / seconds,
            cpus: (after.ran - before.ran) / seconds,
        })
    }
}

/// Seconds of the daemon's threads since they began.
#[derive(Clone, Copy, Debug, Default)]
struct Threads {
    /// For which all of them ran.
    ran: f64,
    /// For which its workers were ready to run and others ran.
    worker_waited: f64,
}

impl Threads {
    fn of(process: u32) -> Outcome<Self> {
        let tasks = format!("/proc/{process}/task");
        let mut threads = Self::default();
        for task in std::fs::read_dir(&tasks).context(&tasks)? {
            let task = task.context(&tasks)?.path();
            // A thread may end while it is looked at.
            let read = |name| std::fs::read_to_string(task.join(name)).unwrap_or_default();
            let times = read("schedstat");
            let mut seconds = times.split_whitespace().map(|ns| ns.parse().unwrap_or(0.0) / 1e9);
            threads.ran += seconds.next().unwrap_or(0.0);
            if read("comm").starts_with("worker-") {
                threads.worker_waited += seconds.next().unwrap_or(0.0);
            }
        }
        Ok(threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_explain_is_measured_again_and_nothing_else_is_excused() {
        let verdict = |error, held_up| Measured { error, held_up, cpus: 0.0 }.verdict();
        assert_eq!(verdict(-0.009, 0.0), Verdict::Exact);
        assert_eq!(verdict(-0.03, 0.025), Verdict::HeldUp);
        assert_eq!(verdict(-0.03, 0.01), Verdict::Beside);
        assert_eq!(verdict(0.02, 0.5), Verdict::Beside, "nobody's wait lets more pass");
    }
}
