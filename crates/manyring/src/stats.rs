//! `manyring stats`: prints the counters of a running daemon, which it reads over the control
//! socket.

mod blk;
mod net;
pub(crate) mod table;
mod workers;

use crate::ask::check_name;
use crate::cli::StatsArgs;
use manyring_control::snapshot::{DeviceInfo, Devices};
use manyring_serve::control_client::look;
use manyring_serve::output::{Failure, print};
use manyring_serve::worker_view::{StuckInfo, WorkerInfo, Workers};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use table::Before;

/// One reading of a daemon: its devices, and, unless the user asked for one device only, its
/// workers and stuck threads.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Shown {
    pub(crate) devices: Vec<DeviceInfo>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) workers: Vec<WorkerInfo>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) stuck: Vec<StuckInfo>,
}

/// Carries out `manyring stats`: prints tables or JSON, with `--watch` again and again.
pub(crate) async fn show(args: &StatsArgs) -> Result<(), Failure> {
    let mut before = fetch(&args.control, args.device.as_deref()).await?;
    print(&render(args, &before, None)?)?;
    let Some(period) = args.watch.map(Duration::from_secs) else { return Ok(()) };
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last = ticks.tick().await - period;
    loop {
        let shown = fetch(&args.control, args.device.as_deref()).await?;
        let now = tokio::time::Instant::now();
        let elapsed = (now - last).as_secs_f64().max(0.001);
        print(&render(args, &shown, Some((&before, elapsed)))?)?;
        (before, last) = (shown, now);
        ticks.tick().await;
    }
}

/// Reads the counters of one device, or of all devices and workers, from the daemon at `control`.
pub(crate) async fn fetch(control: &Path, device: Option<&str>) -> Result<Shown, String> {
    match device {
        None => {
            let all: Devices = look(control, "/v1/devices").await?;
            let workers: Workers = look(control, "/v1/workers").await?;
            let Workers { workers, stuck } = workers;
            Ok(Shown { devices: all.devices, workers, stuck })
        }
        Some(name) => {
            check_name(name)?;
            let path = format!("/v1/devices/{name}");
            let device = look(control, &path).await?;
            Ok(Shown { devices: vec![device], workers: Vec::new(), stuck: Vec::new() })
        }
    }
}

fn render(
    args: &StatsArgs,
    shown: &Shown,
    before: Option<(&Shown, f64)>,
) -> Result<String, String> {
    if !args.json {
        let old = before.map(|(old, seconds)| (&old.devices[..], seconds));
        let mut text = tables(&shown.devices, old);
        if !shown.workers.is_empty() {
            let old = before.map(|(old, seconds)| (&old.workers[..], seconds));
            text = format!("{text}\n{}", workers::table(&shown.workers, old));
        }
        if !shown.stuck.is_empty() {
            text = format!("{text}\n{}", workers::stuck(&shown.stuck));
        }
        return Ok(text);
    }
    // With --watch, each reading is one line of JSON.
    let text = match args.watch {
        None => serde_json::to_string_pretty(shown),
        Some(_) => serde_json::to_string(shown),
    };
    text.map(|text| text + "\n").map_err(|error| error.to_string())
}

/// Returns a table of the disks and a table of the network devices; a kind without devices has no
/// table.
fn tables(devices: &[DeviceInfo], before: Before<'_>) -> String {
    let of = |is_net: bool| -> Vec<&DeviceInfo> {
        let is_such = |d: &&DeviceInfo| (d.kind == "net") == is_net;
        devices.iter().filter(is_such).collect()
    };
    let (blks, nets) = (of(false), of(true));
    let mut texts = Vec::new();
    if !blks.is_empty() || nets.is_empty() {
        texts.push(blk::table(&blks, before));
    }
    if !nets.is_empty() {
        texts.push(net::table(&nets, before));
    }
    let waits = |device: &DeviceInfo| {
        device.reason.as_ref().map(|reason| format!("{} waits: {reason}\n", device.name))
    };
    let waiting: String = devices.iter().filter_map(waits).collect();
    if !waiting.is_empty() {
        texts.push(waiting);
    }
    texts.join("\n")
}
