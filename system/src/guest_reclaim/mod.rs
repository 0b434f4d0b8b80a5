//! Small writes of a real guest to a TCP socket of its host, without and with `reclaim`.
//!
//! For each round a User Mode Linux guest is booted with two networks. A daemon of its own serves
//! each: one runs with `--reclaim off`, the other with `--reclaim auto`. The guest sends streams of
//! small writes through one network and then through the other, with each size, with and without
//! Nagle's algorithm (TCP_NODELAY), on one and on several connections; then it asks and waits for
//! answers. In every other round the two daemons change places, so that neither has the guest's
//! first network, nor the first turn, more often. Both turns are repeated if other programs took
//! too much of the CPUs during them (`guest_load`). The end is a table of the medians (`table`).

mod table;

use crate::cleanup::Folder;
use crate::guest::{Kernel, Kind};
use crate::guest_load::{Options, Party, Rig, Setup, Stream, WARM_UP, least_disturbed, machine};
use crate::{Context, Outcome};
use std::time::Duration;
use table::{Cell, Measured, Pair, Table};

/// Without and with.
pub(crate) const PARTIES: [Party<'static>; 2] = [
    Party { name: "off", arguments: &["--reclaim", "off"] },
    Party { name: "auto", arguments: &["--reclaim", "auto"] },
];

/// Bytes of the guest's writes, whether Nagle's algorithm is off, and connections.
const SIZES: [usize; 2] = [200, 512];
const NODELAY: [bool; 2] = [true, false];
const CONNECTIONS: [usize; 2] = [1, 8];
/// Bytes of a request and of its response; `manyring-bench load rr` has the same.
const REQUEST_BYTES: u64 = 256;

/// Measures, and prints the table.
///
/// # Errors
/// A guest does not boot, a stream breaks, an answer is wrong, or a daemon breaks.
pub fn run(options: &Options) -> Outcome {
    let kernel = Kernel::prepare(Kind::Uml)?;
    let mut table = Table::default();
    for round in 1..=options.rounds {
        let mut parties = PARTIES;
        parties.rotate_left((round - 1) % PARTIES.len());
        println!(
            "guest-reclaim: round {round} of {}, {} before {}",
            options.rounds, parties[0].name, parties[1].name
        );
        one_guest(options, &kernel, &parties, &mut table).context(format!("round {round}"))?;
    }
    println!();
    println!("guest-reclaim: TCP from the guest to its host, User Mode Linux as the guest");
    println!("on {}", machine());
    println!(
        "{} rounds of {} s; the guest on CPU {}, receivers at the host's end of the taps and the \
         workers of both daemons on CPU {}",
        options.rounds,
        options.time.as_secs_f64(),
        options.guest_cpu,
        options.daemon_cpu
    );
    print!("{table}");
    Ok(())
}

/// One guest with a network of each party: every cell, by one and then by the other.
fn one_guest(
    options: &Options,
    kernel: &Kernel,
    parties: &[Party<'_>; 2],
    table: &mut Table,
) -> Outcome {
    let folder = Folder::new()?;
    let setup = Setup {
        daemon: &options.daemon,
        bench: &options.bench,
        folder: folder.path(),
        logs: &options.logs,
        parties,
        guest_cpu: Some(options.guest_cpu),
        server_cpu: Some(options.daemon_cpu),
        daemon_cpu: Some(options.daemon_cpu),
    };
    let mut rig = Rig::start(kernel, &setup)?;
    for party in 0..parties.len() {
        measure(&mut rig, party, Cell::Requests, WARM_UP)?;
    }
    for cell in cells() {
        let mut turn = |party| measure(&mut rig, party, cell, options.time);
        let ([first, second], others_percent) = least_disturbed(|| Ok([turn(0)?, turn(1)?]))?;
        let is_off_first = parties[0].name == PARTIES[0].name;
        let (off, auto) = if is_off_first { (first, second) } else { (second, first) };
        println!(
            "  {cell}: auto / off {:.2}x; other programs took {others_percent} % of the CPUs",
            auto.rate / off.rate
        );
        table.pairs.push(Pair { cell, off, auto, others_percent });
    }
    rig.stop()
}

/// Everything that is measured, in this order.
fn cells() -> impl Iterator<Item = Cell> {
    let each = CONNECTIONS.into_iter().flat_map(|connections| {
        SIZES.into_iter().flat_map(move |size| {
            NODELAY.map(|nodelay| Cell::Writes(Stream { size, nodelay, connections }))
        })
    });
    each.chain([Cell::Requests])
}

/// One load by one party.
fn measure(rig: &mut Rig, party: usize, cell: Cell, time: Duration) -> Outcome<Measured> {
    match cell {
        Cell::Writes(stream) => {
            let load = rig.stream(party, stream, time)?;
            Ok(Measured { rate: load.rate, bytes: load.bytes, moved: load.moved })
        }
        Cell::Requests => {
            let load = rig.rr(party, 1, time)?;
            let bytes = load.transactions * REQUEST_BYTES;
            Ok(Measured { rate: load.rate, bytes, moved: load.moved })
        }
    }
}
