//! DPDK's testpmd, as a polling vhost-user-net back-end and as a polling front-end.

use super::{PeerError, Server, apart, find, spawn};
use crate::direction::Direction;
use crate::measure::{Affinity, now};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// testpmd and its package.
const TESTPMD: (&str, &str) = ("dpdk-testpmd", "dpdk-dev");
/// Longest wait for the figures of a front-end.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Reports (one a second) of a front-end that are skipped while it warms up.
const WARM_UP: usize = 2;
/// Number of runs so far, so that no run shares its files with an earlier one.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn failed(problem: impl ToString) -> PeerError {
    PeerError::Failed { program: "testpmd".to_owned(), problem: problem.to_string() }
}

/// The prefix of the files of one run; the files are removed on drop.
#[derive(Debug)]
struct Prefix(String);

impl Prefix {
    fn new() -> Self {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(format!("manyring-bench-{}-{count}", std::process::id()))
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new("/run/dpdk").join(&self.0));
    }
}

/// Buffers of a front-end: both rings twice over; and many more, which go round and round. On pages
/// of 4 KiB the second measures how long the CPU takes to find a page, too.
pub(crate) const POOLS: [u32; 2] = [SMALL_POOL, 16_384];
/// Buffers for each queue pair of a back-end.
const SMALL_POOL: u32 = 4096;

/// The arguments of every testpmd; both lcores may run on any CPU of the process.
fn arguments(
    prefix: &Prefix,
    devices: &[OsString],
    mode: &str,
    pairs: u16,
    pool: u32,
) -> Vec<OsString> {
    let mut all: Vec<OsString> =
        ["--no-pci", "--no-telemetry", "--no-huge", "-m", "256", "--file-prefix"]
            .map(OsString::from)
            .into();
    all.push(prefix.0.clone().into());
    all.extend(devices.iter().flat_map(|device| ["--vdev".into(), device.clone()]));
    all.push("--".into());
    all.push(format!("--forward-mode={mode}").into());
    all.push(format!("--rxq={pairs}").into());
    all.push(format!("--txq={pairs}").into());
    all.push(format!("--total-num-mbufs={pool}").into());
    all.extend(["--nb-cores=1", "--rxd=1024", "--txd=1024"].map(OsString::from));
    all.extend(["--txpkts=64", "--stats-period", "1"].map(OsString::from));
    all
}

/// The two lcores of a run on CPU `cpu`.
fn lcores(cpu: usize) -> [OsString; 2] {
    ["--lcores".into(), format!("0@{cpu},1@{cpu}").into()]
}

/// A vhost port: a sink, or a generator.
#[derive(Debug)]
pub(crate) struct BackEnd {
    pub(crate) server: Server,
    _prefix: Prefix,
}

impl BackEnd {
    /// Starts it on CPU `cpu` and waits for its socket.
    pub(crate) fn start(
        socket: &Path,
        direction: Direction,
        pairs: u16,
        cpu: usize,
    ) -> Result<Self, PeerError> {
        let program = find(TESTPMD)?;
        let prefix = Prefix::new();
        let device = vhost(0, socket, pairs);
        // The direction is the guest's: frames that it transmits, testpmd receives.
        let mode = match direction {
            Direction::Transmit => "rxonly",
            Direction::Receive => "txonly",
        };
        let mut all: Vec<OsString> = lcores(cpu).into();
        let pool = SMALL_POOL * u32::from(pairs);
        all.extend(arguments(&prefix, &[device], mode, pairs, pool));
        let server = Server::start(&program, &all, socket, &Affinity::one(cpu))?;
        Ok(Self { server, _prefix: prefix })
    }

    /// Starts one on CPU `cpu` that forwards between two guests, and waits for their sockets.
    pub(crate) fn between(sockets: &[PathBuf; 2], cpu: usize) -> Result<Self, PeerError> {
        let program = find(TESTPMD)?;
        let prefix = Prefix::new();
        let devices = [vhost(0, &sockets[0], 1), vhost(1, &sockets[1], 1)];
        let mut all: Vec<OsString> = lcores(cpu).into();
        all.extend(arguments(&prefix, &devices, "io", 1, SMALL_POOL * 2));
        let _ = std::fs::remove_file(&sockets[0]);
        let server = Server::start(&program, &all, &sockets[1], &Affinity::one(cpu))?;
        Ok(Self { server, _prefix: prefix })
    }
}

/// A vhost port of this number, which listens there.
fn vhost(number: u32, socket: &Path, pairs: u16) -> OsString {
    let mut device = OsString::from(format!("net_vhost{number},iface="));
    device.push(socket);
    device.push(format!(",queues={pairs}"));
    device
}

/// Drives the back-end behind `socket` by a virtio-user port with this many buffers on CPU `cpu`:
/// packets in a second.
pub(crate) fn front_end(
    socket: &Path,
    direction: Direction,
    pool: u32,
    cpu: usize,
) -> Result<f64, PeerError> {
    let program = find(TESTPMD)?;
    let prefix = Prefix::new();
    let mut device = OsString::from("net_virtio_user0,path=");
    device.push(socket);
    device
        .push(",queues=1,queue_size=1024,packed_vq=0,mrg_rxbuf=1,in_order=1,mac=52:54:00:00:00:01");
    let (mode, word) = match direction {
        Direction::Transmit => ("txonly", "Tx-pps:"),
        Direction::Receive => ("rxonly", "Rx-pps:"),
    };
    let mut command = apart(&program);
    command.args(lcores(cpu)).args(arguments(&prefix, &[device], mode, 1, pool));
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = spawn(&mut command, &Affinity::one(cpu)).map_err(failed)?;
    let output = child.stdout.take();
    let _running = Server { child };
    let start = now();
    let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines());
    let mut seen = 0;
    for line in lines {
        if start.elapsed() > TIMEOUT {
            break;
        }
        if let Some(rate) = rate_of(&line.map_err(failed)?, word) {
            seen += 1;
            if seen > WARM_UP {
                return Ok(rate);
            }
        }
    }
    Err(failed("ended, or was silent, before it had figures"))
}

/// The number behind `word` in a line.
fn rate_of(line: &str, word: &str) -> Option<f64> {
    line.split_once(word)?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_as_many_buffers_as_it_is_asked_for() {
        let all = arguments(&Prefix::new(), &["net_x".into()], "rxonly", 4, 16_384);
        assert!(all.contains(&"--total-num-mbufs=16384".into()), "{all:?}");
        assert!(all.contains(&"--rxq=4".into()), "{all:?}");
    }

    #[test]
    fn rates_are_read_from_the_reports() {
        let line = "  Rx-pps:      1234567          Rx-bps:    632098304";
        assert_eq!(rate_of(line, "Rx-pps:"), Some(1_234_567.0));
        assert_eq!(rate_of(line, "Tx-pps:"), None);
    }
}
