//! `/metrics`: every counter and histogram in the OpenMetrics text format.
//!
//! Everything comes from where it is defined ([`manyring_device::QueueStats`]): a new counter is
//! exported by being there. `bytes_x` becomes `x_bytes` and `x_ns` becomes `x_seconds`, since
//! OpenMetrics wants base units last.

use crate::assemble;
use crate::control::State;
use crate::control::snapshot::Workers;
use manyring_device::QueueStats;
use manyring_device::net::NetDevice;
use manyring_device::stats::{Class, Histogram, Kind};
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

/// Exponents of the histogram buckets' bounds, `2^n - 1`: nanoseconds from 1 us to 17 s.
const TIME_BOUNDS: std::ops::RangeInclusive<u32> = 10..=34;
/// The same for plain numbers, 1 to 1023.
const COUNT_BOUNDS: std::ops::RangeInclusive<u32> = 1..=10;

/// All metrics of the process.
pub(crate) fn text(state: &State) -> String {
    let mut out = String::new();
    family(&mut out, "manyring_build", "info", None, "The program");
    line(&mut out, "manyring_build_info", "version=\"", env!("CARGO_PKG_VERSION"), "\"", "1");
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

/// One sample, its label text in three parts.
fn line(out: &mut String, name: &str, label: &str, value: &str, rest: &str, number: &str) {
    let _ = writeln!(out, "{name}{{{label}{value}{rest}}} {number}");
}

fn devices(out: &mut String, state: &State) {
    let gauge = |out: &mut String, name: &str, unit, help, value: &dyn Fn(usize) -> u64| {
        family(out, name, "gauge", unit, help);
        for (at, device) in state.devices.iter().enumerate() {
            let name_of = device.part.device.name();
            line(out, name, "device=\"", name_of, "\"", &value(at).to_string());
        }
    };
    let parts = |at: usize| &state.devices[at].part;
    family(out, "manyring_device_size_bytes", "gauge", Some("bytes"), "Size of the disk");
    for part in state.devices.iter().map(|d| &d.part) {
        if let assemble::Kind::Blk(blk) = &part.kind {
            let size = blk.size().to_string();
            line(out, "manyring_device_size_bytes", "device=\"", part.device.name(), "\"", &size);
        }
    }
    nets(out, state);
    gauge(out, "manyring_device_connected", None, "1 while a front-end is connected", &|at| {
        u64::from(*parts(at).connected.borrow())
    });
}

fn nets(out: &mut String, state: &State) {
    let gauge = |out: &mut String, name, unit, help, value: &dyn Fn(&NetDevice) -> Option<u64>| {
        family(out, name, "gauge", unit, help);
        for part in state.devices.iter().map(|d| &d.part) {
            if let assemble::Kind::Net(net) = &part.kind
                && let Some(value) = value(net)
            {
                line(out, name, "device=\"", part.device.name(), "\"", &value.to_string());
            }
        }
    };
    gauge(out, "manyring_device_link_up", None, "1 while the guest's link is up", &|net| {
        Some(net.is_link_up().into())
    });
    let mtu = "MTU that the guest is told, or else the interface's";
    gauge(out, "manyring_device_mtu_bytes", Some("bytes"), mtu, &|net| {
        net.mtu().or_else(|| net.port().mtu()).map(u64::from)
    });
    let attached = "Queue pairs that the host may use";
    gauge(out, "manyring_device_attached_pairs", None, attached, &|net| {
        u64::try_from(net.attached_pairs()).ok()
    });
}

fn workers(out: &mut String, state: &State) {
    let workers = Workers::new(state).workers;
    let index = |at: usize| workers[at].index.to_string();
    let each = |out: &mut String, name: &str, value: &dyn Fn(usize) -> String| {
        for at in 0..workers.len() {
            line(out, name, "worker=\"", &index(at), "\"", &value(at));
        }
    };
    family(out, "manyring_worker_queues", "gauge", None, "Queues the worker owns");
    each(out, "manyring_worker_queues", &|at| workers[at].queues.to_string());
    family(out, "manyring_worker_sleeps", "counter", None, "Times the worker slept");
    each(out, "manyring_worker_sleeps_total", &|at| workers[at].sleeps.to_string());
    let slept = "manyring_worker_slept_seconds";
    family(out, slept, "counter", Some("seconds"), "Time the worker slept");
    each(out, "manyring_worker_slept_seconds_total", &|at| seconds(workers[at].slept_ns));
}

/// Every queue's stats with its labels.
fn all_queues(state: &State) -> Vec<(String, Arc<QueueStats>)> {
    let mut all = Vec::new();
    for device in state.devices.iter().map(|d| &d.part.device) {
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
    let definitions = [Class::Blk, Class::Net].map(QueueStats::new);
    let mut seen = HashSet::new();
    for counter in definitions.iter().flat_map(QueueStats::counters) {
        if !seen.insert(counter.name) {
            continue;
        }
        let (name, unit) = base_name(counter.name);
        let (kind, suffix) = match counter.kind {
            Kind::Counter => ("counter", "_total"),
            Kind::Gauge => ("gauge", ""),
        };
        family(out, &name, kind, unit, counter.help);
        for (labels, stats) in &all {
            let counters = stats.counters();
            let found = counters.iter().find(|c| c.name == counter.name);
            if let Some(value) = found.map(|c| c.value.to_string()) {
                line(out, &format!("{name}{suffix}"), labels, "", "", &value);
            }
        }
    }
    for histogram in definitions.iter().flat_map(QueueStats::histograms) {
        if !seen.insert(histogram.name) {
            continue;
        }
        let (name, unit) = base_name(histogram.name);
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

/// The exported name and unit of a counter or histogram.
fn base_name(name: &str) -> (String, Option<&'static str>) {
    if let Some(rest) = name.strip_prefix("bytes_") {
        (format!("manyring_queue_{rest}_bytes"), Some("bytes"))
    } else if let Some(rest) = name.strip_suffix("_ns") {
        (format!("manyring_queue_{rest}_seconds"), Some("seconds"))
    } else {
        (format!("manyring_queue_{name}"), None)
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
        let le = format!(",le=\"{}\"", number(bound));
        line(out, &bucket, labels, "", &le, &count.to_string());
    }
    let count = filled.iter().map(|b| b.1).sum::<u64>().to_string();
    line(out, &bucket, labels, "", ",le=\"+Inf\"", &count);
    line(out, &format!("{name}_count"), labels, "", "", &count);
    line(out, &format!("{name}_sum"), labels, "", "", &number(histogram.sum()));
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
        for stats in [Class::Blk, Class::Net].map(QueueStats::new) {
            all.extend(stats.counters().iter().map(|c| c.name));
            all.extend(stats.histograms().iter().map(|h| h.name));
        }
        let names: Vec<_> = all.into_iter().map(base_name).collect();
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
