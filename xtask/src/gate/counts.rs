//! Instruction counts of the benches against their baselines: the only figures that are judged.
//!
//! A baseline is a text file beside its bench, in the words that the bench prints: a row is its
//! name and instructions per item. A change that costs instructions on purpose renews it, so that
//! its diff shows what it costs.

use crate::cargo::{ROOT, cargo, quiet, see};
use manyring_system::command::text;
use manyring_system::{Context, Outcome, check};
use std::fmt::{Display, Formatter};
use std::path::Path;
use std::process::Command;

/// The command that writes baselines.
const RENEW: &str = "cargo xtask bench-smoke --renew";
/// How far a count may be from its baseline, in percent.
const MARGIN: f64 = 3.0;

/// A bench that counts, what cargo must be told to run it, and its baseline.
struct Bench {
    cargo: &'static [&'static str],
    baseline: &'static str,
}

const BENCHES: [Bench; 2] = [
    Bench {
        cargo: &["bench", "-p", "manyring-queue", "--bench", "ring"],
        baseline: "crates/queue/benches/ring.baseline",
    },
    Bench {
        cargo: &["bench", "-p", "manyring-device", "--features", "bench", "--bench", "turn"],
        baseline: "crates/device/benches/turn.baseline",
    },
];

/// Runs the benches that count, and compares; fails if a count is above its baseline.
pub(super) fn judge() -> Outcome {
    if !cfg!(target_arch = "x86_64") {
        println!("xtask: the baselines are of x86-64: no count is judged here");
        return Ok(());
    }
    let mut bad = 0;
    for bench in &BENCHES {
        let counted = rows(&run(bench)?).context("the bench")?;
        let path = Path::new(ROOT).join(bench.baseline);
        let baseline = std::fs::read_to_string(path).context(bench.baseline)?;
        let found = compare(&rows(&baseline).context(bench.baseline)?, &counted);
        for finding in &found {
            println!("{}: {finding}", bench.baseline);
        }
        bad += found.iter().filter(|finding| finding.is_bad()).count();
    }
    check(bad == 0, || format!("counts that break their baselines: {bad}; if they should: {RENEW}"))
}

/// Writes the baselines anew.
pub(super) fn renew() -> Outcome {
    for bench in &BENCHES {
        let printed = run(bench)?;
        rows(&printed).context("the bench")?;
        std::fs::write(Path::new(ROOT).join(bench.baseline), printed).context(bench.baseline)?;
        println!("xtask: {} is renewed", bench.baseline);
    }
    Ok(())
}

/// Builds the benches that count and shows nothing.
pub(super) fn build() -> Outcome {
    BENCHES.iter().try_for_each(|bench| quiet(&mut command(bench, &["--no-run"])))
}

/// Builds a bench, which is seen, and gives what it prints, which is shown too.
fn run(bench: &Bench) -> Outcome<String> {
    see(&mut command(bench, &["--no-run"]))?;
    let printed = text(&mut command(bench, &["--", "--callgrind"]))?;
    print!("{printed}");
    Ok(printed)
}

/// cargo for a bench, with further arguments. Compiler flags of the shell would count other code.
fn command(bench: &Bench, more: &[&str]) -> Command {
    let mut command = cargo(&[bench.cargo, more].concat());
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    command
}

/// A row of a bench: its name, and instructions per item.
type Row = (String, f64);

/// Reads what a bench prints. Lines that begin with `#` are for people.
fn rows(text: &str) -> Outcome<Vec<Row>> {
    let is_row = |line: &&str| !line.starts_with('#') && !line.trim().is_empty();
    let rows: Option<Vec<Row>> = text.lines().filter(is_row).map(row).collect();
    let rows = rows.ok_or_else(|| format!("a line is no name and count:\n{text}"))?;
    check(!rows.is_empty(), || "there is no count".into())?;
    Ok(rows)
}

fn row(line: &str) -> Option<Row> {
    let (name, count) = line.trim().split_once(' ')?;
    let count = count.trim().parse::<f64>().ok()?;
    (count.is_finite() && count > 0.0).then(|| (name.to_owned(), count))
}

/// Where a count and its baseline do not agree.
#[derive(Clone, Debug, PartialEq)]
enum Finding {
    /// More instructions than the baseline allows.
    Above { name: String, baseline: f64, counted: f64 },
    /// So many fewer that the baseline would let the next change waste them.
    Below { name: String, baseline: f64, counted: f64 },
    /// The bench counts a row that has no baseline.
    New { name: String },
    /// The baseline has a row that the bench does not count.
    Gone { name: String },
}

impl Finding {
    /// True if the gate must not let it pass.
    fn is_bad(&self) -> bool {
        !matches!(self, Self::Below { .. })
    }
}

impl Display for Finding {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Above { name, baseline, counted } => {
                let percent = (counted / baseline - 1.0) * 100.0;
                write!(f, "{name} takes {counted:.1} instructions, {percent:.1} % above its ")?;
                write!(f, "baseline of {baseline:.1}; {MARGIN} % are allowed")
            }
            Self::Below { name, baseline, counted } => {
                let percent = (1.0 - counted / baseline) * 100.0;
                write!(f, "{name} takes {counted:.1} instructions, {percent:.1} % below its ")?;
                write!(f, "baseline of {baseline:.1}, which should be renewed: {RENEW}")
            }
            Self::New { name } => write!(f, "{name} has no baseline"),
            Self::Gone { name } => write!(f, "{name} has a baseline, but is not counted"),
        }
    }
}

/// Compares what was counted with its baseline, row by row.
fn compare(baseline: &[Row], counted: &[Row]) -> Vec<Finding> {
    let of = |rows: &[Row], name: &str| rows.iter().find(|row| row.0 == name).map(|row| row.1);
    let margin = MARGIN / 100.0;
    let judged = counted.iter().filter_map(|(name, counted)| {
        let (name, counted) = (name.clone(), *counted);
        let Some(baseline) = of(baseline, &name) else { return Some(Finding::New { name }) };
        if counted > baseline * (1.0 + margin) {
            Some(Finding::Above { name, baseline, counted })
        } else if counted < baseline * (1.0 - margin) {
            Some(Finding::Below { name, baseline, counted })
        } else {
            None
        }
    });
    let gone = baseline.iter().filter(|(name, _)| of(counted, name).is_none());
    judged.chain(gone.map(|(name, _)| Finding::Gone { name: name.clone() })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASELINE: &str = "# instructions per frame\ntx/1   1000.0\ntx/32     500.0\n";

    fn findings(counted: &str) -> Vec<Finding> {
        compare(&rows(BASELINE).unwrap(), &rows(counted).unwrap())
    }

    #[test]
    fn counts_within_three_percent_of_their_baselines_pass_without_a_word() {
        for counted in ["tx/1 1000\ntx/32 500", "tx/1 1030\ntx/32 485", "tx/32 515\ntx/1 970"] {
            assert_eq!(findings(counted), [], "{counted}");
        }
    }

    #[test]
    fn a_count_more_than_three_percent_above_fails_and_names_both() {
        let found = findings("tx/1 1000\ntx/32 515.1");
        assert!(found.len() == 1 && found[0].is_bad(), "{found:?}");
        let sentence = found[0].to_string();
        assert!(sentence.starts_with("tx/32 takes 515.1 instructions, 3.0 % above"), "{sentence}");
        assert!(sentence.contains("baseline of 500.0"), "{sentence}");
    }

    #[test]
    fn a_count_more_than_three_percent_below_passes_and_asks_for_a_new_baseline() {
        let found = findings("tx/1 960\ntx/32 500");
        assert!(found.len() == 1 && !found[0].is_bad(), "{found:?}");
        let sentence = found[0].to_string();
        assert!(sentence.contains("960.0 instructions, 4.0 % below"), "{sentence}");
        assert!(sentence.ends_with(RENEW), "{sentence}");
    }

    #[test]
    fn a_row_that_only_one_side_has_fails() {
        let found = findings("tx/1 1000\nrx/1 1");
        assert_eq!(
            found,
            [Finding::New { name: "rx/1".into() }, Finding::Gone { name: "tx/32".into() }]
        );
        assert!(found.iter().all(Finding::is_bad));
    }

    #[test]
    fn what_is_no_list_of_counts_is_refused() {
        for text in ["", "# nothing\n", "tx/1\n", "tx/1 fast\n", "tx/1 0\n", "tx/1 NaN\n"] {
            assert!(rows(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_baselines_are_there_and_can_be_read() {
        for Bench { baseline, .. } in BENCHES {
            let text = std::fs::read_to_string(Path::new(ROOT).join(baseline)).unwrap();
            assert!(rows(&text).is_ok(), "{baseline}");
        }
    }
}
