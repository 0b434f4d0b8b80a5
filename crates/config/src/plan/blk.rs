//! The plan of a disk: the keys of `[[blk]]`.

use super::{
    DevicePlan, Format, HelperPlan, LimitPlan, NbdPlan, Pinned, Place, PlanError, Source, cache,
    device_place, logical_block_size, on_full, pins, size,
};
use crate::limit_keys::Of;
use crate::numbers;
use crate::raw::{RawBlk, RawSize};
use manyring_protocol::nbd::{ExportSpec, NbdSpec, NbdTarget};
use manyring_protocol::spec::{
    BlkSettings, BlkSpec, DeviceSpec, DiskFaultSpec, DiskSpec, KindSpec, OnFullSpec,
};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Queues of a disk whose number is not said.
pub const NUM_QUEUES: usize = 8;

/// A block device.
#[derive(Clone, Debug, Serialize)]
pub struct BlkPlan {
    /// The keys that a disk and a network share: name, socket, limit.
    #[serde(flatten)]
    pub device: DevicePlan,
    /// The image, memory or server that holds the disk's bytes.
    pub disk: DiskPlan,
    /// The guest may not write.
    pub read_only: bool,
    /// None: that of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<u32>,
    /// Request queues.
    pub num_queues: usize,
    /// Descriptors of a queue, a power of two.
    pub queue_size: u16,
    /// The serial number that the guest reads, at most 20 bytes.
    pub serial: String,
    /// Writes are complete in the host's cache; the guest flushes.
    pub writeback: bool,
    /// Whether a write waits or fails while the host has no room for it.
    pub on_full: OnFullSpec,
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
        /// How it is found and held, if a user has named it whom `allow_paths` binds.
        #[serde(skip)]
        pinned: Option<Pinned>,
        /// The host's page cache is not used (`O_DIRECT`).
        direct: bool,
        /// The lock is held only while a ring runs.
        lock_with_rings: bool,
        /// None: raw, and refused if it looks like another format.
        format: Option<Format>,
    },
    /// No bytes are kept; reads give zeros.
    Null {
        /// Bytes.
        size: u64,
    },
    /// Memory of the process, lost at its end.
    Memory {
        /// Bytes.
        size: u64,
    },
    /// An export of an NBD server.
    Nbd(NbdPlan),
    /// An image in a format that a helper reads.
    Helper(HelperPlan),
}

/// What is known of a disk by its kind. Whoever asks has an answer for each kind: all of it stands
/// in [`DiskPlan::kind`].
#[derive(Clone, Copy, Debug)]
pub struct DiskKind<'a> {
    /// The key that names the disk.
    pub key: &'static str,
    /// The file that the disk is kept in.
    pub path: Option<&'a Path>,
    /// How the file is found and held, if a user has named it whom `allow_paths` binds.
    pub pinned: Option<&'a Pinned>,
    /// A name beside that of a file that one disk has at a time.
    pub needs: Option<&'a str>,
    /// Bytes, if the configuration says how many.
    pub size: Option<u64>,
    /// A user whom `allow_paths` binds may have such a disk.
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
        // A killed helper loses the writes that it has only cached: its default is to write
        // through.
        let by_itself = raw.needs_helper().then_some("writethrough");
        let writeback = cache(raw.cache.as_deref().or(by_itself), &place)?;
        let on_full = on_full::on_full(raw.on_full.as_deref(), &place)?;
        let logical_block_size = logical_block_size(raw.logical_block_size, &place)?;
        let disk = DiskPlan::new(&raw, &place)?.in_blocks(logical_block_size, &place)?;
        let queue_workers = pins::queue_workers(raw.queue_workers.as_deref(), num_queues, &place)?;
        let limit = LimitPlan::new(raw.limit.as_ref(), Of::Disk, &place)?;
        let served = (queue_workers, raw.moderation.as_deref(), limit);
        let device = DevicePlan::new(name, place, raw.socket(), served)?.within(raw.domain)?;
        let blk = Self {
            disk,
            read_only: raw.read_only,
            logical_block_size,
            num_queues,
            queue_size,
            serial,
            writeback,
            on_full,
            fault: raw.fault.map(Into::into),
            device,
        };
        Ok(blk)
    }

    /// The device for a device process; `None`: no device process serves such a disk.
    /// `told`: the export of a server's disk, as it was measured.
    pub fn spec(&self, told: Option<ExportSpec>) -> Option<DeviceSpec> {
        let disk = self.disk.spec(&self.device.name, told)?;
        let blk = BlkSpec { disk, settings: self.settings() };
        Some(self.device.spec(KindSpec::Blk(blk)))
    }

    /// How the disk is served, in whichever process.
    pub fn settings(&self) -> BlkSettings {
        let Self {
            device,
            read_only,
            logical_block_size,
            num_queues,
            queue_size,
            serial,
            writeback,
            on_full,
            fault,
            // A spec has a part for it.
            disk: _,
        } = self;
        BlkSettings {
            num_queues: *num_queues,
            queue_size: *queue_size,
            serial: serial.clone(),
            read_only: *read_only,
            writeback: *writeback,
            logical_block_size: *logical_block_size,
            on_full: *on_full,
            moderation: device.moderation.spec(),
            fault: *fault,
        }
    }
}

impl DiskPlan {
    /// The disk of device `name` for a device process; `None`: a server's disk was not measured.
    pub fn spec(&self, name: &str, told: Option<ExportSpec>) -> Option<DiskSpec> {
        Some(match *self {
            Self::File {
                direct,
                lock_with_rings,
                // The supervisor finds the file, judges its content, and hands over what it opens.
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

    /// What is known of the disk of `device` by its kind.
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
            // The process's own, in which all guests would miss it.
            Self::Memory { size } => {
                let size = Some(*size);
                DiskKind { key: "memory", path, pinned, needs, size, is_for_all: false }
            }
            // The process would connect to whatever the user names, with its own rights.
            Self::Nbd(nbd) => {
                let needs = Some(nbd.text.as_str());
                DiskKind { key: "nbd", path, pinned, needs, size: None, is_for_all: false }
            }
            // It would open whatever the image names. Its socket is named after the device.
            Self::Helper(HelperPlan { path, .. }) => {
                let (path, needs) = (Some(path.as_path()), Some(device));
                DiskKind { key: "format", path, pinned, needs, size: None, is_for_all: false }
            }
        }
    }

    /// Has the disk found below these folders only, for a user whom they bind.
    ///
    /// # Errors
    /// The key that such a user may not have.
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
    /// Checks that a disk of a given size is whole logical blocks, if the operator has chosen their
    /// size. The size of a file, or of a server's disk, is measured when it is opened.
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
