//! The three tables: the name, width and cells of each column.

use super::units::{rate, time};
use crate::stats::Shown;
use crate::stats::table::{Seen, seen};
use manyring_control::snapshot::{DeviceInfo, as_float};
use manyring_serve::worker_view::{Summary, WorkerInfo};

/// One of the three tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Devices,
    Queues,
    Workers,
}

impl View {
    /// All tables, in the order of the keys that show them.
    pub(super) const ALL: [Self; 3] = [Self::Devices, Self::Queues, Self::Workers];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Devices => "devices",
            Self::Queues => "queues",
            Self::Workers => "workers",
        }
    }

    /// Names and widths of the columns. The widths, with a space between two columns, add up to 80
    /// at most.
    pub(super) fn columns(self) -> &'static [(&'static str, u16)] {
        match self {
            Self::Devices => &[
                ("DEVICE", 16),
                ("KIND", 7),
                ("STATE", 9),
                ("OPS/s", 7),
                ("IN/s", 6),
                ("OUT/s", 6),
                ("p99", 7),
                ("FLIGHT", 6),
                ("LOST/s", 6),
            ],
            Self::Queues => &[
                ("DEVICE", 15),
                ("QUEUE", 5),
                ("WORKER", 6),
                ("OPS/s", 6),
                ("BYTES/s", 7),
                ("KICKS/s", 7),
                ("CALLS/s", 7),
                ("BATCH", 5),
                ("p99", 6),
                ("LOST/s", 6),
            ],
            Self::Workers => &[
                ("WORKER", 12),
                ("STATE", 5),
                ("CPUS", 10),
                ("QUEUES", 6),
                ("CPU%", 5),
                ("LOOK%", 5),
                ("SLEEPS/s", 8),
                ("HIT%", 5),
                ("MOVES", 6),
                ("PAUSE p99", 9),
            ],
        }
    }
}

/// A cell: its text as shown, and for a number the value by which rows are sorted.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Text(String),
    Number(f64, String),
}

impl Cell {
    fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    fn rate(value: f64) -> Self {
        Self::Number(value, rate(value))
    }

    fn time(ns: u64) -> Self {
        Self::Number(as_float(ns), time(as_float(ns)))
    }

    fn count(value: u64) -> Self {
        Self::Number(as_float(value), value.to_string())
    }

    fn percent(share: f64) -> Self {
        Self::Number(share, format!("{:.0}", share * 100.0))
    }

    /// Returns the text that is shown.
    pub(super) fn shown(&self) -> &str {
        match self {
            Self::Text(text) | Self::Number(_, text) => text,
        }
    }

    /// Returns the order of rows: the largest number first, texts from A to Z.
    pub(super) fn order(&self, other: &Self) -> std::cmp::Ordering {
        match (self, other) {
            (Self::Number(a, _), Self::Number(b, _)) => b.total_cmp(a),
            _ => self.shown().cmp(other.shown()),
        }
    }
}

/// A row of a table: its cells, and the device or worker that it shows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// The name of the row's device, queue or worker. The chosen row is found again by it after
    /// each reading.
    pub(super) key: String,
    /// The device of the row; `None` for a worker.
    pub(super) device: Option<String>,
    pub(super) cells: Vec<Cell>,
    /// True if the row is highlighted: its device is not served, or lost requests or packets.
    pub(super) is_bad: bool,
}

/// Returns the rows of a table. With an earlier reading `before`, and the seconds since then,
/// counters are shown per second.
pub(super) fn rows(view: View, now: &Shown, before: Option<(&Shown, f64)>) -> Vec<Row> {
    match view {
        View::Devices => now.devices.iter().map(|device| of_device(device, before)).collect(),
        View::Queues => {
            let old = before.map(|(old, seconds)| (&old.devices[..], seconds));
            let all = now.devices.iter().flat_map(|device| seen(device, old));
            all.map(|queue| of_queue(&queue, before.is_some())).collect()
        }
        View::Workers => now.workers.iter().map(|worker| of_worker(worker, before)).collect(),
    }
}

/// Returns the counters of losses that are not zero: `errors` of disks, `dropped_*` of networks.
pub(super) fn losses<'a>(queue: &'a Seen<'a>) -> impl Iterator<Item = (&'a str, f64)> {
    let names = queue.queue.counters.keys();
    let lost = names.filter(|name| *name == "errors" || name.starts_with("dropped_"));
    lost.map(|name| (name.as_str(), queue.scaled(name))).filter(|(_, scaled)| *scaled > 0.0)
}

/// Returns a queue's operations, bytes to the guest and bytes from the guest, each per second.
fn done(queue: &Seen<'_>) -> [f64; 3] {
    let passed = queue.scaled("bytes_passed");
    let is_rx = queue.queue.name.as_deref().is_some_and(|name| name.starts_with("rx"));
    let (rx, tx) = if is_rx { (passed, 0.0) } else { (0.0, passed) };
    [
        queue.scaled("requests") + queue.scaled("packets"),
        queue.scaled("bytes_read") + rx,
        queue.scaled("bytes_written") + tx,
    ]
}

/// Returns the latency of a queue: for a disk, the time to serve a request; for a network device,
/// the time until the worker sees a packet.
fn took(queue: &Seen<'_>) -> Summary {
    queue.histogram(if queue.device.kind == "net" { "wait_ns" } else { "serve_ns" })
}

fn of_device(device: &DeviceInfo, before: Option<(&Shown, f64)>) -> Row {
    let old = before.map(|(old, seconds)| (&old.devices[..], seconds));
    // Without an earlier reading the counters are sums since the daemon's start, not rates.
    let is_interval = old.is_some();
    let (mut sums, mut flight, mut lost, mut p99) = ([0.0; 3], 0, 0.0, 0);
    for queue in seen(device, old) {
        flight += queue.queue.counter("in_flight");
        if is_interval {
            done(&queue).iter().zip(&mut sums).for_each(|(more, sum)| *sum += more);
            lost += losses(&queue).fold(0.0, |sum, (_, scaled)| sum + scaled);
            // A device shows the p99 of its slowest queue: an average would hide that queue.
            p99 = p99.max(took(&queue).p99);
        }
    }
    let state = match (device.state.as_str(), device.connected) {
        ("serving", true) => "connected",
        ("serving", false) => "free",
        (state, _) => state,
    };
    let is_bad = device.state == "failed" || device.state == "waiting" || lost > 0.0;
    let cells = vec![
        Cell::text(&device.name),
        Cell::text(&device.kind),
        Cell::text(state),
        Cell::rate(sums[0]),
        Cell::rate(sums[1]),
        Cell::rate(sums[2]),
        Cell::time(p99),
        Cell::count(flight),
        Cell::rate(lost),
    ];
    Row { key: device.name.clone(), device: Some(device.name.clone()), cells, is_bad }
}

fn of_queue(queue: &Seen<'_>, is_interval: bool) -> Row {
    let per_second = |value: f64| Cell::rate(if is_interval { value } else { 0.0 });
    let name = queue.queue.name.clone().unwrap_or_else(|| queue.queue.index.to_string());
    let lost = losses(queue).fold(0.0, |sum, (_, scaled)| sum + scaled);
    let device = &queue.device.name;
    let [operations, to_guest, from_guest] = done(queue);
    let none = || Cell::Number(0.0, "-".to_owned());
    let cells = vec![
        Cell::text(device),
        Cell::text(&name),
        Cell::count(queue.queue.counter("worker")),
        per_second(operations),
        per_second(to_guest + from_guest),
        per_second(queue.scaled("kicks")),
        per_second(queue.scaled("calls")),
        if is_interval { Cell::count(queue.histogram("batch_size").p50) } else { none() },
        if is_interval { Cell::time(took(queue).p99) } else { none() },
        per_second(lost),
    ];
    let key = format!("{device} {name}");
    Row { key, device: Some(device.clone()), cells, is_bad: is_interval && lost > 0.0 }
}

fn of_worker(worker: &WorkerInfo, before: Option<(&Shown, f64)>) -> Row {
    let old = before.and_then(|(old, _)| old.workers.iter().find(|w| w.name() == worker.name()));
    let seconds = before.map_or(1.0, |(_, seconds)| seconds);
    let since = |of: &dyn Fn(&WorkerInfo) -> u64| match old {
        Some(old) => as_float(of(worker).saturating_sub(of(old))),
        None => 0.0,
    };
    let policy =
        |name: &'static str| move |w: &WorkerInfo| w.polling.get(name).copied().unwrap_or(0);
    let (hits, misses) = (since(&policy("spins_hit")), since(&policy("spins_missed")));
    let hit_share = if hits + misses > 0.0 {
        Cell::percent(hits / (hits + misses))
    } else {
        Cell::Number(-1.0, "-".to_owned())
    };
    let came = old.map_or_else(Summary::default, |old| worker.pause_ns.since(&old.pause_ns));
    let cells = vec![
        Cell::Number(as_float(worker.index as u64), worker.name()),
        Cell::text(if worker.running { "runs" } else { "ended" }),
        Cell::text(worker.short_place()),
        Cell::count(worker.queues),
        Cell::percent(since(&|w| w.ran_ns) / 1e9 / seconds),
        Cell::percent(since(&|w| w.looked_ns) / 1e9 / seconds),
        Cell::rate(since(&|w| w.sleeps) / seconds),
        hit_share,
        Cell::count(came.count),
        Cell::time(came.p99),
    ];
    Row { key: format!("worker {}", worker.name()), device: None, cells, is_bad: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_fits_into_eighty_columns() {
        for view in View::ALL {
            let widths: u16 = view.columns().iter().map(|(_, width)| width + 1).sum();
            assert!(widths - 1 <= 80, "{view:?} is {} wide", widths - 1);
            let fits = |&(name, width): &(&str, u16)| name.len() <= usize::from(width);
            assert!(view.columns().iter().all(fits), "{view:?}");
        }
    }
}
