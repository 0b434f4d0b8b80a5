//! `cargo xtask readme`: README's table of promises, written from the figures of one run.

use crate::cargo::{ROOT, build_bench};
use manyring_system::command::text;
use manyring_system::{Context, Outcome, check};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The figures, as `manyring-bench readme` prints them.
pub(crate) const FIGURES: &str = "docs/promises.json";
/// The marks before and behind the written lines, in a README as in this program.
const BEGIN: &str = "<!-- From here on written by `cargo xtask readme`. -->";
const END: &str = "<!-- Up to here written by `cargo xtask readme`. -->";
/// More than that nobody reads.
const ROWS_MAX: usize = 8;

/// Takes the figures of a run, if one is given, and writes the table.
pub(crate) fn run(run: Option<&str>) -> Outcome {
    let root = Path::new(ROOT);
    if let Some(run) = run {
        let bench = build_bench("dev")?;
        let figures = text(Command::new(bench).args(["readme", run]))?;
        std::fs::write(root.join(FIGURES), figures).context(FIGURES)?;
        println!("xtask: wrote {FIGURES}");
    }
    let figures = std::fs::read_to_string(root.join(FIGURES)).context(FIGURES)?;
    let readme = std::fs::read_to_string(root.join("README.md")).context("README.md")?;
    let written = with_table(&readme, &table(&figures)?)?;
    std::fs::write(root.join("README.md"), written).context("README.md")?;
    println!("xtask: wrote README.md");
    Ok(())
}

/// The fault of a README's table; `None`: it shows these figures.
pub(crate) fn difference(readme: &str, figures: &str) -> Option<String> {
    let written = table(figures).and_then(|table| with_table(readme, &table));
    match written {
        Ok(written) if written == readme => None,
        Ok(_) => Some(format!("the table is not that of {FIGURES}: cargo xtask readme")),
        Err(problem) => Some(problem),
    }
}

/// The lines between the marks.
fn table(figures: &str) -> Outcome<String> {
    let figures: Value = serde_json::from_str(figures).context(FIGURES)?;
    let rows = figures["rows"].as_array().ok_or(format!("{FIGURES}: no rows"))?;
    check((1..=ROWS_MAX).contains(&rows.len()), || {
        format!("{FIGURES}: {} rows, {ROWS_MAX} at most", rows.len())
    })?;
    let mut text = String::from(
        "| what | against | it reaches | CPU for each | command |\n|---|---|---|---|---|\n",
    );
    for row in rows {
        let word = |key: &str| row[key].as_str().ok_or(format!("{FIGURES}: a row without {key}"));
        let number = |key: &str| row[key].as_f64().ok_or(format!("{FIGURES}: a row without {key}"));
        let mut figure =
            format!("{}x ({} to {})", number("median")?, number("min")?, number("max")?);
        figure += &row["cpus"].as_str().map_or(String::new(), |cpus| format!(", CPUs {cpus}"));
        let cpu = row["cpu"].as_f64().map_or("-".to_owned(), |cpu| format!("{cpu}x"));
        let (what, than, command) = (word("what")?, word("than")?, word("command")?);
        text += &format!("| {what} | {than} | {figure} | {cpu} | `{command}` |\n");
    }
    let word = |key: &str| figures[key].as_str().ok_or(format!("{FIGURES}: no {key}"));
    let (rounds, machine) = (word("rounds")?, word("machine")?);
    text += &format!(
        "\nOur requests, packets or bytes in a second divided by the other side's: the median of \
         the ratios of {rounds} rounds,\nwith the smallest and the largest, both sides in turn in \
         one run. {machine}; other machines differ.\nCPU for each: the CPU time that the server \
         takes for one of them, against what the other side takes, in the same run.\nCPUs \
         near or far: whether the two CPUs were threads or neighbours of one core (20 to 60 ns \
         for a cache line), or not (100 and more).\nA client that polls \
         never sleeps; a guest does, and gets other ratios. The other figures, and how they are \
         measured:\n[docs/guide/bench.md](docs/guide/bench.md).\n"
    );
    Ok(text)
}

/// A README with other lines between its marks.
fn with_table(readme: &str, table: &str) -> Outcome<String> {
    let marks = "README.md: the marks of the table of promises are missing";
    let (before, rest) = readme.split_once(BEGIN).ok_or(marks)?;
    let (_, after) = rest.split_once(END).ok_or(marks)?;
    Ok(format!("{before}{BEGIN}\n{table}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(rows: usize) -> String {
        let row = r#"{"what":"w","than":"t","median":2.9,"min":2.0,"max":13.0,"cpu":0.5,
            "cpus":"near","command":"c"}"#;
        let rows = vec![row; rows].join(",");
        format!(r#"{{"machine":"m","rounds":"5","rows":[{rows}]}}"#)
    }

    #[test]
    fn a_table_has_a_row_for_each_promise_and_eight_at_most() {
        let text = table(&figures(8)).unwrap();
        assert_eq!(
            text.matches("| w | t | 2.9x (2 to 13), CPUs near | 0.5x | `c` |").count(),
            8,
            "{text}"
        );
        for wrong in [figures(9), figures(0), "{}".to_owned(), "no".to_owned()] {
            assert!(table(&wrong).unwrap_err().contains(FIGURES), "{wrong}");
        }
    }

    #[test]
    fn a_readme_that_shows_other_figures_is_found() {
        let readme = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        assert!(difference(&readme, &figures(1)).unwrap().contains("cargo xtask readme"));
        let written = with_table(&readme, &table(&figures(1)).unwrap()).unwrap();
        assert_eq!(difference(&written, &figures(1)), None);
        assert!(written.starts_with("a\n") && written.ends_with("\nb\n"), "{written}");
        assert!(difference(&written, &figures(2)).is_some());
        assert!(difference("no marks", &figures(1)).unwrap().contains("marks"));
    }
}
