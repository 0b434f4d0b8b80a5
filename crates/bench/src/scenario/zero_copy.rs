//! `zero-copy`: what a frame costs its sender that a network card reads in the sender's memory
//! (AF_XDP, `zero_copy`), against one that is copied: 64, 512 and 1500 bytes.
//!
//! Few cards can do that, so it runs in an emulated machine, which counts its instructions: a
//! nanosecond of its time is one instruction. Its figures are the same on every host, and say
//! nothing of caches.

use super::ScenarioArgs;
use super::net::{NetBench, PartyRun};
use crate::progress;
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell, NetSample, PerOperation};
use manyring_system::guest::boot_on_cable;
use serde::Deserialize;
use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::time::Duration;

/// Programs that make and run the machine.
pub(super) const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("strip", "binutils"),
];
/// How the frames leave: the words of a line, the party, and the option.
const WAYS: [(&str, &str, &str); 2] =
    [("LENT", "manyring, zero_copy", "--zero-copy"), ("COPIED", "manyring, copied", "")];
/// Bytes of a frame, as `load pages` sends them.
const SIZES: [usize; 3] = [64, 512, 1500];
/// Frames of each size in a round.
const FRAMES: usize = 12_800;
const FRAMES_SMOKE: usize = 320;
/// The machine takes no longer for each round.
const LIMIT: Duration = Duration::from_secs(120);

/// The part of the output of `load pages` that this scenario reads.
#[derive(Deserialize)]
struct PagesOutput {
    /// Bytes of a frame, and nanoseconds that one takes.
    frame_ns: Vec<(usize, u64)>,
}

/// Runs the scenario.
pub(crate) fn run(args: &ScenarioArgs) -> Result<ScenarioReport<NetCell>, String> {
    let bench = NetBench::new(args)?;
    let counted = RefCell::new(None);
    let mut cells = Vec::new();
    for size in SIZES {
        let (bench, counted) = (&bench, &counted);
        let of_way = |way: usize| -> PartyRun<'_> {
            let round = Cell::new(0);
            Box::new(move || {
                let mut counted = counted.borrow_mut();
                let all = match &mut *counted {
                    Some(all) => all,
                    None => counted.insert(in_machine(bench)?),
                };
                let of_rounds: &Vec<PagesOutput> = &all[way];
                let at = round.replace(round.get() + 1) % of_rounds.len().max(1);
                sample(of_rounds.get(at), size)
            })
        };
        let parties: Vec<_> =
            (0..WAYS.len()).map(|way| (WAYS[way].1.to_owned(), of_way(way))).collect();
        let name = format!("a frame of {size} B leaves, in an emulated machine");
        cells.push(bench.cell((name, 1, "kpps"), &parties, Compare::First)?);
    }
    Ok(bench.report("zero-copy", cells))
}

/// Boots the machine, and lets it count every way once a round.
fn in_machine(bench: &NetBench<'_>) -> Result<[Vec<PagesOutput>; 2], String> {
    let rounds = bench.args.rounds();
    let frames = if bench.args.smoke { FRAMES_SMOKE } else { FRAMES };
    let mut script =
        "ip link set lo up\nip link set eth1 up\nip link set eth0 up\nsleep 1\n".to_owned();
    for _ in 0..rounds {
        for (word, _, option) in WAYS {
            let load = "manyring-bench load pages --interface eth0 --changed 0";
            let _ = writeln!(script, "echo \"{word} $({load} --frames {frames} {option})\"");
        }
    }
    progress::cell("an emulated machine boots");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = bench.own_file("machine");
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let console = folder.join("console.log");
    let guest = boot_on_cable(&folder, &[&program], &script, &console)?;
    let said = guest.finish(LIMIT * u32::try_from(rounds + 1).unwrap_or(1))?;
    let counted = WAYS.map(|(word, ..)| {
        let lines = said.lines().filter_map(|line| line.trim().strip_prefix(word));
        lines.map(|line| serde_json::from_str(line.trim())).collect::<Result<Vec<PagesOutput>, _>>()
    });
    let [lent, copied] = counted.map(|all| match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(format!("the machine has counted nothing: {said}")),
        Err(error) => Err(format!("{error}: {said}")),
    });
    Ok([lent?, copied?])
}

/// The sample for frames of this size, from the time that one takes.
#[allow(clippy::cast_precision_loss, reason = "a few thousand instructions")]
fn sample(counted: Option<&PagesOutput>, size: usize) -> Result<NetSample, String> {
    let of_size = |counted: &PagesOutput| {
        counted.frame_ns.iter().find(|(len, _)| *len == size).map(|(_, ns)| *ns)
    };
    let ns = counted.and_then(of_size).ok_or("the machine has not sent frames of this size")?;
    let ns = ns.max(1) as f64;
    Ok(NetSample {
        throughput: 1e6 / ns,
        cpu: 100.0,
        backend_cpu: 100.0,
        avg_pkt_size: size as f64,
        per_operation: Some(PerOperation { cpu_us_per_op: ns / 1000.0, ..Default::default() }),
        ..NetSample::default()
    })
}
