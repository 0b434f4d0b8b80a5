//! The rows R1 to R10 of README's table "What it unites", as far as a run can judge them.

use super::document::{CellDocument, PartyDocument, RunDocument, ScenarioDocument};
use super::references::{self, count_before, geomean};
use super::{Spread, ratio};
use std::fmt::Write as _;

/// The scenarios that have a table of one of the documents: those of `run references`.
pub(crate) const SCENARIOS: [&str; 4] = ["multiqueue", "tcp-ladder", "zero-copy", "xen-blk-queues"];

/// What is asked of a run: whether it is so, and the figures in words.
type Check = (bool, String);

/// A row of README: its number and subject, the scenario that shows it, and what is asked of that.
type UnitedRow = (&'static str, &'static str, &'static str, fn(&ScenarioDocument) -> Vec<Check>);

const ROWS: [UnitedRow; 10] = [
    ("R1", "multi-queue taps", "multiqueue", |run| carried(run, &["from the guest"])),
    ("R2", "a flow's queue", "multiqueue", one_flow),
    ("R3", "the multi-queue device", "multiqueue", |run| {
        carried(run, &["from the guest", "to the guest"])
    }),
    ("R4", "its driver", "tcp-ladder", |run| {
        vec![less(run, "kicks_per_op", "delayed kick", "suppression")]
    }),
    ("R5", "a thread for each queue", "multiqueue", many_flows),
    ("R6", "fewer kicks and interrupts", "tcp-ladder", |run| {
        vec![
            less(run, "kicks_per_op", "suppression", "no suppression"),
            less(run, "calls_per_op", "moderation", "suppression"),
        ]
    }),
    ("R7", "sending without a copy", "zero-copy", copies),
    ("R8", "Xen disks with several rings", "xen-blk-queues", promised),
    ("R9", "benches of all that", "multiqueue", tables),
    ("R10", "what they left open", "multiqueue", promised),
];

/// A row after a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Judged {
    /// `R1: multi-queue taps`.
    pub(crate) row: String,
    /// `None`: the run has not measured it.
    pub(crate) holds: Option<bool>,
    /// The figures, or what does not hold.
    pub(crate) words: String,
}

/// All ten rows, in their order.
pub(crate) fn judge(run: &RunDocument) -> Vec<Judged> {
    let one = |(number, what, shown_by, checks): &UnitedRow| {
        let name = format!("{number}: {what}");
        let scenario = run.scenarios.iter().find(|scenario| scenario.name == *shown_by);
        let checks = scenario.map_or_else(Vec::new, checks);
        if checks.is_empty() {
            let words = format!("the run has no figures of {shown_by}");
            return Judged { row: name, holds: None, words };
        }
        let holds = checks.iter().all(|(is_so, _)| *is_so);
        let said = checks.into_iter().filter(|(is_so, _)| *is_so == holds);
        let words: Vec<String> = said.map(|(_, words)| words).collect();
        Judged { row: name, holds: Some(holds), words: words.join("; ") }
    };
    ROWS.iter().map(one).collect()
}

/// The rows for a terminal: `holds`, or what does not.
pub(crate) fn text(run: &RunDocument) -> String {
    let mut text = String::from("the rows of README, as far as this run judges them\n");
    for Judged { row, holds, words } in judge(run) {
        let outcome = match holds {
            Some(true) => "holds",
            Some(false) => "does not hold",
            None => "not measured",
        };
        let _ = writeln!(text, "  {row}: {outcome}: {words}");
    }
    text
}

/// The cells of a scene, each with its parties and their queue pairs.
fn cells<'a>(
    run: &'a ScenarioDocument,
    scene: &'a str,
) -> impl Iterator<Item = (&'a CellDocument, Vec<(usize, &'a PartyDocument)>)> {
    let cells = run.report.cells.iter().filter(move |cell| cell.name.starts_with(scene));
    cells.map(|cell| {
        let pairs = |party: &'a PartyDocument| Some((count_before(&party.name, "pair")?, party));
        (cell, cell.parties.iter().filter_map(pairs).collect())
    })
}

/// Streams passed both ways by every number of pairs, several of them among these.
fn carried(run: &ScenarioDocument, scenes: &[&str]) -> Vec<Check> {
    let of_scene = |scene: &&str| {
        let all: Vec<_> = cells(run, scene).flat_map(|(_, parties)| parties).collect();
        let passed = |party: &PartyDocument| party.rounds("throughput").iter().all(|x| *x > 0.0);
        let most = all.iter().filter(|(_, party)| passed(party)).map(|(pairs, _)| *pairs).max()?;
        let is_so = most > 1 && all.iter().all(|(_, party)| passed(party));
        Some((is_so, format!("{scene}, streams by up to {most} pairs")))
    };
    scenes.iter().filter_map(of_scene).collect()
}

/// The throughput of several pairs to one, of the cells with so many sessions.
fn to_one(run: &ScenarioDocument, scene: &str, is_wanted: fn(usize) -> bool) -> Vec<f64> {
    let of_sessions = cells(run, scene).filter(|(cell, _)| cell.sessions.is_some_and(is_wanted));
    let ratios = of_sessions.flat_map(|(_, parties)| {
        let one = parties.iter().find(|(pairs, _)| *pairs == 1).map(|(_, party)| *party);
        let many = parties.into_iter().filter(|(pairs, _)| *pairs > 1);
        many.filter_map(move |(_, party)| rounds(party, one?, "throughput")).collect::<Vec<_>>()
    });
    ratios.collect()
}

/// The median of the ratios of the rounds.
fn rounds(one: &PartyDocument, other: &PartyDocument, key: &str) -> Option<f64> {
    let (a, b) = (one.rounds(key), other.rounds(key));
    let ratios = a.iter().zip(&b).map(|(a, b)| ratio(*a, *b));
    (!a.is_empty() && !b.is_empty()).then(|| Spread::of(ratios).median)
}

/// A stream alone gains nothing by more pairs, and loses where it is torn apart.
fn one_flow(run: &ScenarioDocument) -> Vec<Check> {
    let ratios: Vec<f64> = ["to the guest", "from the guest"]
        .iter()
        .flat_map(|scene| to_one(run, scene, |sessions| sessions == 1))
        .collect();
    let worst = ratios.iter().copied().reduce(f64::min);
    let check = |worst| (worst >= 0.9, format!("one stream by several pairs, worst {worst:.2}x"));
    worst.map(check).into_iter().collect()
}

fn many_flows(run: &ScenarioDocument) -> Vec<Check> {
    let of_scene = |scene: &str| {
        let ratios = to_one(run, scene, |sessions| sessions >= 4);
        let mean = geomean(ratios.iter().copied());
        let words = format!("{scene}, 4 and 8 streams by several pairs, geomean {mean:.2}x");
        (!ratios.is_empty()).then_some((mean >= 1.0, words))
    };
    ["to the guest", "from the guest"].into_iter().filter_map(of_scene).collect()
}

/// On the most connections, one party has less of this number than another one.
fn less(run: &ScenarioDocument, key: &str, party: &str, than: &str) -> Check {
    let cell = run.report.cells.iter().max_by_key(|cell| cell.sessions);
    let of = |name: &str| {
        let party = cell?.parties.iter().find(|party| party.name == name)?;
        Some(party.spread(key)?.median)
    };
    let what = key.replace("_per_op", " per transaction");
    match (of(party), of(than)) {
        (Some(a), Some(b)) => (a < b, format!("{what}, {party} {a:.3}, {than} {b:.3}")),
        _ => (false, format!("{what} of {party} or of {than} were not counted")),
    }
}

/// A frame that is lent takes less CPU time, where it is not so small that it is copied.
fn copies(run: &ScenarioDocument) -> Vec<Check> {
    let of_cell = |cell: &CellDocument| {
        let bytes = count_before(&cell.name, "B")?;
        let [lent, copied] = &cell.parties[..] else { return None };
        let share = rounds(lent, copied, "cpu_us_per_op")?;
        let most = if bytes < 256 { 1.1 } else { 1.0 };
        Some((share <= most, format!("{bytes} B, {share:.2}x of the CPU time of a copy")))
    };
    run.report.cells.iter().filter_map(of_cell).collect()
}

/// The scenario's own verdict; none of a smoke test.
fn promised(run: &ScenarioDocument) -> Vec<Check> {
    let broken = run.broken.iter().map(|broken| (false, broken.clone()));
    broken.chain(run.kept.iter().map(|kept| (true, kept.clone()))).collect()
}

/// What no scenario has of the documents' tables.
const MISSING: &str = "of the tap's tables guests that talk to another host, 8 pairs, guests of \
     several virtual CPUs; of the slides requests by pairs; of the small-packet study the \
     cumulative ladder; of zero-copy messages of 4 to 64 KiB; of the Xen tables 16 \
     jobs in a real guest";

fn tables(run: &ScenarioDocument) -> Vec<Check> {
    let beside = |cell: &CellDocument| {
        let parties = cell.parties.iter();
        parties.filter_map(|p| references::multiqueue_tap(&run.name, cell, &p.name)).count()
    };
    let (count, all) = (run.report.cells.iter().map(beside).sum::<usize>(), 256);
    vec![(count == all, format!("{count} of the tap's {all} cells; missing: {MISSING}"))]
}

#[cfg(test)]
mod tests;
