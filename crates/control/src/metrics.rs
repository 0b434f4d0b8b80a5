//! `/metrics`: every counter and histogram, in the format that the scraper asks for.
//!
//! Counters are read from their definition ([`manyring_engine::QueueStats`]), so a new counter
//! needs no code here. `bytes_x` becomes `x_bytes` and `x_ns` becomes `x_seconds`, since Prometheus
//! wants base units last. A queue is exported only after its first start, so that a thousand
//! devices without a guest do not make thousands of zero samples.

mod connections;
mod exposition;
mod process;

pub(crate) use exposition::Format;

use crate::state::State;
use exposition::{Sort, Text};
use manyring_engine::QueueStats;
use manyring_engine::stats::{Histogram, Kind, PolicyStats, QueueClass, ServeTimes};
use manyring_serve::view::DeviceView;
use manyring_serve::worker_view::{WorkerInfo, Workers};
use manyring_supervisor::model::Entry;
use std::collections::HashSet;
use std::sync::Arc;

/// Upper bounds of the buckets of a histogram of times, each given as the n of `2^n - 1`
/// nanoseconds: from 1 us to 17 s, a factor of four apart. The control API shows finer buckets.
const TIME_BOUNDS: [u32; 13] = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34];
/// Upper bounds of the buckets of a histogram of plain numbers, each given as the n of `2^n - 1`:
/// from 1 to 1023.
const COUNT_BOUNDS: [u32; 6] = [1, 2, 4, 6, 8, 10];

/// Returns all metrics of the process as the text of an answer.
pub(crate) fn text(state: &State, format: Format) -> String {
    let mut out = Text::new(format);
    out.family("manyring_build", Sort::Info, None, "The program");
    out.line(format_args!("version=\"{}\"", env!("CARGO_PKG_VERSION")), 1);
    let generation = state.shown.borrow().0;
    let help = "Generation: how many changes of the configuration the process has carried out";
    out.family("manyring_config_generation", Sort::Gauge, None, help);
    out.alone(generation);
    process::write(&mut out);
    devices(&mut out, state);
    connections::write(&mut out, state);
    processes(&mut out, state);
    workers(&mut out, state);
    switch_ports(&mut out, state);
    queues(&mut out, state);
    out.end()
}

fn devices(out: &mut Text, state: &State) {
    let mut gauge = |name: &str, unit, help, value: &dyn Fn(&DeviceView) -> Option<u64>| {
        out.family(name, Sort::Gauge, unit, help);
        for view in state.devices.served().iter().map(|d| &d.view) {
            if let Some(value) = value(view) {
                out.line(format_args!("device=\"{}\"", view.name()), value);
            }
        }
    };
    let bytes = Some("bytes");
    gauge("manyring_device_size_bytes", bytes, "Size of the disk", &|view| {
        view.side.as_blk().map(|blk| blk.host.size())
    });
    gauge("manyring_device_link_up", None, "1 while the guest's link is up", &|view| {
        view.side.as_net().map(|net| net.is_link_up().into())
    });
    let mtu = "MTU that the device reports to the guest, or else that of the interface";
    gauge("manyring_device_mtu_bytes", bytes, mtu, &|view| {
        let net = view.side.as_net()?;
        net.mtu().or_else(|| net.port().mtu()).map(u64::from)
    });
    let attached = "Queue pairs over which the host spreads flows";
    gauge("manyring_device_attached_pairs", None, attached, &|view| {
        u64::try_from(view.side.as_net()?.attached_pairs()).ok()
    });
    gauge("manyring_device_connected", None, "1 while a front-end is connected", &|view| {
        Some((*view.connected.borrow()).into())
    });
    queue_lengths(out, state);
    let all = state.devices.all();
    let help = "1 while the device is not served; label key: the key of the missing resource";
    out.family("manyring_device_waiting", Sort::Gauge, None, help);
    for entry in &all {
        let (name, key, value) = match entry {
            Entry::Served(device) => (device.view.name(), "", 0),
            Entry::Waiting(waiting) => (waiting.name.as_str(), waiting.key, 1),
        };
        out.line(format_args!("device=\"{name}\",key=\"{key}\""), value);
    }
    let help = "1 for the state that the device is in: serving, waiting or failed";
    out.family("manyring_device_state", Sort::Gauge, None, help);
    for entry in &all {
        let (name, state) = match entry {
            Entry::Served(device) => (device.view.name(), "serving"),
            Entry::Waiting(waiting) => (waiting.name.as_str(), waiting.state()),
        };
        out.line(format_args!("device=\"{name}\",state=\"{state}\""), 1);
    }
}

/// Writes the queue lengths of the host's interfaces (`txqueuelen`).
fn queue_lengths(out: &mut Text, state: &State) {
    let served = state.devices.served();
    let lengths =
        served.iter().filter_map(|d| Some((&d.view, d.view.side.as_net()?.port().queue_length()?)));
    let lengths: Vec<_> = lengths.collect();
    let help = "Queue pairs to which the host delivers packets, and who has chosen them";
    out.family("manyring_device_receive_pairs", Sort::Gauge, None, help);
    let nets = served.iter().filter_map(|d| Some((&d.view, d.view.side.as_net()?)));
    let nets = nets.filter(|(_, net)| net.port().interface().is_some());
    let nets: Vec<_> = nets.map(|(view, net)| (view, net.receives())).collect();
    for (view, receives) in &nets {
        let labels = format_args!("device=\"{}\",source=\"{}\"", view.name(), receives.source);
        out.line(labels, receives.pairs);
    }
    let help = "Times the number of pairs to which the host delivers was changed";
    out.family("manyring_device_receive_pairs_changes", Sort::Counter, None, help);
    for (view, receives) in &nets {
        out.line(format_args!("device=\"{}\"", view.name()), receives.changes);
    }
    let help = "Frames that may wait for the guest in the interface, and who has chosen them";
    out.family("manyring_device_txqueuelen_frames", Sort::Gauge, None, help);
    for (view, length) in &lengths {
        let labels = format_args!("device=\"{}\",source=\"{}\"", view.name(), length.source.word());
        out.line(labels, length.frames);
    }
    let help = "Times the length of the interface was changed";
    out.family("manyring_device_txqueuelen_changes", Sort::Counter, None, help);
    for (view, length) in &lengths {
        out.line(format_args!("device=\"{}\"", view.name()), length.changes);
    }
}

fn processes(out: &mut Text, state: &State) {
    let processes = state.processes.all();
    let help = "1 for the state that the process of a trust domain is in";
    out.family("manyring_device_process_state", Sort::Gauge, None, help);
    for process in &processes {
        out.line(format_args!("process=\"{}\",state=\"{}\"", process.process, process.state), 1);
    }
    let help = "1 if the device process has answered the last request for counters in time";
    out.family("manyring_device_process_answers", Sort::Gauge, None, help);
    for process in &processes {
        out.line(format_args!("process=\"{}\"", process.process), u8::from(process.answers));
    }
    out.family(
        "manyring_device_process_starts",
        Sort::Counter,
        None,
        "Times the device process was started",
    );
    for process in &processes {
        out.line(format_args!("process=\"{}\"", process.process), process.starts);
    }
    let help =
        "Resident memory of the device process, with the pages of guest memory that it has used";
    out.family("manyring_device_process_resident_memory_bytes", Sort::Gauge, Some("bytes"), help);
    for process in &processes {
        out.line(format_args!("process=\"{}\"", process.process), process.resident_bytes);
    }
    let help = "CPU time of the device process that runs now";
    out.family("manyring_device_process_cpu_seconds", Sort::Counter, Some("seconds"), help);
    for process in &processes {
        out.line(format_args!("process=\"{}\"", process.process), seconds(process.cpu_ns));
    }
}

/// Writes the counters of the ports of switches; writes nothing if there are no ports.
fn switch_ports(out: &mut Text, state: &State) {
    let mut ports = Vec::new();
    for device in state.devices.served().iter().map(|d| &d.view) {
        if let Some(counters) = device.side.as_net().and_then(|net| net.port().counted()) {
            ports.push((format!("device=\"{}\"", device.name()), counters.all()));
        }
    }
    let Some((_, first)) = ports.first() else { return };
    for (at, counter) in first.iter().enumerate() {
        let name = format!("manyring_switch_port_{}", counter.name);
        out.family(&name, Sort::Counter, None, counter.help);
        for (labels, counters) in &ports {
            out.line(labels, counters[at].value);
        }
    }
}

fn workers(out: &mut Text, state: &State) {
    let Workers { workers, stuck } = state.workers();
    let help = "1 while the thread is blocked while it serves the device";
    out.family("manyring_thread_stuck", Sort::Gauge, None, help);
    for thread in stuck {
        let (process, thread, device) = (of_process(&thread.process), thread.thread, thread.device);
        out.line(format_args!("{process}thread=\"{thread}\",device=\"{device}\""), 1);
    }
    let each = |out: &mut Text, value: &dyn Fn(&WorkerInfo) -> String| {
        for worker in &workers {
            let WorkerInfo { process, index, .. } = worker;
            out.line(format_args!("{}worker=\"{index}\"", of_process(process)), value(worker));
        }
    };
    out.family("manyring_worker_queues", Sort::Gauge, None, "Queues the worker owns");
    each(out, &|worker| worker.queues.to_string());
    out.family("manyring_worker_sleeps", Sort::Counter, None, "Times the worker slept");
    each(out, &|worker| worker.sleeps.to_string());
    let slept = "manyring_worker_slept_seconds";
    out.family(slept, Sort::Counter, Some("seconds"), "Time the worker slept");
    each(out, &|worker| seconds(worker.slept_ns));
    out.family("manyring_worker_running", Sort::Gauge, None, "1 while the worker's thread runs");
    each(out, &|worker| u8::from(worker.running).to_string());
    let ran = "manyring_worker_ran_seconds";
    out.family(ran, Sort::Counter, Some("seconds"), "Time the worker ran on a CPU");
    each(out, &|worker| seconds(worker.ran_ns));
    let looked = "manyring_worker_looked_seconds";
    out.family(looked, Sort::Counter, Some("seconds"), "Time the worker polled and found no work");
    each(out, &|worker| seconds(worker.looked_ns));
    let pages = "manyring_guest_pages";
    let help = "Pages of a sample of the guests' memory in the process, by NUMA node";
    out.family(pages, Sort::Gauge, None, help);
    for WorkerInfo { process, guest_pages, .. } in first_of_each(&workers) {
        for (node, count) in guest_pages.iter().enumerate() {
            out.line(format_args!("{}node=\"{node}\"", of_process(process)), *count);
        }
    }
    let waits = "manyring_worker_device_waits";
    out.family(
        waits,
        Sort::Counter,
        None,
        "Times a call to a block device of the host blocked the worker for 4 ms or more",
    );
    each(out, &|worker| worker.device_waits.to_string());
    let pause = "manyring_worker_move_pause_seconds";
    let help = "Pause of a queue while it moved to this worker from another one";
    out.family(pause, Sort::Histogram, Some("seconds"), help);
    for (index, stats) in state.pool.worker_stats().iter().enumerate() {
        buckets(out, true, &format!("worker=\"{index}\""), &stats.pause_ns);
    }
    for WorkerInfo { process, index, pause_ns, .. } in &workers {
        if !process.is_empty() {
            let labels = format!("{}worker=\"{index}\"", of_process(process));
            filled(out, true, &labels, &pause_ns.buckets, pause_ns.sum);
        }
    }
    for number in PolicyStats::default().counters() {
        let (name, unit) = base_name("worker_polling", number.name);
        out.family(&name, sort_of(number.kind), unit, number.help);
        each(out, &|worker| {
            let value = worker.polling.get(number.name).copied().unwrap_or_default();
            if unit == Some("seconds") { seconds(value) } else { value.to_string() }
        });
    }
}

/// The first worker of each process.
fn first_of_each(workers: &[WorkerInfo]) -> impl Iterator<Item = &WorkerInfo> {
    let mut processes = HashSet::new();
    workers.iter().filter(move |worker| processes.insert(&worker.process))
}

/// The label that names the device process, followed by a comma; empty for a worker of the daemon
/// itself.
fn of_process(process: &str) -> String {
    if process.is_empty() { String::new() } else { format!("process=\"{process}\",") }
}

/// Returns the labels and the stats of every queue that runs or has run.
fn all_queues(state: &State) -> Vec<(String, Arc<QueueStats>)> {
    let mut all = Vec::new();
    for device in state.devices.served().iter().map(|d| &d.view) {
        for (index, stats) in device.side.stats.all().iter().enumerate() {
            if has_run(stats) {
                all.push((
                    format!("device=\"{}\",queue=\"{index}\"", device.name()),
                    stats.clone(),
                ));
            }
        }
    }
    all
}

/// True if the queue was started at least once.
fn has_run(stats: &QueueStats) -> bool {
    let counters = [&stats.running, &stats.requests, &stats.packets, &stats.kicks, &stats.faults];
    counters.iter().any(|counter| counter.value() > 0)
}

fn queues(out: &mut Text, state: &State) {
    let all = all_queues(state);
    let definitions = QueueClass::ALL.map(QueueStats::new);
    let mut seen = HashSet::new();
    for counter in definitions.iter().flat_map(QueueStats::counters) {
        if !seen.insert(counter.name) {
            continue;
        }
        let (name, unit) = base_name("queue", counter.name);
        out.family(&name, sort_of(counter.kind), unit, counter.help);
        for (labels, stats) in &all {
            let counters = stats.counters();
            if let Some(found) = counters.iter().find(|c| c.name == counter.name) {
                let is_time = unit == Some("seconds");
                let value = if is_time { seconds(found.value) } else { found.value.to_string() };
                out.line(labels, value);
            }
        }
    }
    for histogram in definitions.iter().flat_map(QueueStats::histograms) {
        if !seen.insert(histogram.name) {
            continue;
        }
        let (name, unit) = base_name("queue", histogram.name);
        let help = histogram.help.replace(", in nanoseconds", "");
        out.family(&name, Sort::Histogram, unit, &help);
        for (labels, stats) in &all {
            let histograms = stats.histograms();
            if let Some(found) = histograms.iter().find(|h| h.name == histogram.name) {
                buckets(out, unit == Some("seconds"), labels, found.value);
            }
        }
    }
    serve_times(out, &all);
}

/// Writes how long the requests of disks took, by operation. An operation that a queue has not
/// served yet has no sample.
fn serve_times(out: &mut Text, queues: &[(String, Arc<QueueStats>)]) {
    let help = "Time from pop to completion";
    out.family("manyring_queue_serve_seconds", Sort::Histogram, Some("seconds"), help);
    for (labels, stats) in queues {
        let ops = stats.served().into_iter().flat_map(ServeTimes::ops);
        for (op, histogram) in ops.filter(|(_, histogram)| histogram.count() > 0) {
            buckets(out, true, &format!("{labels},op=\"{op}\""), histogram);
        }
    }
}

fn sort_of(kind: Kind) -> Sort {
    match kind {
        Kind::Counter => Sort::Counter,
        Kind::Gauge => Sort::Gauge,
    }
}

/// Returns the exported name and unit of a counter or histogram. `of` is its owner, like `queue`.
fn base_name(of: &str, name: &str) -> (String, Option<&'static str>) {
    if let Some(rest) = name.strip_prefix("bytes_") {
        (format!("manyring_{of}_{rest}_bytes"), Some("bytes"))
    } else if let Some(rest) = name.strip_suffix("_ns") {
        (format!("manyring_{of}_{rest}_seconds"), Some("seconds"))
    } else {
        (format!("manyring_{of}_{name}"), None)
    }
}

fn buckets(out: &mut Text, is_time: bool, labels: &str, histogram: &Histogram) {
    // The histogram is read once, so that its buckets and its count agree.
    let all: Vec<_> = histogram.filled().collect();
    filled(out, is_time, labels, &all, histogram.sum());
}

/// Writes a histogram from its filled buckets, pairs of upper bound and count. The exported bounds
/// lie on bucket edges of [`Histogram`], so the counts are exact.
fn filled(out: &mut Text, is_time: bool, labels: &str, filled: &[(u64, u64)], sum: u64) {
    let number = |n: u64| if is_time { seconds(n) } else { n.to_string() };
    let (mut rest, mut count) = (filled.iter().peekable(), 0);
    for power in if is_time { TIME_BOUNDS.as_slice() } else { &COUNT_BOUNDS } {
        let bound = (1u64 << power) - 1;
        while let Some((_, n)) = rest.next_if(|(max, _)| *max <= bound) {
            count += n;
        }
        out.part("_bucket", format_args!("{labels},le=\"{}\"", number(bound)), count);
    }
    let count = filled.iter().map(|b| b.1).sum::<u64>();
    out.part("_bucket", format_args!("{labels},le=\"+Inf\""), count);
    out.part("_count", labels, count);
    out.part("_sum", labels, number(sum));
}

/// Formats nanoseconds as seconds, without rounding.
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
        for stats in QueueClass::ALL.map(QueueStats::new) {
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
        assert!(names.contains(&("manyring_queue_wait_seconds".to_owned(), Some("seconds"))));
    }

    #[test]
    fn bucket_counts_are_cumulative_and_exact() {
        let histogram = Histogram::default();
        for value in [1, 3, 4, 7, 8, 1023, 1024, 5000] {
            histogram.record(value, 1);
        }
        let mut out = Text::new(Format::Plain);
        out.family("x", Sort::Histogram, None, "X");
        buckets(&mut out, false, "q=\"0\"", &histogram);
        let out = out.end();
        for (le, count) in [("1", 1), ("3", 2), ("15", 5), ("255", 5), ("1023", 6), ("+Inf", 8)] {
            let wanted = format!("x_bucket{{q=\"0\",le=\"{le}\"}} {count}\n");
            assert!(out.contains(&wanted), "{wanted}\n{out}");
        }
        assert!(out.ends_with("x_count{q=\"0\"} 8\nx_sum{q=\"0\"} 7070\n"), "{out}");
    }
}
