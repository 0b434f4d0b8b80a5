//! What a scenario found: medians and ratios, as a table or as JSON.

pub(crate) mod net;

use crate::measure::Calibration;
use serde::Serialize;

/// One run of one party.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sample {
    /// Requests in a second.
    pub(crate) iops: f64,
    /// Median latency in microseconds.
    pub(crate) p50_us: f64,
    /// Latency that 99 of 100 requests did not exceed.
    pub(crate) p99_us: f64,
    /// CPU seconds of the server for a million requests; of the whole program if there is none.
    pub(crate) cpu_per_million: f64,
    /// The same of the client; 0 if there is none.
    pub(crate) client_cpu_per_million: f64,
    /// Other programs had too much of the CPUs, however often it was tried.
    pub(crate) disturbed: bool,
}

/// All runs of one party in one cell.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Party {
    pub(crate) name: String,
    pub(crate) samples: Vec<Sample>,
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

/// The first party against another one: ratios of the rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Against {
    pub(crate) peer: String,
    pub(crate) iops: Spread,
    pub(crate) cpu_per_million: Spread,
}

/// One line of a scenario: the same load on each party in turn.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) name: String,
    pub(crate) parties: Vec<Party>,
    pub(crate) against: Vec<Against>,
}

impl Cell {
    /// Puts the first party against each of the others, round by round.
    pub(crate) fn new(name: String, parties: Vec<Party>) -> Self {
        let against = parties
            .iter()
            .skip(1)
            .map(|peer| {
                let ratios = |value: fn(&Sample) -> f64| {
                    let ours = parties.first().map_or(&[][..], |p| &p.samples);
                    Spread::of(
                        ours.iter().zip(&peer.samples).map(|(a, b)| ratio(value(a), value(b))),
                    )
                };
                Against {
                    peer: peer.name.clone(),
                    iops: ratios(|s| s.iops),
                    cpu_per_million: ratios(|s| s.cpu_per_million),
                }
            })
            .collect();
        Self { name, parties, against }
    }
}

fn ratio(ours: f64, theirs: f64) -> f64 {
    if theirs > 0.0 { ours / theirs } else { 0.0 }
}

/// All of a scenario.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) scenario: &'static str,
    pub(crate) machine: String,
    pub(crate) calibration: Calibration,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) cells: Vec<Cell>,
}

impl Report {
    /// Prints a table, or JSON.
    pub(crate) fn print(&self, json: bool) -> Result<(), String> {
        if json {
            println!("{}", serde_json::to_string_pretty(self).map_err(|e| e.to_string())?);
            return Ok(());
        }
        println!(
            "{}: {} rounds of {} s on {}",
            self.scenario, self.rounds, self.seconds, self.machine
        );
        println!("  {}", self.calibration);
        for cell in &self.cells {
            println!("{}", cell.name);
            println!(
                "  {:<28} {:>10} {:>9} {:>9} {:>10} {:>10}",
                "party", "IOPS", "p50 us", "p99 us", "cpu-s/M", "client/M"
            );
            for party in &cell.parties {
                let median =
                    |value: fn(&Sample) -> f64| Spread::of(party.samples.iter().map(value)).median;
                println!(
                    "  {:<28} {:>10.0} {:>9.2} {:>9.2} {:>10.3} {:>10.3}",
                    party.name,
                    median(|s| s.iops),
                    median(|s| s.p50_us),
                    median(|s| s.p99_us),
                    median(|s| s.cpu_per_million),
                    median(|s| s.client_cpu_per_million),
                );
            }
            let all = cell.parties.iter().flat_map(|party| &party.samples);
            let disturbed = all.clone().filter(|sample| sample.disturbed).count();
            if disturbed > 0 {
                let count = all.count();
                println!("  DISTURBED by other load: {disturbed} of {count} runs; do not use");
            }
            for against in &cell.against {
                let (iops, cpu) = (against.iops, against.cpu_per_million);
                println!(
                    "  against {:<20} IOPS {:.2}x ({:.2} to {:.2}), CPU per request {:.2}x \
                     ({:.2} to {:.2})",
                    against.peer, iops.median, iops.min, iops.max, cpu.median, cpu.min, cpu.max
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(name: &str, iops: &[f64]) -> Party {
        let sample = |iops| Sample {
            iops,
            p50_us: 1.0,
            p99_us: 1.0,
            cpu_per_million: 1000.0 / iops,
            client_cpu_per_million: 0.0,
            disturbed: false,
        };
        Party { name: name.to_owned(), samples: iops.iter().map(|i| sample(*i)).collect() }
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_medians() {
        let ours = party("ours", &[10.0, 40.0, 30.0]);
        let peer = party("peer", &[10.0, 10.0, 60.0]);
        let cell = Cell::new("c".to_owned(), vec![ours, peer]);
        let against = &cell.against[0];
        assert_eq!(against.iops, Spread { median: 1.0, min: 0.5, max: 4.0 });
        assert_eq!(against.cpu_per_million.median, 1.0);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(Spread::of([4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::of([7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
        assert_eq!(Spread::of([]), Spread { median: 0.0, min: 0.0, max: 0.0 });
    }
}
