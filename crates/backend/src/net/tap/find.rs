//! Interfaces of the host, found by their names.

use super::TapError;
use crate::sys::link::{InterfaceInfo, Links};

pub(in crate::net) fn open_links(name: &str) -> Result<Links, TapError> {
    Links::open().map_err(|errno| TapError::system(name, "ask for interfaces", errno))
}

pub(in crate::net) fn find(links: &Links, name: &str) -> Result<Option<InterfaceInfo>, TapError> {
    links.find(name).map_err(|errno| TapError::system(name, "look at the interface", errno))
}

/// The interface `bridge`, if it is a bridge.
pub(super) fn find_bridge(links: &Links, bridge: &str) -> Result<InterfaceInfo, TapError> {
    let found = find(links, bridge)?.ok_or_else(|| TapError::BridgeMissing(bridge.to_owned()))?;
    if found.kind == "bridge" { Ok(found) } else { Err(TapError::NotABridge(bridge.to_owned())) }
}
