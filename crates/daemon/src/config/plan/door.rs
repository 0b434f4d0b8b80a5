//! `DoorPlan`: an image in a format that a program in a process of its own reads for us: the key
//! `door`.

use super::super::raw::RawBlk;
use super::nbd::max_wait;
use super::{DiskPlan, Place, Plan, PlanError};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The formats of images for which there is a door: names of drivers of qemu-storage-daemon.
const FORMATS: [&str; 4] = ["qcow2", "vmdk", "vdi", "vhdx"];

/// An image behind a door.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DoorPlan {
    pub(crate) format: &'static str,
    pub(crate) path: PathBuf,
    pub(crate) direct: bool,
    /// Seconds for which requests wait for a door that is gone; `None`: for ever.
    #[serde(rename = "reconnect_seconds")]
    pub(crate) reconnect: Option<u64>,
}

impl DoorPlan {
    /// The image at `path`; `None`: the keys want no door for it.
    pub(super) fn new(raw: &RawBlk, path: &Path, place: &Place) -> Result<Option<Self>, PlanError> {
        let Some(text) = &raw.door else { return Ok(None) };
        let Some(format) = FORMATS.into_iter().find(|format| format == text) else {
            return place.error("door", format!("{text:?} is none of {}", FORMATS.join(", ")));
        };
        for (key, is_set) in
            [("format", raw.format.is_some()), ("lock_with_rings", raw.lock_with_rings)]
        {
            if is_set {
                return place.error(key, format!("contradicts {}", place.key("door")));
            }
        }
        let (path, direct) = (path.to_owned(), raw.direct);
        Ok(Some(Self { format, path, direct, reconnect: max_wait(raw, place)? }))
    }
}

impl Plan {
    /// Checks that there is a folder for the sockets of doors.
    pub(super) fn check_doors(&self) -> Result<(), PlanError> {
        let mut doors = self.blk.iter().filter(|blk| matches!(blk.disk, DiskPlan::Door(_)));
        match doors.next() {
            Some(blk) if self.daemon.state_dir.is_none() => {
                blk.device.place.error("door", "needs state_dir in [daemon]")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    fn disk(keys: &str) -> Result<(DiskPlan, bool), String> {
        let text = format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\n{keys}");
        config::parse(&text).map(|plan| (plan.blk[0].disk.clone(), plan.blk[0].writeback))
    }

    #[test]
    fn an_image_behind_a_door_is_written_through_unless_the_operator_says_else() {
        for (keys, expected) in [
            ("", (false, None, false)),
            ("direct = true\nreconnect = '60s'", (true, Some(60), false)),
            ("cache = 'writeback'", (false, None, true)),
        ] {
            let keys = format!(
                "file = '/a.qcow2'\ndoor = 'qcow2'\n{keys}\n[daemon]\nstate_dir = '/var/lib/m'"
            );
            let (found, writeback) = disk(&keys).unwrap();
            let DiskPlan::Door(plan) = found else { panic!("{keys}: {found:?}") };
            assert_eq!((plan.format, plan.path.as_path()), ("qcow2", Path::new("/a.qcow2")));
            assert_eq!((plan.direct, plan.reconnect, writeback), expected, "{keys}");
        }
    }

    #[test]
    fn a_door_that_there_is_not_names_its_key() {
        for (keys, problem) in [
            ("file = '/a'\ndoor = 'raw'", "door: \"raw\" is none of qcow2, vmdk, vdi, vhdx"),
            ("null = '1G'\ndoor = 'qcow2'", "door: needs file"),
            ("file = '/a'\ndoor = 'qcow2'", "door: needs state_dir in [daemon]"),
            ("file = '/a'\ndoor = 'qcow2'\nformat = 'raw'", "format: contradicts door"),
            ("file = '/a'\ndoor = 'qcow2'\nlock_with_rings = true", "lock_with_rings: contradicts"),
            ("file = '/a'\ndoor = 'qcow2'\ndomain = 'd'", "domain: contradicts door"),
        ] {
            let error = disk(keys).unwrap_err();
            assert!(error.contains(problem), "{keys}: {error}");
        }
    }
}
