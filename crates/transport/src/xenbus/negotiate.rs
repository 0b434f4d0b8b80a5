//! Parses the nodes of a device in xenstore into typed records, and reports errors in them.
//!
//! The table of the nodes, and the records that they make up, are in `wire::xen`. This file adds
//! the whole path of the node to each error, and checks the rules that concern several folders.

use super::DeviceId;
use manyring_wire::xen::blkif::{RING_PAGE_ORDER_MAX, VDISK_READONLY, VDISK_REMOVABLE};
use manyring_wire::xen::device::{Assignment, Connection, DiskGeometry, Nodes, Offer, QUEUES_MAX};
use manyring_wire::xen::keys::{self, Folder, Key, KeyError, KeyFault, Writer};
use manyring_wire::xen::path::{Path, PathError};
use manyring_wire::xen::state::XenbusState;

/// The node of the back-end's folder in which a hotplug script reports how its work ended.
pub const HOTPLUG_STATUS: &str = "hotplug-status";
/// The node in which a hotplug script reports why it failed.
pub const HOTPLUG_ERROR: &str = "hotplug-error";
/// Nodes that a former process may have offered to a front-end that is still connected, so this
/// process must not offer less.
const OFFERED: [Key; 3] =
    [keys::MULTI_QUEUE_MAX_QUEUES, keys::MAX_RING_PAGE_ORDER, keys::FEATURE_MAX_INDIRECT_SEGMENTS];

/// One reading of the nodes of a device. A folder that does not exist has no nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The nodes of the back-end's folder.
    pub back: Nodes,
    /// The nodes of the front-end's folder, and of the folders of its queues.
    pub front: Nodes,
}

/// Why a device cannot be served, or cannot be served any longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the Display text says what each field is")]
pub enum Reason {
    #[error("{folder}/{error}")]
    Node { folder: String, error: KeyError },
    #[error("{folder}/frontend: {error}")]
    FrontendPath { folder: String, error: PathError },
    #[error("{folder}/frontend: not an absolute path")]
    FrontendRelative { folder: String },
    #[error("{path}: the front-end changed it while connected")]
    Changed { path: String },
    #[error("{folder}/hotplug-status: the hotplug script failed: {text}")]
    Hotplug { folder: String, text: String },
    /// The device or its disk has failed, for this reason.
    #[error("{0}")]
    Device(String),
}

impl Reason {
    fn node(folder: &str, error: KeyError) -> Self {
        Self::Node { folder: folder.to_owned(), error }
    }
}

/// Returns the names of the nodes that are read in the back-end's folder.
pub fn back_names() -> impl Iterator<Item = &'static str> {
    let of_toolstack = |key: &&Key| key.folder == Folder::Back && key.writer == Writer::Toolstack;
    let names = keys::KEYS.iter().filter(of_toolstack).map(|key| key.name);
    let names = names.chain(OFFERED.iter().map(|key| key.name));
    let own = [keys::BACK_STATE.name, keys::SECTOR_SIZE.name];
    names.chain(own).chain([HOTPLUG_STATUS, HOTPLUG_ERROR])
}

/// Returns how many queues the nodes of the back-end's folder offer.
#[must_use]
pub fn queues_offered(back: &Nodes) -> u32 {
    Offer::parse(back).map_or(0, |offer| offer.queues_max)
}

/// Returns the offer to a front-end that a former process has left connected: of each limit, the
/// larger one of that process's offer and of `offer`.
pub(super) fn offer_left(back: &Nodes, offer: Offer) -> Offer {
    let Ok(former) = Offer::parse(back) else { return offer };
    Offer {
        queues_max: offer.queues_max.max(former.queues_max).min(QUEUES_MAX),
        ring_page_order_max: offer.ring_page_order_max.max(former.ring_page_order_max),
        indirect_segments_max: offer.indirect_segments_max.max(former.indirect_segments_max),
        ..offer
    }
}

/// Returns the nodes of the front-end's folder that are read first; they tell the number of queues.
pub fn front_names() -> impl Iterator<Item = &'static str> {
    let of_front = |key: &&Key| key.folder == Folder::Front && key.writer == Writer::Front;
    keys::KEYS.iter().filter(of_front).map(|key| key.name)
}

/// Returns the names of the nodes of the front-end's queues. The list is empty in a state in which
/// these nodes have no meaning. It is also empty if the number of queues is wrong, or larger than
/// `queues_max`: the front-end is refused for that, and its queues need not be read.
#[must_use]
pub fn queue_names(front: &Nodes, queues_max: u32) -> Vec<String> {
    use XenbusState::{Closed, Closing, Initialising, Unknown};
    if matches!(state_of(front), Some(Unknown | Initialising | Closing | Closed)) {
        return Vec::new();
    }
    let number = |key: Key| key.number(value(front, key.name)).unwrap_or(0);
    let count = number(keys::MULTI_QUEUE_NUM_QUEUES);
    if count > queues_max.clamp(1, QUEUES_MAX).into() {
        return Vec::new();
    }
    let order_of_pages = u64::from(number(keys::NUM_RING_PAGES).max(1).ilog2());
    let order = number(keys::RING_PAGE_ORDER).max(order_of_pages);
    let pages = 1_u64 << order.min(RING_PAGE_ORDER_MAX.into());
    let mut names = Vec::new();
    for queue in 0..count {
        let folder = if count == 1 { String::new() } else { format!("queue-{queue}/") };
        names.push(format!("{folder}{}", keys::EVENT_CHANNEL.name));
        names.push(format!("{folder}{}", keys::RING_REF.name));
        names.extend((0..pages).map(|page| format!("{folder}{}{page}", keys::RING_REF.name)));
    }
    names
}

/// Returns the state in a folder's `state` node; `Unknown` if there is no such node. `None`: the
/// value of the node is no state.
#[must_use]
pub fn state_of(nodes: &Nodes) -> Option<XenbusState> {
    value(nodes, keys::FRONT_STATE.name).map_or(Some(XenbusState::Unknown), XenbusState::parse)
}

/// Returns the state of the front-end.
///
/// # Errors
/// [`Reason::Node`]: the value of the node is no state.
pub(super) fn front_state(folder: &str, front: &Nodes) -> Result<XenbusState, Reason> {
    let key = keys::FRONT_STATE;
    let wrong = |fault| Reason::node(folder, KeyError { key: key.name.to_owned(), fault });
    key.number(value(front, key.name)).map_err(wrong)?;
    Ok(state_of(front).unwrap_or_default())
}

/// Parses the nodes of the device that the tool stack has written.
///
/// # Errors
/// * [`Reason::Node`]: a node is wrong, or the front-end's domain is not that of the folder.
/// * [`Reason::FrontendPath`], [`Reason::FrontendRelative`]: the front-end's path is not valid, or
///   not absolute.
pub(super) fn assignment(id: &DeviceId, back: &Nodes) -> Result<Assignment, Reason> {
    let folder = id.back_folder();
    let assignment = Assignment::parse(back).map_err(|error| Reason::node(&folder, error))?;
    match Path::parse(assignment.frontend.as_bytes()) {
        Ok(path) if path.is_absolute() => {}
        Ok(_) => return Err(Reason::FrontendRelative { folder }),
        Err(error) => return Err(Reason::FrontendPath { folder, error }),
    }
    if assignment.frontend_id != id.domain {
        let other = "the domain of this folder";
        let fault = KeyFault::Contradiction { value: assignment.frontend_id.into(), other };
        let key = keys::FRONTEND_ID.name.to_owned();
        return Err(Reason::node(&folder, KeyError { key, fault }));
    }
    Ok(assignment)
}

/// Returns the error that a failed hotplug script has left.
pub(super) fn hotplug_failure(id: &DeviceId, back: &Nodes) -> Option<Reason> {
    if value(back, HOTPLUG_STATUS) != Some(b"error") {
        return None;
    }
    const TEXT_MAX: usize = 200;
    let text = value(back, HOTPLUG_ERROR).unwrap_or(b"no reason given");
    let text = text[..text.len().min(TEXT_MAX)].escape_ascii().to_string();
    Some(Reason::Hotplug { folder: id.back_folder(), text })
}

/// Parses the nodes in which the front-end names its rings and event channels.
///
/// # Errors
/// [`Reason::Node`]: a node is missing or wrong, or asks for more than was offered.
pub(super) fn connection(folder: &str, front: &Nodes, offer: &Offer) -> Result<Connection, Reason> {
    Connection::parse(front, offer).map_err(|error| Reason::node(folder, error))
}

/// Returns the path of the first node, except the state, that differs between two readings.
pub(super) fn first_change(folder: &str, was: &Nodes, is: &Nodes) -> String {
    let names = was.keys().chain(is.keys()).filter(|name| *name != keys::FRONT_STATE.name);
    let changed = names.min_by_key(|name| was.get(*name) == is.get(*name));
    format!("{folder}/{}", changed.map_or("", String::as_str))
}

/// Returns the part of a device's offer that goes to this front-end: no discards if it may not
/// write, or if the tool stack has disabled them.
pub(super) fn offer_to(assignment: &Assignment, mut offer: Offer) -> Offer {
    if !assignment.writable || !assignment.discard_enable {
        offer.discard = None;
    }
    offer
}

/// Returns the disk for this front-end, with the flags for read-only and removable disks.
pub(super) fn disk_for(assignment: &Assignment, mut disk: DiskGeometry) -> DiskGeometry {
    if !assignment.writable {
        disk.info |= VDISK_READONLY;
    }
    if assignment.removable {
        disk.info |= VDISK_REMOVABLE;
    }
    disk
}

/// Returns the disk for a front-end that a former process has left connected. It keeps the sector
/// size that the former process has written, because a front-end reads that node only when it
/// connects.
pub(super) fn disk_left(back: &Nodes, disk: DiskGeometry) -> DiskGeometry {
    let sector_size = match value(back, keys::SECTOR_SIZE.name) {
        Some(b"512") => 512,
        Some(b"4096") => 4096,
        _ => return disk,
    };
    let physical_sector_size = disk.physical_sector_size.max(sector_size);
    DiskGeometry { sector_size, physical_sector_size, ..disk }
}

pub(super) fn value<'a>(nodes: &'a Nodes, name: &str) -> Option<&'a [u8]> {
    nodes.get(name).map(Vec::as_slice)
}
