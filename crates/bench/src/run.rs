//! `manyring-bench run`: scenarios one after the other, within a time, into one document.

use crate::measure::{machine, now};
use crate::plan::{self, Cost};
use crate::progress;
use crate::report::document::{Machine, RunDocument, ScenarioDocument as Entry, quoted};
use crate::report::files;
use crate::report::{self, rows};
use crate::scenario::ScenarioArgs;
use crate::scenario::registry::{self, Scenario};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// `manyring-bench run ..`
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// Scenarios of `manyring-bench list`, `all`, or `references`: the tables of the documents
    /// alone, and which rows of README hold.
    #[arg(required = true, value_name = "SCENARIO")]
    names: Vec<String>,
    /// Write the document as a page, as CSV and as JSON into this folder.
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    #[command(flatten)]
    options: ScenarioArgs,
}

/// The name of the scenarios that have a table of one of the documents.
const REFERENCES: &str = "references";

/// Runs the scenarios. The results of those that have finished are printed and written even if
/// others fail, or a signal ends the run.
///
/// # Errors
/// A scenario is unknown, failed or broke a promise, a peer is missing, or a signal came.
pub(crate) fn run(args: &BenchArgs) -> Result<(), String> {
    let scenarios = chosen(&args.names)?;
    let mut document = RunDocument {
        command: command_line(std::env::args_os()),
        began: utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())),
        machine: describe(),
        costs: args.options.costs(),
        ..RunDocument::default()
    };
    let is_of_references = args.names.iter().any(|name| name == REFERENCES);
    let (mut failed, start) = (Vec::new(), now());
    for (index, scenario) in scenarios.iter().enumerate() {
        if progress::is_stopped() {
            break;
        }
        let rest = &scenarios[index..];
        let rounds = args.options.wanted_rounds().unwrap_or_else(|| {
            plan::rounds(&costs(rest), args.options.seconds(), left(start.elapsed().as_secs_f64()))
        });
        let seconds = |some: &[&dyn Scenario]| -> f64 {
            let cost = |cost: &Cost| cost.seconds(rounds, args.options.seconds());
            costs(some).iter().map(cost).sum()
        };
        let (planned, after) = (seconds(&rest[..1]), seconds(&rest[1..]));
        progress::begin(scenario.facts().name, (index + 1, scenarios.len()), planned, after);
        let outcome = one(*scenario, &args.options.words(rounds));
        progress::end();
        match outcome {
            Ok(entry) => {
                match (args.options.json, is_of_references) {
                    (true, _) => {}
                    (false, true) => print!("{}", report::references_text(&entry)),
                    (false, false) => print!("{}", report::text(&entry)),
                }
                failed.extend(entry.broken.iter().cloned());
                document.scenarios.push(entry);
                // Whatever comes next: this scenario is kept.
                write(args, &document)?;
            }
            Err(problem) if progress::is_stopped() => drop(problem),
            Err(problem) => progress::leave_out(format!("{}: {problem}", scenario.facts().name)),
        }
    }
    document.left_out = progress::left_out();
    if progress::is_stopped() {
        let done = document.scenarios.len();
        let all = scenarios.len();
        document.left_out.push(format!("stopped by a signal after {done} of {all} scenarios"));
    }
    if args.options.json {
        let text = serde_json::to_string_pretty(&document).map_err(|e| e.to_string())?;
        println!("{text}");
    } else if is_of_references {
        print!("{}", rows::text(&document));
    }
    write(args, &document)?;
    if let Some(folder) = &args.report {
        eprintln!("manyring-bench: the page is {}", folder.join(files::PAGE).display());
    }
    failed.extend(document.left_out.iter().cloned());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

fn write(args: &BenchArgs, document: &RunDocument) -> Result<(), String> {
    args.report.as_ref().map_or(Ok(()), |folder| files::write_run(folder, document))
}

/// Seconds that are left of the time for all.
fn left(elapsed: f64) -> f64 {
    (plan::BUDGET - elapsed).max(0.0)
}

fn costs(scenarios: &[&dyn Scenario]) -> Vec<Cost> {
    scenarios.iter().map(|scenario| scenario.facts().cost).collect()
}

/// The scenarios of these names, in their order, each once.
fn chosen(names: &[String]) -> Result<Vec<&'static dyn Scenario>, String> {
    if names.iter().any(|name| name == "all") {
        return Ok(registry::ALL.to_vec());
    }
    let mut chosen: Vec<&'static dyn Scenario> = Vec::new();
    let names = names.iter().map(String::as_str);
    let names = names.flat_map(|name| match name {
        REFERENCES => rows::SCENARIOS.to_vec(),
        name => vec![name],
    });
    for name in names {
        let scenario = registry::find(name).ok_or_else(|| {
            format!("no scenario is called {name}; `manyring-bench list` names them")
        })?;
        if !chosen.iter().any(|other| other.facts().name == scenario.facts().name) {
            chosen.push(scenario);
        }
    }
    Ok(chosen)
}

/// Runs one by its words, as they would stand behind its name on the command line.
fn one(scenario: &dyn Scenario, words: &[OsString]) -> Result<Entry, String> {
    let all = std::iter::once(scenario.facts().name.into()).chain(words.iter().cloned());
    let matches =
        scenario.command().try_get_matches_from(all.clone()).map_err(|e| e.to_string())?;
    let command = command_line(std::iter::once("manyring-bench".into()).chain(all));
    Ok(registry::run(scenario, &matches, command)?.0)
}

/// Words as a shell takes them; the program by its name alone.
fn command_line(words: impl Iterator<Item = OsString>) -> String {
    let words = words.map(|word| quoted(&word.to_string_lossy()));
    let mut words: Vec<String> = words.collect();
    if let Some(program) = words.first_mut() {
        *program = "manyring-bench".to_owned();
    }
    words.join(" ")
}

fn describe() -> Machine {
    let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
    let governor = std::fs::read_to_string(governor).ok().map(|text| text.trim().to_owned());
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = memory.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    Machine { name: machine(), governor, memory_mib: kib.unwrap_or(0) / 1024 }
}

/// A time as `2026-01-31 23:59 UTC`.
fn utc(unix_seconds: u64) -> String {
    let (mut days, minutes) = (unix_seconds / 86_400, unix_seconds % 86_400 / 60);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, minutes / 60, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        run: BenchArgs,
    }

    #[test]
    fn a_scenario_is_chosen_once_all_means_all_and_an_unknown_one_is_named() {
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let two = chosen(&names(&["tcp-rr", "null-blk", "tcp-rr"])).unwrap();
        assert_eq!(two.iter().map(|s| s.facts().name).collect::<Vec<_>>(), ["tcp-rr", "null-blk"]);
        assert_eq!(chosen(&names(&["all"])).unwrap().len(), registry::ALL.len());
        let error = chosen(&names(&["nul-blk"])).err().unwrap();
        assert!(error.contains("nul-blk") && error.contains("list"), "{error}");
    }

    #[test]
    fn the_words_of_options_give_them_again_to_a_scenario() {
        let given = ["x", "all", "--smoke", "--only", "QD1, a", "--extra=--polling=never"];
        let more = ["--seconds=0.1", "--against", "fio,testpmd", "--client-cpu=1"];
        let run = Alone::try_parse_from(given.iter().chain(&more)).unwrap().run;
        let words = run.options.words(3);
        let all = std::iter::once("x".into()).chain(words.clone());
        let matches = registry::ALL[0].command().try_get_matches_from(all).unwrap();
        let again = <ScenarioArgs as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        assert_eq!(again.words(3), words);
        let line = command_line(std::iter::once("/a/b".into()).chain(words));
        assert!(line.starts_with("manyring-bench --rounds=3"), "{line}");
        assert!(line.contains("'--only=QD1, a'") && line.contains("--against=fio"), "{line}");
    }

    #[test]
    fn a_time_of_the_clock_is_a_date() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_735_689_599), "2024-12-31 23:59 UTC");
    }
}
