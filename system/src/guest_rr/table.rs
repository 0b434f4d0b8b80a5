//! The results of all rounds: medians, ranges, and ratios of the rounds.

use super::MODES;
use crate::guest_load::{Load, Spread, ratio, write_disturbed};
use std::fmt::{Display, Formatter, Result};
use std::time::Duration;

/// One load of one guest.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) mode: String,
    pub(super) connections: usize,
    pub(super) load: Load,
    /// The share of all CPUs that other programs took during the load, in per cent.
    pub(super) others_percent: u64,
}

/// The CPU time of a daemon while its guest idled.
#[derive(Clone, Debug)]
pub(super) struct Idle {
    pub(super) mode: String,
    pub(super) ticks: u64,
    pub(super) time: Duration,
}

/// All of them, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) runs: Vec<Run>,
    pub(super) idle: Vec<Idle>,
}

impl Table {
    /// The numbers of connections, in the order in which they ran.
    fn sizes(&self) -> Vec<usize> {
        let mut sizes = Vec::new();
        for run in &self.runs {
            if !sizes.contains(&run.connections) {
                sizes.push(run.connections);
            }
        }
        sizes
    }

    /// The rounds of a mode.
    fn rounds<'a>(&'a self, mode: &'a str, connections: usize) -> impl Iterator<Item = &'a Run> {
        self.runs.iter().filter(move |run| run.mode == mode && run.connections == connections)
    }

    /// The ratios of the rounds, `mode` to `other`.
    fn ratio(&self, modes: (&str, &str), connections: usize, value: fn(&Load) -> f64) -> Spread {
        let others = self.rounds(modes.1, connections);
        let rounds = self.rounds(modes.0, connections).zip(others);
        Spread::of(rounds.map(|(one, other)| value(&one.load) / value(&other.load)))
    }

    fn write_loads(&self, f: &mut Formatter<'_>, connections: usize) -> Result {
        writeln!(f, "{connections} connections")?;
        writeln!(
            f,
            "  {:<8} {:>8} {:>17} {:>8} {:>8} {:>11} {:>11} {:>12} {:>13}",
            "polling",
            "trans/s",
            "(range)",
            "p50 us",
            "p99 us",
            "kicks/trans",
            "calls/trans",
            "CPU us/trans",
            "sleeps/trans"
        )?;
        for mode in MODES {
            let of = |value: fn(&Load) -> f64| {
                Spread::of(self.rounds(mode, connections).map(|run| value(&run.load)))
            };
            let rate = of(|load| load.rate);
            writeln!(
                f,
                "  {mode:<8} {:>8.0} {:>17} {:>8.1} {:>8.1} {:>11.3} {:>11.3} {:>12.2} {:>13.3}",
                rate.median,
                format!("({:.0} to {:.0})", rate.min, rate.max),
                of(|load| load.p50_us).median,
                of(|load| load.p99_us).median,
                of(|load| ratio(load.moved.kicks, load.transactions)).median,
                of(|load| ratio(load.moved.calls, load.transactions)).median,
                of(cpu_us).median,
                of(|load| ratio(load.moved.sleeps, load.transactions)).median
            )?;
        }
        Ok(())
    }

    fn write_comparisons(&self, f: &mut Formatter<'_>, connections: usize) -> Result {
        for other in &MODES[1..] {
            let modes = (MODES[0], *other);
            let rate = self.ratio(modes, connections, |load| load.rate);
            let cpu = self.ratio(modes, connections, cpu_us);
            writeln!(f, "  auto against {other}: transactions {rate}, CPU for each {cpu}")?;
        }
        for run in self.rounds(MODES[0], connections) {
            writeln!(f, "  auto learned: {}", run.load.moved.polling)?;
        }
        let all = self.runs.iter().filter(|run| run.connections == connections);
        write_disturbed(f, all.map(|run| run.others_percent))
    }
}

/// Microseconds of the worker for each transaction.
#[allow(clippy::cast_precision_loss, reason = "a ratio needs no more than 52 bits")]
fn cpu_us(load: &Load) -> f64 {
    load.moved.ran.as_secs_f64() * 1e6 / load.transactions as f64
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for connections in self.sizes() {
            self.write_loads(f, connections)?;
            self.write_comparisons(f, connections)?;
        }
        let seconds = self.idle.first().map_or(0, |idle| idle.time.as_secs());
        write!(
            f,
            "idle for {seconds} s, the guest up: ticks of the daemon's CPU time in each round"
        )?;
        for mode in MODES {
            let of_mode = self.idle.iter().filter(|idle| idle.mode == mode);
            let ticks: Vec<_> = of_mode.map(|idle| idle.ticks.to_string()).collect();
            write!(f, "; {mode}: {}", ticks.join(" "))?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest_load::{Moved, Polling};

    fn run(mode: &str, rate: f64, others_percent: u64) -> Run {
        let moved = Moved {
            kicks: 1500,
            calls: 2000,
            ran: Duration::from_millis(25),
            sleeps: 250,
            polling: Polling { gain_permille: 1234, ..Polling::default() },
            ..Moved::default()
        };
        let load = Load { transactions: 1000, rate, p50_us: 50.0, p99_us: 90.0, moved };
        Run { mode: mode.to_owned(), connections: 32, load, others_percent }
    }

    #[test]
    fn the_table_has_medians_ratios_of_rounds_and_what_was_disturbed() {
        let runs = vec![
            run("auto", 900.0, 10),
            run("always", 1000.0, 10),
            run("never", 500.0, 10),
            run("auto", 300.0, 11),
            run("always", 100.0, 10),
            run("never", 300.0, 10),
        ];
        let idle =
            |mode: &str, ticks| Idle { mode: mode.to_owned(), ticks, time: Duration::from_secs(3) };
        let idle = vec![idle("auto", 0), idle("always", 2), idle("never", 0), idle("auto", 7)];
        let text = Table { runs, idle }.to_string();
        assert!(text.starts_with("32 connections\n"), "{text}");
        let auto = text.lines().find(|line| line.starts_with("  auto ")).unwrap();
        let words: Vec<_> = auto.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "auto", "600", "(300", "to", "900)", "50.0", "90.0", "1.500", "2.000", "25.00",
                "0.250"
            ]
        );
        assert!(text.contains("auto against always: transactions 1.95x (0.90 to 3.00)"), "{text}");
        assert!(text.contains("auto against never: transactions 1.40x (1.00 to 1.80)"), "{text}");
        assert_eq!(text.matches("gain 1234 permille").count(), 2, "{text}");
        assert!(text.contains("up to 11 % of the CPUs: 1 of 6 runs; do not use"), "{text}");
        assert!(text.ends_with("; auto: 0 7; always: 2; never: 0\n"), "{text}");
    }
}
