//! Tests of the tables, on recorded runs.

use super::*;
use crate::report::document::RunDocument;
use crate::report::text;

/// A run of three scenarios, as `run --json` has printed it.
const RUN: &str = include_str!("../../../../../system/src/behaviours/bench_report.json");

fn recorded(name: &str) -> ScenarioDocument {
    let run = RunDocument::parse(RUN).unwrap();
    run.scenarios.into_iter().find(|scenario| scenario.name == name).unwrap()
}

#[test]
fn a_terminal_has_the_rows_ratios_and_references_of_the_page() {
    let streams = text(&recorded("tap-stream"));
    let heads = streams.lines().find(|line| line.trim_start().starts_with("party")).unwrap();
    assert!(heads.contains("normalized") && heads.contains("ref. Mbit/s"), "{heads}");
    assert!(streams.contains("\n    manyring, 4 pairs against manyring, 1 pairs: "), "{streams}");
    assert!(!streams.contains("--only"), "commands are for the page");
    let mut disks = recorded("null-blk");
    let rounds = serde_json::json!([{"line_ns": 40, "rounds": 1, "ratio": 2.0},
        {"line_ns": 205, "rounds": 2, "ratio": 1.5}]);
    disks.report.cells[0].against[0].insert("by_distance".into(), rounds);
    let distances = "by distance of the CPUs: 2.00x near (40 ns a cache line, 1 round), 1.50x far";
    assert!(text(&disks).contains(distances), "{}", text(&disks));
}
