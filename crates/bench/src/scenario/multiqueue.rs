//! `multiqueue`: whether queue pairs ever cost a network something: TCP streams to the guest and
//! from the guest, 1, 2, 4 and 8 of them, by 4, 2 and 1 queue pairs, in messages of 512 bytes and
//! in those that the tool takes by itself.
//!
//! The cells and columns are those of the test bench of multi-queue TAP: sessions, throughput, CPU
//! of everything between the two TCP stacks, and the first divided by the second. There, more
//! queues lost up to 69 %.
//!
//! The queues of a tap share one queue length here (`--txqueuelen=auto`). The last cell is without,
//! as the default is: there each queue of four is as long as the only queue of one.

use super::ScenarioArgs;
use super::net::{Daemon, NamespaceJoin, NetBench, Ring};
use super::streams::{self, TcpLoad};
use crate::report::ScenarioReport;
use crate::report::net::{Compare, NetCell};
use crate::report::references::geomean;
use crate::report::verdict::Verdict;

/// Streams at once.
const SESSIONS: [usize; 4] = [1, 2, 4, 8];
/// Queue pairs; the others are compared with the last.
const PAIRS: [u16; 3] = [4, 2, 1];
/// Bytes of a message: small ones, and the tool's own choice.
const MESSAGES: [(Option<usize>, &str); 2] = [(Some(512), "512 B"), (None, "default size")];
/// The least ratios of several pairs to one pair: of all cells of a scene together, and of each.
const GEOMEAN_MIN: f64 = 1.0;
const CELL_MIN: f64 = 0.9;

/// Runs the scenario. The second part is the verdict.
pub(crate) fn run(args: &ScenarioArgs) -> Result<(ScenarioReport<NetCell>, Verdict), String> {
    let bench = NetBench::new(args)?;
    let mut cells = Vec::new();
    for to_guest in [true, false] {
        for (message, words) in MESSAGES {
            for sessions in if args.smoke { &SESSIONS[1..2] } else { &SESSIONS[..] } {
                let load = TcpLoad { to_guest, sessions: *sessions, message };
                let name = scene(to_guest, words);
                cells.push(by_pairs(&bench, &name, load, &["--txqueuelen=auto"])?);
            }
        }
    }
    // The gain of sharing the length, which is not judged: its name begins with no scene's.
    let (message, words) = MESSAGES[0];
    let load = TcpLoad { to_guest: true, sessions: SESSIONS[3], message };
    let name = format!("each queue with the whole length, {}", scene(true, words));
    cells.push(by_pairs(&bench, &name, load, &[])?);
    let report = bench.report("multiqueue", cells);
    let (words, broken) = judge(&report.cells);
    Ok((report, Verdict::new(args.smoke, words, broken)))
}

/// One of the four that are judged, each by all its cells.
fn scene(to_guest: bool, message: &str) -> String {
    format!("{} the guest, {message}", if to_guest { "to" } else { "from" })
}

/// Measures equal streams by each number of pairs. The system places the threads.
fn by_pairs(
    bench: &NetBench<'_>,
    scene: &str,
    load: TcpLoad,
    arguments: &[&str],
) -> Result<Option<NetCell>, String> {
    let party = |pairs: u16| {
        let ring = Ring::new(Daemon::Ours, pairs, arguments);
        (format!("manyring, {pairs} pairs"), NamespaceJoin::Ring(ring))
    };
    let name = format!("{scene}, {} sessions", load.sessions);
    streams::cell(bench, (name, "Mbit/s"), &PAIRS.map(party), load, Compare::Last)
}

/// The ratios of several pairs to one pair in one cell.
struct Ratio {
    cell: String,
    throughput: f64,
    normalized: f64,
}

/// The cells of a scene against one pair: medians of the ratios of the rounds.
fn ratios(cells: &[NetCell], scene: &str) -> Vec<Ratio> {
    let of_scene = cells.iter().filter(|cell| cell.name.starts_with(scene));
    let of_cell = |cell: &NetCell| -> Vec<Ratio> {
        let one = |line: &crate::report::net::NetAgainst| Ratio {
            cell: format!("{}, {}", cell.name, line.party),
            throughput: line.throughput.median,
            normalized: 1.0 / line.cpu_per_unit.median.max(f64::MIN_POSITIVE),
        };
        cell.against.iter().map(one).collect()
    };
    of_scene.flat_map(of_cell).collect()
}

/// The verdict in words, and what broke a promise.
fn judge(cells: &[NetCell]) -> (String, Vec<String>) {
    let (mut words, mut broken) = (Vec::new(), Vec::new());
    for to_guest in [true, false] {
        for (_, message) in MESSAGES {
            let scene = scene(to_guest, message);
            let all = ratios(cells, &scene);
            for (what, value) in [
                ("throughput", (|r| r.throughput) as fn(&Ratio) -> f64),
                ("normalized", |r| r.normalized),
            ] {
                let worst = all.iter().min_by(|a, b| value(a).total_cmp(&value(b)));
                let Some(worst) = worst else { continue };
                let geomean = geomean(all.iter().map(value));
                let least = value(worst);
                let line = format!(
                    "{scene}: {what} geomean {geomean:.2}, worst {least:.2} ({})",
                    worst.cell
                );
                let is_kept = geomean >= GEOMEAN_MIN && least >= CELL_MIN;
                if is_kept { &mut words } else { &mut broken }.push(line);
            }
        }
    }
    (words.join("; "), broken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Party;
    use crate::report::net::NetSample;

    /// A cell with these throughputs of four, two and one pairs, all at 50 % of a CPU.
    fn cell(name: &str, rates: [f64; 3]) -> NetCell {
        let sample = |throughput| NetSample { throughput, cpu: 50.0, ..NetSample::default() };
        let party =
            |(pairs, rate)| Party { name: format!("{pairs} pairs"), samples: vec![sample(rate)] };
        let parties = PAIRS.into_iter().zip(rates).map(party).collect();
        NetCell::new((name.to_owned(), 1, "Mbit/s"), parties, Compare::Last)
    }

    #[test]
    fn a_scene_is_judged_by_all_its_cells_and_by_the_worst_of_them() {
        let (to, from) = (scene(true, "512 B"), scene(false, "512 B"));
        // The loss of one cell is made up for by another one of the same scene.
        let cells = [
            cell(&format!("{to}, 1 sessions"), [95.0, 100.0, 100.0]),
            cell(&format!("{to}, 8 sessions"), [150.0, 140.0, 100.0]),
            cell(&format!("{from}, 8 sessions"), [99.0, 100.0, 100.0]),
        ];
        let (words, broken) = judge(&cells);
        assert!(words.contains("to the guest, 512 B: throughput geomean 1.19"), "{words}");
        assert_eq!(broken.len(), 2, "{broken:?}");
        assert!(broken.iter().all(|line| line.contains("from the guest, 512 B")), "{broken:?}");
        // A cell that lost too much is not made up for.
        let (_, broken) = judge(&[cell(&to, [89.0, 500.0, 100.0])]);
        assert_eq!(broken.len(), 2, "{broken:?}");
        assert!(broken[0].contains("worst 0.89 (to the guest, 512 B, 4 pairs)"), "{broken:?}");
    }
}
