//! `guest-blk`: a disk that costs nothing as the kernel of a real guest sees it.
//!
//! fio reads blocks of 4 KiB at random in a guest of QEMU and in one of User Mode Linux. Each guest
//! has a disk of every party at once: of our daemon with each way of polling, and of
//! qemu-storage-daemon. A guest needs CPUs itself: QEMU has a thread for the guest's CPU and one
//! for its devices. On a machine with few CPUs, a back-end that spins may take one from the very
//! guest that it serves, and that is what this scenario is about. Nothing is pinned, unless that is
//! asked for.

use super::file_blk::parse_fio;
use super::rounds::{self, RunOf};
use super::{Contender, How, ScenarioArgs, ours, per_million, qemu_storage_daemon};
use crate::measure::Affinity;
use crate::peer::{self, Server};
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::blk::{BlkCell, BlkSample};
use clap::Args;
use manyring_system::guest::Kind;
use manyring_system::guest_disks::{GuestDisks, Place};
use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `guest-blk`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GuestBlkArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    /// The guest on the client's CPU, all back-ends on the server's.
    #[arg(long)]
    pinned: bool,
}

/// Programs that boot the guests and run in them, beside the peer.
pub(super) const PROGRAMS: &[(&str, &str)] = &[
    ("linux.uml", "user-mode-linux"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("fio", "fio"),
    ("gcc", "gcc"),
    ("nm", "binutils"),
];

const KINDS: [(Kind, &str); 2] = [(Kind::Qemu, "QEMU"), (Kind::Uml, "User Mode Linux")];
const DEPTHS: [usize; 3] = [1, 8, 32];
/// fio needs some requests before its figures mean something.
const SECONDS_MIN: f64 = 0.2;
/// The load that comes before the one that is measured: `auto` needs up to a second to find how a
/// client is served best, and what it does then is what a guest's load sees from there on.
const SETTLES: Duration = Duration::from_secs(1);

/// A back-end that runs, and what its party is called. It runs among all other programs, as the
/// guest does: a back-end that went before all others would take the CPUs from its own client.
struct Served {
    name: String,
    server: Server,
    socket: PathBuf,
}

/// Runs the scenario.
pub(crate) fn run(args: &GuestBlkArgs) -> Result<ScenarioReport<BlkCell>, String> {
    let scenario = &args.scenario;
    let mut cells = Vec::new();
    for (kind, word) in KINDS {
        let names = DEPTHS.map(|depth| (depth, format!("{word}, QD{depth}")));
        let is_wanted = |name: &str| scenario.only.as_ref().is_none_or(|only| name.contains(only));
        let wanted: Vec<_> = names.into_iter().filter(|(_, name)| is_wanted(name)).collect();
        if !wanted.is_empty() {
            cells.extend(in_guest(args, kind, &wanted)?);
        }
    }
    let report = scenario.report("guest-blk", cells);
    Ok(ScenarioReport { seconds: seconds(scenario), ..report })
}

fn seconds(args: &ScenarioArgs) -> f64 {
    args.seconds().max(SECONDS_MIN)
}

/// All parties: ours with each way of polling, and the peer.
fn contenders(args: &ScenarioArgs) -> Result<Vec<Contender>, String> {
    let mut all = Vec::new();
    for (name, polling) in [
        ("manyring", "auto"),
        ("manyring, polling never", "never"),
        ("manyring, polling always", "always"),
    ] {
        let polling = format!("--polling={polling}");
        let words: [&dyn AsRef<std::ffi::OsStr>; 4] =
            [&"--null=64G", &"--num-queues=1", &"--workers=1", &polling];
        all.push(ours(args, name, &words)?);
    }
    if !args.without_peers {
        let node = "driver=null-co,node-name=disk,size=68719476736,read-zeroes=off";
        all.push(qemu_storage_daemon(&[node.to_owned()], 1)?);
    }
    all.retain(|contender| args.takes_part(&contender.name));
    Ok(all)
}

/// The cells of one guest, which has a disk of each party.
fn in_guest(
    args: &GuestBlkArgs,
    kind: Kind,
    cells: &[(usize, String)],
) -> Result<Vec<BlkCell>, String> {
    let scenario = &args.scenario;
    let folder = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
    let backend =
        if args.pinned { Affinity::one(scenario.server_cpu) } else { Affinity::current() };
    let mut served = Vec::new();
    for (index, contender) in contenders(scenario)?.into_iter().enumerate() {
        let How::Server { program, arguments } = contender.how else { continue };
        let socket = folder.path().join(format!("disk{index}"));
        let server = Server::start_among_others(&program, &arguments(&socket), &socket, &backend);
        let server = server.map_err(|e| e.to_string())?;
        served.push(Served { name: contender.name, server, socket });
    }
    let sockets: Vec<_> = served.iter().map(|served| served.socket.as_path()).collect();
    let place =
        Place { kind, cpu: args.pinned.then_some(scenario.client_cpu), folder: folder.path() };
    let guest = RefCell::new(GuestDisks::boot(place, &sockets)?);
    let time = Duration::from_secs_f64(seconds(scenario));
    let mut found = Vec::new();
    for (depth, name) in cells {
        progress::cell(name);
        let mut runs = Vec::new();
        for (disk, served) in served.iter().enumerate() {
            let guest = &guest;
            runs.push((&*served.name, move || {
                read(&mut guest.borrow_mut(), (disk, *depth), &served.server, time)
            }));
        }
        let parties: Vec<_> =
            runs.iter().map(|(name, run)| (*name, run as RunOf<'_, BlkSample>)).collect();
        found.push(BlkCell::new(name.clone(), rounds::run(scenario, name, &parties)?));
    }
    guest.into_inner().stop()?;
    Ok(found)
}

/// Has the guest read from one of its disks, twice. Returns fio's results of the second time, and
/// the CPU time that the disk's back-end took during this load.
fn read(
    guest: &mut GuestDisks,
    (disk, depth): (usize, usize),
    server: &Server,
    time: Duration,
) -> Result<BlkSample, String> {
    let mut read = |time| guest.read(disk, depth, time).map_err(|problem| guest.explain(&problem));
    read(SETTLES)?;
    let ran = peer::ran_seconds(server.id());
    let report = read(time)?;
    let (sample, requests) = parse_fio(&report)?;
    let ran = peer::ran_seconds(server.id()) - ran;
    let client_cpu_per_million = sample.cpu_per_million;
    Ok(BlkSample { cpu_per_million: per_million(ran, requests), client_cpu_per_million, ..sample })
}
