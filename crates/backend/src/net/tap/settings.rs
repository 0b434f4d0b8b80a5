//! The settings that an operator chooses for an interface: its MTU, its bridge, and its state.

use super::find::{find, find_bridge};
use super::{Opened, QueueLength, TapError};
use crate::sys::link::{Change, InterfaceInfo, Links};
use rustix::io::Errno;

/// The settings for a tap or macvtap; `None` leaves the interface's own unchanged.
#[derive(Default)]
pub(super) struct Settings<'a> {
    pub(super) sndbuf: Option<u32>,
    pub(super) txqueuelen: QueueLength,
    pub(super) merge: bool,
    pub(super) steer: bool,
    pub(super) mtu: Option<u16>,
    pub(super) bridge: Option<&'a str>,
    pub(super) up: Option<bool>,
}

/// Sets the MTU, the bridge and the state of the interface, and returns its MTU. A setting that is
/// as wanted already is not set again, since that would need a capability.
pub(super) fn apply(opened: &Opened, settings: &Settings<'_>) -> Result<Option<u16>, TapError> {
    let name = &opened.name;
    let Some(link) = &opened.link else {
        let wants = settings.mtu.is_some()
            || settings.bridge.is_some()
            || matches!(settings.txqueuelen, QueueLength::Frames(_))
            || settings.up.is_some();
        return if wants { Err(TapError::Elsewhere(name.clone())) } else { Ok(None) };
    };
    let up = settings.up.or(opened.is_created.then_some(true));
    let set = |change| opened.links.set(link.index, &change);
    if let Some(mtu) = settings.mtu.filter(|mtu| u32::from(*mtu) != link.mtu) {
        set(Change { mtu: Some(mtu.into()), ..Change::default() }).map_err(
            |errno| match errno {
                Errno::INVAL => TapError::MtuRefused { name: name.clone(), mtu },
                errno => TapError::system(name, "set its MTU", errno),
            },
        )?;
    }
    if let Some(bridge) = settings.bridge {
        join_bridge(&opened.links, (name, link), bridge)?;
    }
    if let Some(up) = up.filter(|up| *up != link.is_up) {
        set(Change { up: Some(up), ..Change::default() })
            .map_err(|errno| TapError::system(name, "set it up or down", errno))?;
    }
    // Read the MTU after all changes. Joining a bridge does not change the MTU of the tap.
    let mtu = find(&opened.links, name)?.map_or(link.mtu, |link| link.mtu);
    Ok(u16::try_from(mtu).ok())
}

/// Makes interface `name` a port of `bridge`, unless it is one already.
pub(super) fn join_bridge(
    links: &Links,
    (name, link): (&str, &InterfaceInfo),
    bridge: &str,
) -> Result<(), TapError> {
    let found = find_bridge(links, bridge)?;
    if link.master.is_some_and(|master| master != found.index) {
        return Err(TapError::OtherBridge(name.to_owned()));
    }
    if link.master.is_none() {
        let change = Change { master: Some(found.index), ..Change::default() };
        links
            .set(link.index, &change)
            .map_err(|errno| TapError::system(name, "join the bridge", errno))?;
    }
    Ok(())
}
