//! `manyring resize`, `link`, `mtu` and `announce`: a running daemon, asked over its control
//! socket to change a device.

use crate::cli::{AnnounceArgs, LinkArgs, LinkState, MtuArgs, ResizeArgs};
use crate::config::plan::{is_device_name, parse_size};
use crate::control::client::ask;
use crate::output::{Failure, print};
use hyper::Method;
use serde_json::{Value, json};
use std::path::Path;

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
    let answer = change(&args.control, &args.device, "resize", body).await?;
    print(&format!("{}: {} bytes\n", args.device, answer["size"]))
}

/// `manyring link`
pub(crate) async fn link(args: &LinkArgs) -> Result<(), Failure> {
    let up = args.state == LinkState::Up;
    let body = json!({ "up": up }).to_string();
    change(&args.control, &args.device, "link", body).await?;
    print(&format!("{}: link {}\n", args.device, if up { "up" } else { "down" }))
}

/// `manyring mtu`
pub(crate) async fn mtu(args: &MtuArgs) -> Result<(), Failure> {
    let body = json!({ "mtu": args.mtu }).to_string();
    let answer = change(&args.control, &args.device, "mtu", body).await?;
    print(&format!("{}: MTU {}\n", args.device, answer["mtu"]))
}

/// `manyring announce`
pub(crate) async fn announce(args: &AnnounceArgs) -> Result<(), Failure> {
    change(&args.control, &args.device, "announce", String::new()).await?;
    print(&format!("{}: the guest has been told to announce itself\n", args.device))
}

async fn change(control: &Path, device: &str, what: &str, body: String) -> Result<Value, String> {
    check_name(device)?;
    let path = format!("/v1/devices/{device}/{what}");
    ask(control, Method::POST, &path, body).await
}

/// A name that no device can have is not put into a path.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if is_device_name(name) { Ok(()) } else { Err(format!("no device is named {name:?}")) }
}
