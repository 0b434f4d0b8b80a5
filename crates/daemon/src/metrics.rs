//! `/metrics`: every counter and histogram in the OpenMetrics text format.
//!
//! Everything comes from where it is defined ([`manyring_engine::QueueStats`]): a new counter is
//! exported by being there. `bytes_x` becomes `x_bytes` and `x_ns` becomes `x_seconds`, since
//! OpenMetrics wants base units last.

use crate::assemble::{self, Part};
use crate::control::snapshot::{WorkerInfo, Workers};
use crate::control::{Entry, State};
use manyring_device::net::NetDevice;
use manyring_engine::QueueStats;
use manyring_engine::stats::{Class, Histogram, Kind, LawStats};
use std::collections::HashSet;
use std::fmt::{Display, Write};
use std::sync::Arc;

/// Exponents of the histogram buckets' bounds, `2^n - 1`: nanoseconds from 1 us to 17 s.
const TIME_BOUNDS: std::ops::RangeInclusive<u32> = 10..=34;
/// Exponents of the bounds of buckets for plain numbers, 1 to 1023.
const COUNT_BOUNDS: std::ops::RangeInclusive<u32> = 1..=10;

/// All metrics of the process.
pub(crate) fn text(state: &State) -> String {
    let mut out = String::new();
    family(&mut out, "manyring_build", "info", None, "The program");
    let version = env!("CARGO_PKG_VERSION");
    line(&mut out, "manyring_build_info", format_args!("version=\"{version}\""), 1);
    devices(&mut out, state);
    workers(&mut out, state);
    queues(&mut out, state);
    out.push_str("# EOF\n");
    out
}

fn family(out: &mut String, name: &str, kind: &str, unit: Option<&str>, help: &str) {
    let _ = writeln!(out, "# TYPE {name} {kind}");
    if let Some(unit) = unit {
        let _ = writeln!(out, "# UNIT {name} {unit}");
    }
    let _ = writeln!(out, "# HELP {name} {help}.");
}

/// One sample.
fn line(out: &mut String, name: &str, labels: impl Display, value: impl Display) {
    let _ = writeln!(out, "{name}{{{labels}}} {value}");
}

fn devices(out: &mut String, state: &State) {
    let mut gauge = |name: &str, unit, help, value: &dyn Fn(&Part) -> Option<u64>| {
        family(out, name, "gauge", unit, help);
        for part in state.devices.served().iter().map(|d| &d.part) {
            if let Some(value) = value(part) {
                line(out, name, format_args!("device=\"{}\"", part.name()), value);
            }
        }
    };
    let bytes = Some("bytes");
    gauge("manyring_device_size_bytes", bytes, "Size of the disk", &|part| match &part.kind {
        assemble::Kind::Blk(blk) => Some(blk.size()),
        assemble::Kind::Net(_) => None,
    });
    gauge("manyring_device_link_up", None, "1 while the guest's link is up", &|part| {
        net_of(part).map(|net| net.is_link_up().into())
    });
    let mtu = "MTU that the guest is told, or else the interface's";
    gauge("manyring_device_mtu_bytes", bytes, mtu, &|part| {
        let net = net_of(part)?;
        net.mtu().or_else(|| net.port().mtu()).map(u64::from)
    });
    let attached = "Queue pairs that the host may use";
    gauge("manyring_device_attached_pairs", None, attached, &|part| {
        u64::try_from(net_of(part)?.attached_pairs()).ok()
    });
    gauge("manyring_device_connected", None, "1 while a front-end is connected", &|part| {
        Some((*part.connected.borrow()).into())
    });
    let waits = "manyring_device_waiting";
    let help = "1 while another process holds what the device needs: what its key names";
    family(out, waits, "gauge", None, help);
    for entry in state.devices.all() {
        let (name, key, value) = match &entry {
            Entry::Served(device) => (device.part.name(), "", 0),
            Entry::Waiting(waiting) => (waiting.name.as_str(), waiting.key, 1),
        };
        line(out, waits, format_args!("device=\"{name}\",key=\"{key}\""), value);
    }
}

fn net_of(part: &Part) -> Option<&NetDevice> {
    match &part.kind {
        assemble::Kind::Net(net) => Some(net),
        assemble::Kind::Blk(_) => None,
    }
}

fn workers(out: &mut String, state: &State) {
    let Workers { workers, held } = Workers::new(state);
    let name = "manyring_thread_held";
    family(out, name, "gauge", None, "1 while a thread does not come back from serving a device");
    for held in held {
        let (thread, device) = (held.thread, held.device);
        line(out, name, format_args!("thread=\"{thread}\",device=\"{device}\""), 1);
    }
    let each = |out: &mut String, name: &str, value: &dyn Fn(&WorkerInfo) -> String| {
        for worker in &workers {
            line(out, name, format_args!("worker=\"{}\"", worker.index), value(worker));
        }
    };
    family(out, "manyring_worker_queues", "gauge", None, "Queues the worker owns");
    each(out, "manyring_worker_queues", &|worker| worker.queues.to_string());
    family(out, "manyring_worker_sleeps", "counter", None, "Times the worker slept");
    each(out, "manyring_worker_sleeps_total", &|worker| worker.sleeps.to_string());
    let slept = "manyring_worker_slept_seconds";
    family(out, slept, "counter", Some("seconds"), "Time the worker slept");
    each(out, "manyring_worker_slept_seconds_total", &|worker| seconds(worker.slept_ns));
    family(out, "manyring_worker_running", "gauge", None, "1 while the worker's thread runs");
    each(out, "manyring_worker_running", &|worker| u8::from(worker.running).to_string());
    let ran = "manyring_worker_ran_seconds";
    family(out, ran, "counter", Some("seconds"), "Time the worker ran on a CPU");
    each(out, "manyring_worker_ran_seconds_total", &|worker| seconds(worker.ran_ns));
    let looked = "manyring_worker_looked_seconds";
    family(out, looked, "counter", Some("seconds"), "Time the worker looked and found no work");
    each(out, "manyring_worker_looked_seconds_total", &|worker| seconds(worker.looked_ns));
    let waits = "manyring_worker_device_waits";
    family(out, waits, "counter", None, "Times a device of the host made the worker wait");
    each(out, "manyring_worker_device_waits_total", &|worker| worker.device_waits.to_string());
    let pause = "manyring_worker_move_pause_seconds";
    let help = "Time a queue paused that came to the worker from another one";
    family(out, pause, "histogram", Some("seconds"), help);
    for (index, stats) in state.pool.worker_stats().iter().enumerate() {
        buckets(out, pause, true, &format!("worker=\"{index}\""), &stats.pause_ns);
    }
    for number in LawStats::default().counters() {
        let (name, unit) = base_name("worker_polling", number.name);
        let (kind, suffix) = kind_of(number.kind);
        family(out, &name, kind, unit, number.help);
        each(out, &format!("{name}{suffix}"), &|worker| {
            let value = worker.polling.get(number.name).copied().unwrap_or_default();
            if unit == Some("seconds") { seconds(value) } else { value.to_string() }
        });
    }
}

/// Every queue's stats with its labels.
fn all_queues(state: &State) -> Vec<(String, Arc<QueueStats>)> {
    let mut all = Vec::new();
    for device in state.devices.served().iter().map(|d| &d.part) {
        for index in 0..device.queue_count() {
            if let Some(stats) = device.stats(index) {
                all.push((format!("device=\"{}\",queue=\"{index}\"", device.name()), stats));
            }
        }
    }
    all
}

fn queues(out: &mut String, state: &State) {
    let all = all_queues(state);
    let definitions = Class::ALL.map(QueueStats::new);
    let mut seen = HashSet::new();
    for counter in definitions.iter().flat_map(QueueStats::counters) {
        if !seen.insert(counter.name) {
            continue;
        }
        let (name, unit) = base_name("queue", counter.name);
        let (kind, suffix) = kind_of(counter.kind);
        family(out, &name, kind, unit, counter.help);
        for (labels, stats) in &all {
            let counters = stats.counters();
            if let Some(found) = counters.iter().find(|c| c.name == counter.name) {
                let is_time = unit == Some("seconds");
                let value = if is_time { seconds(found.value) } else { found.value.to_string() };
                line(out, &format!("{name}{suffix}"), labels, value);
            }
        }
    }
    for histogram in definitions.iter().flat_map(QueueStats::histograms) {
        if !seen.insert(histogram.name) {
            continue;
        }
        let (name, unit) = base_name("queue", histogram.name);
        let help = histogram.help.replace(", in nanoseconds", "");
        family(out, &name, "histogram", unit, &help);
        for (labels, stats) in &all {
            let histograms = stats.histograms();
            if let Some(found) = histograms.iter().find(|h| h.name == histogram.name) {
                buckets(out, &name, unit == Some("seconds"), labels, found.value);
            }
        }
    }
}

/// What a counter or gauge is called, and what its samples end with.
fn kind_of(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Counter => ("counter", "_total"),
        Kind::Gauge => ("gauge", ""),
    }
}

/// The exported name and unit of a counter or histogram of a queue, or of what `of` names.
fn base_name(of: &str, name: &str) -> (String, Option<&'static str>) {
    if let Some(rest) = name.strip_prefix("bytes_") {
        (format!("manyring_{of}_{rest}_bytes"), Some("bytes"))
    } else if let Some(rest) = name.strip_suffix("_ns") {
        (format!("manyring_{of}_{rest}_seconds"), Some("seconds"))
    } else {
        (format!("manyring_{of}_{name}"), None)
    }
}

/// The bounds lie on bucket edges of [`Histogram`], so that the counts are exact.
fn buckets(out: &mut String, name: &str, is_time: bool, labels: &str, histogram: &Histogram) {
    let number = |n: u64| if is_time { seconds(n) } else { n.to_string() };
    let bucket = format!("{name}_bucket");
    // One reading: all samples of a histogram agree.
    let filled: Vec<_> = histogram.filled().collect();
    let (mut rest, mut count) = (filled.iter().peekable(), 0);
    for power in if is_time { TIME_BOUNDS } else { COUNT_BOUNDS } {
        let bound = (1u64 << power) - 1;
        while let Some((_, n)) = rest.next_if(|(max, _)| *max <= bound) {
            count += n;
        }
        line(out, &bucket, format_args!("{labels},le=\"{}\"", number(bound)), count);
    }
    let count = filled.iter().map(|b| b.1).sum::<u64>();
    line(out, &bucket, format_args!("{labels},le=\"+Inf\""), count);
    line(out, &format!("{name}_count"), labels, count);
    line(out, &format!("{name}_sum"), labels, number(histogram.sum()));
}

/// Nanoseconds as seconds, exactly.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    let short = text.trim_end_matches('0');
    if short.ends_with('.') { format!("{short}0") } else { short.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_become_exact_seconds() {
        for (ns, text) in [
            (0, "0.0"),
            (1, "0.000000001"),
            (1023, "0.000001023"),
            (1_500_000_000, "1.5"),
            (2_000_000_000, "2.0"),
        ] {
            assert_eq!(seconds(ns), text);
        }
    }

    #[test]
    fn every_name_is_unique_and_ends_in_its_unit() {
        let mut all = HashSet::new();
        for stats in Class::ALL.map(QueueStats::new) {
            all.extend(stats.counters().iter().map(|c| c.name));
            all.extend(stats.histograms().iter().map(|h| h.name));
        }
        let names: Vec<_> = all.into_iter().map(|name| base_name("queue", name)).collect();
        let unique: HashSet<_> = names.iter().map(|n| &n.0).collect();
        assert_eq!(unique.len(), names.len());
        for (name, unit) in &names {
            assert!(unit.is_none_or(|unit| name.ends_with(&format!("_{unit}"))), "{name}");
        }
        assert!(names.contains(&("manyring_queue_read_bytes".to_owned(), Some("bytes"))));
        assert!(names.contains(&("manyring_queue_serve_seconds".to_owned(), Some("seconds"))));
    }

    #[test]
    fn bucket_counts_are_cumulative_and_exact() {
        let histogram = Histogram::default();
        for value in [1, 3, 4, 7, 8, 1023, 1024, 5000] {
            histogram.record(value, 1);
        }
        let mut out = String::new();
        buckets(&mut out, "x", false, "q=\"0\"", &histogram);
        for (le, count) in [("1", 1), ("3", 2), ("7", 4), ("15", 5), ("1023", 6), ("+Inf", 8)] {
            let wanted = format!("x_bucket{{q=\"0\",le=\"{le}\"}} {count}\n");
            assert!(out.contains(&wanted), "{wanted}\n{out}");
        }
        assert!(out.ends_with("x_count{q=\"0\"} 8\nx_sum{q=\"0\"} 7070\n"), "{out}");
    }
}
