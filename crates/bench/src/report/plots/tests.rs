//! Tests of which plots a scenario has.

use super::*;
use crate::report::document::tests::scenario;
use serde_json::json;

/// A scenario of several cells with the same parties.
fn of_cells(cells: &[&str], parties: &[&str]) -> ScenarioDocument {
    let parties: Vec<(&str, &[f64])> = parties.iter().map(|name| (*name, &[5.0][..])).collect();
    let mut all = scenario("s", cells[0], &parties);
    for name in &cells[1..] {
        all.report.cells.extend(scenario("s", name, &parties).report.cells);
    }
    all
}

fn found(scenario: &ScenarioDocument) -> Vec<(String, String, usize, Kind)> {
    let plots = of(scenario).into_iter().filter(|plot| plot.y == "kpps");
    plots.map(|plot| (plot.title, plot.x, plot.series.len(), plot.kind)).collect()
}

#[test]
fn cells_that_differ_in_a_number_are_lines_over_it() {
    let cells = ["one queue, QD1, polls", "one queue, QD32, polls", "other, QD64, polls"];
    let plots = found(&of_cells(&cells, &["a", "b"]));
    let line =
        ("one queue, QD…, polls".to_owned(), "requests in flight".to_owned(), 2, Kind::Lines);
    let bars = ("other, QD64, polls".to_owned(), String::new(), 2, Kind::Bars);
    assert_eq!(plots, [line, bars]);
}

#[test]
fn parties_that_differ_in_a_number_are_lines_over_it_too() {
    let cells = ["to guest, 1 streams by queue pairs", "to guest, 8 streams by queue pairs"];
    let parties = ["manyring, 4 pairs", "manyring, 2 pairs", "manyring, 1 pairs"];
    let plots = found(&of_cells(&cells, &parties));
    let title = "to guest, … streams by queue pairs".to_owned();
    let by_streams = (title.clone(), "streams".to_owned(), 3, Kind::Lines);
    assert_eq!(plots, [by_streams, (title, "pairs".to_owned(), 2, Kind::Lines)]);
}

#[test]
fn a_single_cell_of_numbered_parties_is_a_line_and_its_points_are_in_order() {
    let idle = of_cells(&["5 s of nothing"], &["1 device", "100 devices", "10 devices"]);
    let plots = of(&idle);
    let points: Vec<f64> = plots[0].series[0].points.iter().map(|(x, _)| *x).collect();
    assert_eq!((plots[0].x.as_str(), points), ("devices", vec![1.0, 10.0, 100.0]));
}

#[test]
fn the_number_with_most_values_is_the_axis_where_several_differ() {
    let cells = ["512 B, 1 sessions", "512 B, 2 sessions", "512 B, 4 sessions", "64 B, 1 sessions"];
    let plots = found(&of_cells(&cells, &["a", "b"]));
    assert_eq!(plots[0].0, "512 B, … sessions");
    assert_eq!((plots.len(), plots[1].3), (2, Kind::Bars));
}

#[test]
fn a_histogram_adds_all_rounds_up_and_is_in_per_cent() {
    let mut all = of_cells(&["c"], &["a", "b"]);
    let party = &mut all.report.cells[0].parties[0];
    let sample = json!({"latency_us": [[1.0, 30], [2.0, 10]]}).as_object().unwrap().clone();
    party.samples = vec![sample.clone(), sample];
    let plots = latencies(&all);
    let shares: Vec<f64> = plots[0].series[0].points.iter().map(|(_, y)| y.median).collect();
    assert_eq!((plots.len(), plots[0].series.len(), shares), (1, 1, vec![75.0, 25.0]));
}

#[test]
fn queue_pairs_are_plotted_as_ratios_too_with_the_curve_of_the_documents() {
    let parties: Vec<(&str, &[f64])> =
        vec![("4 pairs", &[8.0, 9.0]), ("2 pairs", &[4.0, 6.0]), ("1 pairs", &[4.0, 3.0])];
    let one = |sessions: usize| {
        scenario("multiqueue", &format!("from the guest, 512 B, {sessions} sessions"), &parties)
    };
    let mut all = one(2);
    all.report.cells.extend(one(8).report.cells);
    let plots = of(&all);
    let named = |y: &str| plots.iter().filter(|plot| plot.y == y).collect::<Vec<_>>();
    let [ratios, normalized] = ["ratio to one queue", "normalized"].map(named);
    assert_eq!((ratios.len(), normalized.len()), (1, 1));
    let point = |name: &str| {
        let series = ratios[0].series.iter().find(|series| series.name == name).unwrap();
        (series.is_reference, series.points[0].1.median)
    };
    // By rounds: 8 to 4 and 9 to 3. In the document 2485 of 7222.
    assert_eq!(point("4 pairs"), (false, 2.5));
    let (is_reference, theirs) = point("4 pairs, reference");
    assert!(is_reference && theirs < 0.6, "{theirs}");
    let dashed = named("kpps")[0].series.iter().filter(|series| series.is_reference).count();
    assert_eq!(dashed, 3);
}

#[test]
fn the_curves_of_the_xen_document_lie_over_ours() {
    let parties = ["1 queues", "4 queues", "8 queues", "16 queues"];
    let mut disks = of_cells(&["null disk, QD256 in all"], &parties);
    disks.name = "xen-blk-queues".into();
    let iops = |sample: &mut serde_json::Map<_, _>| {
        *sample = json!({"iops": 5e6}).as_object().unwrap().clone();
    };
    let parties = disks.report.cells[0].parties.iter_mut();
    parties.for_each(|party| party.samples.iter_mut().for_each(iops));
    let plots = of(&disks);
    let curve = |plot: &Plot, at: usize| plot.series[3].points[at].1.median;
    assert_eq!(plots.iter().map(|plot| plot.series.len()).collect::<Vec<_>>(), [4, 4]);
    assert_eq!((curve(&plots[0], 3), plots[0].series[3].is_reference), (1_440_000.0, true));
    assert_eq!((curve(&plots[1], 3) * 810.0).round(), 1440.0);
}
