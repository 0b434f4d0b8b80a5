//! TCP requests and responses between a real guest and its host, with each way of polling.
//!
//! For each round and each mode of `--polling` a daemon is started, and a User Mode Linux guest is
//! booted on its network. The guest runs the client, the host's end of the tap the server,
//! once for each number of connections. Then the guest idles, and the CPU time of the daemon is
//! counted. The modes take turns within a round, so that what the machine does beside meets all of
//! them alike. A load during which other programs took too much of the CPUs is run again
//! (`guest_load`). The end is a table of the medians (`table`).

mod table;

use crate::cleanup::Folder;
use crate::guest::{Kernel, Kind};
use crate::guest_load::{Load, Others, Rig, Setup};
use crate::{Context, Outcome};
use std::path::PathBuf;
use std::time::Duration;
use table::{Idle, Run, Table};

/// What `--polling` takes.
pub(crate) const MODES: [&str; 3] = ["auto", "always", "never"];

/// How to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon.
    pub daemon: PathBuf,
    /// `manyring-bench`, which is the client and the server.
    pub bench: PathBuf,
    /// How often each mode is measured.
    pub rounds: usize,
    /// How long each load lasts.
    pub time: Duration,
    /// Connections of each load.
    pub connections: Vec<usize>,
    /// The CPU of the guest, and of the server at the host's end of the tap.
    pub guest_cpu: usize,
    /// The CPU of the daemon's worker.
    pub daemon_cpu: usize,
    /// Where the logs of daemon and guests go; the folder is there.
    pub logs: PathBuf,
}

/// Of a load that is not counted: the guest touches its memory for the first time.
const WARM_UP: Duration = Duration::from_millis(500);
/// How often a load is tried that other programs disturb.
const TRIES: usize = 4;
/// Share of all CPUs that other programs may take during a load, in per cent.
const OTHERS_PERCENT_MAX: u64 = 10;
/// How long the guest and the daemon idle while the CPU time of the daemon is counted.
const IDLE: Duration = Duration::from_secs(3);

/// Measures, and prints the table.
///
/// # Errors
/// A guest does not boot, an answer is wrong, or the daemon breaks.
pub fn run(options: &Options) -> Outcome {
    let kernel = Kernel::prepare(Kind::Uml)?;
    let mut table = Table::default();
    for round in 1..=options.rounds {
        for mode in MODES {
            println!("guest-rr: round {round} of {}, polling {mode}", options.rounds);
            one_guest(options, &kernel, mode, &mut table)
                .context(format!("polling {mode}, round {round}"))?;
        }
    }
    println!();
    println!("guest-rr: TCP, requests and responses of 256 bytes, User Mode Linux as the guest");
    println!("on {}", machine());
    println!(
        "{} rounds of {} s; client (in the guest) and server (at the host's end of the tap) on CPU \
         {}, the daemon's worker on CPU {}",
        options.rounds,
        options.time.as_secs_f64(),
        options.guest_cpu,
        options.daemon_cpu
    );
    print!("{table}");
    Ok(())
}

/// The host, for people: its processor, its CPUs, its kernel.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("an unnamed processor", |(_, name)| name.trim());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = rustix::system::uname();
    format!("{model}, {cpus} CPUs, Linux {}", kernel.release().to_string_lossy())
}

/// One guest on one daemon: a load for each number of connections, then nothing.
fn one_guest(options: &Options, kernel: &Kernel, mode: &str, table: &mut Table) -> Outcome {
    let folder = Folder::new()?;
    let setup = Setup {
        daemon: &options.daemon,
        bench: &options.bench,
        folder: folder.path(),
        logs: &options.logs,
        polling: mode,
        guest_cpu: Some(options.guest_cpu),
        daemon_cpu: Some(options.daemon_cpu),
    };
    let mut rig = Rig::start(kernel, &setup)?;
    rig.load(1, WARM_UP)?;
    for connections in &options.connections {
        let (load, others_percent) = least_disturbed(&mut rig, *connections, options.time)?;
        println!(
            "  {connections} connections: {:.0} transactions/s; other programs took \
             {others_percent} % of the CPUs",
            load.rate
        );
        let mode = mode.to_owned();
        table.runs.push(Run { mode, connections: *connections, load, others_percent });
    }
    let ticks = rig.idle_ticks(IDLE)?;
    println!("  idle: {ticks} ticks in {} s", IDLE.as_secs());
    table.idle.push(Idle { mode: mode.to_owned(), ticks, time: IDLE });
    rig.stop()
}

/// A load, and the share of the CPUs that other programs took meanwhile. It is tried again while
/// they take too much; what counts is the try in which they took least.
fn least_disturbed(rig: &mut Rig, connections: usize, time: Duration) -> Outcome<(Load, u64)> {
    let once = |rig: &mut Rig| -> Outcome<(Load, u64)> {
        let before = Others::now()?;
        let load = rig.load(connections, time)?;
        Ok((load, Others::now()?.percent_since(&before)))
    };
    let mut best = once(rig)?;
    for _ in 1..TRIES {
        if best.1 <= OTHERS_PERCENT_MAX {
            break;
        }
        let next = once(rig)?;
        if next.1 < best.1 {
            best = next;
        }
    }
    Ok(best)
}
