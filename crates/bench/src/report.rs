//! The results of a scenario: medians and ratios, as a table or as JSON.

pub(crate) mod blk;
pub(crate) mod columns;
pub(crate) mod compare;
pub(crate) mod document;
pub(crate) mod files;
mod html;
pub(crate) mod idle;
pub(crate) mod neighbours;
pub(crate) mod net;
mod page;
mod plot;
mod plots;
pub(crate) mod references;
pub(crate) mod rows;
mod tables;
pub(crate) mod verdict;

use crate::measure::Calibration;
use document::{ReportDocument, ScenarioDocument};
use serde::{Deserialize, Serialize};
use verdict::Verdict;

/// One run of one party.
pub(crate) trait Sample {
    /// In every attempt other programs took too much CPU time, or the host moved the CPUs.
    fn is_disturbed(&self) -> bool;
    fn disturb(&mut self);
    /// Nanoseconds that a cache line needed from one CPU to the other, if that was measured.
    fn line_ns(&self) -> Option<u64>;
    fn set_line(&mut self, line_ns: Option<u64>);
}

/// True if two times of a cache line are those of different distances. Repeated at one distance
/// they hardly ever differ by more than a half; near and far differ by a factor of five.
pub(crate) fn is_far(one_ns: u64, other_ns: u64) -> bool {
    one_ns.max(other_ns) * 2 > one_ns.min(other_ns) * 5
}

/// Nanoseconds for a cache line from which on CPUs are far from each other: threads of a core and
/// neighbouring cores take 20 to 60, others 150 and more.
const FAR_NS: u64 = 100;

/// The distance of two CPUs in a word, by what a cache line takes between them.
pub(crate) fn nearness(line_ns: u64) -> &'static str {
    if line_ns < FAR_NS { "near" } else { "far" }
}

/// All runs of one party in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Party<S> {
    pub(crate) name: String,
    pub(crate) samples: Vec<S>,
}

impl<S> Party<S> {
    fn median(&self, value: fn(&S) -> f64) -> f64 {
        Spread::of(self.samples.iter().map(value)).median
    }

    /// Ratios of the rounds, this party to the other.
    fn against(&self, peer: &Self, value: fn(&S) -> f64) -> Spread {
        let rounds = self.samples.iter().zip(&peer.samples);
        Spread::of(rounds.map(|(a, b)| ratio(value(a), value(b))))
    }
}

impl<S: Sample> Party<S> {
    /// As [`Self::against`], by distance of the CPUs, the nearer first; empty if it never changed.
    fn against_by_distance(&self, peer: &Self, value: fn(&S) -> f64) -> Vec<Distance> {
        let rounds = || self.samples.iter().zip(&peer.samples);
        let lines = || rounds().filter_map(|(sample, _)| sample.line_ns());
        let (Some(near), Some(far)) = (lines().min(), lines().max()) else { return Vec::new() };
        if !is_far(near, far) {
            return Vec::new();
        }
        let at = |line_ns: u64| {
            let is_here = |(a, b): &(&S, &S)| {
                let is_one = |s: &S| s.line_ns().is_some_and(|line| !is_far(line, line_ns));
                is_one(a) && is_one(b)
            };
            let ratios = rounds().filter(is_here).map(|(a, b)| ratio(value(a), value(b)));
            let ratios: Vec<f64> = ratios.collect();
            let rounds = ratios.len();
            Distance { line_ns, rounds, ratio: Spread::of(ratios).median }
        };
        [near, far].map(at).into_iter().filter(|distance| distance.rounds > 0).collect()
    }
}

/// The rounds of a comparison in which the CPUs had one of several distances.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Distance {
    /// Nanoseconds that a cache line needed from one CPU to the other.
    pub(crate) line_ns: u64,
    /// How many rounds these are, and the median of their ratios.
    pub(crate) rounds: usize,
    pub(crate) ratio: f64,
}

impl std::fmt::Display for Distance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { line_ns, rounds, ratio } = self;
        let plural = if *rounds == 1 { "" } else { "s" };
        let nearness = nearness(*line_ns);
        write!(f, "{ratio:.2}x {nearness} ({line_ns} ns a cache line, {rounds} round{plural})")
    }
}

/// Median, smallest and largest of the rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let (half, last) = (values.len() / 2, values.len().saturating_sub(1));
        let median =
            if values.len() % 2 == 1 { at(half) } else { f64::midpoint(at(half), at(last / 2)) };
        Self { median, min: at(0), max: at(last) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2}x ({:.2} to {:.2})", self.median, self.min, self.max)
    }
}

pub(crate) fn ratio(ours: f64, theirs: f64) -> f64 {
    if theirs > 0.0 { ours / theirs } else { 0.0 }
}

/// All of a scenario.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ScenarioReport<C> {
    pub(crate) scenario: &'static str,
    pub(crate) machine: String,
    pub(crate) calibration: Calibration,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) cells: Vec<C>,
}

/// The result of a scenario, whatever the type of its cells.
pub(crate) trait Found {
    /// All of it, for the document of a run.
    fn to_json(&self) -> Result<serde_json::Value, String>;

    /// Whether its promises were kept; none if it makes none.
    fn verdict(&self) -> Option<&Verdict> {
        None
    }
}

impl<C: Serialize> Found for ScenarioReport<C> {
    fn to_json(&self) -> Result<serde_json::Value, String> {
        serde_json::to_value(self).map_err(|error| error.to_string())
    }
}

impl<C: Serialize> Found for (ScenarioReport<C>, Verdict) {
    fn to_json(&self) -> Result<serde_json::Value, String> {
        self.0.to_json()
    }

    fn verdict(&self) -> Option<&Verdict> {
        Some(&self.1)
    }
}

/// The tables of the references, for a terminal: the cells that repeat theirs, or all where a table
/// of theirs stands beside the scenario as a whole; and that table.
pub(crate) fn references_text(scenario: &ScenarioDocument) -> String {
    let mut own = scenario.clone();
    let is_theirs = |cell: &document::CellDocument| {
        let mut parties = cell.parties.iter();
        parties.any(|p| references::beside_party(&scenario.name, cell, &p.name).is_some())
    };
    if own.report.cells.iter().any(is_theirs) {
        own.report.cells.retain(is_theirs);
    }
    let theirs = references::beside(&scenario.name).iter();
    let theirs = theirs.map(|one| format!("{}\n{}", one.title, tables::of_reference(one).text()));
    text(&own) + &theirs.collect::<String>()
}

/// The tables of a scenario, for a terminal.
pub(crate) fn text(scenario: &ScenarioDocument) -> String {
    let ReportDocument { scenario: name, rounds, seconds, machine, calibration, .. } =
        &scenario.report;
    let mut text = format!("{name}: {rounds} rounds of {seconds} s on {machine}\n");
    text.extend(calibration.iter().map(|calibration| format!("  {calibration}\n")));
    text + &tables::of(scenario).text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_told_apart_by_distance_if_there_were_several() {
        let party = |rounds: &[(f64, u64)]| {
            let sample = |(iops, line)| blk::BlkSample {
                iops,
                line_ns: Some(line),
                ..blk::BlkSample::default()
            };
            Party { name: String::new(), samples: rounds.iter().copied().map(sample).collect() }
        };
        let of = |ours: &[(f64, u64)], theirs: &[(f64, u64)]| {
            let found = party(ours).against_by_distance(&party(theirs), |sample| sample.iops);
            found.iter().map(|d| (d.line_ns, d.rounds, d.ratio)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[(8.0, 40), (9.0, 44)], &[(2.0, 41), (3.0, 40)]), []);
        // The third round was of both distances, and says nothing about either.
        assert_eq!(
            of(
                &[(8.0, 40), (4.0, 205), (8.0, 40), (6.0, 210)],
                &[(2.0, 41), (4.0, 206), (4.0, 205), (3.0, 205)]
            ),
            [(40, 1, 4.0), (210, 2, 1.5)]
        );
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(Spread::of([4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::of([7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
        assert_eq!(Spread::of([]), Spread { median: 0.0, min: 0.0, max: 0.0 });
    }
}
