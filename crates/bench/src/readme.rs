//! `manyring-bench readme`: the few figures of a run that README promises, one for each row.

use crate::report::document::{CellDocument, PartyDocument, RunDocument};
use crate::report::{Spread, nearness, ratio};
use serde::Serialize;

/// A row of README: a ratio that a newcomer understands.
struct Promise {
    what: &'static str,
    than: &'static str,
    scenario: &'static str,
    /// How the name of the cell ends; of several cells the one with the smallest ratio counts.
    cell: &'static str,
    party: &'static str,
    peer: &'static str,
    /// The number of both that is compared.
    key: &'static str,
}

/// At most eight: the rest is in the guide.
const PROMISES: [Promise; 8] = [
    Promise {
        what: "requests to a disk that costs nothing, one at a time, from a client that polls",
        than: "qemu-storage-daemon",
        scenario: "null-blk",
        cell: "one queue, QD1, client polls",
        party: "manyring",
        peer: "qemu-storage-daemon",
        key: "iops",
    },
    Promise {
        what: "the same, 32 at a time",
        than: "qemu-storage-daemon",
        scenario: "null-blk",
        cell: "one queue, QD32, client polls",
        party: "manyring",
        peer: "qemu-storage-daemon",
        key: "iops",
    },
    Promise {
        what: "4 KiB reads of a file past the page cache, 64 at a time, from a client that polls",
        than: "fio with io_uring on the host, no guest",
        scenario: "file-blk",
        cell: "O_DIRECT, QD64, client polls",
        party: "manyring",
        peer: "fio io_uring, no vhost",
        key: "iops",
    },
    Promise {
        what: "4 KiB reads of a file in the page cache, 64 at a time, from a client that polls",
        than: "qemu-storage-daemon",
        scenario: "file-blk",
        cell: "page cache, QD64, client polls",
        party: "manyring",
        peer: "qemu-storage-daemon",
        key: "iops",
    },
    Promise {
        what: "UDP packets of 64 bytes, guest to tap: one flow, a full ring, checksums left to the \
               host",
        than: "a bare loop of one write for each packet",
        scenario: "tap-small",
        cell: "64 B, UDP of one flow, to a tap",
        party: "manyring",
        peer: "bare write loop",
        key: "throughput",
    },
    Promise {
        what: "TCP segments of 512 bytes, guest to tap: one flow, a full ring, checksums left to \
               the host, TSO off",
        than: "a bare loop of one write for each packet",
        scenario: "tap-small",
        cell: "512 B, TCP of one flow, to a tap",
        party: "manyring",
        peer: "bare write loop",
        key: "throughput",
    },
    Promise {
        what: "TCP requests of 256 bytes on 100 connections",
        than: "a bare loop between two taps, no ring",
        scenario: "tcp-rr",
        cell: "256 B, 100 connections",
        party: "manyring",
        peer: "bare loop",
        key: "throughput",
    },
    Promise {
        what: "a guest beside two that abuse the daemon, the worst off of six",
        than: "the same guest beside two greedy ones",
        scenario: "neighbours",
        cell: "",
        party: "abused",
        peer: "among equals",
        key: "rate",
    },
];

/// The figures from which the table of README is written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Figures {
    machine: String,
    rounds: String,
    rows: Vec<Row>,
}

/// One row, in words and numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    what: &'static str,
    than: &'static str,
    median: f64,
    min: f64,
    max: f64,
    /// The server's CPU time for each request, as a ratio to the peer's, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<f64>,
    /// How far the CPUs of both sides were from each other in the rounds, if they have shown it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpus: Option<String>,
    command: String,
}

/// The figures of a run.
///
/// # Errors
/// The run has no such cell or party; the sentence names the first that is missing.
pub(crate) fn figures(run: &RunDocument) -> Result<Figures, String> {
    let rows: Vec<Row> = PROMISES.iter().map(|one| row(run, one)).collect::<Result<_, _>>()?;
    let mut rounds: Vec<usize> = run.scenarios.iter().map(|s| s.report.rounds).collect();
    rounds.sort_unstable();
    rounds.dedup();
    let rounds: Vec<String> = rounds.iter().map(ToString::to_string).collect();
    Ok(Figures { machine: run.machine.name.clone(), rounds: rounds.join(" or "), rows })
}

fn row(run: &RunDocument, promise: &Promise) -> Result<Row, String> {
    let Promise { what, than, scenario, cell, party, peer, .. } = *promise;
    let cells = run.scenarios.iter().filter(|one| one.name == scenario);
    let cells = cells.flat_map(|one| &one.report.cells).filter(|one| one.name.ends_with(cell));
    let found = cells.filter_map(|cell| Some((against(cell, promise)?, cell)));
    let worst = found.min_by(|(a, _), (b, _)| a.median.total_cmp(&b.median));
    let missing = || format!("the run has no {party} against {peer} in {scenario}: {cell}");
    let (Spread { median, min, max }, cell) = worst.ok_or_else(missing)?;
    let cpu = compared(cell, promise, cpu_for_each).map(|spread| two_digits(spread.median));
    let [median, min, max] = [median, min, max].map(two_digits);
    let command = format!("manyring-bench {scenario}");
    Ok(Row { what, than, median, min, max, cpu, cpus: distances(cell, promise), command })
}

/// The distances of the CPUs in the rounds of a cell, in a word or two.
fn distances(cell: &CellDocument, promise: &Promise) -> Option<String> {
    let party = cell.parties.iter().find(|party| party.name == promise.party)?;
    let lines = party.samples.iter().filter_map(|sample| sample.get("line_ns")?.as_u64());
    let mut words: Vec<_> = lines.map(nearness).collect();
    words.sort_unstable_by(|a, b| b.cmp(a));
    words.dedup();
    (!words.is_empty()).then(|| words.join(" and "))
}

fn against(cell: &CellDocument, promise: &Promise) -> Option<Spread> {
    compared(cell, promise, |sample| sample.get(promise.key)?.as_f64())
}

/// The server's CPU time for a request or packet: of a disk as it is measured, else its share of a
/// CPU for the packets of the same time.
fn cpu_for_each(sample: &RoundSample) -> Option<f64> {
    let number = |key: &str| sample.get(key)?.as_f64();
    let for_each = number("cpu_per_million")
        .or_else(|| Some(ratio(number("backend_cpu")?, number("throughput")?)));
    for_each.filter(|time| *time > 0.0)
}

/// The ratios of a number of both sides, round by round.
fn compared(
    cell: &CellDocument,
    promise: &Promise,
    number: impl Fn(&RoundSample) -> Option<f64>,
) -> Option<Spread> {
    let of = |name: &str| cell.parties.iter().find(|party| party.name == name);
    let rounds =
        |party: &PartyDocument| -> Vec<f64> { party.samples.iter().filter_map(&number).collect() };
    let (ours, theirs) = (rounds(of(promise.party)?), rounds(of(promise.peer)?));
    let ratios = ours.iter().zip(&theirs).map(|(a, b)| ratio(*a, *b));
    (!ours.is_empty() && !theirs.is_empty()).then(|| Spread::of(ratios))
}

/// The numbers that a party has measured in a round.
type RoundSample = serde_json::Map<String, serde_json::Value>;

/// As many digits as the rounds of a run are worth.
fn two_digits(value: f64) -> f64 {
    let text = if value < 1.995 {
        format!("{value:.2}")
    } else if value < 9.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    };
    text.parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::tests::scenario;
    use serde_json::json;

    /// A run that has everything; in each cell the first party has half of the second.
    fn run() -> RunDocument {
        let mut document = RunDocument::default();
        for Promise { scenario: name, cell, party, peer, key, .. } in &PROMISES {
            let mut one = scenario(name, &format!("x {cell}"), &[]);
            let sample = |value: f64| json!({*key: value}).as_object().unwrap().clone();
            let of = |name: &str, values: [f64; 2]| PartyDocument {
                name: name.to_owned(),
                samples: values.map(sample).to_vec(),
            };
            one.report.cells[0].parties = vec![of(party, [1.0, 2.0]), of(peer, [2.0, 4.0])];
            document.scenarios.push(one);
        }
        document
    }

    #[test]
    fn each_row_is_the_ratio_of_the_rounds_with_its_command() {
        let figures = figures(&run()).unwrap();
        assert_eq!(figures.rows.len(), PROMISES.len());
        assert!(figures.rows.iter().all(|row| (row.median, row.max) == (0.5, 0.5)));
        assert_eq!(figures.rows[7].command, "manyring-bench neighbours");
    }

    #[test]
    fn a_run_without_a_row_is_an_error_that_names_it() {
        let mut run = run();
        run.scenarios.retain(|scenario| scenario.name != "tcp-rr");
        let error = figures(&run).unwrap_err();
        assert!(error.contains("bare loop in tcp-rr"), "{error}");
    }

    #[test]
    fn a_cell_whose_name_goes_on_is_another_one() {
        let mut run = run();
        let mut other = run.scenarios[4].report.cells[0].clone();
        other.name += ", 16 per burst";
        let sample =
            |sample: &mut serde_json::Map<_, _>| sample.insert("throughput".into(), json!(0.1));
        other.parties[0].samples.iter_mut().for_each(|one| drop(sample(one)));
        run.scenarios[4].report.cells.push(other);
        assert_eq!(figures(&run).unwrap().rows[4].median, 0.5);
    }

    #[test]
    fn of_several_cells_the_worst_counts() {
        let mut run = run();
        let mut worse = run.scenarios[7].report.cells[0].clone();
        worse.parties[0].samples.iter_mut().for_each(|sample| {
            sample.insert("rate".into(), json!(1.0));
        });
        run.scenarios[7].report.cells.push(worse);
        let row = figures(&run).unwrap().rows.remove(7);
        assert_eq!((row.median, row.min, row.max), (0.38, 0.25, 0.5));
    }

    #[test]
    fn a_row_says_how_far_the_cpus_were_from_each_other() {
        let mut run = run();
        for (row, lines) in [(0, [30, 31]), (1, [150, 30])] {
            let samples = &mut run.scenarios[row].report.cells[0].parties[0].samples;
            let lined = samples.iter_mut().zip(lines);
            lined.for_each(|(sample, line)| drop(sample.insert("line_ns".into(), json!(line))));
        }
        let rows = figures(&run).unwrap().rows;
        assert_eq!(rows[0].cpus.as_deref(), Some("near"));
        assert_eq!(rows[1].cpus.as_deref(), Some("near and far"));
        assert_eq!(rows[7].cpus, None);
    }

    #[test]
    fn a_row_has_the_cpu_time_of_the_server_for_each_if_the_run_says_it() {
        let mut run = run();
        let mut add = |row: usize, party: usize, key: &str, value: f64| {
            let samples = &mut run.scenarios[row].report.cells[0].parties[party].samples;
            samples.iter_mut().for_each(|sample| drop(sample.insert(key.into(), json!(value))));
        };
        // Of a disk: for a million requests.
        (0..2).for_each(|party| add(0, party, "cpu_per_million", [3.0, 4.0][party]));
        // For a port: per cent of a CPU, with half of the other's packets.
        (0..2).for_each(|party| add(4, party, "backend_cpu", [60.0, 80.0][party]));
        let rows = figures(&run).unwrap().rows;
        assert_eq!([rows[0].cpu, rows[4].cpu, rows[7].cpu], [Some(0.75), Some(1.5), None]);
        let shown = serde_json::to_value(&rows).unwrap();
        assert_eq!((&shown[0]["cpu"], shown[7].get("cpu")), (&json!(0.75), None));
    }

    #[test]
    fn figures_have_two_digits_or_three() {
        assert_eq!([0.968, 1.994, 1.996, 9.31, 13.4].map(two_digits), [0.97, 1.99, 2.0, 9.3, 13.0]);
    }
}
