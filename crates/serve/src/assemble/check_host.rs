//! Checks without opening anything that the host has the files and interfaces that a plan names. It
//! calls `stat` and asks the kernel for interfaces; it opens no file and no device, changes
//! nothing, and needs no privilege.

use super::{AssembleError, port, wanted::image_error};
use manyring_backend::blk::Image;
use manyring_config::plan::{BlkPlan, NetPlan, Place, Plan, SocketPlan};
use manyring_transport::vhost_user::{ListenError, look_at_path};
use std::io;
use std::path::Path;

/// Checks that all files, folders and interfaces which must exist before a start do exist.
///
/// # Errors
/// The first one that is missing or of the wrong kind. A file that this user may not look at, or
/// that another process holds, is no error: another user may check a plan while the daemon runs.
pub fn look(plan: &Plan) -> Result<(), AssembleError> {
    for (path, key) in plan.daemon.controls() {
        socket(path, &plan.daemon.place, key)?;
    }
    for blk in &plan.blk {
        disk(blk)?;
    }
    plan.net.iter().try_for_each(net)
}

fn socket(path: &Path, place: &Place, key: &'static str) -> Result<(), AssembleError> {
    match look_at_path(path) {
        Err(ListenError::Io { source, .. }) if is_denied(&source) => Ok(()),
        looked => looked.map_err(|source| AssembleError::Socket { at: place.at(key), source }),
    }
}

fn front(plan: &SocketPlan, place: &Place) -> Result<(), AssembleError> {
    match plan {
        SocketPlan::Listen { path, .. } => socket(path, place, "socket_path"),
        // The VMM creates the socket, or another process passes its descriptor.
        SocketPlan::Connect { .. } | SocketPlan::Fd(_) => Ok(()),
    }
}

fn disk(blk: &BlkPlan) -> Result<(), AssembleError> {
    front(&blk.device.socket, &blk.device.place)?;
    let Some(path) = blk.disk.kind("").path else { return Ok(()) };
    Image::look(path).map_err(|source| image_error(&blk.device.place, source))
}

fn net(net: &NetPlan) -> Result<(), AssembleError> {
    let place = &net.device.place;
    front(&net.device.socket, place)?;
    port::look(net)?;
    let Some(path) = &net.pcap else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let found = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(_) => Ok(()),
        Err(_) => std::fs::metadata(folder.unwrap_or(Path::new("."))).map(drop),
    };
    match found {
        Err(source) if !is_denied(&source) => {
            Err(AssembleError::Pcap { at: place.at("pcap"), path: path.clone(), source })
        }
        _ => Ok(()),
    }
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}
