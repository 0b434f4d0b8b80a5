//! Tests of the rows, on runs as they are recorded.

use super::*;
use serde_json::{Value, json};

/// A scenario of cells (name, sessions, parties with a sample of each round) as `run.json` has it.
fn scenario(name: &str, cells: &[(&str, usize, Value)], more: &Value) -> Value {
    let cell = |(name, sessions, parties): &(&str, usize, Value)| {
        let parties: Vec<Value> = parties
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, samples)| json!({"name": name, "samples": samples}))
            .collect();
        json!({"name": name, "sessions": sessions, "parties": parties})
    };
    let cells: Vec<Value> = cells.iter().map(cell).collect();
    let report =
        json!({"scenario": name, "machine": "m", "rounds": 1, "seconds": 0.5, "cells": cells});
    let mut all = json!({"name": name, "report": report});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

fn streams(four: f64, more: &Value) -> Value {
    let parties = |four: f64| {
        let sample = |rate: f64| json!([{"throughput": rate, "cpu": 50.0}]);
        json!({"manyring, 4 pairs": sample(four), "manyring, 1 pairs": sample(100.0)})
    };
    let names = ["to the guest, 512 B, 1 sessions", "from the guest, 512 B, 1 sessions"];
    let mut cells: Vec<_> = names.iter().map(|name| (*name, 1, parties(four))).collect();
    let names = ["to the guest, 512 B, 8 sessions", "from the guest, 512 B, 8 sessions"];
    cells.extend(names.iter().map(|name| (*name, 8, parties(four * 1.2))));
    scenario("multiqueue", &cells, more)
}

fn judged(scenarios: Vec<Value>) -> Vec<(Option<bool>, String)> {
    let run = json!({"command": "c", "began": "b", "machine": {"name": "m"},
        "scenarios": scenarios});
    let run = RunDocument::parse(&run.to_string()).unwrap();
    judge(&run).into_iter().map(|row| (row.holds, row.words)).collect()
}

#[test]
fn a_row_that_was_not_measured_is_said_to_be_so() {
    let rows = judged(vec![streams(95.0, &json!({"kept": "worst 0.95"}))]);
    let not_measured = |at: usize| rows[at].0.is_none();
    let unmeasured: Vec<usize> = (0..rows.len()).filter(|at| not_measured(*at)).collect();
    assert_eq!(unmeasured, [3, 5, 6, 7], "driver, notifications, copies and disks");
    assert_eq!(rows[6].1, "the run has no figures of zero-copy");
}

#[test]
fn streams_by_pairs_hold_or_say_which_do_not() {
    let rows = judged(vec![streams(95.0, &json!({"kept": "worst 0.95"}))]);
    assert_eq!([0, 1, 2, 4, 9].map(|at| rows[at].0), [Some(true); 5], "{rows:?}");
    assert_eq!(rows[9].1, "worst 0.95");
    let rows = judged(vec![streams(80.0, &json!({"broken": ["worst 0.80"]}))]);
    assert_eq!([1, 4, 9].map(|at| rows[at].0), [Some(false); 3], "{rows:?}");
    assert_eq!(rows[1].1, "one stream by several pairs, worst 0.80x");
    assert_eq!(rows[9].1, "worst 0.80");
    assert_eq!(rows[8].0, Some(false), "the documents have more tables");
    assert!(rows[8].1.starts_with("8 of the tap's 256 cells"), "{}", rows[8].1);
    let rows = judged(vec![streams(0.0, &json!({}))]);
    assert_eq!([rows[0].0, rows[9].0], [Some(false), None], "nothing passed, nothing was judged");
}

#[test]
fn notifications_and_copies_are_counted() {
    let op = |kicks: f64, calls: f64| json!([{"kicks_per_op": kicks, "calls_per_op": calls}]);
    let ladder = |moderated: f64| {
        let parties = json!({"no suppression": op(2.0, 2.0), "suppression": op(0.5, 0.5),
            "delayed kick": op(0.2, 0.5), "moderation": op(0.5, moderated)});
        scenario("tcp-ladder", &[("256 B, 100 connections", 100, parties)], &json!({}))
    };
    let frames = |lent: f64| {
        let cost = |us: f64| json!([{"cpu_us_per_op": us}]);
        // The parties stand in the order of their names.
        let parties = json!({"1: lent": cost(lent), "2: copied": cost(5.0)});
        scenario("zero-copy", &[("a frame of 1500 B leaves", 1, parties)], &json!({}))
    };
    let rows = judged(vec![ladder(0.1), frames(2.0)]);
    assert_eq!([3, 5, 6].map(|at| rows[at].0), [Some(true); 3], "{rows:?}");
    assert_eq!(rows[6].1, "1500 B, 0.40x of the CPU time of a copy");
    let rows = judged(vec![ladder(0.6), frames(6.0)]);
    assert_eq!([3, 5, 6].map(|at| rows[at].0), [Some(true), Some(false), Some(false)]);
    let words = "calls per transaction, moderation 0.600, suppression 0.500";
    assert_eq!(rows[5].1, words, "only what does not hold");
}
