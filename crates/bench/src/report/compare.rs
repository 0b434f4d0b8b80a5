//! `manyring-bench compare`: two runs side by side, and what of the difference is more than noise.

use super::Spread;
use super::columns::{self, Better, ColumnHead};
use super::document::{CellDocument, RunDocument, ScenarioDocument};

/// Medians that differ by less are the same, however close the rounds of each run lie.
const DIFFERENCE_MIN: f64 = 0.03;
/// Medians of single rounds that differ by less are the same: so far have the reference tables'
/// own repetitions been apart.
const SINGLE_ROUND_MIN: f64 = 0.25;

/// The result of comparing the second run with the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The difference is not larger than the differences among the rounds of one run.
    Noise,
    Better,
    Worse,
    /// The numbers differ by more than noise, but neither more nor less is better.
    Differs,
}

impl Verdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Noise => "within noise",
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Differs => "differs",
        }
    }
}

/// Judges one number by its rounds in both runs.
///
/// The runs did not take turns, so their rounds cannot be paired. They differ if no round of one
/// lies among those of the other, and if their medians are further apart than the rounds of either
/// run are among each other.
pub(crate) fn judge(before: &[f64], after: &[f64], better: Better) -> Verdict {
    let (a, b) = (Spread::of(before.iter().copied()), Spread::of(after.iter().copied()));
    let apart = (a.median - b.median).abs();
    let is_single = before.len() < 2 || after.len() < 2;
    let least = if is_single { SINGLE_ROUND_MIN } else { DIFFERENCE_MIN };
    let noise = (a.max - a.min).max(b.max - b.min).max(a.median.abs() * least);
    let is_disjoint = a.max < b.min || b.max < a.min;
    if !is_disjoint || apart <= noise {
        return Verdict::Noise;
    }
    match better {
        Better::Neither => Verdict::Differs,
        Better::Higher if b.median > a.median => Verdict::Better,
        Better::Lower if b.median < a.median => Verdict::Better,
        Better::Higher | Better::Lower => Verdict::Worse,
    }
}

/// One number of one party, in both runs.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) party: String,
    pub(crate) head: ColumnHead,
    pub(crate) before: Spread,
    pub(crate) after: Spread,
    pub(crate) verdict: Verdict,
}

impl Row {
    /// The second run's median divided by the first run's.
    pub(crate) fn ratio(&self) -> f64 {
        super::ratio(self.after.median, self.before.median)
    }
}

/// A cell that both runs have.
#[derive(Clone, Debug)]
pub(crate) struct CellPair {
    pub(crate) scenario: String,
    pub(crate) cell: String,
    pub(crate) unit: String,
    pub(crate) rows: Vec<Row>,
}

/// The comparison of two runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Comparison {
    pub(crate) pairs: Vec<CellPair>,
    /// Cells that only one of the runs has.
    pub(crate) alone: Vec<String>,
}

impl Comparison {
    /// Pairs the cells of both runs that have the same name.
    pub(crate) fn new(before: &RunDocument, after: &RunDocument) -> Self {
        let mut comparison = Self::default();
        for (scenario, cell) in cells(before) {
            let other = cells(after).find(|(s, c)| s.name == scenario.name && c.name == cell.name);
            match other {
                Some((_, other)) => comparison.pairs.push(pair(scenario, cell, other)),
                None => comparison.alone.push(alone(scenario, cell, "first")),
            }
        }
        for (scenario, cell) in cells(after) {
            let is_there =
                cells(before).any(|(s, c)| s.name == scenario.name && c.name == cell.name);
            if !is_there {
                comparison.alone.push(alone(scenario, cell, "second"));
            }
        }
        comparison
    }

    /// How many numbers have this verdict; only numbers of which more or less is better are
    /// counted.
    pub(crate) fn count(&self, verdict: Verdict) -> usize {
        let rows = self.pairs.iter().flat_map(|pair| &pair.rows);
        rows.filter(|row| row.head.better() != Better::Neither && row.verdict == verdict).count()
    }

    /// One line for the whole comparison.
    pub(crate) fn summary(&self) -> String {
        let [noise, better, worse] =
            [Verdict::Noise, Verdict::Better, Verdict::Worse].map(|verdict| self.count(verdict));
        format!("{better} better, {worse} worse, {noise} within noise")
    }

    /// The table for a terminal; only numbers of which more or less is better are shown.
    pub(crate) fn text(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        for CellPair { scenario, cell, unit, rows } in &self.pairs {
            let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
            let _ = writeln!(text, "{scenario}: {cell}{unit}");
            let judged = rows.iter().filter(|row| row.head.better() != Better::Neither);
            for row in judged {
                let Row { party, head, before, after, verdict } = row;
                let _ = writeln!(
                    text,
                    "  {party:<28} {:<12} {:>12} {:>12} {:>7.2}x  {}",
                    head.text(),
                    number(before.median),
                    number(after.median),
                    row.ratio(),
                    verdict.word()
                );
            }
        }
        for sentence in &self.alone {
            let _ = writeln!(text, "{sentence}");
        }
        let _ = writeln!(text, "{}", self.summary());
        text
    }
}

fn alone(scenario: &ScenarioDocument, cell: &CellDocument, which: &str) -> String {
    format!("only in the {which} run: {}: {}", scenario.name, cell.name)
}

fn cells(document: &RunDocument) -> impl Iterator<Item = (&ScenarioDocument, &CellDocument)> {
    document.scenarios.iter().flat_map(|s| s.report.cells.iter().map(move |cell| (s, cell)))
}

fn pair(scenario: &ScenarioDocument, before: &CellDocument, after: &CellDocument) -> CellPair {
    let heads = columns::of_cells([before, after]);
    let mut rows = Vec::new();
    for party in &before.parties {
        let Some(other) = after.parties.iter().find(|other| other.name == party.name) else {
            continue;
        };
        for head in &heads {
            let (a, b) = (party.rounds(head.key()), other.rounds(head.key()));
            if a.is_empty() || b.is_empty() {
                continue;
            }
            rows.push(Row {
                party: party.name.clone(),
                head: head.clone(),
                verdict: judge(&a, &b, head.better()),
                before: Spread::of(a),
                after: Spread::of(b),
            });
        }
    }
    let unit = before.unit.clone().unwrap_or_default();
    CellPair { scenario: scenario.name.clone(), cell: before.name.clone(), unit, rows }
}

/// Formats a number with three digits or so, or its whole part with commas.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        small if small < 0.1 => format!("{value:.4}"),
        small if small < 10.0 => format!("{value:.2}"),
        small if small < 100.0 => format!("{value:.1}"),
        _ => in_thousands(&format!("{value:.0}")),
    }
}

/// Whole digits with a comma before every third one from the right.
fn in_thousands(digits: &str) -> String {
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        let left = digits.len() - at;
        if at > 0 && left.is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::tests::scenario;

    fn run(parties: &[(&str, &[f64])]) -> RunDocument {
        RunDocument { scenarios: vec![scenario("s", "c", parties)], ..RunDocument::default() }
    }

    #[test]
    fn a_difference_counts_if_it_is_larger_than_that_of_the_rounds() {
        let before = [100.0, 102.0, 104.0];
        for (after, verdict) in [
            ([100.0, 103.0, 101.0], Verdict::Noise),
            ([104.0, 106.0, 108.0], Verdict::Noise),
            ([105.0, 106.0, 107.0], Verdict::Noise),
            ([105.0, 107.0, 108.0], Verdict::Better),
            ([90.0, 95.0, 97.0], Verdict::Noise),
            ([90.0, 92.0, 95.0], Verdict::Worse),
        ] {
            assert_eq!(judge(&before, &after, Better::Higher), verdict, "{after:?}");
        }
        assert_eq!(judge(&[5.0, 5.0], &[4.0, 4.0], Better::Lower), Verdict::Better);
        assert_eq!(judge(&[5.0, 5.0], &[4.0, 4.0], Better::Neither), Verdict::Differs);
        assert_eq!(judge(&[100.0, 100.0], &[102.9, 102.9], Better::Higher), Verdict::Noise);
    }

    #[test]
    fn single_rounds_tell_only_large_differences() {
        assert_eq!(judge(&[100.0], &[125.0], Better::Higher), Verdict::Noise);
        assert_eq!(judge(&[100.0], &[126.0], Better::Higher), Verdict::Better);
        assert_eq!(judge(&[0.0], &[0.0], Better::Higher), Verdict::Noise);
    }

    #[test]
    fn cells_and_parties_are_matched_by_name_and_the_rest_is_said() {
        let before = run(&[("a", &[100.0, 101.0]), ("gone", &[1.0])]);
        let mut after = run(&[("a", &[200.0, 201.0])]);
        let comparison = Comparison::new(&before, &after);
        let rows = &comparison.pairs[0].rows;
        assert!(rows.iter().all(|row| row.party == "a"), "{rows:?}");
        assert_eq!(comparison.summary(), "2 better, 0 worse, 0 within noise");
        assert!(comparison.text().contains("2.00x  better"), "{}", comparison.text());
        after.scenarios[0].report.cells[0].name = "d".into();
        let apart = Comparison::new(&before, &after);
        assert_eq!((apart.pairs.len(), apart.alone.len()), (0, 2));
    }

    #[test]
    fn numbers_have_the_digits_that_people_read() {
        let digits = [1e7, 123_456.7, -123_456.7, 999.0, 45.67, 4.567, 0.0123, 0.0].map(number);
        let words = ["10,000,000", "123,457", "-123,457", "999", "45.7", "4.57", "0.0123", "0"];
        assert_eq!(digits, words);
    }
}
