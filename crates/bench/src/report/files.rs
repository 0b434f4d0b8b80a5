//! Writes the files of `--report DIR`: the page, and its data as CSV and JSON.

use super::compare::Comparison;
use super::document::{NORMALIZED, RunDocument};
use super::{columns, page};
use std::path::Path;

/// The page of a run.
pub(crate) const PAGE: &str = "index.html";

/// Writes `index.html`, `run.csv` and `run.json` into a folder, which is made if it is not there.
///
/// # Errors
/// A file cannot be written; the sentence names it.
pub(crate) fn write_run(folder: &Path, document: &RunDocument) -> Result<(), String> {
    let json = serde_json::to_string_pretty(document).map_err(|error| error.to_string())?;
    let files = [(PAGE, page::of_run(document)), ("run.csv", csv(document))];
    write(folder, files.into_iter().chain([("run.json", json + "\n")]))
}

/// Writes `compare.html` into a folder.
///
/// # Errors
/// As [`write_run`].
pub(crate) fn write_comparison(
    folder: &Path,
    (before, after): (&RunDocument, &RunDocument),
    comparison: &Comparison,
) -> Result<(), String> {
    write(folder, [("compare.html", page::of_comparison(before, after, comparison))])
}

fn write(
    folder: &Path,
    files: impl IntoIterator<Item = (&'static str, String)>,
) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// A line for each number of each round.
fn csv(document: &RunDocument) -> String {
    let mut text = String::from("scenario,cell,party,round,number,value\n");
    for scenario in &document.scenarios {
        for cell in &scenario.report.cells {
            let heads = columns::of_cells([cell]);
            for party in &cell.parties {
                let name = [&scenario.name, &cell.name, &party.name].map(|word| field(word));
                let name = name.join(",");
                for (round, sample) in party.samples.iter().enumerate() {
                    let heads = heads.iter().filter(|head| head.key() != NORMALIZED);
                    for head in heads {
                        if let Some(value) = sample.get(head.key()) {
                            let line = format!("{name},{},{},{value}\n", round + 1, head.key());
                            text.push_str(&line);
                        }
                    }
                }
            }
        }
    }
    text
}

/// A field of CSV: quoted where it must be.
fn field(word: &str) -> String {
    if word.contains([',', '"', '\n']) {
        return format!("\"{}\"", word.replace('"', "\"\""));
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::tests::scenario;

    #[test]
    fn every_number_of_every_round_is_a_line() {
        let one = scenario("tcp-rr", "256 B, 1 connections", &[("a \"b\"", &[7.5, 8.0])]);
        let document = RunDocument { scenarios: vec![one], ..RunDocument::default() };
        let csv = csv(&document);
        assert_eq!(csv.lines().count(), 1 + 2 * 2, "{csv}");
        let line = "tcp-rr,\"256 B, 1 connections\",\"a \"\"b\"\"\",2,throughput,8.0";
        assert!(csv.contains(line), "{csv}");
    }

    #[test]
    fn a_report_is_three_files_and_its_json_is_the_run_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new/folder");
        let one = scenario("s", "c", &[("a", &[1.0])]);
        let document = RunDocument { scenarios: vec![one], ..RunDocument::default() };
        write_run(&folder, &document).unwrap();
        let again = RunDocument::read(&folder.join("run.json")).unwrap();
        assert_eq!(again.scenarios[0].name, "s");
        write_comparison(&folder, (&document, &again), &Comparison::new(&document, &again))
            .unwrap();
        for name in ["index.html", "run.csv", "compare.html"] {
            assert!(folder.join(name).is_file(), "{name}");
        }
        let error = write_run(Path::new("/dev/null/x"), &document).unwrap_err();
        assert!(error.contains("/dev/null/x"), "{error}");
    }
}
