//! `manyring stats`: what the queues of a running daemon do, asked over its control socket.

mod blk;
mod net;
mod table;

use crate::ask::check_name;
use crate::cli::StatsArgs;
use crate::control::client::ask;
use crate::control::snapshot::{Detail, DeviceInfo, Devices};
use crate::output::{Failure, print};
use hyper::Method;
use std::time::Duration;
use table::Before;

/// `manyring stats`
pub(crate) async fn show(args: &StatsArgs) -> Result<(), Failure> {
    let mut before = fetch(args).await?;
    print(&render(args, &before, None)?)?;
    let Some(period) = args.watch.map(Duration::from_secs) else { return Ok(()) };
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last = ticks.tick().await - period;
    loop {
        let devices = fetch(args).await?;
        let now = tokio::time::Instant::now();
        let elapsed = (now - last).as_secs_f64().max(0.001);
        print(&render(args, &devices, Some((&before, elapsed)))?)?;
        (before, last) = (devices, now);
        ticks.tick().await;
    }
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

fn render(args: &StatsArgs, devices: &[DeviceInfo], before: Before<'_>) -> Result<String, String> {
    if !args.json {
        return Ok(tables(devices, before));
    }
    let all = Devices { devices: devices.to_vec() };
    // One line each time where there are many times.
    let text = match args.watch {
        None => serde_json::to_string_pretty(&all),
        Some(_) => serde_json::to_string(&all),
    };
    text.map(|text| text + "\n").map_err(|error| error.to_string())
}

/// A table for each kind of device that there is.
fn tables(devices: &[DeviceInfo], before: Before<'_>) -> String {
    let of = |is_net: bool| -> Vec<&DeviceInfo> {
        let is_such = |d: &&DeviceInfo| matches!(d.detail, Detail::Net { .. }) == is_net;
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
    texts.join("\n")
}
