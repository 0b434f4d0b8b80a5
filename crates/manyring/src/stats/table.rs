//! A table of queues: its columns, a row for each queue that runs or has run, and the numbers of an
//! interval between two readings.

use manyring_control::snapshot::{DeviceInfo, QueueInfo, as_float};
use manyring_serve::worker_view::Summary;

/// An earlier reading of the devices, and the seconds since then.
pub(crate) type Before<'a> = Option<(&'a [DeviceInfo], f64)>;

/// A column of a table: its name, and a function that makes the cell of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    name: &'static str,
    cell: fn(&Seen<'_>) -> String,
    /// True if the cells are text, which is aligned to the left.
    is_text: bool,
    /// True if the column is shown per second when there is an earlier reading.
    is_rate: bool,
}

/// Makes a column of text.
pub(super) const fn text(name: &'static str, cell: fn(&Seen<'_>) -> String) -> Column {
    Column { name, cell, is_text: true, is_rate: false }
}

/// Makes a column of numbers.
pub(super) const fn number(name: &'static str, cell: fn(&Seen<'_>) -> String) -> Column {
    Column { name, cell, is_text: false, is_rate: false }
}

/// Makes a column of a counter, which is shown per second if there is an earlier reading.
pub(super) const fn rate(name: &'static str, cell: fn(&Seen<'_>) -> String) -> Column {
    Column { name, cell, is_text: false, is_rate: true }
}

// The columns that queues of every kind have.
pub(super) const DEVICE: Column = text("DEVICE", |seen| seen.device.name.clone());
pub(super) const WORKER: Column = number("WORKER", |seen| seen.now("worker"));
pub(super) const KICKS: Column = rate("KICKS", |seen| seen.count("kicks"));
pub(super) const KICKS_SUPPRESSED: Column = rate("KICKS-", |seen| seen.count("kicks_suppressed"));
pub(super) const CALLS: Column = rate("CALLS", |seen| seen.count("calls"));
pub(super) const CALLS_SUPPRESSED: Column = rate("CALLS-", |seen| seen.count("calls_suppressed"));
pub(super) const CALLS_HELD: Column = rate("HELD", |seen| seen.count("calls_held"));
pub(super) const BATCH: Column =
    number("BATCH", |seen| seen.histogram("batch_size").p50.to_string());
pub(super) const WAIT_P50: Column = number("WAIT p50", |seen| us(seen.histogram("wait_ns").p50));
pub(super) const WAIT_P99: Column = number("p99 us", |seen| us(seen.histogram("wait_ns").p99));
pub(super) const FLIGHT: Column = number("FLIGHT", |seen| seen.now("in_flight"));

/// A queue, with its earlier reading if there is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) device: &'a DeviceInfo,
    pub(crate) queue: &'a QueueInfo,
    before: Option<(&'a QueueInfo, f64)>,
}

impl Seen<'_> {
    /// Returns the present value of a gauge, as text.
    fn now(&self, name: &str) -> String {
        self.queue.counter(name).to_string()
    }

    /// Returns the growth of a counter in the interval; its value if there is no earlier reading.
    pub(crate) fn counted(&self, name: &str) -> u64 {
        let now = self.queue.counter(name);
        self.before.map_or(now, |(old, _)| now.saturating_sub(old.counter(name)))
    }

    /// Returns the value of a counter, or its growth per second if there is an earlier reading.
    pub(crate) fn scaled(&self, name: &str) -> f64 {
        let counted = as_float(self.counted(name));
        self.before.map_or(counted, |(_, seconds)| counted / seconds)
    }

    /// Returns [`Self::scaled`] as text without a fraction.
    pub(super) fn count(&self, name: &str) -> String {
        format!("{:.0}", self.scaled(name))
    }

    /// Returns [`Self::scaled`] as text, in millions of bytes with one decimal.
    pub(super) fn megabytes(&self, name: &str) -> String {
        format!("{:.1}", self.scaled(name) / 1e6)
    }

    /// Returns a histogram: of the interval since the earlier reading, or of all time without one.
    pub(crate) fn histogram(&self, name: &str) -> Summary {
        let now = self.queue.histogram(name);
        self.before.map_or_else(|| now.clone(), |(old, _)| now.since(&old.histogram(name)))
    }
}

/// Formats nanoseconds as microseconds with one decimal.
pub(super) fn us(ns: u64) -> String {
    format!("{:.1}", as_float(ns) / 1e3)
}

/// Returns the queues of `device` that run or have run, each with its earlier reading.
pub(crate) fn seen<'a>(
    device: &'a DeviceInfo,
    before: Before<'a>,
) -> impl Iterator<Item = Seen<'a>> {
    let used = |queue: &&QueueInfo| {
        queue.counter("running") + queue.counter("requests") + queue.counter("packets") > 0
    };
    device.queues.iter().filter(used).map(move |queue| {
        let before = before.and_then(|(all, seconds)| {
            let old = all.iter().find(|d| d.name == device.name)?;
            Some((old.queues.iter().find(|q| q.index == queue.index)?, seconds))
        });
        Seen { device, queue, before }
    })
}

/// Returns aligned lines: the names of the columns, a line for each queue, and a line for each
/// device whose queues have never run.
pub(super) fn lines<const N: usize>(
    columns: [Column; N],
    devices: &[&DeviceInfo],
    before: Before<'_>,
) -> String {
    let is_interval = before.is_some();
    let per_second = |c: &Column| if is_interval && c.is_rate { "/s" } else { "" };
    let mut rows = vec![columns.map(|c| format!("{}{}", c.name, per_second(&c)))];
    for device in devices {
        let first = rows.len();
        rows.extend(seen(device, before).map(|seen| columns.map(|c| (c.cell)(&seen))));
        if rows.len() == first {
            let mut idle = [const { String::new() }; N];
            idle[0].clone_from(&device.name);
            idle[1].push_str(match (device.state.as_str(), device.connected) {
                ("waiting", _) => "waits",
                (_, true) => "none",
                (_, false) => "-",
            });
            rows.push(idle);
        }
    }
    align(columns.map(|column| column.is_text), &rows)
}

/// Aligns the cells of rows in columns: text to the left, numbers to the right.
pub(super) fn align<const N: usize>(is_text: [bool; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, width), is_text) in row.iter().zip(&widths).zip(is_text) {
            line += &if is_text { format!("{cell:<width$}") } else { format!("{cell:>width$}") };
            line.push_str("  ");
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// For tests: a queue with these counters, and this histogram if it has a name.
#[cfg(test)]
pub(crate) fn queue_of(
    index: usize,
    counters: &[(&str, u64)],
    histogram: &str,
    buckets: &[(u64, u64)],
) -> QueueInfo {
    let summary = Summary { buckets: buckets.to_vec(), ..Summary::default() };
    // Computes the percentiles of these buckets, as the daemon would.
    let summary = summary.since(&Summary::default());
    let histograms = (!histogram.is_empty()).then(|| (histogram.to_owned(), summary));
    let counters = counters.iter().map(|(name, n)| ((*name).to_owned(), *n));
    QueueInfo::of(index, counters.collect(), histograms.into_iter().collect())
}

/// For tests: the words of a line.
#[cfg(test)]
pub(super) fn words(table: &str, line: usize) -> Vec<&str> {
    table.lines().nth(line).unwrap_or_default().split_whitespace().collect()
}
