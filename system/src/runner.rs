//! Runs behaviours three at a time, and those that watch time alone; says PASS or FAIL of each,
//! keeps the logs of failures.

use crate::behaviours::{Behaviour, Scene, Stage};
use crate::{Context, Outcome, lanes, watch};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Behaviours that run at the same time. A guest mostly waits: for its own boot, for a reconnect.
/// Two at a time leave half of two CPUs idle.
const AT_ONCE: usize = 3;

/// How long a behaviour may take. The longest take some 150 s; the first one also waits until
/// packages are fetched.
const LIMIT: Duration = Duration::from_secs(900);

/// Names that a report shows at its end; the rest is in what was printed before.
const NAMES_MAX: usize = 40;
/// Characters of the reason that stands behind a name.
const REASON_MAX: usize = 200;

/// How many passed, how many failed, and which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Passed.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
    /// Names of those that failed, as far as they have one.
    pub names: Vec<String>,
}

impl Totals {
    /// One that passed.
    #[must_use]
    pub fn of_one() -> Self {
        Self { passed: 1, ..Self::default() }
    }

    /// Counts one that failed for a reason, of which the first line is kept.
    pub fn fail(&mut self, name: &str, reason: &str) {
        self.failed += 1;
        let reason: String = reason.lines().next().unwrap_or("").chars().take(REASON_MAX).collect();
        let colon = if reason.is_empty() { "" } else { ": " };
        self.names.push(format!("{name}{colon}{reason}"));
    }

    /// Adds others.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.names.extend(other.names);
    }

    /// The names of what failed, a line each, then the totals: the end of a report. Where little
    /// is kept of a long output, it is the end.
    #[must_use]
    pub fn report(&self) -> String {
        let mut lines: Vec<String> =
            self.names.iter().take(NAMES_MAX).map(|name| format!("FAILED {name}")).collect();
        if let Some(more) = self.names.len().checked_sub(NAMES_MAX + 1) {
            lines.push(format!("FAILED and {} more", more + 1));
        }
        lines.push(self.to_string());
        lines.join("\n")
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Runs `behaviours` against the daemon `binary`, with `bench` (`manyring-bench`) as the load of
/// guests; the logs of failures stay in `logs`.
///
/// # Errors
/// The folder of the logs cannot be written; what fails in a behaviour is counted.
pub fn run(
    behaviours: &[Behaviour],
    binary: PathBuf,
    bench: PathBuf,
    logs: &Path,
) -> Outcome<Totals> {
    let stage = Stage { binary, bench, uml: OnceLock::new(), qemu: OnceLock::new() };
    if logs.exists() {
        std::fs::remove_dir_all(logs).context(logs.display())?;
    }
    let (alone, beside) = behaviours.iter().copied().partition(Behaviour::runs_alone);
    let mut totals = in_lanes(&stage, beside, AT_ONCE, logs)?;
    totals.add(in_lanes(&stage, alone, 1, logs)?);
    Ok(totals)
}

/// How a behaviour ended.
struct Ended {
    name: &'static str,
    took: Duration,
    outcome: Outcome,
}

/// Runs `behaviours`, `lanes` at a time, each begun in its order.
fn in_lanes(
    stage: &Stage,
    behaviours: Vec<Behaviour>,
    lanes: usize,
    logs: &Path,
) -> Outcome<Totals> {
    let play = |behaviour: Behaviour| {
        let start = Instant::now();
        let (name, folder) = (behaviour.name, logs.join(behaviour.name));
        let plays = || Scene::play(stage, &behaviour, &folder);
        let outcome = watch::within(&format!("system::{name}"), LIMIT, plays);
        Ended { name, took: start.elapsed(), outcome }
    };
    let (mut totals, mut counted) = (Totals::default(), Ok(()));
    lanes::each(behaviours, lanes, play, |ended| {
        let this = count(ended, logs, &mut totals);
        counted = std::mem::replace(&mut counted, Ok(())).and(this);
    });
    counted.map(|()| totals)
}

/// Says how a behaviour ended, and keeps its logs if it failed.
fn count(ended: Ended, logs: &Path, totals: &mut Totals) -> Outcome {
    let (name, seconds) = (ended.name, ended.took.as_secs_f64());
    let folder = logs.join(name);
    match ended.outcome {
        Ok(()) => {
            totals.passed += 1;
            println!("PASS system::{name} ({seconds:.1} s)");
            std::fs::remove_dir_all(&folder).context(folder.display())?;
        }
        Err(error) => {
            println!("FAIL system::{name} ({seconds:.1} s): {error}");
            println!("     logs: {}", folder.display());
            totals.fail(&format!("system::{name}"), &error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_ends_with_what_failed_and_totals_on_one_line_that_ci_reads() {
        let mut totals = Totals { passed: 3, ..Totals::default() };
        totals.fail("system::boots", "no kernel\nand a log of many lines");
        totals.add(Totals { passed: 2, failed: 1, names: vec!["reconnect::one".into()] });
        let lines =
            ["FAILED system::boots: no kernel", "FAILED reconnect::one", "5 passed, 2 failed"];
        assert_eq!(totals.report(), lines.join("\n"));
        assert_eq!(Totals::of_one().report(), "1 passed, 0 failed");
    }

    #[test]
    fn a_report_of_very_many_failures_is_short() {
        let mut totals = Totals::default();
        (0..NAMES_MAX).for_each(|n| totals.fail(&n.to_string(), ""));
        assert_eq!(totals.report().lines().count(), NAMES_MAX + 1);
        (0..7).for_each(|_| totals.fail("seven more", &"x".repeat(5000)));
        let report = totals.report();
        assert_eq!(report.lines().count(), NAMES_MAX + 2);
        assert!(report.ends_with("FAILED and 7 more\n0 passed, 47 failed"));
        assert!(totals.names.iter().all(|name| name.len() < 250));
    }
}
