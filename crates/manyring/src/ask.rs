//! `manyring add`, `set`, `remove`, `reload`, `resize`, `link`, `mtu` and `announce`: each sends a
//! running daemon one request over its control socket.

use crate::cli::{
    AddedDevice, AnnounceArgs, CONTROL, LinkArgs, LinkState, MtuArgs, ReloadArgs, RemoveArgs,
    ResizeArgs, SetArgs,
};
use hyper::Method;
use manyring_config::diff::{RESTART, StepInfo};
use manyring_config::plan::{is_device_name, parse_size};
use manyring_config::tables::RawConfig;
use manyring_serve::control_client::{self as client, look};
use manyring_serve::output::{Failure, print};
use manyring_serve::times::{CLIENT_AT_ONCE, CLIENT_OPEN, CLIENT_OPEN_ALL, CLIENT_RESIZE};
use manyring_supervisor::model::Done;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Carries out `manyring add`: adds the device, and prints the steps that were carried out.
pub(crate) async fn add(device: AddedDevice) -> Result<(), Failure> {
    let (kind, mut raw) = match device {
        AddedDevice::Blk(args) => ("blk", RawConfig::from(*args)),
        AddedDevice::Net(args) => ("net", RawConfig::from(*args)),
    };
    let control = raw.daemon.control.take().unwrap_or_else(|| CONTROL.into());
    if let Some(option) = raw.daemon.given() {
        return Err(Failure::Wrong(format!(
            "{option}: is an option of the daemon, not of a device"
        )));
    }
    let keys =
        raw.blk.iter().map(serde_json::to_value).chain(raw.net.iter().map(serde_json::to_value));
    let mut keys = keys.last().and_then(Result::ok).unwrap_or_default();
    let keys = keys.as_object_mut().ok_or_else(|| "no keys of a device are given".to_owned())?;
    keys.retain(|_, value| !value.is_null());
    // A relative path means the user's working directory, and the daemon has another one.
    for key in ["file", "socket_path", "pcap"] {
        let Some(path) = keys.get(key).and_then(Value::as_str) else { continue };
        let whole = std::path::absolute(path).map_err(|error| format!("{key}: {error}"))?;
        keys.insert(key.to_owned(), whole.to_string_lossy().into());
    }
    keys.insert("kind".to_owned(), kind.into());
    let name = keys.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    check_name(&name)?;
    let (path, body) = (format!("/v1/devices/{name}"), Value::from(keys.clone()).to_string());
    let done: Done = client::change(&control, (Method::PUT, &path), body, CLIENT_OPEN).await?;
    print(&told(&name, &done))
}

/// Carries out `manyring set`: changes live keys of a device.
pub(crate) async fn set(args: &SetArgs) -> Result<(), Failure> {
    check_name(&args.device)?;
    let mut keys = serde_json::Map::new();
    for text in &args.keys {
        let wrong = || Failure::Wrong(format!("{text:?} is not like mtu=9000"));
        let (key, value) = text.split_once('=').ok_or_else(wrong)?;
        // A value that is not JSON, such as a word without quotes, is sent as a string.
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        match key.split_once('.') {
            Some((table, key)) => {
                let table = keys.entry(table).or_insert_with(|| json!({}));
                let table = table.as_object_mut().ok_or_else(wrong)?;
                table.insert(key.to_owned(), value);
            }
            None => _ = keys.insert(key.to_owned(), value),
        }
    }
    let (path, body) = (format!("/v1/devices/{}", args.device), Value::from(keys).to_string());
    let change = (Method::PATCH, path.as_str());
    let done: Done = client::change(&args.control, change, body, CLIENT_OPEN).await?;
    print(&told(&args.device, &done))
}

/// Carries out `manyring remove`: removes a device.
pub(crate) async fn remove(args: &RemoveArgs) -> Result<(), Failure> {
    check_name(&args.device)?;
    let path = format!("/v1/devices/{}?force={}", args.device, args.force);
    let change = (Method::DELETE, path.as_str());
    let _: Value = client::change(&args.control, change, String::new(), CLIENT_OPEN).await?;
    print(&format!("{}: removed\n", args.device))
}

/// Carries out `manyring reload`: has the daemon read its file again, and prints the steps.
pub(crate) async fn reload(args: &ReloadArgs) -> Result<(), Failure> {
    let path = format!("/v1/reload?dry_run={}", args.dry_run);
    let change = (Method::POST, path.as_str());
    let done: Done = client::change(&args.control, change, String::new(), CLIENT_OPEN_ALL).await?;
    print(&told("configuration", &done))
}

/// Formats the steps of a change for the user, one line each.
fn told(what: &str, done: &Done) -> String {
    if done.steps.is_empty() {
        return format!("{what}: nothing to change\n");
    }
    let line = |step: &StepInfo| match step.keys.as_slice() {
        [] => format!("{}: {}\n", step.device, step.step),
        keys if step.step == RESTART => {
            let (table, keys) = (&step.device, keys.join(", "));
            format!("{table} {keys}: changed in the file; needs a restart of the daemon\n")
        }
        keys => format!("{}: {} ({})\n", step.device, step.step, keys.join(", ")),
    };
    done.steps.iter().map(line).collect()
}

/// Carries out `manyring resize`: changes the size of a disk, and prints the new size.
pub(crate) async fn resize(args: &ResizeArgs) -> Result<(), Failure> {
    let body = match &args.size {
        None if args.shrink => json!({ "shrink": true }).to_string(),
        None => String::new(),
        Some(text) => {
            let wrong = || Failure::Wrong(format!("SIZE: {text:?} is not a size, like 20G"));
            let size = parse_size(text).ok_or_else(wrong)?;
            json!({ "size": size, "shrink": args.shrink }).to_string()
        }
    };
    let answer = change(&args.control, &args.device, "resize", body, CLIENT_RESIZE).await?;
    print(&format!("{}: {} bytes\n", args.device, answer["size"]))
}

/// Carries out `manyring link`: sets the link of a network device up or down.
pub(crate) async fn link(args: &LinkArgs) -> Result<(), Failure> {
    let up = args.state == LinkState::Up;
    let body = json!({ "up": up }).to_string();
    change(&args.control, &args.device, "link", body, CLIENT_AT_ONCE).await?;
    print(&format!("{}: link {}\n", args.device, if up { "up" } else { "down" }))
}

/// Carries out `manyring mtu`: changes the MTU of a network device.
pub(crate) async fn mtu(args: &MtuArgs) -> Result<(), Failure> {
    let body = json!({ "mtu": args.mtu }).to_string();
    let answer = change(&args.control, &args.device, "mtu", body, CLIENT_AT_ONCE).await?;
    print(&format!("{}: MTU {}\n", args.device, answer["mtu"]))
}

/// Carries out `manyring announce`: asks a guest to announce its MAC address.
pub(crate) async fn announce(args: &AnnounceArgs) -> Result<(), Failure> {
    change(&args.control, &args.device, "announce", String::new(), CLIENT_AT_ONCE).await?;
    print(&format!("{}: the guest has been told to announce itself\n", args.device))
}

async fn change(
    control: &Path,
    device: &str,
    what: &str,
    body: String,
    host: Duration,
) -> Result<Value, String> {
    check_name(device)?;
    let path = format!("/v1/devices/{device}");
    // Ask a quick question first: if the daemon does not answer at all, the command fails soon, and
    // not only after the long timeout of the change.
    let _: Value = look(control, &path).await?;
    client::change(control, (Method::POST, &format!("{path}/{what}")), body, host).await
}

/// Fails for a name that no device can have, such as one with a slash: the name becomes a part of
/// the request's path.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if is_device_name(name) { Ok(()) } else { Err(format!("no device is named {name:?}")) }
}
