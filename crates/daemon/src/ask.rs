//! `manyring resize`, `link`, `mtu` and `announce`: a running daemon, asked over its control
//! socket to change a device.

use crate::cli::{AnnounceArgs, LinkArgs, LinkState, MtuArgs, ResizeArgs};
use crate::config::plan::{is_device_name, parse_size};
use crate::control::client::{self, look};
use crate::output::{Failure, print};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// `manyring resize`
pub(crate) async fn resize(args: &ResizeArgs) -> Result<(), Failure> {
    let body = match &args.size {
        None => String::new(),
        Some(text) => {
            let wrong = || Failure::Wrong(format!("SIZE: {text:?} is not a size, like 20G"));
            let size = parse_size(text).ok_or_else(wrong)?;
            json!({ "size": size, "shrink": args.shrink }).to_string()
        }
    };
    let answer = change(&args.control, &args.device, "resize", body, RESIZE).await?;
    print(&format!("{}: {} bytes\n", args.device, answer["size"]))
}

/// `manyring link`
pub(crate) async fn link(args: &LinkArgs) -> Result<(), Failure> {
    let up = args.state == LinkState::Up;
    let body = json!({ "up": up }).to_string();
    change(&args.control, &args.device, "link", body, AT_ONCE).await?;
    print(&format!("{}: link {}\n", args.device, if up { "up" } else { "down" }))
}

/// `manyring mtu`
pub(crate) async fn mtu(args: &MtuArgs) -> Result<(), Failure> {
    let body = json!({ "mtu": args.mtu }).to_string();
    let answer = change(&args.control, &args.device, "mtu", body, AT_ONCE).await?;
    print(&format!("{}: MTU {}\n", args.device, answer["mtu"]))
}

/// `manyring announce`
pub(crate) async fn announce(args: &AnnounceArgs) -> Result<(), Failure> {
    change(&args.control, &args.device, "announce", String::new(), AT_ONCE).await?;
    print(&format!("{}: the guest has been told to announce itself\n", args.device))
}

/// Changes of an interface end within what any answer may take.
const AT_ONCE: Duration = Duration::ZERO;
/// A resize gives requests in flight ten seconds, and a slow host has to change a large file.
const RESIZE: Duration = Duration::from_secs(25);

async fn change(
    control: &Path,
    device: &str,
    what: &str,
    body: String,
    host: Duration,
) -> Result<Value, String> {
    check_name(device)?;
    let path = format!("/v1/devices/{device}");
    // A daemon that does not answer at all is told of soon, whatever the change may take.
    let _: Value = look(control, &path).await?;
    client::change(control, &format!("{path}/{what}"), body, host).await
}

/// A name that no device can have is not put into a path.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if is_device_name(name) { Ok(()) } else { Err(format!("no device is named {name:?}")) }
}
