//! `manyring stats` and `manyring resize`: a running daemon, asked over its control socket.

use crate::cli::{ResizeArgs, StatsArgs};
use crate::config::plan::parse_size;
use crate::control::client::ask;
use crate::control::snapshot::{DeviceInfo, Devices, QueueInfo};
use hyper::Method;
use std::io::Write;
use std::time::Duration;

/// What shows the queues of `before` as they were, to take the difference.
type Before<'a> = Option<(&'a [DeviceInfo], f64)>;

/// The columns: name, and whether text is aligned to the left.
const COLUMNS: [(&str, bool); 17] = [
    ("DEVICE", true),
    ("QUEUE", false),
    ("WORKER", false),
    ("REQUESTS", false),
    ("READ MB", false),
    ("WRITE MB", false),
    ("KICKS", false),
    ("KICKS-", false),
    ("CALLS", false),
    ("CALLS-", false),
    ("BATCH", false),
    ("WAIT p50", false),
    ("p99 us", false),
    ("SERVE p50", false),
    ("p99 us", false),
    ("ERRORS", false),
    ("FLIGHT", false),
];

/// `manyring stats`
pub(crate) async fn show(args: &StatsArgs) -> Result<(), String> {
    let mut before = fetch(args).await?;
    if print(&render(args, &before, None)?).is_err() {
        return Ok(());
    }
    let Some(period) = args.watch.map(Duration::from_secs) else { return Ok(()) };
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last = ticks.tick().await - period;
    loop {
        let devices = fetch(args).await?;
        let now = tokio::time::Instant::now();
        let elapsed = (now - last).as_secs_f64().max(0.001);
        if print(&render(args, &devices, Some((&before, elapsed)))?).is_err() {
            return Ok(());
        }
        (before, last) = (devices, now);
        ticks.tick().await;
    }
}

/// `manyring resize`
pub(crate) async fn resize(args: &ResizeArgs) -> Result<(), String> {
    let body = match &args.size {
        None => String::new(),
        Some(text) => {
            let size = parse_size(text).ok_or_else(|| format!("SIZE: {text:?} is not a size"))?;
            serde_json::json!({ "size": size }).to_string()
        }
    };
    check_name(&args.device)?;
    let path = format!("/v1/devices/{}/resize", args.device);
    let answer: serde_json::Value = ask(&args.control, Method::POST, &path, body).await?;
    let _ = print(&format!("{}: {} bytes\n", args.device, answer["size"]));
    Ok(())
}

async fn fetch(args: &StatsArgs) -> Result<Vec<DeviceInfo>, String> {
    match &args.device {
        None => {
            let all: Devices =
                ask(&args.control, Method::GET, "/v1/devices", String::new()).await?;
            Ok(all.devices)
        }
        Some(name) => {
            check_name(name)?;
            let path = format!("/v1/devices/{name}");
            Ok(vec![ask(&args.control, Method::GET, &path, String::new()).await?])
        }
    }
}

/// A name that no device can have is not put into a path.
fn check_name(name: &str) -> Result<(), String> {
    let plain = crate::config::plan::is_device_name(name);
    if plain { Ok(()) } else { Err(format!("no device is named {name:?}")) }
}

/// Fails when nobody reads any more.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn render(args: &StatsArgs, devices: &[DeviceInfo], before: Before<'_>) -> Result<String, String> {
    if !args.json {
        return Ok(table(devices, before));
    }
    let all = Devices { devices: devices.to_vec() };
    // One line each time where there are many times.
    let text = match args.watch {
        None => serde_json::to_string_pretty(&all),
        Some(_) => serde_json::to_string(&all),
    };
    text.map(|text| text + "\n").map_err(|error| error.to_string())
}

/// A line for each queue that runs or has run; numbers are per second if there is a `before`.
fn table(devices: &[DeviceInfo], before: Before<'_>) -> String {
    let mut rows = vec![COLUMNS.map(|c| c.0.to_owned())];
    if before.is_some() {
        for column in [3, 4, 5, 6, 7, 8, 9, 15] {
            rows[0][column].push_str("/s");
        }
    }
    for device in devices {
        let used = |q: &&QueueInfo| {
            q.counter("running") + q.counter("requests") + q.counter("packets") > 0
        };
        let first = rows.len();
        for queue in device.queues.iter().filter(used) {
            let old = before.and_then(|(all, seconds)| {
                let old = all.iter().find(|d| d.name == device.name)?;
                Some((old.queues.iter().find(|q| q.index == queue.index)?, seconds))
            });
            rows.push(row(device, queue, old));
        }
        if rows.len() == first {
            let mut idle = [const { String::new() }; COLUMNS.len()];
            idle[0].clone_from(&device.name);
            idle[1].push_str(if device.connected { "none" } else { "-" });
            rows.push(idle);
        }
    }
    align(&rows)
}

fn row(
    device: &DeviceInfo,
    queue: &QueueInfo,
    before: Option<(&QueueInfo, f64)>,
) -> [String; COLUMNS.len()] {
    let scaled = |name: &str, unit: f64| {
        let now = queue.counter(name);
        match before {
            None => as_float(now) / unit,
            Some((old, seconds)) => {
                as_float(now.saturating_sub(old.counter(name))) / seconds / unit
            }
        }
    };
    let count = |name: &str| format!("{:.0}", scaled(name, 1.0));
    let megabytes = |name: &str| format!("{:.1}", scaled(name, 1e6));
    let histogram = |name: &str| {
        let now = queue.histogram(name);
        before.map_or_else(|| now.clone(), |(old, _)| now.since(&old.histogram(name)))
    };
    let us = |ns: u64| format!("{:.1}", as_float(ns) / 1e3);
    let (wait, serve) = (histogram("wait_ns"), histogram("serve_ns"));
    [
        device.name.clone(),
        queue.index.to_string(),
        queue.counter("worker").to_string(),
        count("requests"),
        megabytes("bytes_read"),
        megabytes("bytes_written"),
        count("kicks"),
        count("kicks_suppressed"),
        count("calls"),
        count("calls_suppressed"),
        histogram("batch_size").p50.to_string(),
        us(wait.p50),
        us(wait.p99),
        us(serve.p50),
        us(serve.p99),
        count("errors"),
        queue.counter("in_flight").to_string(),
    ]
}

/// For people to read: what is above 2^53 is rounded.
#[allow(clippy::cast_precision_loss, reason = "shown with fewer digits than a float holds")]
fn as_float(n: u64) -> f64 {
    n as f64
}

fn align(rows: &[[String; COLUMNS.len()]]) -> String {
    let widths: Vec<_> = (0..COLUMNS.len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for ((cell, width), (_, left)) in row.iter().zip(&widths).zip(COLUMNS) {
            line += &if left { format!("{cell:<width$}") } else { format!("{cell:>width$}") };
            line.push_str("  ");
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::snapshot::{Detail, Summary};
    use std::collections::BTreeMap;

    fn device(requests: u64, serve: &[(u64, u64)]) -> DeviceInfo {
        let serve = Summary { buckets: serve.to_vec(), ..Summary::default() };
        // As the daemon would say it: percentiles of these buckets.
        let serve = serve.since(&Summary::default());
        let counters = [("requests", requests), ("running", 1), ("worker", 3)];
        DeviceInfo {
            name: "root".into(),
            kind: "blk".into(),
            detail: Detail::Blk { disk: "uring".into(), size: 1 << 30, read_only: false },
            connected: true,
            socket: "/run/root.sock".into(),
            queues: vec![
                QueueInfo {
                    index: 0,
                    counters: counters.map(|(n, v)| (n.to_owned(), v)).into(),
                    histograms: [("serve_ns".to_owned(), serve)].into(),
                },
                QueueInfo { index: 1, counters: BTreeMap::new(), histograms: BTreeMap::new() },
            ],
        }
    }

    fn words(table: &str, line: usize) -> Vec<&str> {
        table.lines().nth(line).unwrap_or_default().split_whitespace().collect()
    }

    #[test]
    fn a_table_shows_the_queues_that_run_and_aligns_them() {
        let table = table(&[device(1000, &[(1023, 5)])], None);
        assert_eq!(words(&table, 1)[..4], ["root", "0", "3", "1000"]);
        assert_eq!(table.lines().count(), 2, "queue 1 has never run:\n{table}");
        let widths: Vec<_> = table.lines().map(str::len).collect();
        assert_eq!(widths[0], widths[1], "{table}");
    }

    #[test]
    fn watching_shows_what_happened_in_the_interval() {
        let before = [device(1000, &[(1023, 5)])];
        let after = [device(3000, &[(1023, 5), (4095, 7)])];
        let table = table(&after, Some((&before, 2.0)));
        assert!(table.starts_with("DEVICE") && table.contains("REQUESTS/s"), "{table}");
        let line = words(&table, 1);
        assert_eq!((line[3], line[13]), ("1000", "4.1"), "{table}");
    }

    #[test]
    fn a_device_without_a_queue_has_a_line_too() {
        let mut idle = device(0, &[]);
        idle.queues.clear();
        assert_eq!(words(&table(&[idle], None), 1), ["root", "none"]);
    }
}
