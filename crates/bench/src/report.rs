//! What a scenario found: medians and ratios, as a table or as JSON.

pub(crate) mod blk;
pub(crate) mod columns;
pub(crate) mod document;
pub(crate) mod files;
mod html;
pub(crate) mod idle;
pub(crate) mod neighbours;
pub(crate) mod net;
mod page;
mod plot;
mod plots;
mod references;
pub(crate) mod verdict;

use crate::measure::Calibration;
use serde::Serialize;
use verdict::Verdict;

/// One run of one party.
pub(crate) trait Sample: Serialize {
    /// Other programs had too much of the CPUs, however often it was tried.
    fn is_disturbed(&self) -> bool;
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

/// The same load on each party in turn.
pub(crate) trait Cell: Serialize {
    type Sample: Sample;

    fn name(&self) -> &str;
    fn parties(&self) -> &[Party<Self::Sample>];
    /// The names of the columns, below that of the cell.
    fn print_head(&self);
    /// The medians of a party, below their columns.
    fn print_party(&self, party: &Party<Self::Sample>);
    /// A line for each pair of parties that is compared.
    fn print_ratios(&self);

    fn print(&self) {
        println!("{}", self.name());
        self.print_head();
        for party in self.parties() {
            self.print_party(party);
        }
        let all = self.parties().iter().flat_map(|party| &party.samples);
        let disturbed = all.clone().filter(|sample| sample.is_disturbed()).count();
        if disturbed > 0 {
            let count = all.count();
            println!("  DISTURBED by other load: {disturbed} of {count} runs; do not use");
        }
        self.print_ratios();
    }
}

/// All of a scenario.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report<C> {
    pub(crate) scenario: &'static str,
    pub(crate) machine: String,
    pub(crate) calibration: Calibration,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) cells: Vec<C>,
}

/// What a scenario found, whatever its cells are.
pub(crate) trait Found {
    /// Prints a table, or JSON.
    fn print(&self, json: bool) -> Result<(), String>;
    /// All of it, for the document of a run.
    fn to_json(&self) -> Result<serde_json::Value, String>;
    /// Whether its promises were kept; none if it makes none.
    fn verdict(&self) -> Option<&Verdict>;
}

impl<C: Cell> Found for Report<C> {
    fn to_json(&self) -> Result<serde_json::Value, String> {
        serde_json::to_value(self).map_err(|error| error.to_string())
    }

    fn verdict(&self) -> Option<&Verdict> {
        None
    }

    fn print(&self, json: bool) -> Result<(), String> {
        if json {
            println!("{}", serde_json::to_string_pretty(self).map_err(|e| e.to_string())?);
            return Ok(());
        }
        let Self { scenario, rounds, seconds, machine, .. } = self;
        println!("{scenario}: {rounds} rounds of {seconds} s on {machine}");
        println!("  {}", self.calibration);
        self.cells.iter().for_each(C::print);
        Ok(())
    }
}

impl<C: Cell> Found for (Report<C>, Verdict) {
    fn print(&self, json: bool) -> Result<(), String> {
        self.0.print(json)
    }

    fn to_json(&self) -> Result<serde_json::Value, String> {
        self.0.to_json()
    }

    fn verdict(&self) -> Option<&Verdict> {
        Some(&self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(Spread::of([4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::of([7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
        assert_eq!(Spread::of([]), Spread { median: 0.0, min: 0.0, max: 0.0 });
    }
}
