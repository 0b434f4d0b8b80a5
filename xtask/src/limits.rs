//! `cargo xtask limits`: what a disk's limit lets pass, measured by a client: operations and bytes,
//! reads and writes, each with small and large requests and several queues.

use crate::cargo::{build_bench, build_daemon};
use clap::Args;
use manyring_system::cleanup::Folder;
use manyring_system::command::{command, output, text, wait_for};
use manyring_system::{Context, Outcome, check};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// What may pass in a second, where operations are limited.
const IOPS: f64 = 10_000.0;
/// What may pass in a second, where bytes are limited.
const BYTES: f64 = (100 << 20) as f64;
/// How far from it the client may be.
const TOLERANCE: f64 = 0.01;

/// What is measured.
#[derive(Args, Debug)]
pub(crate) struct Limits {
    /// Seconds of each load; fractions are fine. What passes in the first 50 ms counts as well.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Bytes of a request.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "4096,65536,1048576")]
    sizes: Vec<u32>,
    /// Queues that the client drives, 16 at most.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,4")]
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

/// Who serves, and who asks.
#[derive(Debug)]
struct Programs<'a> {
    daemon: &'a Path,
    bench: &'a Path,
    folder: &'a Path,
}

/// Measures every cell; fails if one is more than 1 % beside its limit.
pub(crate) fn run(limits: &Limits) -> Outcome {
    let (daemon, bench) = (build_daemon(&limits.profile)?, build_bench(&limits.profile)?);
    let folder = Folder::new()?;
    let programs = Programs { daemon: &daemon, bench: &bench, folder: folder.path() };
    let mut served = command(&daemon.to_string_lossy());
    served.args(["blk", "--name", "d", "--null", "1G", "--num-queues", "16"]);
    served.arg("--socket-path").arg(folder.path().join("d"));
    served.arg("--control").arg(folder.path().join("control"));
    let mut served =
        served.stdin(Stdio::null()).stderr(Stdio::null()).spawn().context("manyring")?;
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
                let error = programs.error(cell, limits.seconds)?;
                println!("{way}_{of} {size:>8} bytes {queues:>2} queues: {:+.2} %", error * 100.0);
                if error.abs() > TOLERANCE {
                    beside.push(format!("{way}_{of}/{size}/{queues} ({:+.2} %)", error * 100.0));
                }
            }
        }
    }
    Ok(beside)
}

impl Programs<'_> {
    /// How far a client is from the limit, as a part of it.
    fn error(&self, cell: Cell, seconds: f64) -> Outcome<f64> {
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
        let said = text(load.args(["--seconds", &seconds.to_string()]))?;
        let said: Value = serde_json::from_str(&said).context("manyring-bench")?;
        let requests = said["iops"].as_f64().ok_or("manyring-bench has said no iops")?;
        let passed = if of == "iops" { requests } else { requests * f64::from(size) };
        Ok(passed / rate - 1.0)
    }
}
