//! Things that two devices cannot share: a name, a socket, a file, an interface, a queue.
//!
//! These rules are applied twice: to the paths as they are written, when a plan is made from a
//! text, and to the files that the host finds under the paths, before anything is opened: one file
//! has many names (links, other folders), and so has the folder of a socket.

use super::{DevicePlan, DiskPlan, Plan, PortKind, PortPlan, SocketPlan, XenBlkPlan};
use crate::place::PlanError;
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The identity of a file or a socket: two that are equal here are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Identity {
    /// A name, in a folder.
    Name(PathBuf),
    /// A file, whatever its names.
    Inode { filesystem: u64, inode: u64 },
    /// A block or character device, whatever its nodes.
    Device(u64),
}

/// How paths are told apart.
struct Look {
    /// That of a file, which may be a link.
    file: fn(&Path) -> Identity,
    /// That of a socket: a link is replaced, not followed, where we listen.
    socket: fn(&Path) -> Identity,
}

/// As they are written.
const WRITTEN: Look = Look { file: written, socket: written };
/// As the host finds them.
const FOUND: Look = Look { file: found_file, socket: found_name };

fn written(path: &Path) -> Identity {
    Identity::Name(path.to_path_buf())
}

fn found_file(path: &Path) -> Identity {
    match std::fs::metadata(path) {
        Err(_) => found_name(path),
        Ok(found) if found.file_type().is_block_device() || found.file_type().is_char_device() => {
            Identity::Device(found.rdev())
        }
        Ok(found) => Identity::Inode { filesystem: found.dev(), inode: found.ino() },
    }
}

fn found_name(path: &Path) -> Identity {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let folder = absolute.parent().and_then(|folder| std::fs::canonicalize(folder).ok());
    Identity::Name(match (folder, absolute.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => absolute,
    })
}

/// Checks a plan as it is written; nothing is looked at.
pub(super) fn check(plan: &Plan) -> Result<(), PlanError> {
    names(plan)?;
    paths(plan, &WRITTEN)?;
    fds(plan)?;
    interfaces(plan)
}

/// Checks what the host finds under the paths of a plan; nothing is opened.
pub(super) fn check_found(plan: &Plan) -> Result<(), PlanError> {
    paths(plan, &FOUND)
}

fn names(plan: &Plan) -> Result<(), PlanError> {
    let mut names = HashSet::new();
    for DevicePlan { name, place, .. } in plan.devices() {
        if !names.insert(name) {
            return place.error("name", "is already used by another device");
        }
    }
    for XenBlkPlan { name, place, .. } in &plan.xen_blk {
        if !names.insert(name) {
            return place.error("name", "is already used by another device");
        }
    }
    for XenBlkPlan { name, place, .. } in &plan.xen_blk {
        let is_of = |other: &&&String| other.strip_prefix(name).is_some_and(|o| o.starts_with('-'));
        if let Some(other) = names.iter().find(is_of) {
            let problem = format!("its disks could have the name of device \"{other}\"");
            return place.error("name", problem);
        }
    }
    // With a control socket devices can come later.
    if names.is_empty() && plan.daemon.control.is_none() {
        let (at, problem) = ("blk, net, xen_blk".to_owned(), "no device is configured".to_owned());
        return Err(PlanError { at, problem });
    }
    Ok(())
}

fn paths(plan: &Plan, look: &Look) -> Result<(), PlanError> {
    sockets(plan, look)?;
    let disks = disks(plan, look)?;
    let mut captures = HashMap::new();
    for net in &plan.net {
        let (place, Some(path)) = (&net.device.place, &net.pcap) else { continue };
        let identity = (look.file)(path);
        // A capture begins with an empty file.
        if let Some((disk, _)) = disks.get(&identity) {
            return place.error(
                "pcap",
                format!("{} is already used by the disk \"{disk}\"", path.display()),
            );
        }
        if let Some(other) = captures.insert(identity, &net.device.name) {
            return place.error("pcap", twice(path.display(), other));
        }
    }
    Ok(())
}

fn twice(name: impl Display, other: &str) -> String {
    format!("{name} is already used by device \"{other}\"")
}

fn sockets(plan: &Plan, look: &Look) -> Result<(), PlanError> {
    let controls: Vec<_> = plan.daemon.controls().map(|(path, _)| (look.socket)(path)).collect();
    if let [changes, shows] = controls.as_slice()
        && changes == shows
    {
        return plan.daemon.place.error("control_read", "is already used by control");
    }
    let mut sockets = HashMap::new();
    for DevicePlan { name, place, socket, .. } in plan.devices() {
        let Some(path) = socket.path() else { continue };
        let identity = (look.socket)(path);
        if controls.contains(&identity) {
            let problem = format!("{} is already used by the control socket", path.display());
            return place.error("socket_path", problem);
        }
        if let Some(other) = sockets.insert(identity, name) {
            return place.error("socket_path", twice(path.display(), other));
        }
    }
    Ok(())
}

/// Devices that only read may share a file. By file: a device, and whether it only reads.
fn disks<'a>(plan: &'a Plan, look: &Look) -> Result<HashMap<Identity, (&'a str, bool)>, PlanError> {
    let (mut disks, mut exports) = (HashMap::new(), HashMap::new());
    for blk in &plan.blk {
        let (name, place) = (blk.device.name.as_str(), &blk.device.place);
        if let DiskPlan::Nbd(nbd) = &blk.disk
            && let Some((other, reads)) = exports.insert(&nbd.text, (name, blk.read_only))
            && !(reads && blk.read_only)
        {
            return place.error(
                "nbd",
                format!("{}; sharing needs read_only on both", twice(&nbd.text, other)),
            );
        }
        let Some(path) = blk.disk.kind(name).path else { continue };
        if let Some((other, reads)) = disks.insert((look.file)(path), (name, blk.read_only))
            && !(reads && blk.read_only)
        {
            return place.error(
                "file",
                format!("{}; sharing needs read_only on both", twice(path.display(), other)),
            );
        }
    }
    Ok(disks)
}

/// Whoever adopts a file descriptor is its only owner.
fn fds(plan: &Plan) -> Result<(), PlanError> {
    let mut fds = HashMap::new();
    for DevicePlan { name, place, socket, .. } in plan.devices() {
        if let SocketPlan::Fd(fd) = socket
            && let Some(other) = fds.insert(*fd, name)
        {
            return place.error("fd", twice(fd, other));
        }
    }
    for net in &plan.net {
        let PortPlan::TapFds(list) = &net.port else { continue };
        let DevicePlan { name, place, .. } = &net.device;
        for fd in list {
            match fds.insert(*fd, name) {
                None => {}
                Some(other) if other == name => {
                    return place.error("tap_fds", format!("{fd} is given twice"));
                }
                Some(other) => return place.error("tap_fds", twice(fd, other)),
            }
        }
    }
    Ok(())
}

fn interfaces(plan: &Plan) -> Result<(), PlanError> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    for net in &plan.net {
        let PortKind { key, interface: Some(name), .. } = net.port.kind() else { continue };
        let DevicePlan { name: device, place, .. } = &net.device;
        if let Some(other) = names.insert(name, device) {
            return place.error(key, twice(name, other));
        }
    }
    Ok(())
}
