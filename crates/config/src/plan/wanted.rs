//! `Wanted`: a device of the plan, whatever its kind.

use super::{
    BlkPlan, Class, DevicePlan, DiskKind, NetPlan, Pinned, Place, PortPlan, SocketPlan, class_of,
};
use crate::limit_keys::Of;
use manyring_device::net::is_mtu;
use serde_json::{Map, Value};
use std::ffi::OsStr;
use std::sync::Arc;

/// A path that an unprivileged user's device names, and that does not exist or is not below
/// `allow_paths`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct Unfound {
    /// The key that names the path.
    pub key: &'static str,
    /// One sentence that says what is wrong with the path.
    pub problem: String,
}

/// A device that is to be served. Clones share the plan.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// A vhost-user block device.
    Blk(Arc<BlkPlan>),
    /// A vhost-user network device.
    Net(Arc<NetPlan>),
}

impl Wanted {
    /// Returns the part of the plan that devices of every kind have.
    pub fn plan(&self) -> &DevicePlan {
        match self {
            Self::Blk(blk) => &blk.device,
            Self::Net(net) => &net.device,
        }
    }

    /// Returns the kind of the device, as the control API names it: `blk` or `net`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Blk(_) => "blk",
            Self::Net(_) => "net",
        }
    }

    /// Returns the key that names the disk or port of the device, such as `file` or `tap`.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Blk(blk) => blk.disk.kind("").key,
            Self::Net(net) => net.port.kind().key,
        }
    }

    /// Returns the socket of the device in words: its path, or its descriptor like `fd 3`.
    pub fn socket(&self) -> String {
        match &self.plan().socket {
            SocketPlan::Listen { path, .. } | SocketPlan::Connect { path } => {
                path.display().to_string()
            }
            SocketPlan::Fd(fd) => format!("fd {fd}"),
        }
    }

    /// True if the frames of the device are captured into a file (`pcap`).
    pub fn has_capture(&self) -> bool {
        matches!(self, Self::Net(net) if net.pcap.is_some())
    }

    /// Resolves the paths that an unprivileged user has named, below the folders of `allow_paths`,
    /// and keeps descriptors of the files. Does nothing for a device of any other origin. May
    /// block.
    ///
    /// # Errors
    /// [`Unfound`]: a path does not exist or is not allowed. The call can be repeated.
    pub fn find(&self) -> Result<(), Unfound> {
        let find = |pinned: Option<&Pinned>, key| {
            let found = pinned.map_or(Ok(()), |pinned| pinned.find().map(drop));
            found.map_err(|problem| Unfound { key, problem })
        };
        if let SocketPlan::Listen { folder, .. } = &self.plan().socket {
            find(folder.as_ref(), "socket_path")?;
        }
        match self {
            Self::Blk(blk) => {
                let DiskKind { key, pinned, .. } = blk.disk.kind("");
                find(pinned, key)
            }
            Self::Net(_) => Ok(()),
        }
    }

    /// True if the device was added over the control API.
    pub fn is_of_api(&self) -> bool {
        matches!(self.plan().place, Place::Api(_))
    }

    /// True if the device can be opened only after `other` is closed, because both name the same
    /// socket, file, interface or port of a switch. Names are compared as they are written.
    pub fn needs_what_of(&self, other: &Self) -> bool {
        let (own, others) = (self.needs(), other.needs());
        own.iter().any(|need| others.contains(need))
    }

    /// Returns the switch of which the device is a port; `None` if it is no port of a switch.
    pub fn switch(&self) -> Option<&String> {
        match self {
            Self::Net(net) => match &net.port {
                PortPlan::Switch(port) => Some(&port.switch),
                _ => None,
            },
            Self::Blk(_) => None,
        }
    }

    fn needs(&self) -> Vec<(&'static str, &OsStr)> {
        let mut needs = Vec::new();
        if let Some(path) = self.plan().socket.path() {
            needs.push(("socket", path.as_os_str()));
        }
        match self {
            Self::Blk(blk) => {
                let kind = blk.disk.kind(&blk.device.name);
                needs.extend(kind.path.map(|path| ("file", path.as_os_str())));
                needs.extend(kind.needs.map(|name| (kind.key, OsStr::new(name))));
            }
            Self::Net(net) => {
                needs.extend(net.pcap.as_ref().map(|path| ("file", path.as_os_str())));
                needs.extend(net.port.kind().interface.map(|name| ("interface", OsStr::new(name))));
                // A switch knows its ports by the names of their devices.
                needs.extend(self.switch().map(|_| ("port", OsStr::new(&net.device.name))));
            }
        }
        needs
    }

    fn patch_limit(&mut self, with: &Value) -> Result<(), String> {
        let (device, of) = match self {
            Self::Blk(blk) => (&mut Arc::make_mut(blk).device, Of::Disk),
            Self::Net(net) => (&mut Arc::make_mut(net).device, Of::Net),
        };
        let limit = device.limit.patched(with, of, &device.place);
        device.limit = limit.map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Makes the error for a key that cannot change while the device is served. It says when a new
    /// value takes effect, and how to set it.
    fn not_live(&self, key: &str, class: Class) -> String {
        let when = match class {
            Class::Live => return format!("{key}: a disk has no such key"),
            Class::Reconnect => "when the guest reconnects",
            Class::Replace => "when the device is removed and added again",
        };
        let how = match self.is_of_api() {
            true => "PUT the whole device",
            false => "change it in the file and run \"manyring reload\"",
        };
        format!("{key} takes effect {when}; {how}")
    }

    /// Returns the device with new values of live keys.
    ///
    /// # Errors
    /// One line: a key is unknown or not live, or its value is wrong.
    pub fn patched(&self, keys: &Map<String, Value>) -> Result<Self, String> {
        let mut device = self.clone();
        for (key, value) in keys {
            let class = class_of(key).ok_or_else(|| format!("{key}: unknown key"))?;
            if key == "limit" {
                device.patch_limit(value)?;
                continue;
            }
            let (Class::Live, Self::Net(net)) = (class, &mut device) else {
                return Err(self.not_live(key, class));
            };
            let mtu = value.as_u64().and_then(|mtu| u16::try_from(mtu).ok());
            let bad = || format!("{key}: {value} is not between 68 and 65535");
            Arc::make_mut(net).options.mtu = Some(mtu.filter(|mtu| is_mtu(*mtu)).ok_or_else(bad)?);
        }
        Ok(device)
    }
}
