//! Checks that no two devices share a name, a socket, a file, an interface or a descriptor.
//!
//! The rules for paths are applied twice. When a plan is made from a text, paths are compared as
//! they are written. Before anything is opened, the files that the host finds under the paths are
//! compared, since one file can have several paths (hard links, symbolic links, bind mounts).

use super::{DevicePlan, DiskPlan, Plan, PortKind, PortPlan, SocketPlan, XenBlkPlan};
use crate::place::PlanError;
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The identity of a file or a socket. Two paths with equal identities name the same file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Identity {
    /// A path whose file does not exist, or is not looked at.
    Name(PathBuf),
    /// A file, which may have several paths.
    Inode { filesystem: u64, inode: u64 },
    /// A block or character device, which may have several nodes in `/dev`.
    Device(u64),
}

/// The functions that find the identities of paths.
struct Look {
    /// For a file: follows a symbolic link.
    file: fn(&Path) -> Identity,
    /// For a socket: does not follow a symbolic link, because listening replaces the link.
    socket: fn(&Path) -> Identity,
}

/// Compares paths as they are written.
const WRITTEN: Look = Look { file: written, socket: written };
/// Compares the files that the host finds under the paths.
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

/// Checks a plan as it is written, without looking at the host's files.
pub(super) fn check(plan: &Plan) -> Result<(), PlanError> {
    names(plan)?;
    paths(plan, &WRITTEN)?;
    fds(plan)?;
    interfaces(plan)
}

/// Checks the files that the host finds under the paths of a plan, without opening them.
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
    // A disk of the back-end `xen` is named `xen-KIND-DOMAIN-DEVICE`: no other device may have such
    // a name.
    for XenBlkPlan { name, place, .. } in &plan.xen_blk {
        let is_of = |other: &&&String| other.strip_prefix(name).is_some_and(|o| o.starts_with('-'));
        if let Some(other) = names.iter().find(is_of) {
            let problem = format!("its disks could have the name of device \"{other}\"");
            return place.error("name", problem);
        }
    }
    // With a control socket, a plan without devices is useful: they can be added later.
    if names.is_empty() && plan.daemon.control.is_none() {
        let (at, problem) = ("blk, net, xen_blk".to_owned(), "no device is configured".to_owned());
        return Err(PlanError { at, problem });
    }
    Ok(())
}

fn paths(plan: &Plan, look: &Look) -> Result<(), PlanError> {
    sockets(plan, look)?;
    // Captures are compared with the files of disks too, so the disks are collected first.
    let disks = disks(plan, look)?;
    let mut captures = HashMap::new();
    for net in &plan.net {
        let (place, Some(path)) = (&net.device.place, &net.pcap) else { continue };
        let identity = (look.file)(path);
        // Starting a capture truncates the file, which would destroy a disk.
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

/// Checks that no two disks share a file or an NBD export, unless both are read-only. Returns, by
/// file, the name of a disk that uses it, and whether that disk is read-only.
fn disks<'a>(plan: &'a Plan, look: &Look) -> Result<HashMap<Identity, (&'a str, bool)>, PlanError> {
    let (mut disks, mut exports) = (HashMap::new(), HashMap::new());
    for blk in &plan.blk {
        let (name, place) = (blk.device.name.as_str(), &blk.device.place);
        if let DiskPlan::Nbd(nbd) = &blk.disk
            && let Some((other, reads)) = exports.insert(&nbd.text, (name, blk.options.read_only))
            && !(reads && blk.options.read_only)
        {
            return place.error(
                "nbd",
                format!("{}; sharing needs read_only on both", twice(&nbd.text, other)),
            );
        }
        let Some(path) = blk.disk.kind(name).path else { continue };
        if let Some((other, reads)) = disks.insert((look.file)(path), (name, blk.options.read_only))
            && !(reads && blk.options.read_only)
        {
            return place.error(
                "file",
                format!("{}; sharing needs read_only on both", twice(path.display(), other)),
            );
        }
    }
    Ok(disks)
}

/// Checks that no two devices name the same inherited descriptor: each is adopted and closed by one
/// owner.
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
