//! The document of a run: what `run --json` prints, `--report` writes and `compare` reads. It takes
//! the cells of any scenario as they are: named numbers of each party, round by round.

use super::Spread;
use crate::calibrate::Costs;
use crate::measure::Calibration;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// One `manyring-bench run`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct RunDocument {
    /// The command line.
    pub(crate) command: String,
    /// When it began, in UTC.
    pub(crate) began: String,
    pub(crate) machine: Machine,
    /// The basic costs of the machine.
    #[serde(default)]
    pub(crate) costs: Costs,
    /// The scenarios that have come to their end.
    pub(crate) scenarios: Vec<ScenarioDocument>,
    /// The parts that are missing, and why.
    #[serde(default)]
    pub(crate) left_out: Vec<String>,
}

/// Where it ran.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Machine {
    /// Processor, CPUs, kernel.
    pub(crate) name: String,
    /// The frequency governor of CPU 0, if the system has one.
    #[serde(default)]
    pub(crate) governor: Option<String>,
    /// Mebibytes of memory.
    #[serde(default)]
    pub(crate) memory_mib: u64,
}

/// A scenario of a run.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct ScenarioDocument {
    pub(crate) name: String,
    /// The purpose of the scenario, in a sentence.
    #[serde(default)]
    pub(crate) about: String,
    /// The command that repeats it alone.
    #[serde(default)]
    pub(crate) command: String,
    /// Each cell can be repeated by that command and `--only`.
    #[serde(default)]
    pub(crate) by_cell: bool,
    /// How long it took.
    #[serde(default)]
    pub(crate) took_seconds: f64,
    pub(crate) report: ReportDocument,
    /// Promises that were broken.
    #[serde(default)]
    pub(crate) broken: Vec<String>,
    /// The figures of a promise that was kept, in words; none if nothing is promised or judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept: Option<String>,
}

impl ScenarioDocument {
    /// The command that repeats a cell.
    pub(crate) fn command_of(&self, cell: &CellDocument) -> String {
        if self.by_cell {
            format!("{} --only={}", self.command, quoted(&cell.name))
        } else {
            self.command.clone()
        }
    }
}

/// The results of a scenario, in the form of its own `--json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct ReportDocument {
    pub(crate) scenario: String,
    pub(crate) machine: String,
    #[serde(default)]
    pub(crate) calibration: Option<Calibration>,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) cells: Vec<CellDocument>,
}

/// One load, measured on each party in turn.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct CellDocument {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) sessions: Option<usize>,
    /// Unit of `throughput`.
    #[serde(default)]
    pub(crate) unit: Option<String>,
    pub(crate) parties: Vec<PartyDocument>,
    /// Ratios of the rounds: `party` (the first, if not named) against `peer`.
    #[serde(default)]
    pub(crate) against: Vec<Map<String, Value>>,
}

/// All runs of one party in one cell.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct PartyDocument {
    pub(crate) name: String,
    pub(crate) samples: Vec<Map<String, Value>>,
}

/// Throughput for each per cent of a CPU, as the reference tables have it: no field of a sample.
pub(crate) const NORMALIZED: &str = "normalized";

/// The main number of a party to that of one queue of its cell: no field of a sample either.
pub(crate) const TO_ONE: &str = "to_one_queue";

impl PartyDocument {
    /// The values of this field in every round. Disturbed rounds are left out, unless all rounds
    /// are disturbed.
    pub(crate) fn rounds(&self, key: &str) -> Vec<f64> {
        let is_calm = |sample: &&Map<String, Value>| {
            !sample.get("disturbed").and_then(Value::as_bool).unwrap_or(false)
        };
        let calm: Vec<f64> =
            self.samples.iter().filter(is_calm).filter_map(|s| number(s, key)).collect();
        if calm.is_empty() {
            return self.samples.iter().filter_map(|sample| number(sample, key)).collect();
        }
        calm
    }

    /// Median, smallest and largest; none if the samples have no such number.
    pub(crate) fn spread(&self, key: &str) -> Option<Spread> {
        let rounds = self.rounds(key);
        (!rounds.is_empty()).then(|| Spread::of(rounds))
    }

    /// Rounds that were disturbed, however often they were tried.
    pub(crate) fn disturbed(&self) -> usize {
        let is = |sample: &&Map<String, Value>| sample.get("disturbed") == Some(&Value::Bool(true));
        self.samples.iter().filter(is).count()
    }
}

/// The field for what a cache line took, and the longest time of one in nanoseconds, between the
/// processors of one host.
pub(crate) const LINE: &str = "line_ns";
const LINE_MAX_NS: f64 = 1000.0;

fn number(sample: &Map<String, Value>, key: &str) -> Option<f64> {
    if key != NORMALIZED {
        let value = sample.get(key).and_then(Value::as_f64);
        // Another program ran in the place of one of the two threads.
        return value.filter(|value| key != LINE || *value <= LINE_MAX_NS);
    }
    let of = |key| sample.get(key).and_then(Value::as_f64);
    let (throughput, cpu) = (of("throughput")?, of("cpu")?);
    Some(if cpu > 0.0 { (throughput / cpu).floor() } else { 0.0 })
}

impl RunDocument {
    /// Reads a document of `run`, or what a scenario's own `--json` has printed.
    ///
    /// # Errors
    /// The file cannot be read, or is neither; the sentence names it.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if value.get("scenarios").is_some() {
            return serde_json::from_value(value).map_err(|error| error.to_string());
        }
        let report: ReportDocument = serde_json::from_value(value)
            .map_err(|error| format!("neither a run nor a scenario's report: {error}"))?;
        let machine = Machine { name: report.machine.clone(), ..Machine::default() };
        let scenario = ScenarioDocument {
            name: report.scenario.clone(),
            about: String::new(),
            command: format!("manyring-bench {}", report.scenario),
            by_cell: false,
            took_seconds: 0.0,
            report,
            broken: Vec::new(),
            kept: None,
        };
        Ok(Self { machine, scenarios: vec![scenario], ..Self::default() })
    }
}

/// A word as a shell takes it.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A scenario with one cell: each party has these throughputs, at 50 % of a CPU.
    pub(crate) fn scenario(name: &str, cell: &str, parties: &[(&str, &[f64])]) -> ScenarioDocument {
        let sample = |throughput: &f64| json!({"throughput": throughput, "cpu": 50.0});
        let party = |(name, rounds): &(&str, &[f64])| {
            let samples: Vec<Value> = rounds.iter().map(sample).collect();
            json!({"name": name, "samples": samples})
        };
        let parties: Vec<Value> = parties.iter().map(party).collect();
        let cell = json!({"name": cell, "sessions": 1, "unit": "kpps", "parties": parties});
        let report = json!({"scenario": name, "machine": "m", "rounds": 1, "seconds": 0.5,
            "cells": [cell]});
        let all = json!({"name": name, "command": format!("manyring-bench {name}"),
            "by_cell": true, "report": report});
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn normalized_is_the_whole_part_of_throughput_by_cpu_of_each_round() {
        let scenario = scenario("s", "c", &[("a", &[99.0, 149.0, 201.0])]);
        let party = &scenario.report.cells[0].parties[0];
        assert_eq!(party.rounds(NORMALIZED), [1.0, 2.0, 4.0]);
        assert_eq!(party.spread("throughput").unwrap().median, 149.0);
        assert_eq!(party.spread("iops"), None);
    }

    #[test]
    fn a_cache_line_that_waited_for_a_thread_was_not_timed() {
        let sample = |ns: u32| json!({"line_ns": ns}).as_object().unwrap().clone();
        let party = |lines: &[u32]| {
            let samples = lines.iter().copied().map(sample).collect();
            PartyDocument { name: String::new(), samples }.spread("line_ns")
        };
        let spread = party(&[45, 38_211, 44]).unwrap();
        assert_eq!((spread.min, spread.max), (44.0, 45.0));
        assert_eq!(party(&[38_211]), None);
    }

    #[test]
    fn disturbed_rounds_count_only_where_there_is_no_other() {
        let sample = |rate: u32, disturbed: bool| {
            json!({"rate": rate, "disturbed": disturbed}).as_object().unwrap().clone()
        };
        let party = |samples| PartyDocument { name: String::new(), samples };
        let mixed = party(vec![sample(1, true), sample(5, false)]);
        assert_eq!((mixed.rounds("rate"), mixed.disturbed()), (vec![5.0], 1));
        assert_eq!(party(vec![sample(1, true)]).rounds("rate"), [1.0]);
    }

    #[test]
    fn the_report_of_one_scenario_is_a_document_too_and_anything_else_is_an_error() {
        let report = scenario("tcp-rr", "c", &[("a", &[1.0])]).report;
        let document = RunDocument::parse(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(document.scenarios[0].command, "manyring-bench tcp-rr");
        let again = RunDocument::parse(&serde_json::to_string(&document).unwrap()).unwrap();
        assert_eq!(again.scenarios[0].report.cells.len(), 1);
        assert!(RunDocument::parse("{}").unwrap_err().contains("neither"));
        assert!(RunDocument::parse("no").is_err());
    }

    #[test]
    fn the_command_of_a_cell_can_be_pasted_into_a_shell() {
        let scenario = scenario("tap-small", "64 B, it's merged", &[]);
        let command = scenario.command_of(&scenario.report.cells[0]);
        assert_eq!(command, r"manyring-bench tap-small --only='64 B, it'\''s merged'");
        assert_eq!((quoted("--rounds=5"), quoted("")), ("--rounds=5".into(), "''".into()));
    }
}
