//! `manyring resize`, `link`, `mtu` and `announce`: a running daemon, asked over its control
//! socket to change a device.

use crate::cli::{AnnounceArgs, LinkArgs, LinkState, MtuArgs, ResizeArgs};
use crate::config::plan::{is_device_name, parse_size};
use crate::control::client::ask;
use hyper::Method;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// `manyring resize`
pub(crate) async fn resize(args: &ResizeArgs) -> Result<(), String> {
    let body = match &args.size {
        None => String::new(),
        Some(text) => {
            let size = parse_size(text).ok_or_else(|| format!("SIZE: {text:?} is not a size"))?;
            json!({ "size": size }).to_string()
        }
    };
    let answer = change(&args.control, &args.device, "resize", body).await?;
    say(&format!("{}: {} bytes", args.device, answer["size"]));
    Ok(())
}

/// `manyring link`
pub(crate) async fn link(args: &LinkArgs) -> Result<(), String> {
    let up = args.state == LinkState::Up;
    let body = json!({ "up": up }).to_string();
    change(&args.control, &args.device, "link", body).await?;
    say(&format!("{}: link {}", args.device, if up { "up" } else { "down" }));
    Ok(())
}

/// `manyring mtu`
pub(crate) async fn mtu(args: &MtuArgs) -> Result<(), String> {
    let body = json!({ "mtu": args.mtu }).to_string();
    let answer = change(&args.control, &args.device, "mtu", body).await?;
    say(&format!("{}: MTU {}", args.device, answer["mtu"]));
    Ok(())
}

/// `manyring announce`
pub(crate) async fn announce(args: &AnnounceArgs) -> Result<(), String> {
    change(&args.control, &args.device, "announce", String::new()).await?;
    say(&format!("{}: the guest has been told to announce itself", args.device));
    Ok(())
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

/// That nobody reads it changes nothing.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
