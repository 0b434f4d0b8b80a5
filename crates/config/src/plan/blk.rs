//! The plan of a disk: the keys of `[[blk]]`.

use super::{
    DevicePlan, Format, HelperPlan, LimitPlan, NbdPlan, Pinned, Place, PlanError, Source, cache,
    device_place, logical_block_size, moderation, on_full, pins, size,
};
use crate::limit_keys::Of;
use crate::numbers;
use crate::tables::{RawBlk, RawSize};
use manyring_device::blk::BlkOptions;
use manyring_protocol::nbd::{ExportSpec, NbdSpec, NbdTarget};
use manyring_protocol::spec::{BlkSpec, DeviceSpec, DiskFaultSpec, DiskSpec, KindSpec};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The default of `num_queues`.
pub const NUM_QUEUES: usize = 8;

/// The plan of a vhost-user block device.
#[derive(Clone, Debug, Serialize)]
pub struct BlkPlan {
    /// The keys that a disk and a network share: name, socket, limit.
    #[serde(flatten)]
    pub device: DevicePlan,
    /// The image, memory or server that holds the disk's bytes.
    pub disk: DiskPlan,
    /// The options of the device, the same in the daemon and in a device process.
    #[serde(flatten)]
    pub options: BlkOptions,
    /// The faults that the device makes on purpose, to test guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<DiskFaultSpec>,
}

/// The backend of a disk, where its blocks are kept.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskPlan {
    /// A regular file or a block device.
    File {
        /// Path of the image.
        path: PathBuf,
        /// The resolved path, if an unprivileged user has named the file (`allow_paths`).
        #[serde(skip)]
        pinned: Option<Pinned>,
        /// True if the host's page cache is not used (`O_DIRECT`).
        direct: bool,
        /// True if the lock is held only while a ring runs.
        lock_with_rings: bool,
        /// `None`: the file is raw, and is refused if its bytes look like another format.
        format: Option<Format>,
    },
    /// The null disk: writes are dropped, and reads give zeros.
    Null {
        /// The size of the disk in bytes.
        size: u64,
    },
    /// Memory of the process; its contents are lost when the process ends.
    Memory {
        /// The size of the disk in bytes.
        size: u64,
    },
    /// An export of an NBD server.
    Nbd(NbdPlan),
    /// An image in a format that a helper reads.
    Helper(HelperPlan),
}

/// The properties that follow from the kind of a disk. Only [`DiskPlan::kind`] decides them, so a
/// new kind of disk needs a new arm there.
#[derive(Clone, Copy, Debug)]
pub struct DiskKind<'a> {
    /// The key that names the disk.
    pub key: &'static str,
    /// The file that holds the disk's bytes.
    pub path: Option<&'a Path>,
    /// The resolved path of the file, if an unprivileged user has named it (`allow_paths`).
    pub pinned: Option<&'a Pinned>,
    /// The name of a resource other than a file that only one disk can use at a time: the address
    /// of an NBD export, or the device whose helper is started.
    pub needs: Option<&'a str>,
    /// The size in bytes, if the configuration gives it.
    pub size: Option<u64>,
    /// True if an unprivileged user of the control API (`allow_paths`) may add such a disk.
    pub is_for_all: bool,
}

impl BlkPlan {
    pub(crate) fn new(raw: RawBlk, index: usize, source: Source) -> Result<Self, PlanError> {
        let name = raw.name.clone().unwrap_or_else(|| format!("blk{index}"));
        let place = device_place(&name, "[[blk]]", source)?;
        numbers::check_all(raw.numbers(), &place)?;
        let num_queues = raw.num_queues.unwrap_or(NUM_QUEUES);
        let queue_size = raw.queue_size.unwrap_or(128);
        if !queue_size.is_power_of_two() || !(4..=1024).contains(&queue_size) {
            let problem = format!("{queue_size} is not a power of two between 4 and 1024");
            return place.error("queue_size", problem);
        }
        let serial = raw.serial.clone().unwrap_or_else(|| name.chars().take(20).collect());
        if serial.len() > 20 || !serial.is_ascii() {
            return place.error("serial", "must be at most 20 ASCII characters");
        }
        // A helper that is killed loses the writes that only the helper has cached, so disks with a
        // helper are write-through by default.
        let by_itself = raw.needs_helper().then_some("writethrough");
        let writeback = cache(raw.cache.as_deref().or(by_itself), &place)?;
        let on_full = on_full::on_full(raw.on_full.as_deref(), &place)?;
        let logical_block_size = logical_block_size(raw.logical_block_size, &place)?;
        let disk = DiskPlan::new(&raw, &place)?.in_blocks(logical_block_size, &place)?;
        let queue_workers = pins::queue_workers(raw.queue_workers.as_deref(), num_queues, &place)?;
        let limit = LimitPlan::new(raw.limit.as_ref(), Of::Disk, &place)?;
        let options = BlkOptions {
            name: name.clone(),
            num_queues,
            queue_size,
            serial,
            read_only: raw.read_only,
            writeback,
            logical_block_size,
            on_full,
            moderation: moderation(raw.moderation.as_deref(), &place)?,
        };
        let device = DevicePlan::new(name, place, raw.socket(), queue_workers, limit)?;
        let device = device.within(raw.domain)?;
        Ok(Self { disk, options, fault: raw.fault.map(Into::into), device })
    }

    /// Makes the description of the disk for a device process. `told`: the export of the disk's NBD
    /// server, as the server has described it. Returns `None` if the disk needs it and `told` is
    /// `None`.
    pub fn spec(&self, told: Option<ExportSpec>) -> Option<DeviceSpec> {
        let Self { device, disk, options, fault } = self;
        let disk = disk.spec(&device.name, told)?;
        let blk = BlkSpec { disk, options: options.clone(), fault: *fault };
        Some(device.spec(KindSpec::Blk(blk)))
    }
}

impl DiskPlan {
    /// Makes the description of the disk of device `name` for a device process. `None`: the disk
    /// needs the export of a server, and `told` is `None`.
    pub fn spec(&self, name: &str, told: Option<ExportSpec>) -> Option<DiskSpec> {
        Some(match *self {
            Self::File {
                direct,
                lock_with_rings,
                // The supervisor opens the file, checks its format, and hands over descriptors.
                path: _,
                pinned: _,
                format: _,
            } => DiskSpec::File { direct, lock_with_rings },
            Self::Null { size } => DiskSpec::Null { size },
            Self::Memory { size } => DiskSpec::Memory { size },
            Self::Nbd(ref nbd) => DiskSpec::Nbd(nbd.spec(told?)),
            Self::Helper(HelperPlan {
                reconnect,
                // The supervisor starts the helper, and connects to it.
                format: _,
                path: _,
                direct: _,
            }) => {
                let target = NbdTarget { export: name.to_owned(), tls: None };
                DiskSpec::Nbd(NbdSpec { target, reconnect, told: told? })
            }
        })
    }

    /// Returns the properties that follow from the kind of the disk of `device`.
    pub fn kind<'a>(&'a self, device: &'a str) -> DiskKind<'a> {
        let (path, pinned, needs) = (None, None, None);
        match self {
            Self::File { path, pinned, .. } => {
                let (path, pinned) = (Some(path.as_path()), pinned.as_ref());
                DiskKind { key: "file", path, pinned, needs, size: None, is_for_all: true }
            }
            Self::Null { size } => {
                let size = Some(*size);
                DiskKind { key: "null", path, pinned, needs, size, is_for_all: true }
            }
            // Not for unprivileged users: they could use up the host's memory.
            Self::Memory { size } => {
                let size = Some(*size);
                DiskKind { key: "memory", path, pinned, needs, size, is_for_all: false }
            }
            // Not for unprivileged users: the daemon would connect with its own rights to any
            // address that the user names.
            Self::Nbd(nbd) => {
                let needs = Some(nbd.text.as_str());
                DiskKind { key: "nbd", path, pinned, needs, size: None, is_for_all: false }
            }
            // Not for unprivileged users: the helper would open any backing file that the image
            // names. `needs` is the device, since the helper's socket has its name.
            Self::Helper(HelperPlan { path, .. }) => {
                let (path, needs) = (Some(path.as_path()), Some(device));
                DiskKind { key: "format", path, pinned, needs, size: None, is_for_all: false }
            }
        }
    }

    /// Restricts the disk to files below the folders `allowed`, for an unprivileged user.
    ///
    /// # Errors
    /// Such a user may not add this kind of disk: the configuration key of the kind.
    pub fn bind(&mut self, allowed: &[PathBuf]) -> Result<(), &'static str> {
        if let Self::File { path, pinned, .. } = self {
            *pinned = Some(Pinned::new(path, allowed));
        }
        let DiskKind { key, is_for_all, .. } = self.kind("");
        if is_for_all { Ok(()) } else { Err(key) }
    }

    fn new(raw: &RawBlk, place: &Place) -> Result<Self, PlanError> {
        let size_of = |key: &'static str, RawSize(text): &RawSize| match size(text) {
            Some(size) => Ok(size),
            None => place
                .error(key, format!("{text:?} is not a size in whole sectors, like 64G or 1536M")),
        };
        for (key, is_set) in [
            ("direct", raw.direct),
            ("lock_with_rings", raw.lock_with_rings),
            ("format", raw.format.is_some()),
        ] {
            if is_set && raw.file.is_none() {
                return place.error(key, format!("needs {}", place.key("file")));
            }
        }
        match (&raw.file, &raw.null, &raw.memory, NbdPlan::new(raw, place)?) {
            (Some(path), None, None, None) => {
                if let Some(helper) = HelperPlan::new(raw, path, place)? {
                    return Ok(Self::Helper(helper));
                }
                let format = Format::new(raw.format.as_deref(), place)?;
                let RawBlk { direct, lock_with_rings, .. } = *raw;
                Ok(Self::File { path: path.clone(), pinned: None, direct, lock_with_rings, format })
            }
            (None, Some(size), None, None) => Ok(Self::Null { size: size_of("null", size)? }),
            (None, None, Some(size), None) => Ok(Self::Memory { size: size_of("memory", size)? }),
            (None, None, None, Some(nbd)) => Ok(Self::Nbd(nbd)),
            (None, None, None, None) => {
                let others = place.keys(&["null", "memory", "nbd"], "or");
                place.error("file", format!("is missing (or {others})"))
            }
            _ => {
                let all = place.keys(&["file", "null", "memory", "nbd"], "and");
                place.error("file", format!("only one of {all} can be served"))
            }
        }
    }
}

impl DiskPlan {
    /// Checks that the size which the configuration gives is a multiple of the logical block size
    /// `block`. The size of a file or an NBD export is not known yet: opening the disk checks it.
    pub(super) fn in_blocks(self, block: Option<u32>, place: &Place) -> Result<Self, PlanError> {
        let DiskKind { key, size, .. } = self.kind("");
        match block.zip(size) {
            Some((block, size)) if !size.is_multiple_of(block.into()) => {
                let chosen = place.key("logical_block_size");
                place.error(key, format!("{size} bytes are not whole blocks of {block} ({chosen})"))
            }
            _ => Ok(self),
        }
    }
}
