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
use crate::guest_load::{Options, Party, Rig, Setup, WARM_UP, least_disturbed, machine};
use crate::{Context, Outcome};
use std::time::Duration;
use table::{Idle, Run, Table};

/// The values of `--polling`.
const MODES: [&str; 3] = ["auto", "always", "never"];

/// How long the guest and the daemon idle while the CPU time of the daemon is counted.
const IDLE: Duration = Duration::from_secs(3);

/// Measures each number of connections in turn, and prints the table.
///
/// # Errors
/// A guest does not boot, an answer is wrong, or the daemon breaks.
pub fn run(options: &Options, connections: &[usize]) -> Outcome {
    let kernel = Kernel::prepare(Kind::Uml)?;
    let mut table = Table::default();
    for round in 1..=options.rounds {
        for mode in MODES {
            println!("guest-rr: round {round} of {}, polling {mode}", options.rounds);
            one_guest(options, connections, (&kernel, mode), &mut table)
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

/// One guest on one daemon: a load for each number of connections, then nothing.
fn one_guest(
    options: &Options,
    connections: &[usize],
    (kernel, mode): (&Kernel, &str),
    table: &mut Table,
) -> Outcome {
    let folder = Folder::new()?;
    let setup = Setup {
        daemon: &options.daemon,
        bench: &options.bench,
        folder: folder.path(),
        logs: &options.logs,
        parties: &[Party { name: mode, arguments: &["--polling", mode] }],
        guest_cpu: Some(options.guest_cpu),
        server_cpu: Some(options.guest_cpu),
        daemon_cpu: Some(options.daemon_cpu),
    };
    let mut rig = Rig::start(kernel, &setup)?;
    rig.rr(0, 1, WARM_UP)?;
    for connections in connections.iter().copied() {
        let once = || rig.rr(0, connections, options.time);
        let (load, others_percent) = least_disturbed(once)?;
        println!(
            "  {connections} connections: {:.0} transactions/s; other programs took \
             {others_percent} % of the CPUs",
            load.rate
        );
        table.runs.push(Run { mode: mode.to_owned(), connections, load, others_percent });
    }
    let ticks = rig.idle_ticks(IDLE)?;
    println!("  idle: {ticks} ticks in {} s", IDLE.as_secs());
    table.idle.push(Idle { mode: mode.to_owned(), ticks, time: IDLE });
    rig.stop()
}
