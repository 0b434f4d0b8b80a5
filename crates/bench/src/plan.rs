//! How long scenarios take, and how many rounds fit into a time.

/// Rounds of each cell, unless the user asks for other ones or there is no time for them.
pub(crate) const ROUNDS: usize = 5;
/// Seconds that `run` may plan for; the rest of half an hour is left for repeated runs.
pub(crate) const BUDGET: f64 = 28.0 * 60.0;

/// The time that a scenario needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    /// Seconds before the first round, for example to write a file or boot a program.
    pub(crate) setup: f64,
    /// Number of runs in a round: every party of every cell.
    pub(crate) runs: f64,
    /// Seconds of a run that are not measured, for programs to start and end.
    pub(crate) each: f64,
}

impl Cost {
    /// Seconds for this many rounds of runs that last `run` seconds each.
    #[allow(clippy::cast_precision_loss, reason = "a handful of rounds")]
    pub(crate) fn seconds(&self, rounds: usize, run: f64) -> f64 {
        self.setup + rounds as f64 * self.runs * (self.each + run)
    }
}

/// The most rounds, from [`ROUNDS`] down to 1, that fit into `budget` seconds for all scenarios
/// together. 1 also if not even one round fits.
pub(crate) fn rounds(costs: &[Cost], run: f64, budget: f64) -> usize {
    let all = |rounds: usize| costs.iter().map(|cost| cost.seconds(rounds, run)).sum::<f64>();
    (1..=ROUNDS).rev().find(|rounds| all(*rounds) <= budget).unwrap_or(1)
}

/// A duration for people: `40 s`, `12 min`.
pub(crate) fn about(seconds: f64) -> String {
    if seconds < 90.0 {
        format!("{:.0} s", seconds.max(0.0))
    } else {
        format!("{:.0} min", seconds / 60.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost { setup: 10.0, runs: 20.0, each: 0.5 };

    #[test]
    fn a_scenario_takes_its_setup_once_and_its_runs_every_round() {
        assert_eq!(COST.seconds(1, 0.5), 30.0);
        assert_eq!(COST.seconds(5, 0.5), 110.0);
    }

    #[test]
    fn rounds_are_as_many_as_fit_and_never_none() {
        let two = [COST, COST];
        for (budget, expected) in [(1000.0, 5), (220.0, 5), (219.0, 4), (100.0, 2), (0.0, 1)] {
            assert_eq!(rounds(&two, 0.5, budget), expected, "{budget} s");
        }
        assert_eq!(rounds(&[], 0.5, 0.0), ROUNDS);
    }

    #[test]
    fn a_time_is_said_in_seconds_or_minutes() {
        assert_eq!(
            (about(89.4), about(90.0), about(-1.0)),
            ("89 s".into(), "2 min".into(), "0 s".into())
        );
    }
}
