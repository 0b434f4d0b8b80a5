//! The format of an image: raw, or a format that a helper reads (a qemu-storage-daemon that the
//! supervisor starts).

use super::super::tables::RawBlk;
use super::nbd::max_wait;
use super::{Place, PlanError};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The formats that a helper reads: names of drivers of qemu-storage-daemon.
const HELPED: [&str; 4] = ["qcow2", "vmdk", "vdi", "vhdx"];

/// The format that the operator has chosen. The daemon never takes it from the file's bytes, since
/// a guest can write them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The bytes of the file are those of the disk.
    Raw,
}

impl Format {
    /// Parses the key `format` of a disk without a helper: `raw` is the only value.
    pub(super) fn new(raw: Option<&str>, place: &Place) -> Result<Option<Self>, PlanError> {
        match raw {
            None => Ok(None),
            Some("raw") => Ok(Some(Self::Raw)),
            Some(other) => {
                let problem = format!("{other:?} is not supported; \"raw\" is the only format");
                place.error("format", problem)
            }
        }
    }
}

/// Returns the value of the key `format` for an image whose detected format is `format`, if a
/// helper reads that format.
pub fn helped(format: &str) -> Option<&'static str> {
    HELPED.into_iter().find(|helped| helped.eq_ignore_ascii_case(format))
}

impl RawBlk {
    /// True if the image has a format that the daemon does not read itself.
    pub(super) fn needs_helper(&self) -> bool {
        self.format.as_deref().is_some_and(|format| format != "raw")
    }
}

/// An image that a helper reads.
#[derive(Clone, Debug, Serialize)]
pub struct HelperPlan {
    /// The format, as qemu-storage-daemon names it.
    pub format: &'static str,
    /// Path of the image.
    pub path: PathBuf,
    /// True if the host's page cache is not used (`O_DIRECT`).
    pub direct: bool,
    /// Seconds for which requests wait for a helper that has ended; `None`: for ever.
    #[serde(rename = "reconnect_seconds")]
    pub reconnect: Option<u64>,
}

impl HelperPlan {
    /// Plans the image at `path`; `None`: the format is raw, or not given, so no helper is needed.
    pub(super) fn new(raw: &RawBlk, path: &Path, place: &Place) -> Result<Option<Self>, PlanError> {
        let Some(text) = raw.format.as_deref().filter(|text| *text != "raw") else {
            return Ok(None);
        };
        let Some(format) = helped(text) else {
            let problem = format!("{text:?} is not one of raw, {}", HELPED.join(", "));
            return place.error("format", problem);
        };
        if raw.lock_with_rings {
            let needs = format!("needs {}", place.setting("format", "raw"));
            return place.error("lock_with_rings", needs);
        }
        let (path, direct) = (path.to_owned(), raw.direct);
        Ok(Some(Self { format, path, direct, reconnect: max_wait(raw, place)? }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::DiskPlan;
    use super::*;

    fn disk(keys: &str) -> Result<(DiskPlan, bool), String> {
        let text = format!("[[blk]]\nname = 'a'\nsocket_path = '/s'\n{keys}");
        crate::parse(&text).map(|plan| (plan.blk[0].disk.clone(), plan.blk[0].options.writeback))
    }

    #[test]
    fn an_image_behind_a_helper_is_written_through_unless_the_operator_says_else() {
        for (keys, expected) in [
            ("", (false, None, false)),
            ("direct = true\nreconnect = '60s'", (true, Some(60), false)),
            ("cache = 'writeback'", (false, None, true)),
        ] {
            let keys = format!(
                "file = '/a.qcow2'\nformat = 'qcow2'\n{keys}\n[daemon]\nstate_dir = '/var/lib/m'"
            );
            let (found, writeback) = disk(&keys).unwrap();
            let DiskPlan::Helper(plan) = found else { panic!("{keys}: {found:?}") };
            assert_eq!((plan.format, plan.path.as_path()), ("qcow2", Path::new("/a.qcow2")));
            assert_eq!((plan.direct, plan.reconnect, writeback), expected, "{keys}");
        }
    }

    #[test]
    fn a_format_that_cannot_be_served_names_its_key() {
        for (keys, problem) in [
            (
                "file = '/a'\nformat = 'bochs'",
                "format: \"bochs\" is not one of raw, qcow2, vmdk, vdi",
            ),
            ("null = '1G'\nformat = 'qcow2'", "format: needs file"),
            ("file = '/a'\nformat = 'qcow2'", "format: \"qcow2\" needs state_dir in [daemon]"),
            (
                "file = '/a'\nformat = 'vmdk'\nlock_with_rings = true",
                "lock_with_rings: needs format",
            ),
        ] {
            let error = disk(keys).unwrap_err();
            assert!(error.contains(problem), "{keys}: {error}");
        }
    }
}
