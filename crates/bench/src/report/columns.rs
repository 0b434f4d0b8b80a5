//! The columns of the tables: heading, order, and whether more or less is better.

use super::document::{CellDocument, LINE, NORMALIZED};
use serde_json::Value;
use std::collections::BTreeSet;

/// Which way a number is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
    /// It explains other numbers.
    Neither,
}

/// A number of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SampleColumn {
    /// The field of a sample.
    pub(crate) key: &'static str,
    /// The heading of the column.
    pub(crate) head: &'static str,
    pub(crate) better: Better,
    /// An explanation of the column, for people who see it for the first time.
    pub(crate) about: &'static str,
}

const fn column(
    key: &'static str,
    head: &'static str,
    better: Better,
    about: &'static str,
) -> SampleColumn {
    SampleColumn { key, head, better, about }
}

use Better::{Higher, Lower, Neither};

/// The known ones, in the order of a table. A field that is not here stands behind them, under its
/// own name.
pub(crate) const KNOWN: &[SampleColumn] = &[
    column("iops", "requests/s", Higher, "requests that came back in a second"),
    column("rate", "per second", Higher, "requests, frames or kicks of this guest in a second"),
    column("throughput", "throughput", Higher, "in the unit that stands with the case"),
    column("cpu", "cpu %", Neither, "per cent of one CPU: the back-end, and what joins taps to it"),
    column(
        NORMALIZED,
        "normalized",
        Higher,
        "throughput / cpu, rounded down, as the references do",
    ),
    column("backend_cpu", "back-end %", Neither, "the part of the back-end alone"),
    column("p50_us", "p50 us", Lower, "half of the requests took at most so many microseconds"),
    column("p99_us", "p99 us", Lower, "99 of 100 requests took at most so many microseconds"),
    column("max_us", "max us", Neither, "the longest request, in microseconds"),
    column("p99_clock_us", "p99 by clock", Neither, "p99 with what the guest waited for its CPU"),
    column("cpu_per_million", "cpu s/M", Lower, "CPU seconds of the server per million requests"),
    column("client_cpu_per_million", "client s/M", Neither, "the same of the client"),
    column("packets_sent", "packets sent", Neither, "packets that the guest sent in a round"),
    column("avg_pkt_size", "packet B", Neither, "average bytes of a packet on the ring"),
    column("kicks_per_packet", "kicks/pkt", Neither, "notifications of the device per packet"),
    column("calls_per_packet", "calls/pkt", Neither, "interrupts of the guest per packet"),
    column("cpu_us_per_op", "CPU us/op", Lower, "CPU microseconds of the back-end per operation"),
    column("kicks_per_op", "kicks/op", Neither, "kicks that the back-end counted per operation"),
    column("calls_per_op", "calls/op", Neither, "calls that the back-end sent per operation"),
    column("ready_seconds", "ready s", Lower, "from the start of the daemon to its last socket"),
    column("connect_seconds", "connected s", Neither, "what the guests took to connect in turn"),
    column("ticks", "cpu ticks", Lower, "CPU time of the daemon, in ticks of a hundredth second"),
    column("wakes", "wakes", Lower, "how often a thread of the daemon was woken"),
    column("threads", "threads", Neither, "threads of the daemon"),
    column("resident_kib", "resident KiB", Neither, "resident memory of the daemon's processes"),
    column("group_kib", "cgroup KiB", Neither, "memory that the kernel charges to the daemon"),
    column("group_kib_per_device", "cgroup KiB/device", Lower, "the same for each further device"),
    column("kib_per_device", "KiB/device", Lower, "resident memory for each further device"),
    column("waited_share", "waited", Neither, "share of the run that the guest waited for its CPU"),
    column(LINE, "line ns", Neither, "a cache line from one CPU to the other; far from 100 on"),
    column("worker_share", "worker", Neither, "share of this guest in the worker's time"),
];

/// A column of a table: a known one, or a field under its own name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ColumnHead {
    Known(&'static SampleColumn),
    Other(String),
}

impl ColumnHead {
    pub(crate) fn key(&self) -> &str {
        match self {
            Self::Known(column) => column.key,
            Self::Other(key) => key,
        }
    }

    pub(crate) fn text(&self) -> String {
        match self {
            Self::Known(column) => column.head.to_owned(),
            Self::Other(key) => key.replace('_', " "),
        }
    }

    pub(crate) fn better(&self) -> Better {
        match self {
            Self::Known(column) => column.better,
            Self::Other(_) => Neither,
        }
    }
}

/// The columns of some cells: every number that a sample has and that is not 0 in all of them.
pub(crate) fn of_cells<'a>(cells: impl IntoIterator<Item = &'a CellDocument>) -> Vec<ColumnHead> {
    let mut keys: BTreeSet<&str> = BTreeSet::new();
    for sample in cells.into_iter().flat_map(|cell| &cell.parties).flat_map(|p| &p.samples) {
        let is_there = |value: &Value| value.as_f64().is_some_and(|number| number != 0.0);
        keys.extend(sample.iter().filter(|(_, value)| is_there(value)).map(|(key, _)| &**key));
    }
    if keys.contains("throughput") && keys.contains("cpu") {
        keys.insert(NORMALIZED);
    }
    let known = KNOWN.iter().filter(|column| keys.contains(column.key)).map(ColumnHead::Known);
    let is_other = |key: &&&str| KNOWN.iter().all(|column| column.key != **key);
    let others = keys.iter().filter(is_other).map(|key| ColumnHead::Other((*key).to_owned()));
    known.chain(others).collect()
}

/// The number that a cell is about: the first of which one way is better.
pub(crate) fn main_of(cell: &CellDocument) -> Option<ColumnHead> {
    of_cells([cell]).into_iter().find(|head| head.better() != Neither)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::PartyDocument;
    use serde_json::json;

    fn cell(sample: &Value) -> CellDocument {
        let samples = vec![sample.as_object().unwrap().clone()];
        let parties = vec![PartyDocument { name: "a".into(), samples }];
        CellDocument { parties, ..CellDocument::default() }
    }

    #[test]
    fn known_columns_stand_in_their_order_and_others_behind_them() {
        let sample = json!({"zeal": 2, "cpu": 50.0, "throughput": 9.0, "p50_us": 0.0, "an_age": 1,
            "disturbed": false});
        let cell = cell(&sample);
        let heads: Vec<String> = of_cells([&cell]).iter().map(ColumnHead::text).collect();
        assert_eq!(heads, ["throughput", "cpu %", "normalized", "an age", "zeal"]);
        assert_eq!(main_of(&cell).unwrap().key(), "throughput");
    }

    #[test]
    fn a_cell_of_unknown_numbers_is_about_none() {
        assert_eq!(main_of(&cell(&json!({"an_age": 1}))), None);
        assert!(of_cells([]).is_empty());
    }
}
