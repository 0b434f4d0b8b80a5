//! Runs behaviours one by one, says PASS or FAIL of each, keeps the logs of failures.

use crate::behaviours::{Behaviour, Scene, Stage};
use crate::{Context, Outcome};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How many passed and how many failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Passed.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
}

impl Totals {
    /// Counts one more.
    pub fn count(&mut self, passed: bool) {
        if passed { self.passed += 1 } else { self.failed += 1 }
    }

    /// Adds others.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Runs `behaviours` against `binary`; the logs of failures stay in `logs`.
///
/// # Errors
/// The folder of the logs cannot be written; what fails in a behaviour is counted.
pub fn run(behaviours: &[Behaviour], binary: PathBuf, logs: &Path) -> Outcome<Totals> {
    let stage = Stage { binary, uml: OnceCell::new(), qemu: OnceCell::new() };
    let mut totals = Totals::default();
    if logs.exists() {
        std::fs::remove_dir_all(logs).context(logs.display())?;
    }
    for behaviour in behaviours {
        let folder = logs.join(behaviour.name);
        let start = Instant::now();
        let outcome = Scene::play(&stage, behaviour, &folder);
        let seconds = start.elapsed().as_secs_f64();
        totals.count(outcome.is_ok());
        match outcome {
            Ok(()) => {
                println!("PASS system::{} ({seconds:.1} s)", behaviour.name);
                std::fs::remove_dir_all(&folder).context(folder.display())?;
            }
            Err(error) => {
                println!("FAIL system::{} ({seconds:.1} s): {error}", behaviour.name);
                println!("     logs: {}", folder.display());
            }
        }
    }
    Ok(totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_one_line_that_ci_reads() {
        let mut totals = Totals { passed: 3, failed: 0 };
        totals.count(false);
        totals.add(Totals { passed: 2, failed: 1 });
        assert_eq!(totals.to_string(), "5 passed, 2 failed");
    }
}
