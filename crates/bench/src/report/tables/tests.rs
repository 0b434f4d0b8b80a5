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

#[test]
fn packets_and_latencies_of_streams_are_columns() {
    let mut run = recorded("tap-stream");
    let sample = &mut run.report.cells[0].parties[0].samples[0];
    let json = serde_json::to_value(crate::report::net::NetSample {
        throughput: 9263.0,
        packets_sent: 2_737_788.0,
        avg_pkt_size: 5689.0,
        p50_us: 12.5,
        p99_us: 1250.0,
        ..crate::report::net::NetSample::default()
    });
    *sample = json.unwrap().as_object().unwrap().clone();
    run.report.cells[0].parties[0].samples.truncate(1);
    run.report.cells.truncate(1);
    let text = text(&run);
    let heads: Vec<&str> = text.lines().nth(3).unwrap().split("  ").map(str::trim).collect();
    let heads: Vec<&str> = heads.into_iter().filter(|head| !head.is_empty()).collect();
    let at = heads.iter().position(|head| *head == "packets sent").unwrap();
    assert_eq!(heads[at + 1], "packet B", "{heads:?}");
    let row = text.lines().find(|line| line.trim_start().starts_with("manyring ")).unwrap();
    for number in ["9,263", "2,737,788", "5,689", "12.5", "1,250"] {
        assert!(row.contains(number), "{number} is not in {row}");
    }
}
