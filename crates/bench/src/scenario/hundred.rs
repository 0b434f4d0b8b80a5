//! `hundred`: what one busy guest reaches beside 99 that are connected and do nothing.
//!
//! One daemon with one worker. Beside the crowd it has a hundred devices, fifty disks and fifty
//! networks or one more of either kind; alone it has the busy guest's device only.

use super::counts::NotificationCounts;
use super::crowd::{Crowd, CrowdDevices, name};
use super::net::{NetBench, PartyRun};
use super::null_net::drive_as;
use super::{ScenarioArgs, WAITED_MAX};
use crate::direction::Direction;
use crate::load::net::NetLoadArgs;
use crate::load::{LoadArgs, LoadOptions, LoadResult, Rw};
use crate::measure::now;
use crate::own_load::{own_load, result_of};
use crate::peer::{self, Server};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample};
use crate::report::verdict::Verdict;
use std::path::PathBuf;
use std::time::Duration;

/// Devices beside the crowd, the busy guest's among them.
const DEVICES: usize = 100;
/// The least share of its throughput alone that the busy guest must keep.
const KEPT_MIN: f64 = 0.97;
/// Bytes of a frame and of a block.
const FRAME: usize = 64;
const BLOCK: usize = 4096;

/// The activity of the busy guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BusyGuest {
    /// 4 KiB reads, this many in flight; the guest polls.
    Disk(usize),
    /// Small frames.
    Net(Direction),
}

impl BusyGuest {
    fn words(self) -> String {
        match self {
            Self::Disk(depth) => format!("null disk, QD{depth}"),
            Self::Net(direction) => format!("null port, guest {}s {FRAME} B", direction.word()),
        }
    }

    /// The section of its device, and its keys.
    fn section(self) -> (&'static str, &'static str) {
        match self {
            Self::Disk(_) => ("blk", "null = '64G'\nnum_queues = 1"),
            Self::Net(Direction::Transmit) => ("net", "null = true"),
            Self::Net(Direction::Receive) => ("net", "null = true\ngenerate = 64"),
        }
    }

    const fn unit(self) -> &'static str {
        if matches!(self, Self::Disk(_)) { "kIOPS" } else { "kpps" }
    }
}

/// Runs the scenario. The second part is the verdict.
pub(crate) fn run(args: &ScenarioArgs) -> Result<(ScenarioReport<NetCell>, Verdict), String> {
    let bench = NetBench::new(args)?;
    let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
    let mut cells = Vec::new();
    for busy in [
        BusyGuest::Disk(1),
        BusyGuest::Disk(32),
        BusyGuest::Net(Direction::Receive),
        BusyGuest::Net(Direction::Transmit),
    ] {
        let party = |devices: usize| -> PartyRun<'_> {
            let (bench, devices) = (&bench, CrowdDevices::new(folder.path(), devices));
            Box::new(move || run_once(bench, &devices, busy))
        };
        let parties = [
            (format!("beside {} idle guests", DEVICES - 1), party(DEVICES)),
            ("alone".to_owned(), party(1)),
        ];
        cells.push(bench.cell((busy.words(), 1, busy.unit()), &parties, Compare::First)?);
    }
    let report = bench.report("hundred", cells);
    let kept = format!("a busy guest keeps {KEPT_MIN} of what it reaches alone, or more");
    let verdict = Verdict::new(args.smoke, kept, broken(&report.cells));
    Ok((report, verdict))
}

/// The cells whose guest lost too much.
fn broken(cells: &[NetCell]) -> Vec<String> {
    let against = cells.iter().filter_map(|cell| Some((&cell.name, cell.against.first()?)));
    let lost = against.filter(|(_, against)| against.throughput.median < KEPT_MIN);
    lost.map(|(name, against)| format!("{name}: {} beside the crowd", against.throughput)).collect()
}

/// One run: the daemon, its crowd, the busy guest.
fn run_once(
    bench: &NetBench<'_>,
    devices: &CrowdDevices,
    busy: BusyGuest,
) -> Result<NetSample, String> {
    let manyring = peer::manyring(bench.args.manyring.as_deref()).map_err(|e| e.to_string())?;
    let config = devices.config("workers = 1", Some(busy.section()));
    let server = devices.serve(&manyring, &config, &bench.args.extra, &bench.server)?;
    let _crowd = Crowd::connect(devices, 1..devices.count(), &bench.client)?;
    let look = || NotificationCounts::ask(&manyring, &devices.control(), &name(0));
    let (counts, cpu) = (look()?, server.cpu_seconds());
    let socket = devices.socket(0);
    let (sample, operations) = match busy {
        BusyGuest::Disk(depth) => read(bench, &server, socket, depth)?,
        BusyGuest::Net(direction) => {
            let load = NetLoadArgs::new(socket, direction, 1, bench.args.seconds());
            let sample = drive_as(bench, &server, &load)?;
            (sample, sample.throughput * 1e3 * bench.args.seconds())
        }
    };
    let cpu = server.cpu_seconds() - cpu;
    let each = look()?.per_operation(counts, cpu, operations);
    let sample = NetSample { per_operation: Some(each), ..sample };
    Ok(match busy {
        // The driver half of a disk does not count what it notifies.
        BusyGuest::Disk(_) => NetSample {
            kicks_per_packet: each.kicks_per_op,
            calls_per_packet: each.calls_per_op,
            ..sample
        },
        BusyGuest::Net(_) => sample,
    })
}

/// Reads blocks as fast as they come: the sample, and how many they were.
#[allow(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
fn read(
    bench: &NetBench<'_>,
    server: &Server,
    socket: PathBuf,
    depth: usize,
) -> Result<(NetSample, f64), String> {
    let options = LoadOptions {
        socket,
        queues: 1,
        depth,
        duration: Duration::from_secs_f64(bench.args.seconds()),
        poll: true,
        each_call: false,
        threads: None,
        size: BLOCK,
        rw: Rw::Read,
        cpu: None,
        seed: 1,
    };
    let mut command = own_load(None, &["driver"])?;
    command.args(LoadArgs::of(&options));
    let (cpu, waited, start) = (server.cpu_seconds(), server.waited_seconds(), now());
    let result: LoadResult = result_of(&mut command, &bench.client)?;
    let share = (server.waited_seconds() - waited) / start.elapsed().as_secs_f64();
    let cpu = (server.cpu_seconds() - cpu) / result.seconds * 100.0;
    let sample = NetSample {
        throughput: result.iops / 1e3,
        cpu,
        backend_cpu: cpu,
        avg_pkt_size: BLOCK as f64,
        p50_us: result.p50_us,
        disturbed: share + result.waited_seconds / result.seconds > WAITED_MAX,
        ..NetSample::default()
    };
    Ok((sample, result.requests as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Party;

    #[test]
    fn a_guest_that_loses_more_than_three_per_cent_beside_the_crowd_breaks_the_promise() {
        let party = |throughput| Party {
            name: String::new(),
            samples: vec![NetSample { throughput, ..NetSample::default() }],
        };
        let cell = |name: &str, beside| {
            let head = (name.to_owned(), 1, "kpps");
            NetCell::new(head, vec![party(beside), party(100.0)], Compare::First)
        };
        let broken = broken(&[cell("a", 97.0), cell("b", 96.0), cell("c", 120.0)]);
        assert_eq!(broken, ["b: 0.96x (0.96 to 0.96) beside the crowd"]);
    }
}
